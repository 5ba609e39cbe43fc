"""Faults on the executor of devices: each ends in an error, in a bounded wait, or in wrong bytes.

Rank 0 of 2x2 runs broken schedules, or breaks the order of use, while a rank that makes the fault matter is slow. Sums
are of small whole numbers, so that every result is known to the bit.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
from nodes_scenarios import Rank, bf16, layouts, own_shard
from ranks import launch, threads, values
from stage import AWAIT, array, controls, fake, memory, play, program, scenario, until

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.schedule import Await, Item, Notify, Op, Put, Schedule, Zero
from tide_strategies.errors import TideMismatchError, TidePeerError
from tide_strategies.runtime.cuda import group as device_group
from tide_strategies.topology import Topology
from tide_strategies.verify.faults import FAULTS

BROKEN, GROUP, TURNS = 0, 1, 4
#: Where a wait never ends, it ends soon; where bytes are looked at, no busy machine may end one.
SOON_S, BOUND_S = 0.4, 20.0
#: For how long what has to be slow is held up, first; longer where the machine is so busy that nobody has run ahead.
HELD_S = (0.05, 0.3, 1.0)
EDITS = {fault.name: fault.edit for fault in FAULTS}


@dataclass(frozen=True)
class Case:
    """A fault: an edit of rank 0's schedules wherever it hits, or something that its caller does.

    Args:
        name: for people; of a caller's fault, what :class:`Caller` does.
        edit: of ``FAULTS``.
        kind: of the operations that are hit.
        counter: that they wait for or add to.
        held: (rank, stream) that is held up in each call, without which the fault would not matter; its outcome is
            wrong bytes, otherwise an error.
    """

    name: str
    edit: str = ""
    kind: type | tuple[type, ...] = ()
    counter: str = ""
    held: tuple[int, str] | None = None

    def hits(self, op: Op) -> bool:
        counter = op.signal if isinstance(op, Put) else getattr(op, "counter", None)
        return isinstance(op, self.kind) and (
            not self.counter or (counter is not None and counter.name == self.counter)
        )

    @property
    def errors(self) -> bool:
        """Whether what shows it is an error, not wrong bytes."""
        return self.held is None and self.kind is not Zero and self.name not in ("no fault", "landing vacated early")


def case(edit: str, kind: type, counter: str, held: tuple[int, str] | None = None) -> Case:
    return Case(f"{edit}: {kind.__name__} {counter}", edit, kind, counter, held)


#: On 2x2: rank 1 shares rank 0's node, rank 2 its rail.
CASES = [
    Case("no fault"),
    case("dropped signal", Notify, "pushed"),
    case("dropped signal", Notify, "consumed"),
    case("dropped signal", Notify, "filled"),
    case("dropped signal", Notify, "landed"),
    case("dropped signal", Notify, "vacated"),
    case("dropped signal", Notify, "credit"),
    case("dropped signal", Notify, "stage_free"),
    case("dropped transfer", Put, "arrived"),
    case("dropped transfer", Put, "gathered"),
    case("wait that comes late", Notify, "filled"),  # the edit that makes anything late
    case("wait for too much", Await, "arrived"),
    case("doubled signal", Notify, "pushed", (0, "push")),
    case("doubled transfer", Put, "arrived", (0, "network")),
    case("dropped wait", Await, "pushed", (1, "push")),
    case("dropped wait", Await, "arrived", (2, "network")),
    case("dropped wait", Await, "gathered", (2, "rail")),
    case("wait that comes late", Await, "pushed", (1, "push")),
    case("wait that comes late", Await, "arrived", (2, "network")),
    Case("landing vacated early"),
    Case("gradients released early", held=(0, "push")),
    Case("dropped call"),
    Case("reordered calls"),
]


@contextmanager
def breaking(case: Case):
    """What builds schedules breaks rank 0's."""
    with ExitStack() as stack:
        for name in ("reduce_scatter", "all_gather_nodes"):
            build = getattr(device_group, name)

            def broken(layout, topology, rank, *args, build=build, **kwargs) -> Schedule:
                schedule = build(layout, topology, rank, *args, **kwargs)
                if rank != BROKEN or not case.edit:
                    return schedule
                streams = {}
                for stream, ops in schedule.streams.items():
                    for at in [i for i, op in enumerate(ops) if case.hits(op)][::-1]:
                        ops = tuple(EDITS[case.edit](ops, at))
                    streams[stream] = ops
                return replace(schedule, streams=streams, issue=())

            stack.enter_context(mock.patch.object(device_group, name, broken))
        yield


