"""Replay schedules against rates: when does each operation run, and when is the collective through?

The same schedules that executors run and the verifier proves (``collectives/schedule.py``). Streams of a rank run side
by side, operations of a stream in order; consecutive copies of a stream go out as one batch, spread over their
destinations, as executors issue them. Contention is in the resources (``planner/events.py``): links in and out, rails,
memory, the summing and landing thread blocks. With ``delay_s`` every operation and signal is late by up to that much,
drawn from a seeded generator, which shows how sensitive a schedule is, and that it ends whatever the timing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tide_strategies.collectives.all_gather import CAST_CTAS
from tide_strategies.collectives.schedule import (
    NODE,
    SELF,
    Await,
    Copy,
    Counter,
    Land,
    Notify,
    Op,
    Put,
    Record,
    Schedule,
    Sum,
    WaitEvent,
    Zero,
)
from tide_strategies.collectives.signals import PER_SLOT
from tide_strategies.errors import TideError
from tide_strategies.planner.events import Action, Resource, Simulation, Uses
from tide_strategies.planner.rates import Rates
from tide_strategies.topology import Topology


class SimulationError(TideError):
    """The schedules do not end: some stream waits for what nobody will do."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What schedules are replayed on.

    Args:
        rates: of one rank.
        topology: M x L.
        sum_ctas: thread blocks of the sum.
        landing_ctas: thread blocks of the landing.
        one_memory: whether the ranks of a node share one memory and see one landing (CPU processes).
    """

    rates: Rates
    topology: Topology
    sum_ctas: int = 1
    landing_ctas: int = 1
    one_memory: bool = False

    def capacity(self, resource: Resource) -> float:
        """Bytes/s of a resource."""
        r = self.rates
        kind = resource[0]  # type: ignore[index]
        return {
            "out": r.push,
            "in": r.intake,
            "rail out": r.rail,
            "rail in": r.rail,
            "local": r.local,
            "memory": r.memory,
            "sum": self.sum_ctas * r.sum_per_cta,
            "cast": CAST_CTAS * self.sum_ctas * r.sum_per_cta,
            "land": min(self.landing_ctas * r.land_per_cta, r.land_cap),
        }[kind]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a stream did, or waited for (``wait``), from ``start`` to ``end`` seconds."""

    rank: int
    stream: str
    what: str
    start: float
    end: float
    nbytes: int = 0
    wait: bool = False


@dataclass
class Replayed:
    """What a replay found.

    Args:
        seconds: when the last rank was through.
        per_rank: when each rank was.
        spans: what ran and waited, in order of its end.
        moved: bytes by resource.
    """

    seconds: float
    per_rank: list[float]
    spans: list[Span] = field(default_factory=list)
    moved: dict[Resource, float] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """One rank's call of a collective. ``slot`` is the landing slot, whose counters it uses."""

    schedule: Schedule
    slot: int = 0
    totals: dict[tuple[Counter, int], int] | None = None
    #: When the first operation may begin, on whichever thread.
    begun_s: float = 0.0
    recorded: dict[str, list[Action]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)


#: One thing that a thread does: given what to do once it is done, says whether it is done already.
Step = Callable[[Action], bool]
#: One thread of a rank: streams of its calls, one after another.
Thread = Sequence[tuple[Call, str]]


def one_call(schedules: Sequence[Schedule], together: Sequence[Sequence[str]]) -> list[tuple[int, Thread]]:
    """Threads for one call on every rank. ``together`` names the streams of each thread; absent ones are left out."""
    threads: list[tuple[int, Thread]] = []
    for schedule in schedules:
        call = Call(schedule)
        for names in together:
            steps = [(call, name) for name in names if name in schedule.streams]
            if steps:
                threads.append((schedule.rank, steps))
    return threads


def replay(machine: Machine, threads: Sequence[tuple[int, Thread]], *, seed: int = 0, delay_s: float = 0.0) -> Replayed:
    """Replay threads (each a rank and its steps) to their end.

    Raises:
        SimulationError: they do not end; says who waits for what.
    """
    return _Replay(machine, seed, delay_s).run(threads)


