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

from tide_strategies import _native


@dataclass(eq=False)
class Slot:
    """A range of the arena that backs one landing at a time."""

    index: int
    offset: int
    occupant: Landing | None = None
    vacated_at: int = 0
    holds: Landing | None = None  # whose values the memory shows, also after they were vacated


class Landing:
    """A group's unsharded parameters: ``nbytes`` at one virtual address."""

    def __init__(self, arena: _native.Arena, nbytes: int) -> None:
        self._arena = arena
        self.window = _native.Window(max(nbytes, 1))
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
            self.window.map(self._arena, slot.offset)
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
        grow: reserves one more slot on every rank and returns its (counter index, arena offset).
        slots: slots to begin with.
        poison: make vacated landings read NaN.
    """

    def __init__(self, grow: Callable[[], tuple[int, int]], slots: int, poison: bool = False) -> None:
        self._grow, self._poison = grow, poison
        self._slots = [Slot(*grow()) for _ in range(slots)]
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

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
        slot = Slot(*self._grow())
        self._slots.append(slot)
        return slot
