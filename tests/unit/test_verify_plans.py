"""Which plans run: the whole range of the paper's appendix D, and why a plan is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.plan import BasePlan, Wave, credited, placement_faults, refusals, round_faults, stale
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Copy, Item, Put, Schedule
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.architectures import preset
from tide_strategies.topology import Topology
from tide_strategies.verify.base_plans import base_plans, connections, copy_descriptors


@pytest.mark.timeout(120)
def test_the_whole_range_of_base_plans_is_accepted_and_rejected_as_published() -> None:
    *_, last = base_plans()
    assert (last.accepted, last.rejected) == (458_304, 65_472)


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_passes_accept_what_one_pass_accepts(passes) -> None:
    nodes = [*range(2, 40), 63, 64, 65, 100, 257]
    *_, one = base_plans(nodes)
    *_, several = base_plans(nodes, passes)
    assert (several.accepted, several.rejected) == (one.accepted, one.rejected)


def test_a_width_that_does_not_divide_can_collide_with_the_own_node() -> None:
    (why,) = refusals(BasePlan(9, 8, 3, 4))
    assert "contributors 8 and 9 of wave 2 share an inbox block" in why


@pytest.mark.parametrize(("nodes", "local_ranks"), [(2, 1), (5, 2), (9, 4), (33, 8), (128, 6)])
def test_every_width_that_divides_is_free_of_collisions(nodes, local_ranks) -> None:
    for width in (w for w in range(1, local_ranks + 1) if local_ranks % w == 0):
        plan = BasePlan(nodes, local_ranks, width, 2)
        assert refusals(plan) == ()
        for wave in plan.waves():
            assert len(set(plan.filled(wave))) == len(wave.contributors)


def test_every_block_is_filled_or_zero_when_a_wave_is_landed() -> None:
    plan = BasePlan(21, 8, 4, 2)
    written: dict[int, set[int]] = {0: set(range(8)), 1: set(range(8))}  # nothing is known of before
    for wave, zeroed in stale(plan):
        filled = set(plan.filled(wave))
        assert not zeroed & filled
        assert written[wave.generation] - zeroed <= filled
        written[wave.generation] = filled


def test_refusals_say_what_is_out_of_range() -> None:
    assert "several nodes" in refusals(BasePlan(1, 8, 8, 4))[0]
    assert "wave_width" in refusals(BasePlan(4, 4, 8, 4))[0]
    assert "round_width" in refusals(BasePlan(4, 4, 4, 0))[0]


def test_the_small_outbox_covers_two_rounds_in_a_row() -> None:
    assert BasePlan(64, 8, 8, 4, slot_reuse=True).outbox_blocks() == 8
    assert BasePlan(9, 8, 8, 3, slot_reuse=True).outbox_blocks() == 6  # rounds of 3, 3, 2
    assert BasePlan(64, 8, 8, 4).outbox_blocks() == 63


def test_counts_of_copies_and_connections() -> None:
    assert copy_descriptors(64, 8, 30) == (107_520, 13_440)
    (pairs, steps), (rail_pairs, rail_steps) = connections(8, 8, rails=1)
    assert (pairs // rail_pairs, steps // rail_steps) == (8, 64), "as published: L and L^2"
    assert connections(8, 8)[1] == (2 * rail_pairs, 2 * rail_steps), (
        "all-gathers and reductions have a communicator each"
    )


class Broken(BasePlan):
    """A plan whose waves are changed by hand."""

    __slots__ = ("change",)

    def waves(self) -> Iterator[Wave]:
        yield from map(self.change, BasePlan.waves(self))


def broken(change: Callable[[Wave], Wave]) -> Broken:
    plan = Broken(5, 2, 2, 1)
    object.__setattr__(plan, "change", change)
    return plan


def test_a_plan_that_is_whole_has_nothing_wrong() -> None:
    plan = broken(lambda wave: wave)
    assert placement_faults(plan, stale(plan)) == ()
    assert round_faults(plan) == ((), 2)


@pytest.mark.parametrize("index", [1, 2])
def test_a_block_that_is_not_zeroed_is_stale(index: int) -> None:
    # In a generation's first wave nothing is known of any block; the last wave has the own node's partial alone.
    plan = BasePlan(5, 2, 1, 1) if index == 1 else BasePlan(5, 2, 2, 1)
    zeroed = [(wave, frozenset() if wave.index == index else blocks) for wave, blocks in stale(plan)]
    assert any(why.startswith(f"stale: landing wave {index} reads") for why in placement_faults(plan, zeroed))


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (lambda r: r[:-1], "4 are due"),
        (lambda r: (*r, r[-1]), "begins with contributor 2 after 2 sends"),
        (lambda r: r[::-1], "begins with contributor 2 after 0 sends"),
        (lambda r: (range(r[0].start, r[-1].stop),), "outside the wave or wider than 1"),
        (lambda r: (*r[:-1], range(r[-1].start, r[-1].stop + 1)), "outside the wave or wider than 1"),
        (lambda r: (*r, range(r[-1].stop, r[-1].stop)), "outside the wave or wider than 1"),
    ],
    ids=["lost", "sent twice", "out of order", "too wide", "of the next wave", "empty"],
)
def test_rounds_that_lose_double_or_widen_are_refused(rounds, words: str) -> None:
    def change(wave: Wave) -> Wave:
        return replace(wave, rounds=rounds(wave.rounds)) if wave.index == 0 else wave

    assert any(words in why for why in round_faults(broken(change))[0])


def test_an_outbox_too_small_for_two_rounds_is_refused(monkeypatch) -> None:
    plan = BasePlan(64, 8, 8, 4, slot_reuse=True)
    assert refusals(plan) == ()
    monkeypatch.setattr(BasePlan, "outbox_blocks", lambda self: 7)
    assert refusals(plan) == ("two rounds need 8 outbox blocks of 7",)


def _block_of_llama(topology: Topology) -> GroupLayout:
    return preset("llama-3.1-70b").groups[-2].layout(topology.ranks)


def _reduce(layout: GroupLayout, topology: Topology) -> Schedule:
    plan = BasePlan(topology.nodes, topology.local_ranks, topology.local_ranks, 4)
    return reduce_scatter(layout, topology, 0, grad=Item.BF16, output=Item.F32, chunk_bytes=32 << 20, plan=plan)


def test_a_schedule_issues_no_more_copies_than_are_counted() -> None:
    topology = Topology(64, 8)
    layout = GroupLayout((ParamShape(512, 512, 2),) * 30, topology.ranks)
    pushes = [op for op in _reduce(layout, topology).streams["read"] if isinstance(op, Copy)]
    flat, coalesced = copy_descriptors(64, 8, 30)
    assert 0 < len(pushes) <= coalesced
    assert sum(op.rows for op in pushes) == 8 * len(pushes) <= flat, "each is of all destination ranks of a node"


@pytest.mark.timeout(10)
def test_a_rank_of_128_nodes_has_its_schedules_of_a_real_block_in_seconds() -> None:
    topology = Topology(128, 8)
    layout = _block_of_llama(topology)
    gather = all_gather_nodes(layout, topology, 0, [Item.F32] * len(layout.params), shared_landing=False)
    for schedule in (_reduce(layout, topology), gather):
        assert any(isinstance(op, Put) for ops in schedule.streams.values() for op in ops)


@pytest.mark.parametrize(("nodes", "credits"), [(8, 4), (16, 0), (128, 97)])
def test_few_sends_need_a_credit(nodes: int, credits: int) -> None:
    plan = BasePlan(nodes, 8, 8, 4)
    assert sum(map(len, credited(plan, own_in_inbox=False))) == credits
