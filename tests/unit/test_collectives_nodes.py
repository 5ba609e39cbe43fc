"""Schedules across nodes: geometry, doubling, casts, and what builders refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.all_gather_nodes import MERGED_FROM, all_gather_nodes
from tide_strategies.collectives.doubling import rounds
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Copy, Item, Put, Space
from tide_strategies.collectives.subslices import PIECE_ALIGNMENT, SubSlices
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.story import Story

shapes = st.builds(ParamShape, st.integers(0, 19), st.integers(0, 4), st.sampled_from([2, 4]))
params = st.lists(shapes, max_size=4).map(tuple)
nodes_and_locals = st.sampled_from([(2, 1), (2, 2), (3, 2), (2, 3), (5, 1), (4, 2)])
booleans = st.booleans()


@pytest.mark.parametrize("nodes", [*range(2, 40), 127, 128, 129, 1024])
def test_doubling_gives_every_node_every_slot_once_from_who_has_it(nodes) -> None:
    plans = {n: list(rounds(nodes, n)) for n in range(nodes)}
    has = {n: {0} for n in range(nodes)}
    assert len(plans[0]) == (nodes - 1).bit_length()
    for step in range(len(plans[0])):
        before = {n: set(slots) for n, slots in has.items()}
        for n in range(nodes):
            r = plans[n][step]
            assert r.source == (n + r.first) % nodes
            assert plans[r.source][step].target == n
            assert set(range(r.slots)) <= before[r.source]
            received = set(range(r.first, r.first + r.slots))
            assert not received & has[n]
            has[n] |= received
    assert all(slots == set(range(nodes)) for slots in has.values())


@given(params, nodes_and_locals, st.integers(1, 4), st.sampled_from([16, 48]), st.sampled_from([Item.BF16, Item.F32]))
def test_chunks_cover_what_exists_of_each_partial_once_within_bounds(params, shape, passes, row_bytes, grad) -> None:
    topology = Topology(*shape)
    layout = GroupLayout(params, topology.ranks)
    slices = SubSlices(layout, topology, passes)
    for node in range(topology.nodes):
        seen = []
        for s in range(topology.local_ranks):
            for part in range(passes):
                low, high = slices.bounds(s, part)
                assert high - low <= slices.part_items
                for pieces in slices.chunks(node, s, part, grad, row_bytes):
                    end = 0
                    for piece in pieces:
                        assert piece.at >= end
                        assert piece.at % PIECE_ALIGNMENT == 0
                        end = piece.at + piece.items * grad.size
                        for row, items in piece.lines():
                            seen += [(row, piece.p, piece.start + i, low + piece.column + i) for i in range(items)]
                    assert 0 < end <= row_bytes
        want = [
            (row, p, i, layout.output_offset(p) + i)
            for row in range(topology.local_ranks)
            for p in range(len(params))
            for i in range(layout.valid_items(p, topology.rank(node, row)))
        ]
        assert sorted(seen) == sorted(want)


@settings(max_examples=25, deadline=None)
@given(params, nodes_and_locals, st.sampled_from([1, 24, 1 << 20]), booleans, booleans)
def test_shards_are_cast_on_the_way_across_nodes(params, shape, head, shared, interleave) -> None:
    # Everything else is in test_verify_schedules.py; here shards are fp32, and landings have items of 2 or 4 bytes.
    topology = Topology(*shape)
    layout = GroupLayout(params, topology.ranks)
    story = Story(topology, interleave=interleave, shared_landing=shared, lane=topology.lane)
    for call in range(3):
        gathered = story.gather(layout, [Item.F32] * len(params), call % 2, head_bytes=4 * head)
        story.use(gathered)
        story.vacate(gathered)
    story.run()
    assert story.checked == 3 * topology.ranks


def test_long_runs_of_slots_move_by_one_strided_copy_per_parameter() -> None:
    nodes, topology = 64, Topology(64, 8)
    layout = GroupLayout((ParamShape(512, 16, 2), ParamShape(1024, 4, 2)), topology.ranks)
    schedule = all_gather(layout, topology, 0, [Item.RAW2] * 2)
    copies = [op for op in schedule.streams["copy"] if isinstance(op, Copy) and op.dst.space is Space.LANDING]
    assert sum(op.rows for op in copies) == nodes * 2
    assert sum(op.rows > 1 for op in copies) >= 2 * (nodes.bit_length() - 3)
    assert all(op.rows == 1 or op.rows >= MERGED_FROM for op in copies)
    assert len(copies) < 2 * 16


def test_one_copy_moves_a_piece_of_all_destination_ranks_of_a_node() -> None:
    topology = Topology(8, 8)
    layout = GroupLayout((ParamShape(128, 16, 2),) * 30, 64)
    schedule = reduce_scatter(layout, topology, 0, grad=Item.BF16, output=Item.F32, chunk_bytes=1 << 20)
    pushes = [op for op in schedule.streams["read"] if isinstance(op, Copy)]
    assert sum(op.items * op.rows for op in pushes) == 7 * 8 * (30 * 32 // 8) * 8
    assert {op.rows for op in pushes} == {8}
    assert len(pushes) <= 7 * 8 * 30
    puts = [op for op in schedule.streams["network"] if isinstance(op, Put)]
    assert len(puts) == 7


def test_builders_across_nodes_refuse_what_they_cannot_do() -> None:
    layout, topology = GroupLayout((ParamShape(4, 2, 2),), 4), Topology(2, 2)

    def reduce(**options):
        return reduce_scatter(
            layout, topology, 0, **{"grad": Item.BF16, "output": Item.F32, "chunk_bytes": 64, **options}
        )

    with pytest.raises(ValueError, match="do not fit"):
        reduce(plan=BasePlan(3, 2, 2, 1))
    with pytest.raises(ValueError, match="multiple of 16 from 32"):
        reduce(chunk_bytes=16)
    with pytest.raises(ValueError, match="bank must be"):
        reduce(bank=2)
    with pytest.raises(ValueError, match="f32 or bf16"):
        reduce(grad=Item.RAW2)
    with pytest.raises(ValueError, match="refused: wave_width"):
        reduce(plan=BasePlan(2, 2, 3, 1))
    with pytest.raises(ValueError, match="does not fit"):
        all_gather(layout, topology, 0, [])
    with pytest.raises(ValueError, match="no cast"):
        all_gather(layout, topology, 0, [Item.RAW8])
    with pytest.raises(ValueError, match="not cast"):
        all_gather_nodes(layout, topology, 0, [Item.F32], adopted=True)
    with pytest.raises(ValueError, match="head_bytes"):
        all_gather_nodes(layout, topology, 0, [Item.BF16], head_bytes=0)


@pytest.mark.parametrize(
    ("members", "shape"),
    [
        (range(16, 32), "2x8"),  # one shard group of HSDP
        (range(4), "1x4"),  # half a node
        (range(3, 32, 8), "4x1"),  # experts: one rank a node
        ([0, 1, 8, 9], "2x2"),
    ],
)
def test_a_group_has_a_topology_of_its_own(members, shape) -> None:
    assert str(Topology.of_group(members, 8)) == shape


@pytest.mark.parametrize("members", [[], [0, 1, 8], [8, 0], [0, 8, 1, 9]])
def test_a_group_that_is_not_even_or_not_in_order_has_none(members) -> None:
    with pytest.raises(ValueError, match="as many ranks on each"):
        Topology.of_group(members, 8)
