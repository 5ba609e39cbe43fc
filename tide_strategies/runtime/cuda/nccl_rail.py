"""The rail of GPUs: puts into the memory of the ranks on this rail, by NCCL's host RMA, in the order of a CUDA stream.

Nothing here waits for a peer on the host. A wait is enqueued like everything else, and bounded by
:meth:`NcclRail.check`, which whoever watches the device calls now and then: a stream that waits in vain cannot be
released (NCCL knows no such call), so the process has to end, as it does after every failed wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tide_strategies._native import nccl
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.runtime.cuda.nccl_domains import NcclArena, NcclDomains

_STOP = "All ranks stop rather than go on with incomplete data."


class DeviceRail(Protocol):
    """What a schedule's streams ask of the rail between nodes. Peers are ranks of the topology; streams are handles."""

    def put(self, peer: int, source: int, offset: int, nbytes: int, stream: int, context: int = 0) -> None:
        """Copy ``nbytes`` from byte ``source`` of the own arena to byte ``offset`` of the peer's, then signal."""

    def signal(self, peer: int, stream: int, context: int = 0) -> None:
        """Signal without data."""

    def wait(self, counts: Mapping[int, int], stream: int, label: str, contexts: Iterable[int] = (0,)) -> None:
        """Let the stream go on when so many further signals have come from each rank, in each of the contexts."""

    def check(self) -> None:
        """Raise if a wait has blocked its stream for longer than allowed."""

    def close(self) -> None:
        """End it, when every rank does. Bounded in time, whatever the peers do."""


class NcclRail:
    """A :class:`DeviceRail` over NCCL.

    Puts to one peer in one context arrive in the order of their streams, and what they wrote is there when their signal
    is; between contexts there is no order, and more bandwidth.

    Args:
        domains: the communicators.
        arena: what is put from and into.

    Raises:
        RuntimeError: NCCL has no host RMA between these ranks.
    """

    def __init__(self, domains: NcclDomains, arena: NcclArena) -> None:
        self.rank, self.timeout_s = domains.rank, domains.timeout_s
        self._window = arena.rail
        self._base = arena.address
        self._domains = domains
        self._places = {r: i for i, r in enumerate(domains.topology.rail_ranks(domains.rank))}
        self._ranks = {i: r for r, i in self._places.items()}
        self._rma = nccl.Rma(domains.rail, domains.timeout_s)
        self._labels: dict[str, int] = {}

    def put(self, peer: int, source: int, offset: int, nbytes: int, stream: int, context: int = 0) -> None:
        """See :meth:`DeviceRail.put`.

        Raises:
            ValueError: a peer, range or stream that cannot be.
            TidePeerError: NCCL refused it.
        """
        if source < 0:
            raise ValueError(f"source is {source}; it is an offset in the arena")
        place, at = self._place(peer), self._base + source
        self._do(
            f"put {nbytes} bytes to rank {peer}",
            lambda: self._rma.put(place, at, nbytes, self._window, self._window, offset, 0, context, stream),
        )

    def signal(self, peer: int, stream: int, context: int = 0) -> None:
        """See :meth:`DeviceRail.signal`; errors as of :meth:`put`."""
        place = self._place(peer)
        self._do(f"signal rank {peer}", lambda: self._rma.signal(place, 0, context, stream))

    def wait(self, counts: Mapping[int, int], stream: int, label: str, contexts: Iterable[int] = (0,)) -> None:
        """See :meth:`DeviceRail.wait`; errors as of :meth:`put`. ``label`` names the wait in messages."""
        tag = self._labels.setdefault(label, len(self._labels))
        signals = [(self._place(r), n, 0, c) for r, n in counts.items() for c in contexts]
        self._do(f"wait for {sorted(counts)}", lambda: self._rma.wait(signals, tag, stream))

    def check(self) -> None:
        """See :meth:`DeviceRail.check`. The time counts from the first check that finds the stream at the wait.

        Raises:
            TideTimeoutError: naming the wait and whom it waits for.
        """
        for wait in self._rma.overdue(self.timeout_s):
            raise TideTimeoutError(
                f"TIDE: no progress within timeout_s={self.timeout_s:g}: rank {self.rank}, {self._words(wait)}. If a "
                f"rank only needs longer (a slow data loader, a checkpoint), raise timeout_s. {_STOP}"
            )

    def close(self) -> None:
        """See :meth:`DeviceRail.close`. Closes the domains; idempotent."""
        self._domains.close()

    def _place(self, peer: int) -> int:
        if peer not in self._places:
            raise ValueError(f"rank {peer} is not on the rail of rank {self.rank}, which joins {sorted(self._places)}")
        return self._places[peer]

    def _words(self, wait: Mapping[str, Any]) -> str:
        label = next(name for name, tag in self._labels.items() if tag == wait["tag"])
        signals = ", ".join(
            f"{count} signal(s) of rank {self._ranks[place]} (context {context})"
            for place, count, _, context in wait["signals"]
        )
        return f"{label}, awaits {signals}"

    def _do(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except TimeoutError as e:
            raise TideTimeoutError(f"TIDE: rank {self.rank} could not {what} on the rail: {e}. {_STOP}") from e
        except RuntimeError as e:
            raise TidePeerError(f"TIDE: rank {self.rank} could not {what} on the rail: {e}. {_STOP}") from e
