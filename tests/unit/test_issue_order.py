"""Streams side by side, given to one queue that works in order: nothing waits for what is given later, on any rank.

Only counters are followed here; that the same streams give the right results is test_verify_schedules.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import NODE, Await, Counter, Item, Notify, Op, Put, Schedule
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology

SHAPES = [(1, 3), (2, 1), (2, 2), (4, 1), (3, 2), (5, 2), (2, 4)]
#: A part of a call: its schedule, its landing slot, the operations, and whether it is the first part.
Part = tuple[Schedule, int, Sequence[Op], bool]


def in_order(schedule: Schedule, leave: str = "") -> list[Op]:
    """All operations in the order of issue, but for those of the stream ``leave``."""
    ops: list[Op] = []
    done = dict.fromkeys(schedule.streams, 0)
    for name, count in schedule.issue or [(name, len(ops)) for name, ops in schedule.streams.items()]:
        if name != leave:
            ops += schedule.streams[name][done[name] : done[name] + count]
            done[name] += count
    assert all(done[name] == len(ops) for name, ops in schedule.streams.items() if name != leave), "all is issued"
    return ops


def run(topology: Topology, work: list[list[Part]]) -> None:
    """Run each rank's parts one after the other, as far as they get; fails if some rank does not get through."""
    cells: dict[tuple[Counter, int, int], int] = {}  # (counter, writer, who sees it)
    threads = [_thread(topology, rank, parts, cells) for rank, parts in enumerate(work)]
    waiting: list[tuple[tuple[Counter, int, int], int] | None] = [None] * len(threads)
    left = set(range(len(threads)))
    while left:
        moved = False
        for rank in sorted(left):
            wait = waiting[rank]
            if wait is not None and cells.get(wait[0], 0) < wait[1]:
                continue
            moved = True
            waiting[rank] = next(threads[rank], None)
            if waiting[rank] is None:
                left.discard(rank)
        assert moved, f"deadlock: {[w for w in waiting if w]}"


def _thread(
    topology: Topology, rank: int, parts: list[Part], cells: dict[tuple[Counter, int, int], int]
) -> Iterator[tuple[tuple[Counter, int, int], int]]:
    """Does what it can and yields what it waits for."""
    totals: dict[tuple[Counter, int], int] = {}
    bases: dict[tuple[int, int], dict[tuple[Counter, int], int]] = {}
    for schedule, slot, ops, first in parts:

        def bound(counter: Counter, slot: int = slot) -> Counter:
            return Counter("vacated", slot) if counter.name == "vacated" else counter

        if first:
            bases[id(schedule), slot] = dict(totals)
            for (counter, writer), amount in schedule.advance.items():
                key = bound(counter), writer
                totals[key] = totals.get(key, 0) + amount
        base = bases[id(schedule), slot]
        for op in ops:
            if isinstance(op, Await):
                counter = bound(op.counter)
                yield (counter, op.writer, rank), base.get((counter, op.writer), 0) + op.count
            elif isinstance(op, (Notify, Put)):
                counter, to = (op.counter, op.to) if isinstance(op, Notify) else (op.signal, op.dst.at)
                for reader in topology.node_ranks(rank) if to == NODE else (to,):
                    key = bound(counter), rank, reader
                    cells[key] = cells.get(key, 0) + 1


def layout_for(topology: Topology) -> GroupLayout:
    n = topology.ranks
    return GroupLayout((ParamShape(3 * n - 1, 5, 2), ParamShape(2, 3, 2), ParamShape(2 * n, 4, 2)), n)


def reduction(topology: Topology, rank: int, plan: BasePlan | None, output: Item, bank: int) -> Schedule:
    """With chunks so small that pushes wait for sums."""
    return reduce_scatter(
        layout_for(topology),
        topology,
        rank,
        grad=Item.BF16,
        output=output,
        chunk_bytes=16 * (topology.local_ranks if topology.nodes > 1 else 1),
        interleave=False,
        plan=plan,
        bank=bank,
    )


@pytest.mark.parametrize("output", [Item.F32, Item.BF16], ids=lambda o: o.value)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(("rounds", "slot_reuse", "passes"), [(4, False, 1), (1, True, 1), (2, True, 2)])
def test_reduce_scatters(shape: tuple[int, int], rounds: int, slot_reuse: bool, passes: int, output: Item) -> None:
    topology = Topology(*shape)
    plan = BasePlan(*shape, shape[1], rounds, slot_reuse, passes) if shape[0] > 1 else None
    work = []
    for rank in range(topology.ranks):
        calls = [reduction(topology, rank, plan, output, bank) for bank in (0, 1, 0, 1)]
        work.append([(c, 0, in_order(c), True) for c in calls])
    run(topology, work)


@pytest.mark.parametrize("ahead", [False, True], ids=["FSDP2's order", "ahead"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_steps(shape: tuple[int, int], ahead: bool) -> None:
    """A backward pass: the next all-gather is given before the former landing is vacated and its gradients reduced.

    Ahead, the one after it comes between the two. What waits here for all that is given before, on any rank, ends; so
    does a network phase that waits for that all-gather alone.
    """
    topology = Topology(*shape)
    layout, plan = layout_for(topology), BasePlan(*shape, shape[1], 4) if shape[0] > 1 else None
    build = all_gather_nodes if topology.nodes > 1 else all_gather
    work = []
    for rank in range(topology.ranks):
        gathers = [
            build(layout, topology, rank, [Item.RAW2] * 3, shared_landing=False, interleave=False) for _ in range(5)
        ]
        given: list[Part] = [(g, i % 2, in_order(g, "readiness"), True) for i, g in enumerate(gathers)]
        parts = given[: 1 + ahead]
        for i in range(4):
            reduced = reduction(topology, rank, plan, Item.F32, i % 2)
            parts += [] if ahead else given[i + 1 : i + 2]
            parts.append((gathers[i], i % 2, gathers[i].streams["readiness"], False))
            parts += given[i + 2 : i + 3] if ahead else []
            parts.append((reduced, 0, in_order(reduced), True))
        work.append(parts)
    run(topology, work)


def test_an_order_in_which_sums_come_last_is_found_out() -> None:
    topology = Topology(2, 2)
    calls = [reduction(topology, rank, BasePlan(2, 2, 2, 4), Item.F32, 0) for rank in range(4)]
    assert all(len(c.issue) > 6 for c in calls), "there are chunks enough for a push to wait for a sum"
    with pytest.raises(AssertionError, match="deadlock"):
        run(topology, [[(c, 0, [op for ops in c.streams.values() for op in ops], True)] for c in calls])
