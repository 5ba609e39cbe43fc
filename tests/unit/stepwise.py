"""A verified workload on the native executor, one piece of a schedule at a time, in an order that a test chooses.

The verifier says what no execution may do; this shows what one does. All ranks are in one thread: whoever comes
first in an order runs until the executor's wait for a peer ends at its timeout of zero, then the next does. A wait that
nobody ends is what would run into its timeout. Memory begins as NaN, so that what is read too early is seen; data are
small whole numbers, whose sums are exact in any order.

What goes to another node is done by a thread of its own, as by a network card: in order with what has the same signal,
at any time after the stream has gone on, with the bytes that were there then.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tide_strategies._native import Arena
from tide_strategies.collectives.schedule import NODE, SELF, Await, Counter, Notify, Op, Put, Schedule, Space
from tide_strategies.runtime.encode import Encoded, encode
from tide_strategies.verify.memory import Run
from tide_strategies.verify.steps import Act, Call, Do, Join, Mark, Step
from tide_strategies.verify.story import Change, Gathered, Reduced, Story

COUNTERS = 512

#: Changes what the caller of a rank does: (rank, name of the thread, its steps) -> steps.
Edit = Callable[[int, str, list[Step]], list[Step]]

#: Of each (rank, thread), of (rank, -1 - t) for what it sends to rank t of another node, or of (rank, counter) for what
#: it sends with that signal: who has less runs first.
Who = tuple[int, int | Counter]
Order = Mapping[Who, float]
_LAST = 1e6


@dataclass(frozen=True)
class Piece:
    """Operations that run without a pause, ``stream`` of the program: a wait, a signal, or what lies between."""

    stream: int
    awaits: Await | None
    signal: Put | Notify | None


@dataclass(frozen=True)
class Pieces:
    """A schedule cut into pieces, by stream."""

    encoded: Encoded
    streams: dict[str, tuple[Piece, ...]]


def cut(schedule: Schedule, inputs: int) -> Pieces:
    """Each wait and each signal is a piece of its own: others may come between any two."""
    ranges: dict[str, tuple[Op, ...]] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, ops in schedule.streams.items():
        pieces[name] = []
        run: list[Op] = []
        for i, op in enumerate(ops):
            run.append(op)
            following = ops[i + 1] if i + 1 < len(ops) else None
            if isinstance(op, (Await, Notify, Put)) or following is None or isinstance(following, (Await, Notify, Put)):
                awaits, signal = (op if isinstance(op, kind) else None for kind in (Await, (Notify, Put)))
                pieces[name].append(Piece(len(ranges), awaits, signal))
                ranges[f"{name}/{i}"] = tuple(run)
                run = []
    encoded = encode(replace(schedule, streams=ranges, issue=()), inputs)
    return Pieces(encoded, {name: tuple(p) for name, p in pieces.items()})


class Stepwise:
    """What a story does, to be run again and again, whole or broken.

    Args:
        story: of a workload without multicast, which no CPU has.
    """

    def __init__(self, story: Story) -> None:
        assert not story.multicast
        self.story, self.ranks = story, story.topology.ranks
        self.threads = [(rank, name, list(steps)) for (rank, name), steps in story._threads.items()]
        self._sizes = {key: memory.nbytes for key, memory in story.machine.memories.items()}
        for rank, _, steps in self.threads:
            for step in steps:
                if isinstance(step, Do):
                    for (space, index), nbytes in step.call.schedule.memory.items():
                        key = (rank, f"{space.value}{index}")
                        self._sizes[key] = max(nbytes, self._sizes.get(key, 0))
        # Twice the room: what goes astray by its own length must not hit what is no memory of the schedule.
        self._memory = {key: np.zeros(2 * nbytes + 64, np.uint8) for key, nbytes in self._sizes.items()}
        self._cut: dict[int, tuple[Schedule, Pieces]] = {}
        self._data: dict[tuple[object, ...], np.ndarray] = {}

    def orders(self, suspects: Sequence[Who] = (), more: int = 4) -> Iterator[Order]:
        """Each of ``suspects`` last; each rank last, and first; what it sends last; so many at random."""
        threads = {(rank, t): float(t) for t, (rank, _, _) in enumerate(self.threads)}
        cards = {(rank, -1 - to): -1.0 for rank in range(self.ranks) for to in range(self.ranks)}
        plain = threads | cards
        yield from (plain | {suspect: _LAST} for suspect in suspects)
        for rank in range(self.ranks):
            yield plain | {key: _LAST + place for key, place in threads.items() if key[0] == rank}
        for rank in range(self.ranks):
            yield plain | {key: _LAST for key in cards if key[0] == rank}
        for rank in range(self.ranks):
            yield cards | {key: -place - _LAST * (key[0] == rank) for key, place in threads.items()}
        rng = np.random.default_rng(0)
        for _ in range(more):
            yield dict(zip(plain, rng.permutation(len(plain)).tolist(), strict=True))

    def suspects(self, op: Op, rank: int) -> list[Who]:
        """Who has to be late for a fault of rank's operation to matter: what is awaited, what is sent, who is told."""
        if isinstance(op, Put):
            return [(rank, op.signal), (rank, -1 - op.dst.at), *self._threads_of(rank)]
        if isinstance(op, Await):
            return [(op.writer, op.counter), (op.writer, -1 - rank), *self._threads_of(op.writer)]
        return self._threads_of(rank) if isinstance(op, Notify) else []

    def _threads_of(self, rank: int) -> list[Who]:
        """Its threads, if there are several: that a rank is late as a whole is tried anyway."""
        own: list[Who] = [(r, t) for t, (r, _, _) in enumerate(self.threads) if r == rank]
        return own if len(own) > 1 else []

    def finds(
        self,
        change: Change | None = None,
        edit: Edit | None = None,
        suspects: Sequence[Who] = (),
    ) -> str:
        """What an order shows, the first that shows anything: "timeout", "wrong", ...; "" if all run right."""
        for order in self.orders(suspects):
            outcome = self.run(order, change, edit)
            if outcome != "right":
                return outcome
        return ""

    def run(self, order: Order, change: Change | None = None, edit: Edit | None = None) -> str:
        """Run all threads, who comes first in ``order`` first; "right", "wrong", "incast", or how a wait ended."""
        work = self.threads
        if edit is not None:
            work = [(rank, name, edit(rank, name, list(steps))) for rank, name, steps in work]
        for memory in self._memory.values():
            memory[:] = 0xFF
        return _Running(self, work, order, change).outcome()

    def pieces(self, call: Call, change: Change | None) -> Pieces:
        """A call's schedule, changed or not."""
        schedule = call.schedule
        if change is not None:
            schedule = change(schedule.name, call.number, schedule)
        if schedule is not call.schedule:
            return cut(schedule, len(call.inputs))
        known = self._cut.get(id(schedule))
        if known is None:
            known = self._cut[id(schedule)] = schedule, cut(schedule, len(call.inputs))
        return known[1]

    def address(self, call: Call, rank: int, space: Space, index: int, at: int) -> int:
        """Of memory as a call of ``rank`` names it."""
        first = rank - self.story.topology.local_of(rank)
        owner = {SELF: rank, NODE: first}.get(at, at)
        if space is Space.OUTPUT:
            return self._memory[rank, call.output].ctypes.data
        if space is Space.LANDING:
            return self._memory[self.story.machine.landing_owner(owner), f"landing{call.landing}"].ctypes.data
        return self._memory[owner, f"{space.value}{index}"].ctypes.data

    def source(self, call: Call, rank: int, put: Put) -> np.ndarray:
        """What a put reads."""
        src = put.src
        name, at = call.inputs[src.index] if src.space is Space.INPUT else (f"{src.space.value}{src.index}", 0)
        if src.space is Space.LANDING:
            name = f"landing{call.landing}"
        return self._memory[rank, name][at + src.offset :][: put.nbytes]

    def inputs(self, call: Call, rank: int) -> list[int]:
        """Addresses of a call's inputs."""
        return [self._memory[rank, name].ctypes.data + at for name, at in call.inputs]

    def act(self, step: Act) -> bool:
        """What the caller does with memory; False if what it finds is wrong."""
        name, arguments = step.action.func.__name__, step.action.args
        return {"_fill": self._fill, "_check_gathered": self._gathered, "_check_reduced": self._reduced}[name](
            *arguments
        )

    def _fill(self, rank: int, acts: Sequence[tuple[str, int, Run]]) -> bool:
        for name, at, run in acts:
            if run.nbytes:
                kind, number, owner, p, _ = run.terms[0]
                self._memory[rank, name][at : at + run.nbytes] = self._values(kind, number, owner, p, run.nbytes)
        return True

    def _values(self, kind: str, number: int, rank: int, p: int, nbytes: int) -> np.ndarray:
        """Bytes of a shard; whole numbers from -8 to 8 as bf16 for a gradient."""
        key = (kind, number, rank, p)
        if key not in self._data:
            rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
            if kind == "grad":
                self._data[key] = (rng.integers(-8, 9, nbytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(
                    np.uint16
                )
            else:
                self._data[key] = rng.integers(0, 256, nbytes, np.uint8)
        return self._data[key].view(np.uint8)

    def _gathered(self, gathered: Gathered, rank: int) -> bool:
        landing = self._memory[self.story.machine.landing_owner(rank), f"landing{gathered.slot}"]
        layout = gathered.layout
        for p, shape in enumerate(layout.params):
            for owner in range(layout.ranks):
                nbytes = layout.valid_items(p, owner) * shape.itemsize
                at = layout.landing_offset(p, owner)
                want = self._values("shard", gathered.shards, owner, p, nbytes)
                if landing[at : at + nbytes].tobytes() != want.tobytes():
                    return False
        return True

    def _reduced(self, reduced: Reduced, rank: int) -> bool:
        layout, want = reduced.layout, np.zeros(reduced.layout.output_items, np.float32)
        for p, shape in enumerate(layout.params):
            nbytes = 2 * shape.rows * shape.row_items
            grads = [self._values("grad", reduced.number, r, p, nbytes).view(np.uint16) for r in range(self.ranks)]
            total = sum((g.astype(np.uint32) << 16).view(np.float32) for g in grads)
            begin, items = rank * layout.shard_items(p), layout.valid_items(p, rank)
            want[layout.output_offset(p) :][:items] = total[begin : begin + items]
        size = reduced.output.size
        got = self._memory[rank, f"output{reduced.number}"][: want.size * size]
        wanted = want if size == 4 else (want.view(np.uint32) >> 16).astype(np.uint16)
        return got.tobytes() == wanted.tobytes()


class _Running:
    """One run."""

    def __init__(
        self, bench: Stepwise, work: list[tuple[int, str, list[Step]]], order: Order, change: Change | None
    ) -> None:
        self.bench, self.work, self.change, self.order = bench, work, change, order
        first = Arena.create(bench.ranks, 0, COUNTERS)
        self.arenas = [first, *(Arena.attach(first.fd, bench.ranks, r, COUNTERS) for r in range(1, bench.ranks))]
        self.counters: dict[object, int] = {}
        self.calls: dict[int, tuple[Pieces, Any]] = {}
        self.marks: set[object] = set()
        self.heads: set[tuple[int, int, int]] = set()
        self.status = "right"
        self.running: list[Iterator[object]] = []
        self.ready: list[tuple[float, int]] = []
        self.places: list[float] = []
        self.cards: dict[object, deque[Callable[[], None]]] = {}
        self.woken: list[object] = []

    def outcome(self) -> str:
        for rank in range(self.bench.ranks):
            self._begin(rank)
        for t, (rank, _, steps) in enumerate(self.work):
            self._start(self._steps(rank, t, steps), self.order[rank, t])
        waiting: dict[object, list[int]] = {}
        while self.ready:
            place, t = heapq.heappop(self.ready)
            key = next(self.running[t], "end")
            if self.status != "right":
                return self.status
            if key is None:
                heapq.heappush(self.ready, (place, t))
            elif key != "end":
                waiting.setdefault(key, []).append(t)
            for key in self.woken:
                for w in waiting.pop(key, ()):
                    heapq.heappush(self.ready, (self.places[w], w))
            self.woken.clear()
        return "timeout" if any(key[0] != "card" for key in waiting) else "right"

    def _start(self, thread: Iterator[object], place: float) -> None:
        self.running.append(thread)
        self.places.append(place)
        heapq.heappush(self.ready, (place, len(self.places) - 1))

    def _begin(self, rank: int) -> None:
        """Calls take their places: in the order in which one thread comes to them, else in that of their numbers."""
        steps = [s for r, _, own in self.work if r == rank for s in own if isinstance(s, Do)]
        calls = list({id(s.call): s.call for s in steps}.values())
        if not self.bench.story.interleave:
            calls.sort(key=lambda call: call.number)
        for call in calls:
            pieces = self.bench.pieces(call, self.change)
            bases = self.bench.inputs(call, rank)
            bases += [self.bench.address(call, rank, *base) for base in pieces.encoded.bases]
            cells = [self.counters.setdefault(call.bind(c), len(self.counters)) for c in pieces.encoded.counters]
            tag = {"all-gather": 1, "reduce-scatter": 2, "reuse": 3}[call.schedule.name]
            started = pieces.encoded.program.begin(self.arenas[rank], bases, cells, tag, 1.0)
            self.calls[id(call)] = pieces, started

    def _steps(self, rank: int, thread: int, steps: Sequence[Step]) -> Iterator[object]:
        """Step by step; yields None after each, or what it waits for."""
        for step in steps:
            if isinstance(step, Act):
                if not self.bench.act(step):
                    self.status = "wrong"
                yield None
            elif isinstance(step, Mark):
                self.marks.add((rank, step.key))
                self.woken.append((rank, step.key))
                yield None
            elif isinstance(step, Join):
                while (rank, step.key) not in self.marks:
                    yield rank, step.key
            else:
                yield from self._stream(rank, thread, step)

    def _stream(self, rank: int, thread: int, step: Do) -> Iterator[object]:
        pieces, started = self.calls[id(step.call)]
        for piece in pieces.streams[step.stream]:
            if piece.signal is None:
                while (done := started.run(piece.stream, 0.0)).status == "timeout":
                    yield step.call.bind(piece.awaits.counter), piece.awaits.writer
                if done.status != "ok":
                    self.status = done.status
            else:
                self._signal(rank, thread, step.call, started, piece.stream, piece.signal)
            yield None

    def _signal(self, rank: int, thread: int, call: Call, started: Any, stream: int, op: Put | Notify) -> None:
        counter, to = (op.signal, op.dst.at) if isinstance(op, Put) else (op.counter, op.to)
        self._pace(call, counter, to)
        cell = call.bind(counter)
        source = self.bench.source(call, rank, op) if isinstance(op, Put) else None
        bytes_then = None if source is None else source.copy()

        def deliver() -> None:
            if source is not None:
                bytes_now = source.copy()
                source[:] = bytes_then
            started.run(stream, 0.0)
            if source is not None:
                source[:] = bytes_now
            self.woken.append((cell, rank))

        if to in (NODE, *self.bench.story.topology.node_ranks(rank)):
            deliver()
            return
        key = ("card", thread, cell, to)
        if key not in self.cards:
            self.cards[key] = deque()
            self._start(self._card(key), self.order.get((rank, counter), self.order[rank, -1 - to]))
        self.cards[key].append(deliver)
        self.woken.append(key)

    def _card(self, key: object) -> Iterator[object]:
        while True:
            while not self.cards[key]:
                yield key
            self.cards[key].popleft()()
            yield None

    def _pace(self, call: Call, signal: Counter, to: int) -> None:
        """What a round of an all-gather begins before the head of the one before is sent makes two senders at once."""
        if signal.name == "gathered":
            self.heads.add((to, call.number, signal.index))
            if signal.index and (to, call.number, signal.index - 1) not in self.heads:
                self.status = "incast"
