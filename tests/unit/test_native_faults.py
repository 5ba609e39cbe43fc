"""Broken schedules on the running executor: what the verifier finds on paper, a run shows as an error or wrong bytes.

Each fault is tried at many places of rank 0's schedules, under orders of the ranks in which it could matter
(``stepwise.py``). What shows under none must be what the verifier proves to change nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from broken_callers import (
    release_gradients_first,
    skip_call,
    swap_calls,
    use_before_it_is_complete,
    vacate_first,
    without_join,
)
from stepwise import Stepwise
from test_native_nodes import World, to_bf16
from test_verify_faults import GATHER, LANES, REDUCE, gathers, groups, story_of

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item, Notify
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.faults import FAULTS, broken, found, places, schedules
from tide_strategies.verify.workloads import Workload

#: A backward pass with gradients in the landing slots, an outbox of two rounds, and two passes.
TWO_LEVEL = Workload(
    "step",
    Topology(3, 2),
    groups(6, 6),
    plan=BasePlan(3, 2, 2, 1, slot_reuse=True, passes=2),
    slot_reuse=True,
    chunk_bytes=96,
    head_bytes=20,
    calls=4,
)
#: Each: the workload, the kind of call that is broken, and every how manieth place is tried without ``--all``.
WORKLOADS = {
    "all-gather across nodes": (GATHER, "all-gather", 1),
    "reduce-scatter across nodes": (REDUCE, "reduce-scatter", 2),
    "all-gather of a lane": (LANES[0], "all-gather", 1),
    "reduce-scatter of a lane": (LANES[1], "reduce-scatter", 21),
    "all-gather before slot reuse": (TWO_LEVEL, "all-gather", 4),
    "two passes and slot reuse": (TWO_LEVEL, "reduce-scatter", 9),
}
#: All but zeroing, which only a landing by multicast needs: that is dropped on the fake driver.
KINDS = [fault for fault in FAULTS if fault.name != "dropped zeroing"]
#: What these break shows wherever they hit.
ALWAYS = {
    *("dropped signal", "doubled signal", "wait for too little", "dropped transfer", "doubled transfer"),
    *("dropped wait", "misplaced data", "lost contribution", "contribution added twice"),
}


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_fault_passes_silently(request, name, interleave) -> None:
    work, kind, every = WORKLOADS[name]
    work = replace(work, interleave=interleave)
    bench, schedule = Stepwise(work.story()), schedules(work, kind)[0]
    assert bench.finds() == ""
    shown: dict[str, list[str]] = {}
    for number, fault in enumerate(KINDS):
        hit = list(places(schedule, fault.hits))
        if not request.config.getoption("--all"):
            hit = hit[number % every % max(len(hit), 1) :: every]
        for stream, at in hit:
            op = schedule.streams[stream][at]
            change = broken(fault, kind, 0, (stream, at), op)
            outcome = bench.finds(change, suspects=bench.suspects(op, 0))
            if outcome:
                shown.setdefault(fault.name, []).append(outcome)
                continue
            assert found([work], change, count=False) is None, (fault.name, stream, at, op)
            assert work.kind == "step" or fault.name not in ALWAYS, (fault.name, stream, at, op)
    adds = kind == "reduce-scatter"
    assert len(shown) >= (11 if adds else 8), shown
    assert set(shown["dropped signal"]) == {"timeout"}


ONE_THREAD = {
    "landing vacated early": (gathers, {"slots": 1}, vacate_first),
    "parameters used early": (gathers, {}, use_before_it_is_complete),
    "gradients released early": (story_of, {}, release_gradients_first),
    "output used early": (story_of, {}, use_before_it_is_complete),
    "calls swapped": (story_of, {}, swap_calls),
    "call skipped": (story_of, {}, skip_call),
}
SIDE_BY_SIDE = {
    "landing vacated early": (gathers, {"slots": 1}, vacate_first),
    "parameters used before they are placed": (gathers, {}, without_join("copy")),
    "parameters used before all are in": (gathers, {}, without_join("completion")),
    "gradients released before they are pushed": (story_of, {}, without_join("push")),
    "gradients released before they are added": (story_of, {}, without_join("sum")),
    "output used early": (story_of, {}, without_join("network")),
}


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
def test_faults_of_the_caller_show(interleave) -> None:
    for name, (story, knobs, breaks) in (ONE_THREAD if interleave else SIDE_BY_SIDE).items():
        bench = Stepwise(story(interleave=interleave, **knobs))
        assert bench.finds() == "", name

        def edit(rank, thread, steps, breaks=breaks):
            if (rank, thread) == (0, "caller"):
                breaks(steps)
            return steps

        own = [(r, t) for t, (r, _, _) in enumerate(bench.threads) if r == 0]
        assert bench.finds(edit=edit, suspects=own), name


def test_a_signal_that_never_comes_ends_every_rank_at_its_timeout() -> None:
    """For real: ranks are threads that wait, and the first that gives up tells the others."""
    topology, broken_rank, timeout_s = Topology(3, 2), 1, 0.3
    layout = GroupLayout((ParamShape(17, 7, 2),), 6)
    world, outputs, ended = World(topology), np.zeros((6, layout.output_items), np.float32), []
    prepared = []
    for rank in range(6):
        whole = reduce_scatter(
            *(layout, topology, rank),
            **{"grad": Item.BF16, "output": Item.F32, "chunk_bytes": 96, "plan": BasePlan(3, 2, 2, 1)},
        )
        for (space, index), nbytes in whole.memory.items():
            world.buffer(rank, space, index, nbytes)
        if rank == broken_rank:
            ops = whole.streams["network"]
            last = max(i for i, op in enumerate(ops) if isinstance(op, Notify))
            whole = replace(whole, streams={**whole.streams, "network": (*ops[:last], *ops[last + 1 :])})
        prepared.append((whole, [to_bf16(np.ones(17 * 7))]))
    programs = [world.prepare(rank, whole, data, 0, outputs[rank]) for rank, (whole, data) in enumerate(prepared)]

    def run(rank: int) -> None:
        program, bases, counters = programs[rank]
        begun = time.monotonic()
        for number in range(3):
            done = program.replay(world.arenas[rank], bases, counters, number + 1, 1.0, timeout_s)
            if done.status != "ok":
                world.arenas[rank].abort(1, b"stopped")
                ended.append((done.status, time.monotonic() - begun))
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 6
    assert {status for status, _ in ended} <= {"timeout", "aborted"}
    # The first gives up after timeout_s; the rest hear of it, or have waited as long. A second for a busy machine.
    assert all(took < 3 * timeout_s + 1 for _, took in ended)
