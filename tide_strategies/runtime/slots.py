"""Where unsharded parameters live: landings at fixed addresses, backed by a ring of shared slots.

A group's landing has one virtual address for its whole life, because autograd keeps views of it. What backs the
address may change: the ring holds a few slots of shared memory, and a landing takes whichever is free, its former one
if it can. So two groups never fight over a slot: a program that keeps more groups unsharded at once than the ring has
slots (prefetching deeper, ``unshard()`` of every module) makes the ring grow.

Every rank makes the same choices because every rank unshards and reshards in the same order; the choice is part of
the call's tag, so a rank that strays is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Window(Protocol):
    """A range of virtual addresses that can be backed by one slot's memory or another's (``_native.Window``)."""

    @property
    def address(self) -> int:
        """Where the range begins."""

    def map(self, *backing: Any) -> None:
        """Back the window with the memory that ``backing`` names."""

    def poison(self) -> None:
        """Make the window read NaN."""

    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        """A DLPack object over part of the window."""


@dataclass(eq=False)
class Slot:
    """Memory that backs one landing at a time.

    Args:
        index: number of the slot, alike on all ranks.
        backing: what a window is mapped to.
    """

    index: int
    backing: tuple[Any, ...]
    occupant: Landing | None = None
    vacated_at: int = 0
    holds: Landing | None = None  # whose values the memory shows, also after they were vacated


class Landing:
    """A group's unsharded parameters, at the one virtual address of ``window``."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.slot: Slot | None = None
        self._last: Slot | None = None
        self._mapped: Slot | None = None

    @property
    def last_slot(self) -> Slot | None:
        """The slot that the landing was in last, or is in."""
        return self._last

    @property
    def intact(self) -> bool:
        """Whether the landing is vacated but nobody else has been in its slot since."""
        return self.slot is None and self._last is not None and self._last.holds is self

    def occupy(self, slot: Slot) -> None:
        """Back the landing with ``slot``."""
        if self._mapped is not slot:
            self.window.map(*slot.backing)
            self._mapped = slot
        self._last = slot
        self.slot, slot.occupant, slot.holds = slot, self, self

    def vacate(self, clock: int, poison: bool) -> None:
        """Leave the slot. With ``poison`` the address reads NaN until it is backed again."""
        assert self.slot is not None
        self.slot.occupant, self.slot.vacated_at = None, clock
        self.slot = None
        if poison:
            self.window.poison()
            self._mapped = None


class SlotRing:
    """Slots of equal size that landings rotate through.

    Args:
        grow: makes one more slot on every rank.
        slots: slots to begin with.
        poison: make vacated landings read NaN.
    """

    def __init__(self, grow: Callable[[], Slot], slots: int, poison: bool = False) -> None:
        self._grow, self._poison = grow, poison
        self._slots = [grow() for _ in range(slots)]
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return any(s.occupant is None for s in self._slots)

    def acquire(self, landing: Landing) -> Slot:
        """Back ``landing`` with a free slot: the one it had, else the one vacated longest ago, else a new one."""
        last = landing.last_slot
        if last is None or last.occupant is not None:
            free = [s for s in self._slots if s.occupant is None]
            last = min(free, key=lambda s: s.vacated_at) if free else self._add()
        landing.occupy(last)
        return last

    def release(self, landing: Landing) -> None:
        """Free the slot of ``landing``."""
        self._clock += 1
        landing.vacate(self._clock, self._poison)

    def _add(self) -> Slot:
        slot = self._grow()
        self._slots.append(slot)
        return slot
