"""Streams side by side, given to one queue that works in order: nothing waits for what is given later, on any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item, Op, Schedule, Space
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.replay import Call, Machine, ReplayError

SHAPES = [(1, 3), (2, 1), (2, 2), (4, 1), (3, 2), (5, 2), (2, 4)]


def in_order(schedule: Schedule, *, last: tuple[str, ...] = ()) -> Schedule:
    """One stream ``main``, in the order of issue; streams named ``last`` stay what they are."""
    ops: list[Op] = []
    done = dict.fromkeys(schedule.streams, 0)
    runs = schedule.issue or [(name, len(ops)) for name, ops in schedule.streams.items() if name not in last]
    for name, count in runs:
        ops += schedule.streams[name][done[name] : done[name] + count]
        done[name] += count
    assert all(done[name] == len(schedule.streams[name]) for name in done if name not in last), "all is issued"
    return replace(schedule, streams={"main": tuple(ops), **{name: schedule.streams[name] for name in last}}, issue=())


def layout_for(topology: Topology) -> GroupLayout:
    n = topology.ranks
    return GroupLayout((ParamShape(3 * n - 1, 5, 2), ParamShape(2, 3, 2), ParamShape(2 * n, 4, 2)), n)


def shape_width(topology: Topology) -> int:
    """Ranks for which a contribution is staged together."""
    return topology.local_ranks if topology.nodes > 1 else 1


def tags(rank: int, index: int, offset: int) -> tuple[int, int, int]:
    return rank, index, offset


def contributors(tag: tuple) -> list[int]:
    """Ranks of what was added up."""
    return [tag[0]] if isinstance(tag[0], int) else [rank for part in tag for rank in contributors(part)]


def reductions(topology: Topology, plans: list[BasePlan | None], output: Item) -> list[tuple[int, list]]:
    work = []
    for rank in range(topology.ranks):
        steps = []
        for number, plan in enumerate(plans):
            schedule = reduce_scatter(
                *(layout_for(topology), topology, rank),
                **{"grad": Item.BF16, "output": output, "chunk_bytes": 16 * shape_width(topology), "interleave": False},
                plan=plan,
                bank=number % 2,
            )
            steps.append((Call(in_order(schedule), tags, key=number), "main"))
        work.append((rank, steps))
    return work


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(("rounds", "slot_reuse", "passes"), [(4, False, 1), (1, True, 1), (2, True, 2)])
def test_reduce_scatters(shape: tuple[int, int], rounds: int, slot_reuse: bool, passes: int) -> None:
    topology = Topology(*shape)
    plan = BasePlan(*shape, shape[1], rounds, slot_reuse, passes) if shape[0] > 1 else None
    for seed in range(2):
        machine = Machine(topology.ranks, topology.local_ranks, seed, shared_landing=False)
        machine.run(reductions(topology, [plan] * 4, Item.BF16 if seed else Item.F32))
        for rank in range(topology.ranks):
            assert sorted(contributors(machine.read(rank, Space.OUTPUT, 0, 0, 3))) == list(range(topology.ranks))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_steps(shape: tuple[int, int]) -> None:
    """A backward pass: the next all-gather is given before the former landing is vacated and its gradients reduced."""
    topology = Topology(*shape)
    layout, plan = layout_for(topology), BasePlan(*shape, shape[1], 4) if shape[0] > 1 else None
    build = all_gather_nodes if topology.nodes > 1 else all_gather
    for seed in range(2):
        work = []
        for rank, reduced in reductions(topology, [plan] * 4, Item.F32):
            schedule = build(layout, topology, rank, [Item.RAW2] * 3, shared_landing=False, interleave=False)
            gathers = [Call(in_order(schedule, last=("readiness",)), tags, landing=i % 2) for i in range(5)]
            steps = [(gathers[0], "main")]
            for i, reduction in enumerate(reduced):
                steps += [(gathers[i + 1], "main"), (gathers[i], "readiness"), reduction]
            work.append((rank, steps))
        Machine(topology.ranks, topology.local_ranks, seed, shared_landing=False).run(work)


def test_an_order_in_which_sums_come_last_is_found_out() -> None:
    topology = Topology(2, 2)
    work = reductions(topology, [BasePlan(2, 2, 2, 4)], Item.F32)
    for rank, _ in work:
        schedule = reduce_scatter(
            *(layout_for(topology), topology, rank),
            **{"grad": Item.BF16, "output": Item.F32, "chunk_bytes": 32, "interleave": False},
            plan=BasePlan(2, 2, 2, 4),
        )
        assert len(schedule.issue) > 6, "there are chunks enough for a push to wait for a sum"
        work[rank] = rank, [(Call(in_order(replace(schedule, issue=())), tags), "main")]
    with pytest.raises(ReplayError, match="deadlock"):
        Machine(topology.ranks, topology.local_ranks, 0, shared_landing=False).run(work)
