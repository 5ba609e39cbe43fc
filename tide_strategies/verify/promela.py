"""A Promela model of a workload, generated from its schedules, for the Spin model checker.

Every thread becomes a process that waits, accesses memory and notifies in its schedule's order; the puts of a stream to
one rank with one signal become a process of their own, which writes and signals at some later time. Memory is cut where
any access begins or ends; a cell holds the number of the operation that wrote it last, and every read asserts that it
finds the writer it should. Spin goes through all interleavings: an assertion that fails is a race, an invalid end state
a deadlock. So the model checks the verifier's clocks by brute force, on configurations small enough for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tide_strategies.collectives.schedule import Await, Op
from tide_strategies.verify.machine import Machine, Release, Thread
from tide_strategies.verify.memory import Actor, Memory, Run
from tide_strategies.verify.steps import Act, Call, Cell, Join, Mark
from tide_strategies.verify.story import Story

#: Bytes [begin, end) of a memory.
_Span = tuple[str, int, int]


@dataclass
class _Event:
    """What one process does at one point: wait, then access, then notify."""

    waits: list[tuple[object, int]] = field(default_factory=list)
    reads: list[_Span] = field(default_factory=list)
    writes: list[_Span] = field(default_factory=list)
    notifies: list[object] = field(default_factory=list)
    #: For people, and to leave a wait out.
    label: str = ""

    @property
    def only_waits(self) -> bool:
        return not (self.reads or self.writes or self.notifies)


class _Recording(Memory):
    recorder: Recorder

    def read(self, actor: Actor, begin: int, nbytes: int) -> list[Run]:
        if nbytes:
            self.recorder.event(actor).reads.append((self.name, begin, begin + nbytes))
        return super().read(actor, begin, nbytes)

    def write(self, actor: Actor, begin: int, runs: Sequence[Run]) -> None:
        if end := sum(run.nbytes for run in runs):
            self.recorder.event(actor).writes.append((self.name, begin, begin + end))
        super().write(actor, begin, runs)


class Recorder(Machine):
    """A machine that notes what every process does, and in which order."""

    def __init__(self, ranks: int, local_ranks: int, *, shared_landing: bool = True) -> None:
        super().__init__(ranks, local_ranks, shared_landing=shared_landing)
        self.order: list[tuple[str, _Event]] = []

    def add(self, rank: int, name: str, nbytes: int) -> Memory:
        """Memory whose accesses are noted."""
        memory = self.memories.get((rank, name))
        if memory is None or memory.nbytes < nbytes:
            recording = _Recording(f"{name}@{rank}", nbytes, self._names)
            recording.recorder = self
            memory = self.memories[rank, name] = recording
        return memory

    def event(self, actor: Actor) -> _Event:
        """The event that ``actor`` is in."""
        name, event = self.order[-1]
        assert name == actor.name
        return event

    def _begin_event(self, actor: Actor, label: str) -> _Event:
        self.order.append((actor.name, _Event(label=label)))
        return self.order[-1][1]

    def _act(self, thread: Thread, step: Act) -> None:
        self._begin_event(thread, "caller")
        super()._act(thread, step)

    def _do(self, thread: Thread, call: Call, op: Op) -> None:
        self._begin_event(thread, type(op).__name__)
        super()._do(thread, call, op)

    def _nic(self, thread: Thread, cell: Cell, to: int) -> Actor:
        nic = super()._nic(thread, cell, to)
        self.event(thread).notifies.append(("handed", nic.name))
        handed = sum(("handed", nic.name) in event.notifies for _, event in self.order)
        self._begin_event(nic, "rail").waits.append((("handed", nic.name), handed))
        return nic

    def _target(self, thread: Thread, call: Call, op: Await, cell: Cell) -> int:
        value = super()._target(thread, call, op, cell)
        if value > 0:
            self._begin_event(thread, f"call {call.number} {op.counter.name} {op.writer}").waits.append((cell, value))
        return value

    def _notify(self, actor: Actor, cell: Cell, to: int, release: Release) -> None:
        self.event(actor).notifies.append(cell)
        super()._notify(actor, cell, to, release)

    def _mark(self, thread: Thread, step: Mark) -> None:
        self._begin_event(thread, "mark").notifies.append((thread.rank, step.key))
        super()._mark(thread, step)

    def _join(self, thread: Thread, step: Join) -> None:
        self._begin_event(thread, "join").waits.append(((thread.rank, step.key), 1))
        super()._join(thread, step)


def model(story: Story, leave_out: str = "") -> str:
    """The Promela text of a story whose machine is a :class:`Recorder`.

    Args:
        story: what to check; it is run once, to learn which write every read must find.
        leave_out: "PROCESS|LABEL|N": leave out the N-th wait of a process with a label, as listed in the comments.

    Raises:
        Violation: if the story is wrong already.
        ValueError: if there is no such wait.
    """
    recorder = story.machine
    assert isinstance(recorder, Recorder)
    story.run()
    cells: dict[object, str] = {}
    atoms = _Atoms(recorder.order)
    processes: dict[str, list[_Event]] = {}
    writers: dict[int, int] = {}
    text: dict[int, str] = {}
    left = not leave_out
    seen: dict[tuple[str, str], int] = {}
    for number, (name, event) in enumerate(recorder.order, 1):
        processes.setdefault(name, []).append(event)
        asserts = "".join(f" assert(m[{a}] == {writers.get(a, 0)});" for span in event.reads for a in atoms.of(span))
        writes = ""
        for span in event.writes:
            for a in atoms.of(span):
                writers[a] = number
                writes += f" m[{a}] = {number};"
        text[id(event)] = asserts + writes
        if event.waits:
            nth = seen[name, event.label] = seen.get((name, event.label), 0) + 1
            if f"{name}|{event.label}|{nth}" == leave_out:
                event.waits.clear()
                left = True
    if not left:
        raise ValueError(f"no wait {leave_out!r}")

    def cell(key: object) -> str:
        return cells.setdefault(key, f"c[{len(cells)}]")

    bodies: list[str] = []
    for name, events in processes.items():
        lines = []
        for steps in _blocks(events):
            guard = " && ".join(f"{cell(k)} >= {v}" for e in steps for k, v in e.waits)
            body = "".join(text[id(e)] for e in steps) + "".join(f" {cell(k)}++;" for e in steps for k in e.notifies)
            lines.append(f"  atomic {{ ({guard or 'true'});{body} }}")
        bodies.append(f"/* {name} */\nactive proctype p{len(bodies)}() {{\n" + "\n".join(lines) + "\n}\n")
    return f"short m[{max(atoms.count, 1)}];\nbyte c[{max(len(cells), 1)}];\n\n" + "\n".join(bodies)


def waits(story: Story) -> list[str]:
    """Names of all waits for counters of a story whose machine is a :class:`Recorder`, which is run for it."""
    recorder = story.machine
    assert isinstance(recorder, Recorder)
    story.run()
    out: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    for name, event in recorder.order:
        if event.waits and event.label.startswith("call "):
            nth = seen[name, event.label] = seen.get((name, event.label), 0) + 1
            out.append(f"{name}|{event.label}|{nth}")
    return out


def _blocks(events: Sequence[_Event]) -> Iterator[list[_Event]]:
    """Events in steps of waits, then accesses, then notifications.

    Nothing can depend on the middle of such a step, so that interleaving them loses nothing.
    """
    block: list[_Event] = []
    for event in events:
        notified = any(e.notifies for e in block)
        acted = any(not e.only_waits for e in block)
        if (event.waits and acted) or (notified and (event.reads or event.writes)):
            yield block
            block = []
        block.append(event)
    if block:
        yield block


class _Atoms:
    """Memory cut wherever an access begins or ends."""

    def __init__(self, order: Sequence[tuple[str, _Event]]) -> None:
        cuts: dict[str, set[int]] = {}
        for _, event in order:
            for name, begin, end in (*event.reads, *event.writes):
                cuts.setdefault(name, set()).update((begin, end))
        self._cuts = {name: sorted(at) for name, at in cuts.items()}
        self._first: dict[str, int] = {}
        self.count = 0
        for name, at in self._cuts.items():
            self._first[name] = self.count
            self.count += len(at) - 1

    def of(self, span: _Span) -> range:
        """Numbers of the pieces of a span."""
        name, begin, end = span
        cuts, first = self._cuts[name], self._first[name]
        return range(first + bisect_left(cuts, begin), first + bisect_left(cuts, end))
