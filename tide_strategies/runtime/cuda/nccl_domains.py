"""NCCL communicators scoped to what they connect (paper, section 6.1), and device memory registered with them.

One communicator of all ranks gives addresses within a node; it has no RMA contexts, since each would open queue pairs
to every rank. Those of the ranks of each rail have them, and with them the puts between nodes. All cap the channels,
which only NCCL's own collectives use, at one, and connect when they must (NCCL's default, ``NCCL_RUNTIME_CONNECT``).

What one communicator is given happens in that order, on whichever streams it is: NCCL lets every operation wait for
the one before it, and a wait for a peer holds up all that comes later. So kinds of collectives that must not wait for
each other have rails of their own.

The library is the one that the process has already (torch's); a second copy is never loaded.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tide_strategies._native import cuda, nccl
from tide_strategies.runtime.bootstrap import Exchange, agree
from tide_strategies.topology import Topology

#: RMA contexts of a rail: what the paper's evaluation uses.
CONTEXTS = 4
#: NCCL's own collectives are not used here.
_CHANNELS = 1
#: What windows and rails that cannot be had mean for a group.
_CODE = "TIDE-F029"

_REGISTERING = "registering memory with NCCL"

T = TypeVar("T")


def missing_nccl() -> str | None:
    """Why this process's NCCL cannot give windows and host RMA, in words; None if it can."""
    found = nccl.probe()
    return None if found["available"] else str(found["reason"])


@dataclass(frozen=True, eq=False)
class NcclArena:
    """Device memory of the same size on every rank, whose addresses peers know.

    For puts it is registered with a rail as well (``NcclRail.register``), and with nothing twice.

    Args:
        memory: this rank's.
        local: its window in the communicator of all ranks.
    """

    memory: nccl.Memory
    local: nccl.Window

    @property
    def bytes(self) -> int:
        """Bytes asked for, rounded up to whole granules."""
        return self.memory.bytes

    @property
    def address(self) -> int:
        """Where this rank's memory begins."""
        return self.memory.address

    def peer_address(self, rank: int) -> int | None:
        """Where this process sees the memory of a rank; None if only puts reach it."""
        return self.local.peer_address(rank) or None


class NcclDomains:
    """The communicators of one process group on this rank.

    Args:
        exchange: all-gathers a small payload among all ranks, in rank order.
        rank: this rank.
        topology: nodes and ranks; a rail joins the ranks of one place in their nodes.
        device: this rank's CUDA device ordinal.
        timeout_s: bound of every step.
        contexts: RMA contexts of a rail.
        signals: signals that a rank of a rail keeps for each other one.
        multicast: whether NCCL may make multicast objects; the switches of the environment may forbid it all the same.

    Raises:
        TideArenaError: on every rank alike, if one has no usable NCCL, another version than rank 0, or could not
            connect in time.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        topology: Topology,
        device: int,
        timeout_s: float,
        *,
        contexts: int = CONTEXTS,
        signals: int = 1,
        multicast: bool = True,
    ) -> None:
        self.rank, self.topology, self.device, self.timeout_s = rank, topology, device, timeout_s
        self._exchange = exchange
        self._limits = contexts, signals
        self._windows: list[nccl.Window] = []
        #: Communicators of this rank's rail, in the order in which they were made.
        self.rails: list[nccl.Communicator] = []
        self._same(self._agree("finding NCCL", missing_nccl(), _version()), "has NCCL {}")
        # Every rank could make an id; that of rank 0 is taken.
        ids = self._try("naming the communicator", nccl.unique_id, lambda i: base64.b64encode(i).decode())[1]
        id_ = base64.b64decode(ids[0])
        self.main, _ = self._try(
            "connecting all ranks through NCCL",
            lambda: nccl.Communicator.join(device, id_, topology.ranks, rank, 0, 1, _CHANNELS, multicast, timeout_s),
        )

    def add_rail(self) -> nccl.Rma:
        """Connect the ranks of each rail for puts, beside what connects them already. Collective.

        Raises:
            TideArenaError: on every rank alike, if one has no host RMA or could not connect in time.
        """
        place, node = self.topology.local_of(self.rank), self.topology.node_of(self.rank)

        def connect() -> nccl.Rma:
            comm = self.main.split(place, node, *self._limits, _CHANNELS, self.timeout_s)
            self.rails.append(comm)
            return nccl.Rma(comm, self.timeout_s)

        return self._try("connecting the rails through NCCL", connect)[0]

    def arena(self, nbytes: int) -> NcclArena:
        """Allocate ``nbytes`` on every rank and register them with the communicator of all. Collective.

        Raises:
            TideArenaError: on every rank alike, if one has no room or NCCL gives no window.
        """
        what = f"allocating {nbytes} bytes of device memory"
        memory, _ = self._try(what, lambda: nccl.Memory(self.device, nbytes))
        return NcclArena(memory, self.register(memory, self.main))

    def register(self, memory: nccl.Memory | cuda.Mapping, comm: nccl.Communicator) -> nccl.Window:
        """Register a whole allocation, NCCL's or the driver's, with one of the communicators. Collective.

        Raises:
            TideArenaError: on every rank alike, if sizes differ or NCCL gives no window on one.
        """
        self._same(self._agree(_REGISTERING, None, memory.bytes), "registers {} bytes")
        window, _ = self._try(_REGISTERING, lambda: nccl.Window(comm, memory, self.timeout_s))
        self._windows.append(window)
        return window

    def abort(self) -> None:
        """End NCCL's part on this rank at once; for a job that stops. From any thread; bounded in time."""
        for comm in (*self.rails, self.main):
            comm.abort()

    def close(self) -> None:
        """End it in order, when every rank does. Bounded in time; what is not through then is aborted. Idempotent."""
        try:
            for window in reversed(self._windows):
                window.close(self.timeout_s)
            for comm in (*self.rails, self.main):
                comm.close(self.timeout_s)
        except (OSError, RuntimeError):  # a peer has gone: nothing is lost that was not lost before
            self.abort()
        self._windows.clear()

    def _agree(self, what: str, error: str | None, facts: Any = None) -> list[Any]:
        return agree(self._exchange, self.rank, error, what, facts, _CODE)

    def _same(self, found: list[Any], words: str) -> None:
        """Raise on every rank if what they have differs, naming two."""
        apart = next((r for r, value in enumerate(found) if value != found[0]), None)
        if apart is not None:
            error = f"it {words.format(found[apart])}, rank 0 {words.format(found[0])}"
            self._agree("agreeing on NCCL", error if self.rank == apart else None)

    def _try(
        self, what: str, work: Callable[[], T], facts: Callable[[T], Any] = lambda made: None
    ) -> tuple[T, list[Any]]:
        """Do it on every rank; what each adds, or a TideArenaError on each."""
        made, error = None, None
        try:
            made = work()
        except (OSError, ValueError, RuntimeError) as e:
            error = f"{type(e).__name__}: {e}"
        found = self._agree(what, error, None if made is None else facts(made))
        assert made is not None
        return made, found


def _version() -> str | None:
    version = nccl.probe()["version"]
    return None if version is None else str(version)
