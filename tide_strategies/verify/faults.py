"""Breaking schedules on purpose: each fault of the protocol, and the removal of every single wait, signal and zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tide_strategies.collectives.schedule import Await, Copy, Land, Notify, Op, Put, Schedule, Sum, Zero
from tide_strategies.verify.story import Change
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload

#: An operation of one rank's schedule: (stream, position).
Place = tuple[str, int]


@dataclass(frozen=True)
class Fault:
    """One way to break a schedule.

    Args:
        name: for people.
        hits: whether an operation can be broken this way.
        edit: the operations instead of (operations of the stream, position).
    """

    name: str
    hits: Callable[[Op], bool]
    edit: Callable[[Sequence[Op], int], Sequence[Op]]


def _drop(ops: Sequence[Op], at: int) -> Sequence[Op]:
    return [*ops[:at], *ops[at + 1 :]]


def _double(ops: Sequence[Op], at: int) -> Sequence[Op]:
    return [*ops[: at + 1], *ops[at:]]


def _late(ops: Sequence[Op], at: int) -> Sequence[Op]:
    """The operation comes last in its stream: for a wait, everything else runs ahead of it."""
    return [*_drop(ops, at), ops[at]]


def _early(ops: Sequence[Op], at: int) -> Sequence[Op]:
    """The operation comes before what it should announce: first in its stream."""
    return [ops[at], *_drop(ops, at)]


def _less(ops: Sequence[Op], at: int) -> Sequence[Op]:
    op = ops[at]
    assert isinstance(op, Await)
    return [*ops[:at], replace(op, count=op.count - 1), *ops[at + 1 :]]


def _more(ops: Sequence[Op], at: int) -> Sequence[Op]:
    op = ops[at]
    assert isinstance(op, Await)
    return [*ops[:at], replace(op, count=op.count + 1), *ops[at + 1 :]]


def _shift(ops: Sequence[Op], at: int) -> Sequence[Op]:
    """Data goes one piece further than it should."""
    op = ops[at]
    assert isinstance(op, (Copy, Put, Sum, Land))
    size = op.nbytes if isinstance(op, Put) else op.items * op.dst_item.size
    return [*ops[:at], replace(op, dst=replace(op.dst, offset=op.dst.offset + size)), *ops[at + 1 :]]


def _forget_source(ops: Sequence[Op], at: int) -> Sequence[Op]:
    op = ops[at]
    assert isinstance(op, (Sum, Land))
    return [*ops[:at], replace(op, sources=op.sources[1:]), *ops[at + 1 :]]


def _repeat_source(ops: Sequence[Op], at: int) -> Sequence[Op]:
    op = ops[at]
    assert isinstance(op, (Sum, Land))
    return [*ops[:at], replace(op, sources=(*op.sources, op.sources[0])), *ops[at + 1 :]]


def _of(*kinds: type) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def _adds(op: Op) -> bool:
    return isinstance(op, (Sum, Land)) and len(op.sources) > 1


#: Kinds of faults of operations (lifetimes and the order of calls are broken in the story instead).
FAULTS = (
    Fault("dropped wait", _of(Await), _drop),
    Fault("dropped signal", _of(Notify), _drop),
    Fault("doubled signal", _of(Notify), _double),
    Fault("early signal", _of(Notify), _early),
    Fault("wait that comes late", _of(Await), _late),
    Fault("wait for too little", lambda op: isinstance(op, Await) and op.count > 0, _less),
    Fault("wait for too much", _of(Await), _more),
    Fault("dropped transfer", _of(Put), _drop),
    Fault("doubled transfer", _of(Put), _double),
    Fault("dropped zeroing", _of(Zero), _drop),
    Fault("misplaced data", _of(Put, Copy, Sum), _shift),
    Fault("lost contribution", _adds, _forget_source),
    Fault("contribution added twice", _adds, _repeat_source),
)


def places(schedule: Schedule, hits: Callable[[Op], bool]) -> Iterator[Place]:
    """Operations of a schedule."""
    for stream, ops in schedule.streams.items():
        yield from ((stream, i) for i, op in enumerate(ops) if hits(op))


def schedules(workload: Workload, kind: str) -> dict[int, Schedule]:
    """The first schedule of a kind on every rank."""
    found: dict[int, Schedule] = {}

    def note(called: str, number: int, schedule: Schedule) -> Schedule:
        if called == kind:
            found.setdefault(schedule.rank, schedule)
        return schedule

    workload.story(note)
    return found


def broken(fault: Fault, kind: str, rank: int, place: Place, op: Op) -> Change:
    """Break ``op`` in all of rank's schedules of a kind that have it at that place."""
    stream, at = place

    def change(called: str, number: int, schedule: Schedule) -> Schedule:
        ops = schedule.streams.get(stream, ())
        if called != kind or schedule.rank != rank or at >= len(ops) or ops[at] != op:
            return schedule
        return replace(schedule, streams={**schedule.streams, stream: tuple(fault.edit(ops, at))})

    return change


def found(workloads: Sequence[Workload], change: Change, *, count: bool) -> Violation | None:
    """The violation that a change brings about in one of the workloads; None if all run clean.

    ``count``: a total that differs from what schedules say counts as found; otherwise only what would go wrong.
    """
    for workload in workloads:
        try:
            workload.story(change, count=count).run()
        except Violation as violation:
            return violation
    return None


REMOVALS = (FAULTS[0], FAULTS[1], FAULTS[9])


def redundant(workloads: Sequence[Workload], kind: str, ranks: Sequence[int]) -> list[tuple[int, Place, Op]]:
    """Waits, signals and zeros without which all workloads, which share their schedules, still run clean."""
    out = []
    originals = schedules(workloads[0], kind)
    for rank in ranks:
        for fault in REMOVALS:
            for place in places(originals[rank], fault.hits):
                op = originals[rank].streams[place[0]][place[1]]
                if found(workloads, broken(fault, kind, rank, place, op), count=False) is None:
                    out.append((rank, place, op))
    return out
