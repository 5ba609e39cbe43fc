"""Single-node schedules, verified for any layout and rank count in every order of events (``verify/machine.py``)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.reduce_scatter import chunks, reduce_scatter
from tide_strategies.collectives.schedule import Await, Item, Notify, Schedule
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.story import Change, Story
from tide_strategies.verify.violation import Violation

shapes = st.builds(ParamShape, st.integers(0, 11), st.integers(0, 4), st.sampled_from([2, 4]))
layouts = st.builds(GroupLayout, st.lists(shapes, max_size=4).map(tuple), st.integers(1, 5))
booleans = st.booleans()


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from([1, 2, 3]), booleans, booleans, booleans, booleans)
def test_all_gather_lands_every_shard_and_never_overwrites_one_in_use(
    layout, slots, cast, shared, again, interleave
) -> None:
    story = Story(Topology(1, layout.ranks), interleave=interleave, shared_landing=shared)
    # fp32 shards, cast where the landing has items of two bytes; or shards that are as in the landing
    items = [Item.F32 if cast else Item.of_size(p.itemsize) for p in layout.params]
    for call in range(4):
        gathered = story.gather(layout, items, call % slots)
        story.use(gathered)
        story.vacate(gathered)
        if again:  # what is still there is used again: the next all-gather has to wait for that, too
            reused = story.reuse(gathered)
            story.use(reused)
            story.vacate(reused)
    story.run()
    assert story.checked == 4 * (1 + again) * layout.ranks


def test_peers_are_sent_to_before_own_copies_unless_it_is_the_cast_that_is_sent() -> None:
    layout = GroupLayout((ParamShape(4, 2, 2), ParamShape(4, 2, 4)), 2)
    for items, first in (([Item.RAW2, Item.RAW4], "copy"), ([Item.F32, Item.F32], "cast")):
        assert next(iter(all_gather(layout, Topology(1, 2), 0, items, shared_landing=False).streams)) == first


@settings(max_examples=80, deadline=None)
@given(layouts, st.sampled_from([16, 32, 80]), st.sampled_from([Item.F32, Item.BF16]), booleans)
def test_reduce_scatter_sums_every_contribution_once_in_the_promised_order(layout, chunk, grad, interleave) -> None:
    story = Story(Topology(1, layout.ranks), interleave=interleave)
    for reduced in [story.reduce(layout, grad=grad, output=Item.F32, chunk_bytes=chunk) for _ in range(3)]:
        story.finish(reduced)
    story.run()
    assert story.checked == 3 * layout.ranks


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


def two_ranks(change: Change) -> Story:
    """One reduce-scatter, with the schedules changed."""
    story = Story(Topology(1, 2), change=change)
    layout = GroupLayout((ParamShape(4, 2, 4),), 2)
    story.finish(story.reduce(layout, grad=Item.F32, output=Item.F32, chunk_bytes=16))
    return story


def without(kind: type) -> Change:
    """Leave the first such operation on "pushed" out on rank 0."""

    def change(called: str, number: int, schedule: Schedule) -> Schedule:
        if schedule.rank:
            return schedule
        ops = list(schedule.streams["main"])
        ops.remove(next(op for op in ops if isinstance(op, kind) and op.counter.name == "pushed"))
        return Schedule(**{**vars(schedule), "streams": {"main": tuple(ops)}})

    return change


def test_a_lost_signal_is_a_deadlock_and_a_lost_wait_reads_too_early() -> None:
    two_ranks(lambda called, number, schedule: schedule).run()
    with pytest.raises(Violation, match="deadlock"):
        two_ranks(without(Notify)).run()
    with pytest.raises(Violation, match=r"unwritten|race"):
        two_ranks(without(Await)).run()


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
