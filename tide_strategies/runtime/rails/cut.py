"""Cut a schedule where its rail is used, so that what lies between runs in single native calls.

What a rail does is between two native pieces: it is told what to send, and the stream goes on at once. "The stream goes
on when the source has been read" (:class:`~tide_strategies.collectives.schedule.Put`) is kept in what can be seen:
before the rank overwrites the source of a put, or notifies anybody who could, it awaits that the source has been read.
Until then it computes while the bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide_strategies import _native
from tide_strategies.collectives import signals
from tide_strategies.collectives.schedule import (
    NODE,
    Await,
    Copy,
    Counter,
    Land,
    Notify,
    Op,
    Put,
    Ref,
    Schedule,
    Space,
    Sum,
    Zero,
)
from tide_strategies.runtime.encode import Encoded, encode
from tide_strategies.topology import Topology

#: Notifications of what arrived, or that make room in inboxes or behind what puts read: they let nobody overwrite a
#: source. (Sources are the own stage and outbox, and the shards that are already in the own landing.)
_FREES_NOTHING = {
    c.name
    for c in (
        signals.clear(0),
        signals.gathered(0),
        signals.arrived(0),
        signals.credit(0),
        signals.FILLED,
        signals.EMPTIED,
    )
}


@dataclass(frozen=True, slots=True)
class Send:
    """What the rail is given: bytes and a notification for a rank of another node, or a notification alone.

    Args:
        to: the rank.
        counter: which of its writer's cells grows there, as a number of the program's counters.
        base: number of the base address that the source is in; -1 for a notification alone.
        offset: bytes into it.
        nbytes: bytes to send.
        space, index, at: where they go: bytes into memory (space, index) of the rank.
    """

    to: int
    counter: int
    base: int = -1
    offset: int = 0
    nbytes: int = 0
    space: Space = Space.STAGE
    index: int = 0
    at: int = 0


#: A native piece, by its number; or what the rail sends.
Step = int | Send


@dataclass(frozen=True)
class Cut:
    """A schedule ready to run with a rail: native pieces, and each stream's steps."""

    encoded: Encoded
    steps: dict[str, tuple[Step, ...]]


def cut(schedule: Schedule, topology: Topology, inputs: int, program_type: Callable[..., Any] = _native.Program) -> Cut:
    """Cut and encode ``schedule``, whose calls pass ``inputs`` INPUT addresses. Raises like ``encode``."""
    cutter = _Cutter(topology, schedule.rank)
    order = [(name, list(cutter.stream(ops))) for name, ops in schedule.streams.items()]
    pieces: dict[str, tuple[Op, ...]] = {}
    for name, parts in order:
        for part in parts:
            if isinstance(part, tuple):
                pieces[f"{name}.{len(pieces)}"] = part
    advance = {**schedule.advance, **{(signals.RAILED, peer): n for peer, n in cutter.puts.items()}}
    native = replace(schedule, streams=pieces, advance=advance)
    encoded = encode(native, inputs, program_type, [*cutter.sources, *cutter.signals])
    base_of = {base: inputs + i for i, base in enumerate(encoded.bases)}
    counter_of = {c: i for i, c in enumerate(encoded.counters)}
    number = iter(range(len(pieces)))

    def step(part: tuple[Op, ...] | Put | Notify) -> Step:
        if isinstance(part, Put):
            src, dst = part.src, part.dst
            base = src.index if src.space is Space.INPUT else base_of[src.space, src.index, src.at]
            where = (dst.space, dst.index, dst.offset)
            return Send(dst.at, counter_of[part.signal], base, src.offset, part.nbytes, *where)
        if isinstance(part, Notify):
            return Send(part.to, counter_of[part.counter])
        return next(number)

    return Cut(encoded, {name: tuple(step(part) for part in parts) for name, parts in order})


class _Cutter:
    """Goes through the streams in the order in which one thread runs them."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self.node = topology.node_ranks(rank)
        self.puts: dict[int, int] = {}  # so far in the call, by receiver
        #: Memory and counters that the rail uses.
        self.sources: dict[Ref, None] = {}
        self.signals: dict[Counter, None] = {}
        self._reading: dict[int, set[tuple[Space, int]]] = {}  # what puts under way to each receiver read

    def stream(self, ops: Sequence[Op]) -> Iterator[tuple[Op, ...] | Put | Notify]:
        """Native pieces, and what goes over the rail between them."""
        piece: list[Op] = []
        for op in ops:
            piece += self._read_before(op)
            if isinstance(op, Put) and op.dst.at not in self.node:
                self.puts[op.dst.at] = self.puts.get(op.dst.at, 0) + 1
                self._reading.setdefault(op.dst.at, set()).add((op.src.space, op.src.index))
                self.sources[replace(op.src, offset=0)] = None
                self.signals[op.signal] = None
            elif isinstance(op, Notify) and op.to != NODE and op.to not in self.node:
                self.signals[op.counter] = None
            else:
                piece.append(op)
                continue
            if piece:
                yield tuple(piece)
                piece = []
            yield op
        piece += self._all_read()
        if piece:
            yield tuple(piece)

    def _read_before(self, op: Op) -> list[Op]:
        """Awaits for the sources that ``op`` overwrites, or lets others overwrite."""
        if isinstance(op, Notify) and op.counter.name not in _FREES_NOTHING:
            return self._all_read()
        if isinstance(op, Copy | Sum | Land | Zero):
            written = (op.dst.space, op.dst.index)
            return [self._read(peer) for peer, sources in list(self._reading.items()) if written in sources]
        return []

    def _all_read(self) -> list[Op]:
        return [self._read(peer) for peer in list(self._reading)]

    def _read(self, peer: int) -> Op:
        """All puts to ``peer`` so far: a rail may read them in any order."""
        del self._reading[peer]
        return Await(signals.RAILED, peer, self.puts[peer])