class Caller:
    """One rank's turns: an all-gather and a reduction each, whose results are looked at."""

    def __init__(self, rank, exchange, case: Case, held_s: float, shape=(2, 2), **knobs):
        self.case, self.held_s, self.exchange, self.threads = case, held_s, exchange, "multicast" in knobs
        self.device = rank % shape[1] if self.threads else 0
        timeout_s = SOON_S if case.errors else BOUND_S
        self.here = Rank(rank, exchange, Topology(*shape), self.device, chunk_bytes=256, timeout_s=timeout_s, **knobs)
        self.here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
        for each in self.here.groups:
            each.prepare(tuple(range(len(each.layout.params))), Item.BF16, Item.F32)
            each.prepare_all_gather()
        self.group, self.layout = self.here.groups[GROUP], layouts(self.here.topology.ranks)[GROUP]
        self.used = []
        for space, index in self.here.engine._memory:
            array(self.here.engine.own(space, index), np.uint8)[:] = 0xFF  # NaN: what is read too early is seen
        exchange(b"begin")

    def outcome(self) -> str:
        """What this rank sees: "right", "wrong", or the name of an error."""
        found = "right"
        try:
            for turn in range(TURNS):
                if not self._turn(turn):
                    found = "wrong"
        except (TidePeerError, TideMismatchError) as error:
            found = type(error).__name__
        until(lambda: self.here.engine.control.outstanding() == 0, 20)
        self.exchange(b"ended")
        self.here.keep.clear()
        self.here.engine.close()
        return found

    def _turn(self, turn: int) -> bool:
        here, group, layout, rank = self.here, self.group, self.layout, self.here.rank
        odd = self.case.name if rank == BROKEN and turn == 1 else ""
        shapes = [(s.rows, s.row_items) for s in layout.params]
        full = [bf16(np.random.default_rng(turn).integers(-8, 9, s)) for s in shapes]
        kept = True
        if self.case.name == "landing vacated early" and rank == BROKEN and turn == 2:
            time.sleep(0.3)  # the others have begun to gather
            kept = self._landed(self.used)  # what it vacated, it still uses
        self._hold("rail")
        here.gather(group, [own_shard(full[p], layout, p, rank) for p in range(len(shapes))])
        self._settle()
        right, self.used = kept and self._landed(full), full
        here.vacate(group)
        if odd == "dropped call":
            return right
        return self._reduce(turn, odd, shapes) and right

    def _landed(self, full) -> bool:
        window, base = self.group.landing.window, self.layout.landing_base
        return all(np.array_equal(array(window, np.uint16, base(p), x.size), x.ravel()) for p, x in enumerate(full))

    def _reduce(self, turn: int, odd: str, shapes) -> bool:
        here, layout, rank, n = self.here, self.layout, self.here.rank, self.here.topology.ranks
        if odd == "reordered calls":
            other = here.groups[0]
            nothing = [bf16(np.zeros((s.rows, s.row_items))) for s in other.layout.params]
            here.reduce(other, nothing, memory(other.layout.output_items * 4, self.device), Item.F32, 1.0)
        grads = [
            [np.random.default_rng((turn, r, p)).integers(-8, 9, s) for p, s in enumerate(shapes)] for r in range(n)
        ]
        output = memory(layout.output_items * 4, self.device)
        array(output, np.uint8)[:] = 0xFF
        self._hold("push", "network")
        here.reduce(self.group, [bf16(g) for g in grads[rank]], output, Item.F32, 1.0)
        if odd == "gradients released early":
            array(here.keep[-1], np.uint8)[:] = 0  # while the push is held up
        self._settle()
        want = np.zeros(layout.output_items, np.float32)
        for p in range(len(shapes)):
            total = sum(grads[r][p] for r in range(n)).ravel()
            begin, items = rank * layout.shard_items(p), layout.valid_items(p, rank)
            want[layout.output_offset(p) :][:items] = total[begin : begin + items]
        return array(output, np.float32, 0, want.size).tobytes() == want.tobytes()

    def _hold(self, *streams: str) -> None:
        """Let nothing pass on a stream of this rank, if it is one that has to be slow, for a while."""
        for name in streams:
            if self.case.held == (self.here.rank, name):
                both, cells = controls(counters=1)  # of a peer that never comes
                shut = program([[AWAIT, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
                shut.begin(both[0], [], [0], 1, 1.0).enqueue(0, self.here.stream(name))
                self.here.keep.append((both, cells, shut))
                threading.Timer(self.held_s, both[0].release).start()

    def _settle(self) -> None:
        """Wait until this rank's device has done what it was given, or the watchdog has found something."""
        engine = self.here.engine
        until(lambda: engine.watchdog.stopped or fake.fake_idle(self.device, 20), 20)
        engine.watchdog.check()
        if self.threads:  # one device: what one gives it then another would wait for
            self.exchange(b"settled")


def _all(rank, exchange):
    found = {}
    for each in CASES:
        for held_s in HELD_S if each.held else HELD_S[:1]:
            with breaking(each):
                mine = Caller(rank, exchange, each, held_s).outcome()
            everyone = [b.decode() for b in exchange(mine.encode())]
            found[each.name] = everyone
            if set(everyone) != {"right"}:
                break
    return found


@scenario
def no_fault_passes_silently():
    """All faults in one launch of four ranks, an engine each."""
    os.environ["FAKE_CUDA_MEMORY"] = str(1 << 32)  # four ranks have one device, and each fault has an engine of its own
    found, *others = values(launch(4, _all, timeout_s=100))
    assert all(other == found for other in others)
    assert set(found.pop("no fault")) == {"right"}
    silent = [name for name, outcomes in found.items() if set(outcomes) == {"right"}]
    assert not silent, (silent, found)
    errors = {c.name: c.errors for c in CASES}
    for name, outcomes in found.items():  # who goes on for a moment beside one that has stopped may see anything
        assert any(o.endswith("Error") if errors[name] else o == "wrong" for o in outcomes), (name, outcomes)


@scenario
def a_block_that_is_not_zeroed_shows():
    """Only a landing by multicast reads blocks in which there is nothing."""
    os.environ["FAKE_CUDA_MULTICAST"], os.environ["FAKE_CUDA_MEMORY"] = "1", str(1 << 32)
    plan = BasePlan(3, 2, 2, 1)  # in the second wave there is only the own node's partial
    for each in (Case("no fault"), Case("dropped zeroing", "dropped zeroing", Zero)):
        with breaking(each):
            made = threads(6, lambda e, r, c=each: Caller(r, e, c, 0.0, (3, 2), multicast=True, plan=plan))
            found = threads(6, lambda e, r, made=made: made[r].outcome())
        assert ("wrong" in found) == (each.edit != ""), found
        assert set(found) <= {"right", "wrong"}, found


if __name__ == "__main__":
    play(globals())
