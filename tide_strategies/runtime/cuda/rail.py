"""A rail between nodes of GPU ranks that do not reach each other's memory, and schedules cut where they use it.

Without a rail, ranks of other nodes are reached like those of the own node: by copies and stores into their memory.
With one, puts and notifications for other nodes are the rail's. What other nodes send, the rail takes in on a stream of
its own, which then stores into this rank's copy of the sender's counter cell; so waits, their bounds and their errors
are the same for both.

What is taken is taken in the order of the schedule. All-gathers and reduce-scatters each have an intake, or the next
all-gather would wait for the network phase before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import NODE, Await, Counter, Notify, Op, Put, Ref, Schedule, Space
from tide_strategies.runtime.cuda.fit import counted
from tide_strategies.runtime.encode import Encoded, Taken, encode

#: Stream of a cut schedule: stores what has been taken.
INTAKE = "intake"
#: Memory that puts read or write.
RAILED = frozenset({Space.STAGE, Space.OUTBOX, Space.INBOX})


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of this rank that a put of a peer's fills: ``nbytes`` at byte ``offset`` of (space, index)."""

    space: Space
    index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a rail is through with when the peer's cell of a counter, its own ones among them, has come to ``total``."""

    writer: int
    counter: int
    total: int


class DeviceRail(Protocol):
    """Enqueues on CUDA streams, given by handle. Only the setting up waits on the host for a peer."""

    @property
    def fetches(self) -> bool:
        """Whether :meth:`take` has to be told what the signals bring, since it is the rail that puts it in its place.

        Schedules of the peers are built to know it.
        """

    def register(self, space: Space, index: int, memory: cuda.Mapping) -> None:
        """Let memory of a schedule be put from and into. Collective; the same on all ranks, with equal sizes."""

    def put(
        self, peer: int, source: int, nbytes: int, space: Space, index: int, offset: int, counter: int, stream: int
    ) -> Arrival | None:
        """Send ``nbytes`` from address ``source`` to byte ``offset`` of the peer's (space, index), then notify.

        The stream goes on when the source has been read. For what is returned, see :meth:`arrive`.
        """

    def notify(self, peer: int, counter: int, stream: int) -> Arrival | None:
        """Send one signal of ``counter`` to ``peer``, after the puts before it that have the same counter."""

    def take(self, writer: int, counter: int, count: int, stream: int, parts: Sequence[Part] = ()) -> Arrival | None:
        """Let the stream go on when ``count`` signals have come beyond those that were taken before.

        ``parts`` is what they bring, if the rail :attr:`fetches` it.
        """

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Wait on the host until the rail is through with these, or this rank stops. Bounded in time.

        They are what :meth:`put`, :meth:`notify` and :meth:`take` return, if a rail wants the host to wait before a
        stream of the program's does for the streams that were given.
        """

    def pinned_by_part(self) -> dict[str, int]:
        """Bytes of pinned host memory that the rail holds on this rank, by part; empty if what it sends needs none."""

    def check(self) -> None:
        """Raise a TideError if a stream is held up for too long, or for good. Called now and then by the watchdog."""

    def stop(self, why: str = "") -> None:
        """Hold nothing up any more, whatever the peers do: this rank stops. From the watchdog's thread; bounded."""

    def close(self) -> None:
        """Let go of the rail; all ranks do. Bounded in time."""


@dataclass(frozen=True, slots=True)
class Send:
    """What the rail is given: a put or a notification; ``base`` is the number of the base that a put reads."""

    op: Put | Notify
    base: int = -1


@dataclass(frozen=True, slots=True)
class Take:
    """What the rail takes in: so many signals more, and the parts that they bring, if that is known.

    ``ahead``: only later calls wait for them.
    """

    counter: Counter
    writer: int
    count: int
    parts: tuple[Part, ...] = ()
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to enqueue: the native piece of that number, or something of the rail's.

    Args:
        stream: with which stream of the schedule it is enqueued.
        on_intake: whether it is on the intake's CUDA stream instead.
        does: what it is.
    """

    stream: str
    on_intake: bool
    does: int | Send | Take


@dataclass(frozen=True)
class Cut:
    """A schedule ready to run with a rail."""

    encoded: Encoded
    steps: tuple[Step, ...]


def cut(
    schedule: Schedule,
    node: Sequence[int],
    inputs: int,
    program_type: Callable[..., Any],
    schedule_of: Callable[[int], Schedule] | None = None,
) -> Cut:
    """Cut and encode a schedule for the rank of it, whose ``node`` has these ranks. Raises like ``encode``.

    ``schedule_of`` builds any rank's, for a rail that has to be told what comes.
    """
    parts = list(_parts(schedule, node, _Incoming(schedule.rank, schedule_of)))
    native = [(INTAKE if on_intake else name, part) for name, on_intake, part in parts if isinstance(part, tuple)]
    streams: dict[str, tuple[Op, ...]] = dict.fromkeys([*schedule.streams, INTAKE], ())
    for name, ops in native:
        streams[name] += ops
    stripped = replace(schedule, streams=streams, issue=tuple((name, len(ops)) for name, ops in native))
    sources = [replace(p.src, offset=0) for _, _, p in parts if isinstance(p, Put)]
    encoded = encode(counted(stripped), inputs, program_type, sources)
    numbers = iter(range(len(native)))
    base_of = {base: inputs + i for i, base in enumerate(encoded.bases)}

    def does(part: tuple[Op, ...] | Put | Notify | Take) -> int | Send | Take:
        if isinstance(part, Put):
            src: Ref = part.src
            return Send(part, src.index if src.space is Space.INPUT else base_of[src.space, src.index, src.at])
        if isinstance(part, Notify):
            return Send(part)
        return part if isinstance(part, Take) else next(numbers)

    return Cut(encoded, tuple(Step(name, on_intake, does(part)) for name, on_intake, part in parts))


class _Incoming:
    """What the peers' signals bring to a rank, in their order, from the peers' own schedules."""

    def __init__(self, rank: int, schedule_of: Callable[[int], Schedule] | None) -> None:
        self._rank, self._schedule_of = rank, schedule_of
        self._known: dict[int, dict[Counter, list[Part | None]]] = {}

    def of(self, counter: Counter, writer: int, before: int, count: int) -> tuple[Part, ...]:
        """The parts that come with a peer's signals of ``counter`` from number ``before`` up to ``count``."""
        if self._schedule_of is None:
            return ()
        if writer not in self._known:
            self._known[writer] = self._sent_by(self._schedule_of(writer))
        sent = self._known[writer].get(counter, [])
        assert len(sent) >= count, (counter, writer, len(sent), count)
        return tuple(part for part in sent[before:count] if part is not None and part.nbytes)

    def _sent_by(self, theirs: Schedule) -> dict[Counter, list[Part | None]]:
        sent: dict[Counter, list[Part | None]] = {}
        for _, ops in _runs(theirs):
            for op in ops:
                if isinstance(op, Put) and op.dst.at == self._rank:
                    part = Part(op.dst.space, op.dst.index, op.dst.offset, op.nbytes)
                    sent.setdefault(op.signal, []).append(part)
                elif isinstance(op, Notify) and op.to == self._rank:
                    sent.setdefault(op.counter, []).append(None)
        return sent


