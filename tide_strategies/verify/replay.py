"""Replay all ranks' schedules together on symbolic memory, in any interleaving.

Every cell holds *which* element it is rather than a number, so a replay shows where each element went and in which
order contributions were added, whatever the dtype. Operations are atomic; the order in which ranks take turns comes
from a seeded generator. A replay ends when every rank is through, or with :class:`ReplayError` when none can move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    Schedule,
    Space,
    Sum,
    WaitEvent,
    Zero,
)

#: What a cell holds: an element's identity, or a tuple of those that were added, in order.
Tag = Any
#: Makes the tag of an input element: (rank, index, byte offset) -> tag.
InputTags = Callable[[int, int, int], Tag]


class ReplayError(AssertionError):
    """The schedules deadlock, read memory that nobody wrote, or use an event before it is recorded."""


@dataclass
class Call:
    """One rank's call of one collective: the schedule, its inputs, and counter totals at its beginning."""

    schedule: Schedule
    inputs: InputTags
    landing: int = 0
    key: int = 0
    totals: dict[tuple[Counter, int], int] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)
    begun: bool = False


#: One step of a rank: a stream of a call, or a function run between others (to look at memory, say).
Step = tuple[Call, str] | Callable[[], None]


class Machine:
    """Memory and counters of ``ranks`` ranks, ``local_ranks`` to a node.

    With ``shared_landing`` a node has one landing, which NODE means; otherwise every rank has its own.
    """

    def __init__(self, ranks: int, local_ranks: int, seed: int, *, shared_landing: bool = True) -> None:
        self.shared_landing = shared_landing
        self.ranks, self.local_ranks = ranks, local_ranks
        self.random = random.Random(seed)
        self.memory: dict[tuple[int, Space, int, int], dict[int, Tag]] = {}
        self.cells: dict[tuple[Counter, int, int], int] = {}  # (counter, writer, who sees it)
        self.totals: list[dict[tuple[Counter, int], int]] = [{} for _ in range(ranks)]

    def run(self, work: Sequence[tuple[int, Sequence[Step]]]) -> None:
        """Run threads of work, each a rank and its steps in order, to their end; threads interleave at random.

        A rank may have several threads: streams that run side by side. They take up its calls in the same order.
        """
        threads = {i: self._thread(rank, steps) for i, (rank, steps) in enumerate(work)}
        ranks = [rank for rank, _ in work]
        waiting: dict[int, tuple[Counter, int, int] | None] = dict.fromkeys(threads)
        while threads:
            ready = [i for i in threads if self._ready(ranks[i], waiting[i])]
            if not ready:
                stuck = [
                    f"rank {ranks[i]} awaits {w[0]} of rank {w[1]} at {w[2]}" for i in threads if (w := waiting[i])
                ]
                raise ReplayError(f"deadlock: {'; '.join(stuck)}")
            i = self.random.choice(ready)
            try:
                waiting[i] = next(threads[i])
            except StopIteration:
                del threads[i]

    def read(self, rank: int, space: Space, index: int, offset: int, call: int = 0) -> Tag:
        """The tag at ``offset`` bytes of rank's memory."""
        owner = self._node(rank) if space is Space.LANDING and self.shared_landing else rank
        cell = self.memory.get((owner, space, index, call), {})
        if offset not in cell:
            raise ReplayError(f"rank {rank} reads {space.value}[{index}]+{offset}, which nobody wrote")
        return cell[offset]

    def _thread(self, rank: int, steps: Sequence[Step]) -> Iterator[tuple[Counter, int, int] | None]:
        for step in steps:
            if callable(step):
                yield None
                step()
                continue
            call, stream = step
            if not call.begun:
                call.begun = True
                totals = self.totals[rank]
                call.totals = dict(totals)
                for key, amount in call.schedule.advance.items():
                    key = (self._bound(key[0], call), key[1])
                    totals[key] = totals.get(key, 0) + amount
            for op in call.schedule.streams[stream]:
                if isinstance(op, Await):
                    counter = self._bound(op.counter, call)
                    yield (counter, op.writer, call.totals.get((counter, op.writer), 0) + op.count)
                else:
                    yield None
                    self._do(rank, call, op)

    def _ready(self, rank: int, wait: tuple[Counter, int, int] | None) -> bool:
        return wait is None or self.cells.get((wait[0], wait[1], rank), 0) >= wait[2]

    @staticmethod
    def _bound(counter: Counter, call: Call) -> Counter:
        """A slot's counters belong to the slot that the call lands in."""
        return Counter(counter.name, call.landing) if counter.name == "vacated" else counter

    def _node(self, rank: int) -> int:
        return rank // self.local_ranks * self.local_ranks

    def _memory(self, rank: int, call: Call, ref: Ref) -> dict[int, Tag]:
        owner = self._node(rank) if ref.at == NODE else rank if ref.at == SELF else ref.at
        index = call.landing if ref.space is Space.LANDING else ref.index
        key = call.key if ref.space is Space.OUTPUT else 0
        return self.memory.setdefault((owner, ref.space, index, key), {})

    def _load(self, rank: int, call: Call, ref: Ref, offset: int) -> Tag:
        if ref.space is Space.INPUT:
            return call.inputs(rank, ref.index, offset)
        cell = self._memory(rank, call, ref)
        if offset not in cell:
            raise ReplayError(f"rank {rank} reads {ref} at {offset}, which nobody wrote")
        return cell[offset]

    def _do(self, rank: int, call: Call, op: Op) -> None:
        if isinstance(op, Copy):
            for row in range(op.rows):
                for i in range(op.items):
                    source = op.src.offset + row * op.src_pitch + i * op.src_item.size
                    target = op.dst.offset + row * op.dst_pitch + i * op.dst_item.size
                    self._memory(rank, call, op.dst)[target] = self._load(rank, call, op.src, source)
        elif isinstance(op, Put):
            moved = {o: t for o, t in self._memory(rank, call, op.src).items() if 0 <= o - op.src.offset < op.nbytes}
            self._memory(rank, call, op.dst).update({o - op.src.offset + op.dst.offset: t for o, t in moved.items()})
            self._notify(rank, op.signal, call, op.dst.at)
        elif isinstance(op, (Sum, Land)):
            size = op.src_item.size if isinstance(op, Sum) else 4
            sums = self._memory(rank, call, op.dst)
            for i in range(op.items):
                added = tuple(self._load(rank, call, s, s.offset + i * size) for s in op.sources)
                at = op.dst.offset + i * op.dst_item.size
                sums[at] = (*sums.get(at, ()), *added) if op.accumulate else added
        elif isinstance(op, Zero):
            self._memory(rank, call, op.dst).update({op.dst.offset + i: () for i in range(op.nbytes)})
        elif isinstance(op, Notify):
            self._notify(rank, op.counter, call, op.to)
        elif isinstance(op, Record):
            call.events.add(op.event)
        elif isinstance(op, WaitEvent):
            if op.event not in call.events:
                raise ReplayError(f"rank {rank} waits for event {op.event!r} before it is recorded")
        else:
            raise ReplayError(f"unknown operation {op!r}")

    def _notify(self, rank: int, counter: Counter, call: Call, to: int) -> None:
        node = self._node(rank)
        for reader in range(node, node + self.local_ranks) if to == NODE else (to,):
            key = (self._bound(counter, call), rank, reader)
            self.cells[key] = self.cells.get(key, 0) + 1
