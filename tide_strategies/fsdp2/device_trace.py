"""Device times for the measured timeline: events around what is enqueued, read once they have happened."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tide_strategies.runtime.trace import Trace

#: Spans not yet read at most; while that many are pending, nothing is recorded.
_MOST_PENDING = 4096


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class DeviceTrace:
    """Spans of streams of one device.

    Args:
        trace: where they are written.
        event: makes an event with timing.
    """

    def __init__(self, trace: Trace, event: Callable[[], Any] = _event) -> None:
        self._trace, self._event = trace, event
        self._pending: deque[tuple[str, str, int, Any, Any]] = deque()
        self._zero = event()
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()
        trace.on_close(self._read)

    @contextlib.contextmanager
    def span(self, call: str, nbytes: int, streams: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """Time what is enqueued inside on each of these (name, torch stream)."""
        self._read(False)
        if len(self._pending) + len(streams) > _MOST_PENDING:
            yield
            return
        starts = [self._recorded(stream) for _, stream in streams]
        yield
        for (name, stream), start in zip(streams, starts, strict=True):
            self._pending.append((name, call, nbytes, start, self._recorded(stream)))

    def _recorded(self, stream: Any) -> Any:
        event = self._event()
        event.record(stream)
        return event

    def _read(self, wait: bool) -> None:
        """Write the spans that are over, in the order in which they began; ``wait`` for the others."""
        while self._pending:
            name, call, nbytes, start, end = self._pending[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._pending.popleft()
            first, last = (self._zero_s + self._zero.elapsed_time(e) * 1e-3 for e in (start, end))
            self._trace.add(name, call, first, last, 0.0, nbytes)


def span(
    trace: DeviceTrace | None, call: str, nbytes: int, *streams: tuple[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """``trace.span``, or nothing where nothing is traced."""
    return contextlib.nullcontext() if trace is None else trace.span(call, nbytes, streams)
