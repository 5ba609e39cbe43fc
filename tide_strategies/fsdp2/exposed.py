"""How long computing waits for collectives on a GPU, by events around the waits of the compute stream.

Nothing is synchronised: events are read once they have happened, in a later step. Recording costs the host a few
microseconds a wait, so backwards are sampled: as many as keep that below a share of the time that they take.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tide_strategies.fsdp2 import capture
from tide_strategies.report import ExposedStats

#: Share of a backward's time (with the forward before it) that recording may cost the host; 1% is promised.
_MOST_COST = 0.005
#: Sampled backwards that may wait to be read; a device that far behind is sampled no more until it has caught up.
_MOST_PENDING = 4


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class ExposedMeter:
    """Samples the waits of all groups of one installation.

    Args:
        groups: how many groups report to it, and so how many :meth:`finalized` end a backward.
        event: makes an event with timing.
        clock: seconds of the host.
    """

    def __init__(
        self, groups: int, event: Callable[[], Any] = _event, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.groups, self._event, self._clock = groups, event, clock
        self._free: list[Any] = []
        self._current: list[tuple[Any, Any]] = []
        self._pending: deque[list[tuple[Any, Any]]] = deque()
        self._sampling, self._skip, self._stride = True, 0, 1
        self._cost = self._seconds = 0.0
        self._began = clock()
        self._finalized = self._backwards = self._sampled = 0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Time what is enqueued on the current stream inside, if this backward is sampled."""
        if not self._sampling or capture.capturing():  # an event that is captured never happens
            yield
            return
        first, last = self._record(), None
        try:
            yield
            last = self._record()
        finally:
            if last is None:
                self._free.append(first)
            else:
                self._current.append((first, last))

    def finalized(self) -> None:
        """One group is through with a backward; the last one ends it."""
        self._finalized += 1
        if self._finalized < self.groups:
            return
        self._finalized = 0
        self._backwards += 1
        now = self._clock()
        if self._sampling:
            self._pending.append(self._current)
            self._current = []
            spent = max(now - self._began, 1e-9)
            self._stride = max(1, math.ceil(self._cost / (_MOST_COST * spent)))
            self._skip = self._stride
        self._read()
        self._skip -= 1
        self._sampling = self._skip <= 0 and len(self._pending) < _MOST_PENDING
        self._cost, self._began = 0.0, now

    def stats(self) -> ExposedStats:
        """Totals of the samples that have been read so far."""
        self._read()
        return ExposedStats(seconds=self._seconds, sampled=self._sampled, backwards=self._backwards)

    def _record(self) -> Any:
        start = self._clock()
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._cost += self._clock() - start
        return event

    def _read(self) -> None:
        """Take in the samples whose last event has happened; events of one stream happen in order."""
        if capture.capturing():  # which forbids to ask
            return
        while self._pending and all(last.query() for _, last in self._pending[0][-1:]):
            for first, last in self._pending.popleft():
                self._seconds += first.elapsed_time(last) * 1e-3
                self._free += (first, last)
            self._sampled += 1


def around(meter: ExposedMeter | None) -> contextlib.AbstractContextManager[None]:
    """``meter.around()``, or nothing on ranks that have no such meter (CPU: all of a collective is exposed)."""
    return contextlib.nullcontext() if meter is None else meter.around()