def _parts(
    schedule: Schedule, node: Sequence[int], incoming: _Incoming
) -> Iterator[tuple[str, bool, tuple[Op, ...] | Put | Notify | Take]]:
    """(stream, whether on the intake, native operations or something of the rail's) in the order of issue."""
    taken: dict[tuple[Counter, int], int] = {}
    last = ""
    for name, ops in _runs(schedule):
        piece: list[Op] = []
        for op in ops:
            remote = _is_sent(op, node) or (isinstance(op, Await) and op.writer not in node)
            last = name if remote else last
            if not remote or (isinstance(op, Await) and op.count <= taken.get((op.counter, op.writer), 0)):
                piece.append(op)
            else:  # whatever comes before it is enqueued before it
                if piece:
                    yield name, False, tuple(piece)
                piece = []
                if isinstance(op, Await):
                    yield from _take(name, op.counter, op.writer, op.count, taken, incoming)
                    piece.append(op)
                else:
                    assert isinstance(op, (Put, Notify))
                    yield name, False, op
        if piece:
            yield name, False, tuple(piece)
    for (counter, writer), total in schedule.advance.items():
        if writer not in node:  # what only later calls wait for
            yield from _take(last, counter, writer, total, taken, incoming, ahead=True)


def _take(
    stream: str,
    counter: Counter,
    writer: int,
    count: int,
    taken: dict[tuple[Counter, int], int],
    incoming: _Incoming,
    ahead: bool = False,
) -> Iterator[tuple[str, bool, tuple[Op, ...] | Take]]:
    before = taken.get((counter, writer), 0)
    if count > before:
        taken[counter, writer] = count
        yield stream, True, Take(counter, writer, count - before, incoming.of(counter, writer, before, count), ahead)
        yield stream, True, (Taken(counter, writer, count),)


def _runs(schedule: Schedule) -> Iterator[tuple[str, tuple[Op, ...]]]:
    done = dict.fromkeys(schedule.streams, 0)
    for name, count in schedule.issue or [(name, len(ops)) for name, ops in schedule.streams.items()]:
        yield name, schedule.streams[name][done[name] : done[name] + count]
        done[name] += count


def _is_sent(op: Op, node: Sequence[int]) -> bool:
    if isinstance(op, Put):
        return op.dst.at not in node
    return isinstance(op, Notify) and op.to != NODE and op.to not in node


@dataclass(frozen=True, slots=True)
class RailCall:
    """One use of a cut schedule: the native call, the addresses that the rail reads from, and what is to arrive."""

    native: Any
    bases: Sequence[int]
    arrivals: list[Arrival] = field(default_factory=list)


def enqueue(
    made: Cut,
    call: RailCall,
    rail: DeviceRail,
    number: Callable[[Counter], int],
    cuda_streams: Mapping[str, int],
    intake: int,
) -> None:
    """Enqueue the steps of the streams that are named. ``number`` gives a counter's number, alike on all ranks."""
    for step in made.steps:
        if step.stream not in cuda_streams:
            continue
        stream = intake if step.on_intake else cuda_streams[step.stream]
        arrival = None
        if isinstance(step.does, int):
            call.native.enqueue(step.does, stream)
        elif isinstance(step.does, Take):
            take = step.does
            arrival = rail.take(take.writer, number(take.counter), take.count, stream, take.parts)
            arrival = None if take.ahead else arrival
        elif isinstance(step.does.op, Put):
            put = step.does.op
            source, dst = call.bases[step.does.base] + put.src.offset, put.dst
            where = (dst.space, dst.index, dst.offset)
            arrival = rail.put(dst.at, source, put.nbytes, *where, number(put.signal), stream)
        else:
            arrival = rail.notify(step.does.op.to, number(step.does.op.counter), stream)
        if arrival is not None:
            call.arrivals.append(arrival)
