"""A discrete-event engine for flows that share resources.

A flow moves bytes through several resources at once (a copy engine, a link, a memory). Each resource divides its rate
equally among the flows it has; a flow moves at its tightest share. A flow may take a resource with a weight: a local
copy takes two bytes of memory traffic for each byte copied. Nothing else happens in between, so time jumps from one end
of a flow (or timer) to the next.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping

#: Name of a resource, for example ("link in", 3).
Resource = Hashable
Action = Callable[[], None]
#: Resources of a flow, each with the bytes it moves there per byte of the flow.
Uses = Mapping[Resource, float]

#: Seconds' worth of bytes that rounding may leave of a flow that has ended, and as a share of the time by then.
_REST_S, _REST_SHARE = 1e-9, 1e-12


class _Flow:
    __slots__ = ("done", "key", "left", "rate", "since", "uses")

    def __init__(self, key: int, left: float, uses: Uses, done: Action) -> None:
        self.key, self.left, self.uses, self.done = key, left, uses, done
        self.rate, self.since = 0.0, 0.0


class Simulation:
    """Time, flows and timers.

    Args:
        capacity: bytes/s of a resource, finite and above zero, asked once when it is first used.
    """

    def __init__(self, capacity: Callable[[Resource], float]) -> None:
        self.now = 0.0
        self._capacity = capacity
        self._rates: dict[Resource, float] = {}
        self._users: dict[Resource, dict[int, _Flow]] = {}
        self._busy: dict[Resource, float] = {}
        self._events: list[tuple[float, int, int, Action | _Flow]] = []
        self._stamp: dict[int, int] = {}
        self._keys = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Run ``action`` in ``seconds`` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._keys), -1, action))

    def flow(self, nbytes: float, uses: Uses, done: Action) -> None:
        """Move ``nbytes`` through the resources of ``uses`` and then run ``done``."""
        if nbytes <= 0:
            self.after(0.0, done)
            return
        flow = _Flow(next(self._keys), float(nbytes), uses, done)
        flow.since = self.now
        for r in uses:
            if r not in self._rates:
                self._rates[r] = self._capacity(r)
            self._users.setdefault(r, {})[flow.key] = flow
        self._share(flow.uses)

    def run(self) -> float:
        """Run until nothing is left to happen; returns the time."""
        while self._events:
            at, _, stamp, what = heapq.heappop(self._events)
            if not isinstance(what, _Flow):
                self.now = at
                what()
            elif self._stamp.get(what.key) == stamp:  # else its rate has changed since
                self.now = at
                self._end(what)
        return self.now

    def busy(self) -> dict[Resource, float]:
        """Bytes that each resource has moved."""
        return dict(self._busy)

    def _end(self, flow: _Flow) -> None:
        self._settle(flow)
        assert flow.left <= max(_REST_S, _REST_SHARE * self.now) * flow.rate, "a flow ends when it has moved everything"
        del self._stamp[flow.key]
        for r in flow.uses:
            del self._users[r][flow.key]
        self._share(flow.uses)
        flow.done()

    def _settle(self, flow: _Flow) -> None:
        moved = min(flow.left, (self.now - flow.since) * flow.rate)
        flow.left -= moved
        flow.since = self.now
        for r, weight in flow.uses.items():
            self._busy[r] = self._busy.get(r, 0.0) + moved * weight

    def _share(self, resources: Iterable[Resource]) -> None:
        """Rates of all flows that touch ``resources`` anew."""
        touched = {f.key: f for r in resources for f in self._users[r].values()}
        for flow in touched.values():
            rate = min(self._rates[r] / (len(self._users[r]) * w) for r, w in flow.uses.items())
            if rate == flow.rate:
                continue
            self._settle(flow)
            flow.rate = rate
            stamp = self._stamp[flow.key] = next(self._keys)
            end = self.now + flow.left / rate
            heapq.heappush(self._events, (end, stamp, stamp, flow))
