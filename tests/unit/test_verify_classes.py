"""Base plans with eight ranks a node, replayed in full with vector clocks: of every class, the smallest plan."""

from __future__ import annotations

import itertools

import pytest

from tide_strategies.collectives.plan import BASE_LOCAL_RANKS, BASE_ROUNDS, BASE_WIDTHS, BasePlan, refusals
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.workloads import Workload

#: Node counts whose plans are sorted into classes: with every width these have one wave, two, more, and any last wave.
NODES = range(2, 18)


def class_of(plan: BasePlan) -> tuple[str, ...]:
    """What decides how a plan behaves, apart from how often it does so."""
    *_, last = plan.waves()
    rest = len(last.contributors)
    return (
        "divides" if plan.local_ranks % plan.wave_width == 0 else "does not divide",
        "slot reuse" if plan.slot_reuse else "in place",
        "one put a round"
        if plan.round_width == 1
        else "rounds"
        if plan.round_width < plan.wave_width
        else "whole waves",
        {1: "one wave", 2: "two waves"}.get(plan.waves_per_pass, "more waves"),
        "own node alone last" if rest == 1 else "full last" if rest == plan.wave_width else "partial last",
    )


def smallest() -> dict[tuple[str, ...], BasePlan]:
    """Of each class that is accepted, the plan with the fewest nodes."""
    found: dict[tuple[str, ...], BasePlan] = {}
    for values in itertools.product(NODES, BASE_WIDTHS, BASE_ROUNDS[:8], (False, True)):
        nodes, width, rounds, slot_reuse = values
        plan = BasePlan(nodes, BASE_LOCAL_RANKS, width, rounds, slot_reuse)
        if not refusals(plan):
            found.setdefault(class_of(plan), plan)
    return found


def sample(classes: dict[tuple[str, ...], BasePlan], nodes: int) -> list[BasePlan]:
    """So few plans on at most so many nodes that each two marks that meet in any class meet in one of them."""

    def pairs(marks: tuple[str, ...]) -> set[object]:
        return set(itertools.combinations(enumerate(marks), 2))

    small = {marks: plan for marks, plan in classes.items() if plan.nodes <= nodes}
    missing, out = set().union(*map(pairs, small)), []
    while missing:
        best = max(small, key=lambda marks: (len(pairs(marks) & missing), -small[marks].nodes))
        missing -= pairs(best)
        out.append(small[best])
    return out


@pytest.mark.timeout(900)
def test_every_class_of_base_plans_runs_clean(request: pytest.FixtureRequest) -> None:
    """Of all 96 with ``--all``; otherwise of so many, on up to five nodes, that each two of their marks meet."""
    classes = smallest()
    assert len(classes) == 96
    plans = list(classes.values()) if request.config.getoption("--all") else sample(classes, 5)
    for number, plan in enumerate(plans):
        ranks = 8 * plan.nodes
        group = GroupLayout((ParamShape(ranks + 3, 17, 2), ParamShape(2, 3, 2)), ranks)
        # Threads, landings and calls ahead in turn.
        how = {"interleave": number % 2 == 0, "multicast": number // 2 % 2 == 0, "ahead": number // 4 % 2 == 0}
        work = Workload(
            "reduce-scatter", Topology(plan.nodes, 8), (group,), plan=plan, chunk_bytes=1024, calls=3, **how
        )
        assert work.verify() == 3 * ranks, plan
    assert {plan.nodes for plan in plans} >= {2, 5}
    assert {plan.slot_reuse for plan in plans} == {False, True}
