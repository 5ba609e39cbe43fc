"""A collective whose ranks are on several nodes that a rail connects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tide_strategies import _native
from tide_strategies.collectives.schedule import Schedule, Space
from tide_strategies.runtime.engine import Collective
from tide_strategies.runtime.rails.cut import Send, cut

if TYPE_CHECKING:
    from tide_strategies.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class RailCall:
    """One use of a cut schedule: the native call, and what the rail must know of it."""

    native: _native.Call
    bases: Sequence[int]
    counters: Sequence[int]
    tag: int
    slot: int


class RailCollective(Collective):
    """A cut schedule bound to an engine: native pieces, and between them what the rail sends."""

    def __init__(self, engine: Engine, schedule: Schedule, inputs: int, label: str) -> None:
        assert engine.rail is not None
        pieces = cut(schedule, engine.topology, inputs)
        super().__init__(engine, pieces.encoded, label)
        self._steps, self._rail = pieces.steps, engine.rail

    def begin(self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int) -> Any:
        """See :meth:`Collective.begin`."""
        return self._begin(inputs, others, tag, slot, 1.0)

    def _begin(self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int, divisor: float) -> RailCall:
        bases, counters = [*inputs, *others], self._counters(slot)
        native = self._encoded.program.begin(self._engine.arena.native, bases, counters, tag, divisor)
        return RailCall(native, bases, counters, tag, slot)

    def run(self, call: Any, stream: str) -> float:
        """See :meth:`Collective.run`."""
        waited_s = 0.0
        for step in self._steps[stream]:
            if isinstance(step, Send):
                self._send(call, step)
                continue
            outcome = call.native.run(step, self._engine.timeout_s)
            waited_s += outcome.waited_s
            if outcome.status != "ok":
                self._engine.raise_failure(outcome, self.label)
        return waited_s

    def replay(self, inputs: Sequence[int], others: Sequence[int], tag: int, divisor: float) -> float:
        """See :meth:`Collective.replay`."""
        call = self._begin(inputs, others, tag, 0, divisor)
        return sum(self.run(call, stream) for stream in self._steps)

    def _send(self, call: RailCall, send: Send) -> None:
        counter, seq = call.counters[send.counter], call.native.seq
        if send.base < 0:
            self._rail.notify(send.to, counter, seq, call.tag)
            return
        index = call.slot if send.space is Space.LANDING else send.index
        region = self._engine.region(send.space, index)
        address = call.bases[send.base] + send.offset
        self._rail.put(send.to, address, send.nbytes, region, send.at, counter, seq, call.tag)
