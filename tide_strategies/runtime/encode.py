"""Turn a schedule into the flat table that the native executor replays.

The table has twelve 64-bit words per operation (``csrc/program.h`` lists them). Memory that an operation names becomes
an index into the call's list of base addresses: inputs first, in order, then whatever else the schedule touches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tide_strategies import _native
from tide_strategies.collectives.schedule import (
    Await,
    Copy,
    Counter,
    Item,
    Land,
    Notify,
    Op,
    Put,
    Record,
    Ref,
    Schedule,
    Space,
    Sum,
    WaitEvent,
    Zero,
)

WORDS = 12
COPY, SUM, ZERO, NOTIFY, AWAIT = range(5)
_DTYPE = {Item.F32: 0, Item.BF16: 1}
_RAW = 2
_ACCUMULATE, _SCALED = 1, 2


@dataclass(frozen=True, slots=True)
class Taken(Await):
    """No wait: a rail has brought what would be awaited, and this rank's copy of the writer's cell shows it from here.

    Only for devices.
    """


#: Memory that a call needs an address for: (space, index, rank or SELF or NODE).
Base = tuple[Space, int, int]


@dataclass(frozen=True)
class Encoded:
    """A schedule ready to replay.

    Args:
        program: the native table.
        bases: memory behind each base address after the inputs, in order.
        inputs: number of INPUT addresses that come first.
        counters: the counter behind each local counter number.
        streams: number of each named stream. A schedule with an order of issue is cut into pieces, which only
            ``Call.enqueue_lanes`` runs; the number is then the stream's lane.
        operations: the operation behind each native operation, for messages.
    """

    program: Any
    bases: tuple[Base, ...]
    inputs: int
    counters: tuple[Counter, ...]
    streams: dict[str, int]
    operations: tuple[Op, ...]


def encode(
    schedule: Schedule,
    inputs: int,
    program_type: Callable[..., Any] = _native.Program,
    named: Sequence[Ref | Counter] = (),
) -> Encoded:
    """Encode ``schedule``, whose calls pass ``inputs`` INPUT addresses, for an executor's ``program_type``.

    ``named`` is memory and counters that the caller uses beside the table: they get numbers too.

    Raises:
        ValueError: if the schedule waits for an event that no earlier stream records, or names an input it has not.
    """
    table = _Table(inputs)
    streams: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    lanes: list[int] = []
    for name, ops in _pieces(schedule):
        first = len(table.operations)
        for op in ops:
            table.add(op)
        lanes.append(streams.setdefault(name, len(streams)))
        ranges.append((first, len(table.operations) - first))
    for used in named:
        table.base(used) if isinstance(used, Ref) else table.counter(used)
    advance = [(table.counter(c), writer, amount) for (c, writer), amount in schedule.advance.items()]
    program = program_type(
        table.words.tobytes(),
        table.sources.tobytes(),
        ranges,
        inputs + len(table.bases),
        len(table.counters),
        advance,
        **({"lanes": lanes} if schedule.issue else {}),
    )
    return Encoded(program, tuple(table.bases), inputs, tuple(table.counters), streams, tuple(table.operations))


def _pieces(schedule: Schedule) -> Iterator[tuple[str, tuple[Op, ...]]]:
    """Streams, or their parts, in the order in which they are issued."""
    if not schedule.issue:
        yield from schedule.streams.items()
        return
    done = dict.fromkeys(schedule.streams, 0)
    for name, count in schedule.issue:
        start, done[name] = done[name], done[name] + count
        yield name, schedule.streams[name][start : done[name]]
    left = [name for name, count in done.items() if count != len(schedule.streams[name])]
    if left:
        raise ValueError(f"the order of issue leaves operations of {', '.join(left)} out, or has more than there are")


class _Table:
    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.words, self.sources = array("q"), array("q")
        self.bases: dict[Base, int] = {}
        self.counters: dict[Counter, int] = {}
        self.operations: list[Op] = []
        self.events: set[str] = set()

    def add(self, op: Op) -> None:
        for words in self._rows(op):
            self.words.extend(words)
            self.words.extend([0] * (WORDS - len(words)))
            self.operations.append(op)

    def counter(self, counter: Counter) -> int:
        return self.counters.setdefault(counter, len(self.counters))

    def base(self, ref: Ref) -> int:
        if ref.space is Space.INPUT:
            if not 0 <= ref.index < self.inputs:
                raise ValueError(f"operation names input {ref.index} of {self.inputs}")
            return ref.index
        key = (ref.space, ref.index, ref.at)
        return self.bases.setdefault(key, self.inputs + len(self.bases))

    def _rows(self, op: Op) -> Iterator[list[int]]:
        if isinstance(op, Copy):
            yield self._copy(op)
        elif isinstance(op, Put):
            yield [COPY, *self._at(op.src), *self._at(op.dst), 1, op.nbytes, 0, 0, _RAW, _RAW]
            yield [NOTIFY, self.counter(op.signal), 1, op.dst.at]
        elif isinstance(op, Sum):
            yield self._sum(op, op.src_item)
        elif isinstance(op, Land):
            yield self._sum(op, Item.F32)
        elif isinstance(op, Zero):
            yield [ZERO, *self._at(op.dst), op.nbytes]
        elif isinstance(op, Notify):
            yield [NOTIFY, self.counter(op.counter), 1, op.to]
        elif isinstance(op, Await):
            yield [AWAIT, self.counter(op.counter), op.writer, op.count, isinstance(op, Taken)]
        elif isinstance(op, Record):
            self.events.add(op.event)  # one thread runs the streams in order: the point is passed by then
        elif isinstance(op, WaitEvent) and op.event not in self.events:
            raise ValueError(f"event {op.event!r} is awaited before any earlier stream records it")

    def _at(self, ref: Ref) -> tuple[int, int]:
        return self.base(ref), ref.offset

    def _copy(self, op: Copy) -> list[int]:
        if op.src_item == op.dst_item:
            items, src, dst = op.items * op.src_item.size, _RAW, _RAW
        else:
            items, src, dst = op.items, _DTYPE[op.src_item], _DTYPE[op.dst_item]
        return [COPY, *self._at(op.src), *self._at(op.dst), op.rows, items, op.src_pitch, op.dst_pitch, src, dst]

    def _sum(self, op: Sum | Land, src_item: Item) -> list[int]:
        first = len(self.sources) // 2
        for source in op.sources:
            self.sources.extend(self._at(source))
        flags = _ACCUMULATE * op.accumulate | _SCALED * op.scaled
        dtypes = [_DTYPE[src_item], _DTYPE[op.dst_item]]
        return [SUM, *self._at(op.dst), op.items, *dtypes, len(op.sources), first, flags, isinstance(op, Land)]
