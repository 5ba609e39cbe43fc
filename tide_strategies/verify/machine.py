"""Run all ranks' schedules on symbolic memory with vector clocks.

Every stream is a thread with a clock; a notification carries its writer's clock, an await takes the clock of exactly
the notification that it needs and of no later one. So what is ordered here is ordered in every execution, and what is
not is reported as a race although this one execution may have been lucky. Control never depends on data and cells only
grow: if this execution ends, every one does; if it cannot move, none can.

A put writes through a thread of its own per (stream, target, signal): that its bytes are in is known to nobody but who
awaits its signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    Ref,
    Space,
    Sum,
    WaitEvent,
    Zero,
)
from tide_strategies.verify.memory import Actor, Memory, Run, added, cast
from tide_strategies.verify.steps import Act, Call, Cell, Do, Join, Mark, Step
from tide_strategies.verify.violation import Violation

#: What a release passes on: a clock, and (thread, tick) beyond it.
Release = tuple[list[int], tuple[tuple[int, int], ...]]


class Thread(Actor):
    """A stream of a rank, or its caller."""

    __slots__ = ("rank", "steps")

    def __init__(self, number: int, name: str, rank: int, clock: list[int]) -> None:
        super().__init__(number, name, clock)
        self.rank = rank
        self.steps: Iterator[tuple[Cell | object, int] | None] = iter(())

    def release(self) -> Release:
        """What whoever waits for this point learns."""
        out = (self.clock, ((self.number, self.tick),))
        self.tick += 1
        return out

    def acquire(self, release: Release) -> None:
        """Learn what a release passes on."""
        clock, extra = release
        if all(self.clock[n] >= t for n, t in extra[:1]):
            return
        self.clock = list(map(max, self.clock, clock))
        for n, t in extra:
            self.clock[n] = max(self.clock[n], t)


class Machine:
    """Ranks with their memories and counters.

    Args:
        ranks: N.
        local_ranks: L.
        shared_landing: the ranks of a node have one landing.
        count: at the end, check that each call brought what its schedule says. Off, a notification that nobody needs
            may be missing.
    """

    def __init__(self, ranks: int, local_ranks: int, *, shared_landing: bool = True, count: bool = True) -> None:
        self.count = count
        self.ranks, self.local_ranks, self.shared_landing = ranks, local_ranks, shared_landing
        self.memories: dict[tuple[int, str], Memory] = {}
        self.cells: dict[Cell, list[Release]] = {}
        self.audience: dict[Cell, int] = {}
        self.expected: list[dict[Cell, int]] = [{} for _ in range(ranks)]
        self._last: dict[Cell, Actor] = {}
        self._marks: dict[tuple[int, object], Release] = {}
        self._names: list[str] = []
        self._nics: dict[tuple[int, Cell, int], Actor] = {}
        self._heads: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._width = 0

    def add(self, rank: int, name: str, nbytes: int) -> Memory:
        """Give a rank memory, or make what it has as large."""
        memory = self.memories.get((rank, name))
        if memory is None or memory.nbytes < nbytes:
            memory = self.memories[rank, name] = Memory(f"{name}@{rank}", nbytes, self._names)
        return memory

    def run(self, work: Sequence[tuple[int, str, Sequence[Step]]]) -> None:
        """Run threads, each a rank, a name and its steps, to their end.

        Calls of a rank begin in the order of their numbers, whichever thread takes them up first.

        Raises:
            Violation: if a schedule breaks a rule.
        """
        self._begin([(rank, steps) for rank, _, steps in work])
        self._width = len(work) + self._count_nics(work)
        threads = []
        for rank, name, steps in work:
            thread = Thread(len(self._names), f"rank {rank} {name}", rank, [0] * self._width)
            self._names.append(thread.name)
            thread.steps = self._steps(thread, steps)
            threads.append(thread)
        waiting: dict[object, list[tuple[int, Thread]]] = {}
        ready = threads[::-1]
        while ready:
            thread = ready.pop()
            for wait in thread.steps:
                if wait is None:
                    for key in self._woken:
                        blocked = waiting.pop(key, [])
                        ready += [t for n, t in blocked if self._reached(key, n)]
                        still = [(n, t) for n, t in blocked if not self._reached(key, n)]
                        if still:
                            waiting[key] = still
                    self._woken.clear()
                elif not self._reached(*wait):
                    waiting.setdefault(wait[0], []).append((wait[1], thread))
                    break
        if waiting:
            stuck = [f"{t.name} at {self._describe(k, n)}" for k, ts in waiting.items() for n, t in ts]
            raise Violation("deadlock", f"{len(stuck)} threads wait for ever: {'; '.join(stuck[:4])}")
        if self.count:
            self._check_totals()

    def _begin(self, work: Sequence[tuple[int, Sequence[Step]]]) -> None:
        calls = {(s.call.number, rank, id(s.call)): s.call for rank, steps in work for s in steps if isinstance(s, Do)}
        for (_, rank, _), call in sorted(calls.items(), key=lambda kv: kv[0]):
            totals = self.expected[rank]
            for (counter, writer), amount in call.schedule.advance.items():
                cell = (call.bind(counter), writer)
                call.totals[cell] = totals.get(cell, 0)
                totals[cell] = call.totals[cell] + amount
            for (space, index), nbytes in call.schedule.memory.items():
                self.add(rank, f"{space.value}{index}", nbytes)

    def _count_nics(self, work: Sequence[tuple[int, str, Sequence[Step]]]) -> int:
        return sum(
            len({key for s in steps if isinstance(s, Do) for op in s.call.schedule.streams[s.stream]
                 for key in self._remote(rank, s.call, op)})
            for rank, _, steps in work
        )  # fmt: skip

    def _remote(self, rank: int, call: Call, op: Op) -> Iterator[tuple[object, int]]:
        """The signal to a rank of another node, and that rank."""
        if isinstance(op, Put):
            yield call.bind(op.signal), op.dst.at
        elif isinstance(op, Notify) and op.to != NODE and op.to not in self._node(rank):
            yield call.bind(op.counter), op.to

    def _check_totals(self) -> None:
        for rank, totals in enumerate(self.expected):
            for (bound, writer), n in totals.items():
                got = len(self.cells.get((bound, writer), ()))
                if got != n:
                    raise Violation("signal", f"rank {rank} counts on {n} of {bound} by rank {writer}; there are {got}")

    _woken: set[object]

    def _steps(self, thread: Thread, steps: Sequence[Step]) -> Iterator[tuple[object, int] | None]:
        self._woken = set()
        for step in steps:
            if isinstance(step, Act):
                self._act(thread, step)
            elif isinstance(step, Mark):
                self._mark(thread, step)
                yield None
            elif isinstance(step, Join):
                yield (thread.rank, step.key), 0
                self._join(thread, step)
            else:
                yield from self._stream(thread, step.call, step.stream)

    def _stream(self, thread: Thread, call: Call, stream: str) -> Iterator[tuple[object, int] | None]:
        for op in call.schedule.streams[stream]:
            if isinstance(op, Await):
                cell = (call.bind(op.counter), op.writer)
                value = self._target(thread, call, op, cell)
                yield cell, value
                if value > 0:
                    self._in_audience(thread, cell)
                    thread.acquire(self.cells[cell][value - 1])
            elif isinstance(op, WaitEvent):
                key = (thread.rank, (call.number, op.event))
                if key not in self._marks:
                    raise Violation("signal", f"{thread.name} waits for event {op.event!r} before it is recorded")
                thread.acquire(self._marks[key])
            else:
                self._do(thread, call, op)
                if self._woken:
                    yield None

    def _act(self, thread: Thread, step: Act) -> None:
        step.action(thread)

    def _mark(self, thread: Thread, step: Mark) -> None:
        self._marks[thread.rank, step.key] = thread.release()
        self._woken.add((thread.rank, step.key))

    def _join(self, thread: Thread, step: Join) -> None:
        thread.acquire(self._marks[thread.rank, step.key])

    def _target(self, thread: Thread, call: Call, op: Await, cell: Cell) -> int:
        own = call.schedule.advance.get((op.counter, op.writer))
        if own is None or op.count > own:
            raise Violation("signal", f"{thread.name} awaits {op}, of which a call brings {own or 0}")
        return call.totals[cell] + op.count

    def _reached(self, key: object, value: int) -> bool:
        if value == 0:
            return key in self._marks or isinstance(key[0], tuple)  # type: ignore[index]
        return len(self.cells.get(key, ())) >= value  # type: ignore[call-overload]

    def _describe(self, key: object, value: int) -> str:
        return f"{key} of {value} ({len(self.cells.get(key, ()))} there)"  # type: ignore[call-overload]

    def _in_audience(self, thread: Thread, cell: Cell) -> None:
        to, writer = self.audience[cell], cell[1]
        if not (to == thread.rank or (to == NODE and self._node(writer) == self._node(thread.rank))):
            raise Violation("signal", f"{thread.name} awaits {cell[0]} of rank {writer}, which tells it to {to}")

    def _node(self, rank: int) -> range:
        first = rank // self.local_ranks * self.local_ranks
        return range(first, first + self.local_ranks)

    def landing_owner(self, rank: int) -> int:
        """The rank whose memory is the landing that ``rank`` sees."""
        return self._node(rank)[0] if self.shared_landing else rank

    def _base(self, call: Call, ref: Ref) -> int:
        """Byte of the memory where what ``ref`` means begins."""
        return ref.offset + (call.inputs[ref.index][1] if ref.space is Space.INPUT else 0)

    def _memories(self, rank: int, call: Call, ref: Ref, nbytes: int) -> list[Memory]:
        """Where ``nbytes`` from ``ref`` on are, as ``rank`` sees it: within what this call's schedule asks for."""
        if ref.space is Space.INPUT:
            return [self.memories[rank, call.inputs[ref.index][0]]]
        if ref.space is Space.OUTPUT:
            return [self.memories[rank, call.output]]
        if ref.space is Space.LANDING:
            name = f"landing{call.landing}"
        else:
            name = f"{ref.space.value}{ref.index}"
            bytes_allowed = call.schedule.memory.get((ref.space, ref.index), 0)
            if ref.offset + nbytes > bytes_allowed:
                raise Violation(
                    "bounds", f"rank {rank} addresses {nbytes} bytes of {ref}; the schedule has {bytes_allowed} bytes"
                )
        owners: Sequence[int] = [rank if ref.at == SELF else ref.at]
        if ref.at == NODE:
            owners = self._node(rank)
        if ref.space is Space.LANDING and self.shared_landing:
            owners = sorted({self.landing_owner(o) for o in owners})
        return [self.memories[o, name] for o in owners]

    def _do(self, thread: Thread, call: Call, op: Op) -> None:
        if isinstance(op, Copy):
            read, written = op.items * op.src_item.size, op.items * op.dst_item.size
            (source,) = self._memories(thread.rank, call, op.src, (op.rows - 1) * op.src_pitch + read)
            for target in self._memories(thread.rank, call, op.dst, (op.rows - 1) * op.dst_pitch + written):
                for row in range(op.rows):
                    runs = source.read(thread, self._base(call, op.src) + row * op.src_pitch, read)
                    if op.src_item is not op.dst_item:
                        runs = [cast(run, op.src_item.size, op.dst_item.size) for run in runs]
                    target.write(thread, op.dst.offset + row * op.dst_pitch, runs)
        elif isinstance(op, Put):
            self._put(thread, call, op)
        elif isinstance(op, (Sum, Land)):
            self._add(thread, call, op)
        elif isinstance(op, Zero):
            for target in self._memories(thread.rank, call, op.dst, op.nbytes):
                target.write(thread, op.dst.offset, [Run(op.nbytes, ())])
        elif isinstance(op, Notify):
            cell = (call.bind(op.counter), thread.rank)
            if op.to == NODE or op.to in self._node(thread.rank):
                self._notify(thread, cell, op.to, thread.release())
            else:  # it keeps its place among the signals of the cell, but proves nothing of other puts
                nic = self._nic(thread, cell, op.to)
                self._pace(thread, call, op.counter, op.to, (thread.number, thread.tick - 1))
                self._notify(nic, cell, op.to, (thread.clock, ((thread.number, thread.tick - 1),)))
        elif isinstance(op, Record):
            self._marks[thread.rank, (call.number, op.event)] = thread.release()
        else:
            raise Violation("signal", f"unknown operation {op!r}")

    def _put(self, thread: Thread, call: Call, op: Put) -> None:
        (source,) = self._memories(thread.rank, call, op.src, op.nbytes)
        (target,) = self._memories(thread.rank, call, op.dst, op.nbytes)
        if self._node(op.dst.at) == self._node(thread.rank) and self.local_ranks > 1:
            raise Violation("signal", f"{thread.name} puts to rank {op.dst.at} of its own node")
        runs = source.read(thread, self._base(call, op.src), op.nbytes)
        cell = (call.bind(op.signal), thread.rank)
        nic = self._nic(thread, cell, op.dst.at)
        self._pace(thread, call, op.signal, op.dst.at, (nic.number, nic.tick))
        target.write(nic, op.dst.offset, runs)
        release = (nic.clock, ((nic.number, nic.tick), (thread.number, thread.tick - 1)))
        self._notify(nic, cell, op.dst.at, release)
        nic.tick += 1

    def _nic(self, thread: Thread, cell: Cell, to: int) -> Actor:
        """Who acts at rank ``to`` for a stream and a signal: in the stream's order, at a time that it does not know."""
        nic = self._nics.get((thread.number, cell, to))
        if nic is None:
            name = f"{thread.name} to {to} with {cell[0]}"
            nic = self._nics[thread.number, cell, to] = Actor(len(self._names), name, thread.clock)
            self._names.append(name)
        nic.clock = list(thread.clock)
        nic.clock[thread.number], nic.clock[nic.number] = thread.tick, nic.tick
        thread.tick += 1
        return nic

    def _pace(self, thread: Thread, call: Call, signal: Counter, to: int, mark: tuple[int, int]) -> None:
        """A round of an all-gather may begin when the first part of the one before is at the target.

        ``mark`` is what who has this transfer's first part knows.
        """
        if signal.name != "gathered":
            return
        step = signal.index
        self._heads.setdefault((to, call.number, step), mark)
        if step:
            head = self._heads.get((to, call.number, step - 1))
            if head is None or not thread.knows(*head):
                raise Violation(
                    "incast", f"{thread.name} sends round {step} to rank {to} before it has round {step - 1}'s head"
                )

    def _add(self, thread: Thread, call: Call, op: Sum | Land) -> None:
        size = op.src_item.size if isinstance(op, Sum) else 4
        out, dst_size = [], op.dst_item.size
        (target,) = self._memories(thread.rank, call, op.dst, op.items * dst_size)
        if op.accumulate:
            out.append(target.read(thread, op.dst.offset, op.items * dst_size))
        sizes = [dst_size] * len(out)
        for source in op.sources:
            for memory in self._memories(thread.rank, call, source, op.items * size):
                out.append(memory.read(thread, self._base(call, source), op.items * size))
                sizes.append(size)
        target.write(thread, op.dst.offset, added(thread, out, sizes, op.items, dst_size))

    def _notify(self, actor: Actor, cell: Cell, to: int, release: Release) -> None:
        if self.audience.setdefault(cell, to) != to:
            raise Violation("signal", f"{actor.name} tells {cell[0]} to {to}, before to {self.audience[cell]}")
        releases = self.cells.setdefault(cell, [])
        last = self._last.get(cell)
        if last is not None and last is not actor and not actor.knows(*releases[-1][1][0]):
            raise Violation("signal", f"{actor.name} and {last.name} both notify {cell[0]}, in any order")
        self._last[cell] = actor
        releases.append(release)
        self._woken.add(cell)
