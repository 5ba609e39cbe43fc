"""Single-node schedules, replayed symbolically for any layout, rank count and interleaving."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.all_gather import all_gather, reuse
from tide_strategies.collectives.reduce_scatter import chunks, reduce_scatter
from tide_strategies.collectives.schedule import Await, Item, Notify, Space
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.replay import Call, Machine, ReplayError

shapes = st.builds(ParamShape, st.integers(0, 11), st.integers(0, 4), st.sampled_from([2, 4]))
layouts = st.builds(GroupLayout, st.lists(shapes, max_size=4).map(tuple), st.integers(1, 5))
seeds = st.integers(0, 2**32)


def shard_tag(call: int, item: Item):
    return lambda rank, p, offset: ("shard", call, rank, p, offset // item.size)


def gradient_tag(call: int, item: Item):
    return lambda rank, p, offset: ("grad", call, rank, p, offset // item.size)


@settings(max_examples=60, deadline=None)
@given(layouts, seeds, st.sampled_from([1, 2, 3]), st.booleans())
def test_all_gather_lands_every_shard_and_never_overwrites_one_in_use(layout, seed, slots, shared) -> None:
    n = layout.ranks
    topology = Topology(1, n)
    machine = Machine(n, n, seed, shared_landing=shared)
    item = Item.F32
    items = [item] * len(layout.params)
    schedules = [all_gather(layout, topology, r, items, shared_landing=shared) for r in range(n)]
    first = ["copy"] if shared else ["cast", "copy"]
    calls = 4
    work: list[list] = [[] for _ in range(n)]
    checked = []

    def check(number: int, rank: int) -> None:
        for p, shape in enumerate(layout.params):
            for owner in range(n):
                for i in range(layout.valid_items(p, owner)):
                    at = layout.landing_offset(p, owner) + i * shape.itemsize
                    tag = machine.read(rank, Space.LANDING, number % slots, at)
                    assert tag == ("shard", number, owner, p, i)
        checked.append(number)

    for r in range(n):
        for c in range(calls):
            call = Call(schedules[r], shard_tag(c, item), landing=c % slots)
            work[r] += [*((call, s) for s in first), (call, "completion"), partial(check, c, r), (call, "readiness")]
    machine.run(list(enumerate(work)))
    assert sorted(checked) == sorted(list(range(calls)) * n)


@settings(max_examples=80, deadline=None)
@given(layouts, seeds, st.sampled_from([16, 32, 80]), st.sampled_from([Item.F32, Item.BF16]), st.booleans())
def test_reduce_scatter_sums_every_contribution_once_in_the_promised_order(
    layout, seed, chunk, grad, one_thread
) -> None:
    n = layout.ranks
    topology = Topology(1, n)
    machine = Machine(n, n, seed)
    schedules = [reduce_scatter(layout, topology, r, grad=grad, output=Item.F32, chunk_bytes=chunk) for r in range(n)]
    calls = 3
    made = [[Call(schedules[r], gradient_tag(c, grad), key=c) for c in range(calls)] for r in range(n)]
    machine.run([(r, [(c, s) for c in made[r]]) for r in range(n) for s in schedules[r].streams])
    for c in range(calls):
        for r in range(n):
            for p in range(len(layout.params)):
                valid = layout.valid_items(p, r)
                for i in range(layout.shard_items(p)):
                    got = machine.read(r, Space.OUTPUT, 0, (layout.output_offset(p) + i) * 4, c)
                    order = [u for u in range(n) if u != r] + [r]
                    element = r * layout.shard_items(p) + i
                    want = tuple(("grad", c, u, p, element) for u in order) if i < valid else ()
                    assert got == want


@given(layouts, st.sampled_from([16, 48]), st.sampled_from([Item.F32, Item.BF16]))
def test_chunks_cover_each_owned_element_once_within_bounds(layout, chunk, grad) -> None:
    for owner in range(layout.ranks):
        seen = []
        for pieces in chunks(layout, owner, grad, chunk):
            end = 0
            for piece in pieces:
                assert piece.at >= end
                assert piece.at % 16 == 0
                end = piece.at + piece.items * grad.size
                seen += [(piece.p, piece.start + i) for i in range(piece.items)]
            assert 0 < end <= chunk
        assert seen == [(p, i) for p in range(len(layout.params)) for i in range(layout.valid_items(p, owner))]


def _without(schedule, stream, kind, index):
    ops = list(schedule.streams[stream])
    del ops[[i for i, op in enumerate(ops) if isinstance(op, kind)][index]]
    return type(schedule)(**{**schedule.__dict__, "streams": {**schedule.streams, stream: tuple(ops)}})


def test_a_lost_notify_is_a_deadlock() -> None:
    layout, topology = GroupLayout((ParamShape(4, 2, 4),), 2), Topology(1, 2)
    schedules = [reduce_scatter(layout, topology, r, grad=Item.F32, output=Item.F32, chunk_bytes=16) for r in (0, 1)]
    schedules[0] = _without(schedules[0], "main", Notify, 0)
    machine = Machine(2, 2, 0)
    with pytest.raises(ReplayError, match="deadlock"):
        machine.run([(r, [(Call(s, gradient_tag(0, Item.F32)), "main")]) for r, s in enumerate(schedules)])


def test_a_lost_wait_is_seen_under_some_interleaving() -> None:
    layout, topology = GroupLayout((ParamShape(4, 2, 4),), 2), Topology(1, 2)
    schedules = [reduce_scatter(layout, topology, r, grad=Item.F32, output=Item.F32, chunk_bytes=16) for r in (0, 1)]
    waits = [op for op in schedules[0].streams["main"] if isinstance(op, Await)]
    first_pushed = next(i for i, op in enumerate(waits) if op.counter.name == "pushed")
    schedules[0] = _without(schedules[0], "main", Await, first_pushed)

    def fails(seed: int) -> bool:
        try:
            work = [(r, [(Call(s, gradient_tag(0, Item.F32)), "main")]) for r, s in enumerate(schedules)]
            Machine(2, 2, seed).run(work)
        except ReplayError:
            return True
        return False

    assert any(fails(seed) for seed in range(50))


def test_builders_refuse_what_they_cannot_do() -> None:
    layout = GroupLayout((ParamShape(4, 2, 2),), 4)
    with pytest.raises(ValueError, match="does not fit"):
        all_gather(layout, Topology(1, 4), 0, [])
    with pytest.raises(ValueError, match="no cast"):
        all_gather(layout, Topology(1, 4), 0, [Item.RAW8])
    with pytest.raises(ValueError, match="multiple of 16"):
        reduce_scatter(layout, Topology(1, 4), 0, grad=Item.F32, output=Item.F32, chunk_bytes=24)
    with pytest.raises(ValueError, match="f32 or bf16"):
        reduce_scatter(layout, Topology(1, 4), 0, grad=Item.RAW2, output=Item.F32, chunk_bytes=16)


@settings(max_examples=60, deadline=None)
@given(layouts, seeds)
def test_reuse_keeps_the_next_all_gather_out_of_the_slot(layout, seed) -> None:
    n = layout.ranks
    topology = Topology(1, n)
    machine = Machine(n, n, seed)
    checked = []

    def check(number: int) -> None:
        for p, shape in enumerate(layout.params):
            for owner in range(n):
                for i in range(layout.valid_items(p, owner)):
                    at = layout.landing_offset(p, owner) + i * shape.itemsize
                    assert machine.read(0, Space.LANDING, 0, at) == ("shard", number, owner, p, i)
        checked.append(number)

    work: list[list] = [[] for _ in range(n)]
    for r in range(n):
        gather = all_gather(layout, topology, r, [Item.F32] * len(layout.params))
        for number in range(2):
            first = Call(gather, shard_tag(number, Item.F32))
            again = Call(reuse(topology, r), shard_tag(-1, Item.F32))
            work[r] += [(first, "copy"), (first, "completion"), partial(check, number), (first, "readiness")]
            work[r] += [(again, "completion"), partial(check, number), (again, "readiness")]
    machine.run(list(enumerate(work)))
    assert sorted(checked) == sorted([0, 0, 1, 1] * n)
