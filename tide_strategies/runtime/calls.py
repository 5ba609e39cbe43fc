"""What every engine numbers alike on all ranks: counters, landing slots, and what each call does."""

from __future__ import annotations

import zlib

from tide_strategies.collectives.schedule import Counter


class CallBook:
    """Numbers of counters and tags of calls for ``ranks`` ranks and at most ``slots`` landing slots."""

    def __init__(self, ranks: int, slots: int) -> None:
        self._pushed = 2
        self._vacated = self._pushed + ranks
        self.counters = self._vacated + slots
        self._calls: dict[int, str] = {}

    def counter(self, counter: Counter, slot: int = 0) -> int:
        """Number of a counter; "vacated" is the slot's own."""
        if counter.name == "pushed":
            return self._pushed + counter.index
        return {"landed": 0, "consumed": 1, "vacated": self._vacated + slot}[counter.name]

    def counter_name(self, number: int) -> str:
        """The counter with this number, in words."""
        if number < self._pushed:
            return ("landed", "consumed")[number]
        if number < self._vacated:
            return f"pushed[{number - self._pushed}]"
        return f"vacated[slot {number - self._vacated}]"

    def tag(self, label: str) -> int:
        """A number for what a call does, alike on all ranks, by which peers notice that they disagree."""
        tag = zlib.crc32(label.encode()) or 1
        self._calls[tag] = label
        return tag

    def label(self, tag: int) -> str:
        """What a call with this tag does, in words."""
        return self._calls.get(tag, "a collective that this rank has not seen")
