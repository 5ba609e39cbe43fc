"""What every engine numbers alike on all ranks: counters, landing slots, and what each call does."""

from __future__ import annotations

import zlib

from tide_strategies.collectives import signals
from tide_strategies.collectives.all_gather import LANDED, VACATED
from tide_strategies.collectives.reduce_scatter import CONSUMED, pushed
from tide_strategies.collectives.schedule import Counter
from tide_strategies.topology import Topology


class CallBook:
    """Numbers of counters and tags of calls for the ranks of ``topology`` and at most ``slots`` landing slots."""

    def __init__(self, topology: Topology, slots: int) -> None:
        steps = (topology.nodes - 1).bit_length()
        kinds = [(c, 1) for c in (LANDED, CONSUMED, signals.PLACED, signals.RELEASED)]
        kinds.append((pushed(0), topology.local_ranks))
        if topology.nodes > 1:
            kinds += [(c, 1) for c in (signals.FILLED, signals.EMPTIED, signals.STAGE_FREE, signals.SUMMED)]
            kinds += [(c, 1) for c in (signals.FORWARDED, signals.RAILED)]
            kinds += [(signals.sent(0), 2), (signals.arrived(0), topology.nodes), (signals.credit(0), topology.nodes)]
            kinds += [(signals.gathered(0), steps), (signals.clear(0), steps)]
        kinds.append((signals.OPENED if topology.lane else VACATED, slots))
        self._names: list[str] = []
        self._first: dict[str, int] = {}
        for counter, count in kinds:
            self._first[counter.name] = len(self._names)
            self._names += [
                f"{counter.name}[slot {i}]" if counter.name in signals.PER_SLOT else str(Counter(counter.name, i))
                for i in range(count)
            ]
        self._calls: dict[int, str] = {}

    @property
    def counters(self) -> int:
        """How many counters there are."""
        return len(self._names)

    def counter(self, counter: Counter, slot: int = 0) -> int:
        """Number of a counter; those in ``signals.PER_SLOT`` are the slot's own."""
        return self._first[counter.name] + (slot if counter.name in signals.PER_SLOT else counter.index)

    def counter_name(self, number: int) -> str:
        """The counter with this number, in words."""
        return self._names[number]

    def reduces(self, number: int) -> bool:
        """Whether it is by reductions that ranks of other nodes are told of the counter with this number."""
        return self._names[number].split("[")[0] in signals.REDUCING

    def tag(self, label: str) -> int:
        """A number for what a call does, alike on all ranks, by which peers notice that they disagree."""
        tag = zlib.crc32(label.encode()) or 1
        self._calls[tag] = label
        return tag

    def label(self, tag: int) -> str:
        """What a call with this tag does, in words."""
        return self._calls.get(tag, "a collective that this rank has not seen")