class _Replay:
    def __init__(self, machine: Machine, seed: int, delay_s: float) -> None:
        self.machine, self.rates, self.topology = machine, machine.rates, machine.topology
        self.random, self.delay_s = random.Random(seed), delay_s
        self.simulation = Simulation(machine.capacity)
        self.cells: dict[tuple[Counter, int, int], int] = {}  # (counter, writer, who sees it)
        self.waiting: dict[tuple[Counter, int, int], list[tuple[int, Action]]] = {}
        self.totals: list[dict[tuple[Counter, int], int]] = [{} for _ in range(self.topology.ranks)]
        self.blocked: dict[int, str] = {}
        self.spans: list[Span] = []
        self.ends = [0.0] * self.topology.ranks

    def run(self, threads: Sequence[tuple[int, Thread]]) -> Replayed:
        """See :func:`replay`."""
        for number, (rank, steps) in enumerate(threads):
            self.blocked[number] = f"rank {rank} has not begun"
            self._go(number, rank, self._steps(number, rank, steps))
        self.simulation.run()
        if self.blocked:
            raise SimulationError(f"the schedules do not end: {'; '.join(list(self.blocked.values())[:8])}")
        return Replayed(max(self.ends), self.ends, self.spans, self.simulation.busy())

    def _go(self, number: int, rank: int, steps: Iterator[Step]) -> None:
        """Run a thread until a step takes time, and go on once that is done."""
        for step in steps:
            if not step(lambda: self._go(number, rank, steps)):
                return
        del self.blocked[number]
        self.ends[rank] = max(self.ends[rank], self.simulation.now)

    def _steps(self, number: int, rank: int, thread: Thread) -> Iterator[Step]:
        for call, stream in thread:
            if call.totals is None:
                self._begin(rank, call)
                call.begun_s = self.simulation.now + self.rates.call_s
            if self.simulation.now < call.begun_s:
                yield self._timer(call.begun_s - self.simulation.now)
            checked = False  # whether the signals that are given to the stream together have a wait so far
            for kind, ops in _batches(call.schedule.streams[stream]):
                over_s = 0.0 if checked else self.rates.wait_s
                checked = kind is Await or (kind is Notify and checked)
                if kind is Await or kind is WaitEvent:
                    yield self._wait(number, rank, call, stream, ops[0], over_s)
                elif kind is Record:
                    self._record(call, ops[0])
                elif kind is Notify:
                    self._notify(rank, call, ops[0])
                else:
                    yield self._work(number, rank, call, stream, ops)

    def _begin(self, rank: int, call: Call) -> None:
        totals = self.totals[rank]
        call.totals = dict(totals)
        for (counter, writer), amount in call.schedule.advance.items():
            key = (_bound(counter, call), writer)
            totals[key] = totals.get(key, 0) + amount

    def _timer(self, seconds: float) -> Step:
        def step(done: Action) -> bool:
            self.simulation.after(seconds + self._late(), done)
            return False

        return step

    def _late(self) -> float:
        return self.random.uniform(0.0, self.delay_s) if self.delay_s else 0.0

    def _wait(self, number: int, rank: int, call: Call, stream: str, op: Op, over_s: float) -> Step:
        """``over_s``: what it takes if what it waits for has come."""
        start = self.simulation.now

        def step(done: Action) -> bool:
            def pass_on() -> None:
                if self.simulation.now > start:
                    self.spans.append(Span(rank, stream, what, start, self.simulation.now, wait=True))
                self.blocked[number] = f"rank {rank}, stream {stream!r}"
                done()

            if isinstance(op, WaitEvent):
                what = f"event {op.event}"
                if op.event in call.passed:
                    return True
                call.recorded.setdefault(op.event, []).append(pass_on)
            else:
                assert isinstance(op, Await)
                assert call.totals is not None
                counter = _bound(op.counter, call)
                target = call.totals.get((counter, op.writer), 0) + op.count
                what = f"{counter} of rank {op.writer} at {target}"
                key = (counter, op.writer, rank)
                if self.cells.get(key, 0) >= target:
                    if over_s:
                        self.simulation.after(over_s, done)
                    return not over_s
                self.waiting.setdefault(key, []).append((target, pass_on))
            self.blocked[number] = f"rank {rank}, stream {stream!r} of {call.schedule.name}, awaits {what}"
            return False

        return step

    def _record(self, call: Call, op: Op) -> None:
        assert isinstance(op, Record)
        call.passed.add(op.event)
        for action in call.recorded.pop(op.event, []):
            self.simulation.after(0.0, action)

    def _notify(self, rank: int, call: Call, op: Op) -> None:
        assert isinstance(op, Notify)
        self._signal(rank, _bound(op.counter, call), op.to)

    def _signal(self, rank: int, counter: Counter, to: int) -> None:
        readers = self.topology.node_ranks(rank) if to == NODE else (rank if to == SELF else to,)
        for reader in readers:
            near = self.topology.node_of(reader) == self.topology.node_of(rank)
            seconds = self.rates.signal_s if near else self.rates.rail_signal_s
            self.simulation.after(seconds + self._late(), self._arrival((counter, rank, reader)))

    def _arrival(self, key: tuple[Counter, int, int]) -> Action:
        def arrive() -> None:
            value = self.cells[key] = self.cells.get(key, 0) + 1
            waiting = self.waiting.pop(key, [])
            left = [w for w in waiting if w[0] > value]
            if left:
                self.waiting[key] = left
            for target, action in waiting:
                if target <= value:
                    action()

        return arrive

    def _work(self, number: int, rank: int, call: Call, stream: str, ops: Sequence[Op]) -> Step:
        """Start a batch; its parts share what they need and the batch is done with the last of them."""

        def step(done: Action) -> bool:
            start = self.simulation.now
            parts = self._parts(rank, call, ops)
            left = len(parts)

            def part_done(after: Action) -> Action:
                def end() -> None:
                    nonlocal left
                    after()
                    left -= 1
                    if left == 0:
                        nbytes = int(sum(n for n, _, _ in parts))
                        what = f"{type(ops[0]).__name__.lower()} x{len(ops)}"
                        self.spans.append(Span(rank, stream, what, start, self.simulation.now, nbytes))
                        done()

                return end

            def launch() -> None:
                for nbytes, uses, after in parts:
                    self.simulation.flow(nbytes, uses, part_done(after))

            self.blocked[number] = f"rank {rank}, stream {stream!r}"
            self.simulation.after(self.rates.start_s + self._apart(rank, ops) + self._late(), launch)
            return False

        return step

    def _parts(self, rank: int, call: Call, ops: Sequence[Op]) -> list[tuple[float, Uses, Action]]:
        """Flows of a batch: (bytes, resources, what to do at its end)."""
        first = ops[0]
        if isinstance(first, Copy) and self._by_kernel(rank, ops):
            moved = sum(op.items * (op.src_item.size + op.dst_item.size) for op in ops if isinstance(op, Copy))
            return [(moved, {("cast", rank): 1.0, self._memory(rank): 1.0}, _nothing)]
        if isinstance(first, Copy):
            to: dict[tuple[int, int], float] = {}
            for op in ops:
                assert isinstance(op, Copy)
                key = (op.src.at, op.dst.at)
                to[key] = to.get(key, 0.0) + op.rows * op.items * op.dst_item.size
            return [
                (n, uses, _nothing)
                for (src, dst), n in to.items()
                for uses in self._copy(rank if src == SELF else src, rank, dst)
            ]
        if isinstance(first, Put):
            rail: Uses = {("rail out", rank): 1.0, ("rail in", first.dst.at): 1.0}
            counter, to_rank = _bound(first.signal, call), first.dst.at
            return [(first.nbytes, rail, lambda: self._signal(rank, counter, to_rank))]
        memory = self._memory(rank)
        total = 0.0
        for op in ops:
            if isinstance(op, Sum):
                written = op.dst_item.size * (2 if op.accumulate else 1)
                total += op.items * (len(op.sources) * op.src_item.size + written)
            elif isinstance(op, Land):
                total += op.items * 4
            elif isinstance(op, Zero):
                total += op.nbytes
        if isinstance(first, Sum):
            return [(total, {("sum", rank): 1.0, memory: 1.0}, _nothing)]
        if isinstance(first, Land):
            return [(total, {("land", rank): 1.0, **self._landing_traffic(rank, ops)}, _nothing)]
        return [(total, {("local", rank): 1.0, memory: 1.0}, _nothing)]

    def _apart(self, rank: int, ops: Sequence[Op]) -> float:
        """Seconds for which copies within a GPU come one by one."""
        if self.machine.one_memory or self._by_kernel(rank, ops):
            return 0.0
        own = sum(isinstance(op, Copy) and op.src.at == SELF and op.dst.at in (SELF, rank) for op in ops)
        return own * self.rates.own_copy_s

    def _by_kernel(self, rank: int, ops: Sequence[Op]) -> bool:
        """Whether a GPU casts here, with a kernel."""
        casts = (
            isinstance(op, Copy) and op.src_item is not op.dst_item and op.src.at == SELF and op.dst.at in (SELF, rank)
            for op in ops
        )
        return not self.machine.one_memory and all(casts)

    def _landing_traffic(self, rank: int, ops: Sequence[Op]) -> dict[Resource, float]:
        """Memory traffic per byte landed: one written here, and what is read of each rank's inbox, dearer from afar."""
        traffic: dict[Resource, float] = {self._memory(rank): 1.0}
        for op in ops:
            assert isinstance(op, Land)
            for source in op.sources:
                ranks = self.topology.node_ranks(rank) if source.at == NODE else (source.at,)
                for at in ranks:
                    tax = 1.0 if at in (SELF, rank) else self.rates.pull_tax
                    memory = self._memory(rank if at == SELF else at)
                    traffic[memory] = traffic.get(memory, 0.0) + tax / len(ops)
        return traffic

    def _copy(self, src: int, rank: int, dst: int) -> list[Uses]:
        """Resources of a copy from rank ``src`` to ``dst``, issued by ``rank``; several flows if it fans out."""
        if self.machine.one_memory:
            return [{("local", rank): 1.0, self._memory(rank): 2.0}]
        if dst != NODE:
            return [self._to_one(src, rank if dst == SELF else dst, self.rates.pull_tax if src != rank else 1.0)]
        node = self.topology.node_ranks(rank)
        if not self.rates.multicast:
            return [self._to_one(src, r) for r in node]
        fan: dict[Resource, float] = {("out", src): 1.0, self._memory(src): 1.0}
        for r in node:
            fan["in", r] = 1.0
            fan[self._memory(r)] = fan.get(self._memory(r), 0.0) + 1.0
        return [fan]

    def _to_one(self, src: int, dst: int, tax: float = 1.0) -> Uses:
        if src == dst:
            return {("local", dst): 1.0, self._memory(dst): 2.0}
        return {("out", src): 1.0, ("in", dst): 1.0, self._memory(src): tax, self._memory(dst): 1.0}

    def _memory(self, rank: int) -> Resource:
        return ("memory", self.topology.node_of(rank) if self.machine.one_memory else rank)


def _nothing() -> None:
    pass


def _bound(counter: Counter, call: Call) -> Counter:
    """A slot's counters belong to the slot that the call lands in."""
    return Counter(counter.name, call.slot) if counter.name in PER_SLOT else counter


def _batches(ops: Sequence[Op]) -> Iterator[tuple[type, list[Op]]]:
    """Operations that go out together: runs of copies, sums, landings or zeros; everything else by itself."""
    together = (Copy, Sum, Land, Zero)
    for kind, run in groupby(ops, type):
        if kind in together:
            yield kind, list(run)
        else:
            for op in run:
                yield kind, [op]
