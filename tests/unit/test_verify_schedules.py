"""Schedules hold what they promise under every interleaving: vector clocks over many plans, layouts and topologies."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.plan import BasePlan, refusals
from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.architectures import preset
from tide_strategies.topology import Topology
from tide_strategies.verify.story import Story
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload, variants

shapes = st.builds(ParamShape, st.integers(0, 23), st.integers(0, 5), st.just(2))
params = st.lists(shapes, max_size=4).map(tuple)
topologies = st.sampled_from([(1, 3), (2, 1), (2, 2), (3, 2), (4, 2), (8, 1), (5, 1), (2, 3), (2, 4), (3, 3)])
booleans = st.booleans()


def plan_for(topology: Topology, width: int, rounds: int, passes: int, slot_reuse: bool) -> BasePlan | None:
    if topology.nodes == 1:
        return None
    width = max(w for w in range(1, width + 1) if topology.local_ranks % w == 0)
    plan = BasePlan(topology.nodes, topology.local_ranks, width, rounds, slot_reuse, passes)
    assert refusals(plan) == ()
    return plan


@settings(max_examples=40, deadline=None)
@given(params, params, topologies, *[booleans] * 5, st.sampled_from([16, 17, 64]))
def test_all_gathers(first, second, shape, interleave, multicast, adopted, ahead, reuse, head) -> None:
    topology = Topology(*shape)
    groups = tuple(GroupLayout(p, topology.ranks) for p in (first, second))
    work = Workload(
        "all-gather",
        topology,
        groups,
        interleave=interleave,
        multicast=multicast,
        adopted=adopted and topology.nodes > 1,
        ahead=ahead,
        head_bytes=head,
        reuse=reuse,
    )
    assert work.verify() == work.calls * (1 + reuse) * topology.ranks


@settings(max_examples=40, deadline=None)
@given(
    *(params, params, topologies, booleans, booleans, booleans, booleans),
    *(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from([Item.F32, Item.BF16])),
)
def test_reduce_scatters(a, b, shape, interleave, multicast, ahead, reuse, width, rounds, passes, output) -> None:
    topology = Topology(*shape)
    work = Workload(
        "reduce-scatter",
        topology,
        tuple(GroupLayout(p, topology.ranks) for p in (a, b)),
        plan=plan_for(topology, width, rounds, passes, reuse),
        interleave=interleave,
        multicast=multicast,
        ahead=ahead,
        mixed=topology.nodes > 1,
        output=output,
        chunk_bytes=112,
    )
    assert work.verify() == work.calls * topology.ranks


@pytest.mark.parametrize("slot_reuse", [False, True])
@pytest.mark.parametrize(("nodes", "local", "width", "rounds", "passes"), [(2, 2, 2, 4, 1), (5, 2, 1, 2, 2)])
def test_backward_passes_keep_gradients_and_parameters_alive(nodes, local, width, rounds, passes, slot_reuse) -> None:
    topology = Topology(nodes, local)
    n = topology.ranks
    groups = (
        GroupLayout((ParamShape(3 * n - 1, 5, 2), ParamShape(2, 3, 2)), n),
        GroupLayout((ParamShape(2 * n + 1, 8, 2), ParamShape(0, 4, 2)), n),
    )
    plan = BasePlan(nodes, local, width, rounds, slot_reuse, passes)
    work = Workload("step", topology, groups, plan=plan, slot_reuse=slot_reuse, calls=4)
    for variant in variants(work):
        assert variant.verify() == (2 * 4 + 1) * n


@settings(max_examples=30, deadline=None)
@given(
    *(params, params, st.sampled_from([2, 3, 5, 9, 10, 17]), booleans, booleans, booleans),
    *(st.sampled_from(["all-gather", "reduce-scatter", "step"]), st.sampled_from([Item.F32, Item.BF16])),
)
def test_groups_with_one_rank_a_node(a, b, nodes, interleave, ahead, reuse, kind, output) -> None:
    groups = tuple(GroupLayout(p, nodes) for p in (a, b))
    work = Workload(
        kind,
        Topology(nodes, 1),
        groups,
        lane=True,
        interleave=interleave,
        ahead=ahead,
        output=output,
        calls=4,
        reuse=reuse,
    )
    looked_at = {"all-gather": 4 * (1 + reuse), "reduce-scatter": 4, "step": 2 * 4 + 1}
    assert work.verify() == looked_at[kind] * nodes


@pytest.mark.parametrize("multicast", [False, True])
def test_passes_chunks_banks_and_modes_keep_the_order_of_additions(request, multicast) -> None:
    # The story compares every element's contributions with one order that knows of none of these.
    topology = Topology(5, 2)
    groups = (GroupLayout((ParamShape(57, 3, 2), ParamShape(31, 4, 2)), 10),)
    pairs = [(1, 32), (1, 4096), (2, 80), (4, 32), (4, 4096)]
    if request.config.getoption("--all"):
        pairs = [(passes, chunk) for passes in (1, 2, 4) for chunk in (32, 80, 4096)]
    for passes, chunk in pairs:
        for slot_reuse in (False, True):
            plan = BasePlan(5, 2, 2, 2, slot_reuse, passes)
            work = Workload("reduce-scatter", topology, groups, plan=plan, chunk_bytes=chunk, multicast=multicast)
            assert work.verify()


def test_real_geometry_of_a_block() -> None:
    topology = Topology(4, 4)
    block = preset("llama-3.1-70b").groups[-2].layout(topology.ranks)
    plan = BasePlan(4, 4, 4, 4)
    work = Workload(
        "reduce-scatter", topology, (block,), plan=plan, ahead=False, chunk_bytes=32 << 20, head_bytes=8 << 20, calls=3
    )
    assert work.verify() == 48
    assert replace(work, kind="all-gather").verify() == 48


def test_groups_of_one_engine_must_share_their_waves() -> None:
    # A credit that one plan needs, another does not give: the rule is no mere convention.
    story = Story(Topology(7, 2))
    layout = GroupLayout((ParamShape(28, 4, 2),), 14)
    for width in (1, 2, 1, 2):
        story.finish(story.reduce(layout, chunk_bytes=64, plan=BasePlan(7, 2, width, 2)))
    with pytest.raises(Violation):
        story.run()
