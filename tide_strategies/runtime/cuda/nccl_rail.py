"""The rail between GPU nodes by NCCL's host RMA: puts with signals, in the order of CUDA streams.

Counters of schedules are signals of NCCL: a put or a notification adds one to the peer's signal of that number, and
taking waits until so many more have come. Puts to one peer for one counter are ordered, and so are their signals;
counters share NCCL's contexts in turn, and nothing is promised between contexts.

All-gathers and reductions have a communicator each, since NCCL makes what a communicator is given happen in that order.
So whatever the streams, nothing may be given that needs what is given later: schedules say in which order to give it
(``Schedule.issue``).

Nothing here waits for a peer on the host. A stream that waits in vain cannot be released from here (NCCL knows no such
call): that is found by :meth:`NcclRail.check` or by whoever waits for what the stream does next, and when this rank
then stops, :meth:`NcclRail.stop` ends the process if nothing else does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tide_strategies._native import cuda, nccl
from tide_strategies.collectives.schedule import Space
from tide_strategies.collectives.signals import RAILS
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.runtime.bootstrap import Exchange
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.nccl_domains import NcclDomains
from tide_strategies.runtime.cuda.rail import Arrival, Part
from tide_strategies.runtime.failure import PATIENCE, STOP
from tide_strategies.topology import Topology

#: After :meth:`NcclRail.stop`, how long the program has to end by itself while a stream is still blocked.
LAST_RESORT_S = 60.0
#: Exit code of a process that is ended for that (EX_SOFTWARE).
EXIT_CODE = 70
#: Memory that reductions put from and into; whatever else there is is of all-gathers.
_REDUCING = frozenset({Space.OUTBOX, Space.INBOX, Space.SPARE})


def connect_rail(
    exchange: Exchange,
    rank: int,
    topology: Topology,
    device: int,
    timeout_s: float,
    book: CallBook,
    *,
    multicast: bool = True,
) -> NcclRail:
    """The rail of an engine whose counters are those of ``book``. Collective; arguments as of ``NcclDomains``.

    Raises:
        TideArenaError: on every rank alike, with code TIDE-F029, if NCCL cannot connect them.
    """
    domains = NcclDomains(exchange, rank, topology, device, timeout_s, signals=book.counters, multicast=multicast)
    try:
        return NcclRail(domains, book.counter_name, book.reduces)
    except BaseException:
        domains.abort()
        raise


class NcclRail:
    """A rail of one process group on this rank. Peers are ranks of the topology; streams are handles.

    Args:
        domains: the communicators; with as many signals as there are counters.
        name: of a counter, for messages.
        reduces: whether a counter is of reductions.

    Raises:
        TideArenaError: on every rank alike, if NCCL has no host RMA between these ranks.
    """

    def __init__(
        self,
        domains: NcclDomains,
        name: Callable[[int], str] = "counter {}".format,
        reduces: Callable[[int], bool] = lambda counter: False,
    ) -> None:
        self.rank, self.timeout_s = domains.rank, domains.timeout_s
        self.fetches = False  # NCCL writes where it belongs
        self._domains, self._name, self._reduces = domains, name, reduces
        self._places = {r: i for i, r in enumerate(domains.topology.rail_ranks(domains.rank))}
        self._ranks = {i: r for r, i in self._places.items()}
        #: Of all-gathers, and of reductions.
        self._rmas = [domains.add_rail() for _ in range(RAILS)]
        self._contexts = domains.rails[0].contexts
        self._windows: dict[tuple[Space, int], nccl.Window] = {}
        self._stopped = False

    def register(self, space: Space, index: int, memory: nccl.Memory | cuda.Mapping) -> None:
        """Let memory of a schedule be put from and into. Collective; the same on all ranks, with equal sizes.

        Raises:
            TideArenaError: on every rank alike, if NCCL cannot register it.
        """
        self._windows[space, index] = self._domains.register(memory, self._domains.rails[space in _REDUCING])

    def put(
        self, peer: int, source: int, nbytes: int, space: Space, index: int, offset: int, counter: int, stream: int
    ) -> None:
        """Send ``nbytes`` from address ``source`` to byte ``offset`` of the peer's (space, index), then notify.

        The source must lie in registered memory.

        Raises:
            ValueError: a peer, range, counter or stream that cannot be.
            TidePeerError: NCCL refused it; TideTimeoutError: it did not take it in time.
        """
        place, target, origin = self._place(peer), self._windows.get((space, index)), self._holding(source, nbytes)
        if target is None:
            raise ValueError(f"{space.value} {index} is not registered with the rail")
        self._do(
            f"put {nbytes} bytes to rank {peer}",
            lambda: self._of(counter).put(
                place, source, nbytes, origin, target, offset, counter, counter % self._contexts, stream
            ),
        )

    def notify(self, peer: int, counter: int, stream: int) -> None:
        """Send one signal of ``counter``, after the puts to ``peer`` before it that have the same counter.

        Raises like :meth:`put`.
        """
        place = self._place(peer)
        self._do(
            f"signal rank {peer}", lambda: self._of(counter).signal(place, counter, counter % self._contexts, stream)
        )

    def take(self, writer: int, counter: int, count: int, stream: int, parts: Sequence[Part] = ()) -> None:
        """Let the stream go on when ``count`` signals have come beyond those that were taken before.

        Raises like :meth:`put`.
        """
        signals = [(self._place(writer), count, counter, counter % self._contexts)]
        self._do(f"wait for rank {writer}", lambda: self._of(counter).wait(signals, counter, stream))

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Nothing: no thread of Python has a part in what comes."""

    def pinned_by_part(self) -> dict[str, int]:
        """Nothing: NCCL reads and writes the device's memory."""
        return {}

    def check(self) -> None:
        """Raise if a stream has been blocked in :meth:`take`, or the host in NCCL, for longer than ``timeout_s``.

        A stream's time counts from the first check that finds it there, so it is to be called every now and then.

        Raises:
            TideTimeoutError: naming what is awaited, and of whom.
        """
        for wait in (w for rma in self._rmas for w in rma.overdue(self.timeout_s)):
            raise TideTimeoutError(
                f"TIDE: no progress within timeout_s={self.timeout_s:g}: rank {self.rank} awaits {self._words(wait)} "
                f"on the rail. {PATIENCE} {STOP}"
            )
        if any(comm.in_call_s > self.timeout_s for comm in self._domains.rails):
            raise TideTimeoutError(
                f"TIDE: no progress within timeout_s={self.timeout_s:g}: NCCL does not return from a call of rank "
                f"{self.rank} on the rail (NCCL_DEBUG=INFO tells what it does). {STOP}"
            )

    def stop(self, why: str = "") -> None:
        """This rank stops: end NCCL's part at once. From any thread; bounded.

        If a stream is still blocked after ``LAST_RESORT_S``, in which the program should have ended, a host that
        waits for the device would wait for ever: the process is ended with ``EXIT_CODE``.
        """
        if self._stopped:
            return
        self._stopped = True
        last_resort = threading.Timer(LAST_RESORT_S, self._end)
        last_resort.daemon = True
        last_resort.start()
        self._domains.abort()

    def close(self) -> None:
        """End it in order, when every rank does; with the domains. Bounded in time, idempotent."""
        if not self._stopped:
            self._domains.close()

    def outstanding(self) -> int:
        """How many times a stream has yet to get through :meth:`take`."""
        return sum(rma.outstanding() for rma in self._rmas)

    def _end(self) -> None:
        if self.outstanding():
            words = f"TIDE: rank {self.rank} has stopped, and its GPU still waits for a peer: the process is ended."
            sys.stderr.write(words + "\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)

    def _of(self, counter: int) -> nccl.Rma:
        return self._rmas[self._reduces(counter)]

    def _place(self, peer: int) -> int:
        if peer not in self._places:
            raise ValueError(f"rank {peer} is not on the rail of rank {self.rank}, which joins {sorted(self._places)}")
        return self._places[peer]

    def _holding(self, source: int, nbytes: int) -> nccl.Window:
        for window in self._windows.values():
            if window.address <= source and source + nbytes <= window.address + window.bytes:
                return window
        raise ValueError(f"the {nbytes} bytes at {source:#x} are not within memory that is registered with the rail")

    def _words(self, wait: dict[str, Any]) -> str:
        ((place, count, counter, _),) = wait["signals"]
        return f"{count} signal(s) of {self._name(counter)} of rank {self._ranks[place]}"

    def _do(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except TimeoutError as e:
            raise TideTimeoutError(f"TIDE: rank {self.rank} could not {what} on the rail: {e}. {STOP}") from e
        except RuntimeError as e:
            raise TidePeerError(f"TIDE: rank {self.rank} could not {what} on the rail: {e}. {STOP}") from e
