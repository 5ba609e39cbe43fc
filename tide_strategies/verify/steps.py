"""What a verified thread does: streams of calls, and what the caller does between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tide_strategies.collectives.schedule import Counter, Schedule
from tide_strategies.collectives.signals import PER_SLOT
from tide_strategies.verify.memory import Actor

#: A counter as one call means it: name, index, landing slot.
Bound = tuple[str, int, int]
Cell = tuple[Bound, int]


@dataclass(eq=False)
class Call:
    """One rank's call of a collective.

    Args:
        schedule: what it does.
        number: place in the order of calls, alike on all ranks.
        inputs: memory behind INPUT p, and the byte where it begins.
        landing: memory slot behind LANDING.
        output: memory behind OUTPUT.
    """

    schedule: Schedule
    number: int
    inputs: Sequence[tuple[str, int]] = ()
    landing: int = 0
    output: str = ""
    totals: dict[Cell, int] = field(default_factory=dict)

    def bind(self, counter: Counter) -> Bound:
        """The counter itself, or its landing slot's."""
        return counter.name, counter.index, self.landing if counter.name in PER_SLOT else 0


@dataclass(frozen=True, slots=True)
class Do:
    """A step that runs one stream of a call."""

    call: Call
    stream: str


@dataclass(frozen=True, slots=True)
class Act:
    """A step of the caller: uses memory as the acting thread."""

    action: Callable[[Actor], None]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point that other threads of the rank may join."""

    key: object


@dataclass(frozen=True, slots=True)
class Join:
    """Go on after a marked point."""

    key: object


Step = Do | Act | Mark | Join
