"""Layouts are bijections: every item of every parameter has one place, and no two share one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_strategies.layout import LANDING_ALIGNMENT, GroupLayout, ParamShape
from tide_strategies.topology import Topology

shapes = st.builds(ParamShape, st.integers(0, 23), st.integers(0, 9), st.sampled_from([2, 4]))
layouts = st.builds(GroupLayout, st.lists(shapes, max_size=5).map(tuple), st.integers(1, 9))


@given(layouts)
def test_landing_is_a_bijection_onto_contiguous_parameters(layout: GroupLayout) -> None:
    owner: dict[int, tuple[int, int]] = {}
    for p, shape in enumerate(layout.params):
        assert layout.landing_base(p) % LANDING_ALIGNMENT == 0
        places = []
        for rank in range(layout.ranks):
            start = layout.landing_offset(p, rank)
            for i in range(layout.valid_items(p, rank)):
                places.append(start + i * shape.itemsize)
        # All valid items of p, taken rank after rank, are exactly its contiguous (D, K) array.
        base = layout.landing_base(p)
        assert places == [base + i * shape.itemsize for i in range(shape.rows * shape.row_items)]
        for at in places:
            for byte in range(at, at + shape.itemsize):
                assert byte not in owner
                assert byte < layout.landing_bytes
                owner[byte] = (p, at)


@given(layouts)
def test_packed_output_is_a_bijection(layout: GroupLayout) -> None:
    places = [layout.output_offset(p) + i for p in range(len(layout.params)) for i in range(layout.shard_items(p))]
    assert places == list(range(layout.output_items))


@given(shapes, st.integers(1, 9))
def test_shards_are_those_of_torch_chunk(shape: ParamShape, ranks: int) -> None:
    layout = GroupLayout((shape,), ranks)
    step = -(-shape.rows // ranks)
    want = [max(0, min(shape.rows, (r + 1) * step) - r * step) * shape.row_items for r in range(ranks)]
    assert [layout.valid_items(0, r) for r in range(ranks)] == want


def test_scalars_are_one_row() -> None:
    assert ParamShape.of((), 4) == ParamShape(1, 1, 4)
    assert ParamShape.of((3,), 4) == ParamShape(3, 1, 4)
    assert ParamShape.of((3, 2, 5), 2) == ParamShape(3, 10, 2)


def test_topology_is_node_major() -> None:
    t = Topology(3, 4)
    assert [(t.node_of(r), t.local_of(r)) for r in range(12)] == [(n, loc) for n in range(3) for loc in range(4)]
    assert list(t.node_ranks(6)) == [4, 5, 6, 7]
    assert list(t.rail_ranks(6)) == [2, 6, 10]
    assert t.rank(1, 2) == 6


@pytest.mark.parametrize(
    "bad", [lambda: Topology(0, 1), lambda: Topology(2, 2).rank(2, 0), lambda: Topology(2, 2).node_of(4)]
)
def test_topology_refuses_what_it_does_not_have(bad) -> None:
    with pytest.raises(ValueError, match="topology"):
        bad()
