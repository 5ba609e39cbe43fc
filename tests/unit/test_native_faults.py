"""Broken schedules on the running executor: what the verifier finds on paper, a run shows as an error or wrong bytes.

Rank 1 of 3x2 runs a schedule with one fault while each rank in turn is slow. Memory begins as NaN, so that what is read
too early is seen. A run ends within its timeout whatever the fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from test_native_nodes import World, to_bf16

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item, Schedule
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.faults import FAULTS, Fault, places

TOPOLOGY, BROKEN, CALLS = Topology(3, 2), 1, 4
RANKS = TOPOLOGY.ranks
LAYOUT = GroupLayout((ParamShape(3 * RANKS - 1, 7, 2), ParamShape(2 * RANKS, 5, 2)), RANKS)
SIZES = [s.rows * s.row_items for s in LAYOUT.params]
GRADS = np.random.default_rng(0).integers(-8, 9, (CALLS, RANKS, sum(SIZES)))
PLAN = BasePlan(3, 2, 2, 1)
TIMEOUT_S = 0.5
#: How late a rank begins each call; the longer delay is for machines that are busy, where the short one is lost.
DELAYS_S = (0.03, 0.25)

Change = Callable[[Schedule, int], Schedule]


def schedule(rank: int, bank: int) -> Schedule:
    return reduce_scatter(LAYOUT, TOPOLOGY, rank, grad=Item.BF16, output=Item.F32, chunk_bytes=96, bank=bank, plan=PLAN)


SCHEDULES = {(rank, bank): schedule(rank, bank) for rank in range(RANKS) for bank in (0, 1)}


def outcome(change: Change, slow: int | None, slow_s: float = 0.03) -> str:
    """ "right", "wrong", or the status with which the first rank stopped."""
    world, outputs = World(TOPOLOGY), np.full((CALLS, RANKS, LAYOUT.output_items), np.nan, np.float32)
    for (rank, _), whole in SCHEDULES.items():
        for (space, index), nbytes in whole.memory.items():
            world.buffer(rank, space, index, 2 * nbytes)  # room for what goes astray
    prepared = []
    for rank in range(RANKS):
        own = []
        for call in range(CALLS):
            cuts = np.split(GRADS[call, rank], np.cumsum(SIZES)[:-1])
            inputs = [to_bf16(cut) for cut in cuts]
            changed = change(SCHEDULES[rank, call % 2], rank)
            own.append((*world.prepare(rank, changed, inputs, 0, outputs[call, rank]), inputs))
        prepared.append(own)
    stopped: list[str] = []

    def run(rank: int) -> None:
        for number, (program, bases, counters, _) in enumerate(prepared[rank]):
            if rank == slow:
                time.sleep(slow_s)
            done = program.replay(world.arenas[rank], bases, counters, number + 1, 1.0, TIMEOUT_S)
            if done.status != "ok":
                stopped.append(done.status)
                world.arenas[rank].abort(1, b"stopped")
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if stopped:
        return stopped[0]
    return "right" if outputs.tobytes() == expected().tobytes() else "wrong"


def expected() -> np.ndarray:
    out = np.zeros((CALLS, RANKS, LAYOUT.output_items), np.float32)
    for call in range(CALLS):
        total, first = GRADS[call].sum(axis=0), 0
        for p, size in enumerate(SIZES):
            for rank in range(RANKS):
                begin, items = first + rank * LAYOUT.shard_items(p), LAYOUT.valid_items(p, rank)
                at = LAYOUT.output_offset(p)
                out[call, rank, at : at + items] = total[begin : begin + items]
            first += size
    return out


def shows(fault: Fault) -> Iterator[bool]:
    """For each operation of the broken rank that the fault can hit: whether a run shows it."""
    for stream, at in places(SCHEDULES[BROKEN, 0], fault.hits):

        def change(original: Schedule, rank: int, stream: str = stream, at: int = at) -> Schedule:
            if rank != BROKEN or not fault.hits(original.streams[stream][at]):
                return original
            ops = tuple(fault.edit(original.streams[stream], at))
            return replace(original, streams={**original.streams, stream: ops})

        runs = ((slow, delay) for delay in DELAYS_S for slow in (*range(RANKS), None))
        yield any(outcome(change, slow, delay) != "right" for slow, delay in runs)


def test_without_a_fault_the_run_is_right() -> None:
    assert [outcome(lambda original, rank: original, slow) for slow in range(RANKS)] == ["right"] * RANKS


BY_NAME = {fault.name: fault for fault in FAULTS}
#: What these break does not depend on who comes first.
ALWAYS = ["dropped signal", "dropped transfer", "misplaced data", "lost contribution", "contribution added twice"]
#: A race that a run may win: that each is a fault wherever it hits is proven by the verifier (test_verify_faults.py),
#: which needs no luck.
RACES = [
    *("doubled signal", "early signal", "wait for too little", "dropped wait", "wait that comes late"),
    *("wait for too much", "doubled transfer"),
]


@pytest.mark.parametrize("name", ALWAYS)
def test_a_fault_shows_wherever_it_hits(name: str) -> None:
    found = list(shows(BY_NAME[name]))
    assert found
    assert all(found)


@pytest.mark.parametrize("name", RACES)
def test_a_race_that_is_lost_shows(name: str) -> None:
    assert any(shows(BY_NAME[name]))
