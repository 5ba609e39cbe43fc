"""Device memory, counters and call order of one process group whose ranks drive GPUs of one host.

The CUDA counterpart of ``runtime/engine.py``. Nothing here waits: calls are enqueued on CUDA streams, and waits for
peers happen on the device. A watchdog thread bounds them (``watchdog.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Schedule, Space
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.memory import SharedAllocation, share_allocation
from tide_strategies.runtime.cuda.watchdog import Watchdog
from tide_strategies.runtime.encode import Encoded, encode
from tide_strategies.runtime.slots import Landing, Slot
from tide_strategies.runtime.trace import Trace
from tide_strategies.topology import Topology

#: Streams of a schedule that the caller runs itself, with kernels of the framework.
CALLERS_STREAMS = ("cast",)


@dataclass(eq=False)
class DeviceSlot(Slot):
    """A slot of device memory on every rank, mapped by all for as long as the slot exists."""

    memory: SharedAllocation | None = None

    @property
    def addresses(self) -> list[int]:
        """Where each rank's memory begins in this process."""
        assert self.memory is not None
        return self.memory.addresses


class CudaEngine:
    """Everything that the collectives of one process group share on this rank.

    Args:
        exchange: all-gathers a small payload among the ranks, in rank order.
        rank: this rank in the group.
        topology: one node with all ranks of the group.
        device: this rank's CUDA device ordinal.
        slots: upper bound on landing slots, which sizes the counter table.
        staging_bytes: bytes of staging on every rank.
        timeout_s: bound of every wait.

    Raises:
        TideArenaError: on every rank, if device memory cannot be shared between them.
    """

    def __init__(
        self,
        exchange: Callable[[bytes], list[bytes]],
        rank: int,
        topology: Topology,
        device: int,
        *,
        slots: int,
        staging_bytes: int,
        timeout_s: float,
    ) -> None:
        self.rank, self.topology, self.device, self.timeout_s = rank, topology, device, timeout_s
        self.book = CallBook(topology, slots)
        self._exchange = exchange
        #: Where calls are noted, if they are (``runtime/trace.py``). The engine closes it.
        self.trace: Trace | None = None
        self._slots_used = 0
        self._bytes: dict[str, int] = {}
        # Who the peers are, whether they live, and why one stopped: kept in a little shared host memory.
        self.host = SharedArena.create(exchange, rank, topology.ranks, 1, timeout_s)
        cells = self._share(cuda.Control.control_bytes(topology.ranks, self.book.counters), "control")
        peers = [None if r == rank else m for r, m in enumerate(cells.mappings)]
        self.control = cuda.Control(device, topology.ranks, rank, self.book.counters, cells.mappings[rank], peers)
        self._staging = self._share(staging_bytes, "staging") if staging_bytes else None
        exchange(b"ready")  # no rank may write into counters that their owner is still clearing
        self.watchdog = Watchdog(self.control, self.host, self.book, rank, timeout_s)

    def add_slot(self, nbytes: int, part: str) -> DeviceSlot:
        """Make a landing slot of ``nbytes`` on every rank, counted as ``part``."""
        shared = self._share(max(nbytes, 1), part)
        self._slots_used += 1
        return DeviceSlot(self._slots_used - 1, (shared.own,), memory=shared)

    def landing(self, nbytes: int) -> Landing:
        """A landing of ``nbytes``, not yet in any slot."""
        return Landing(cuda.Window(self.device, max(nbytes, 1)))

    def collective(self, schedule: Schedule, inputs: int, label: str) -> CudaCollective:
        """Make a schedule callable. ``label`` names it in messages."""
        streams = {name: ops for name, ops in schedule.streams.items() if name not in CALLERS_STREAMS}
        return CudaCollective(self, encode(replace(schedule, streams=streams), inputs, cuda.Program), label)

    def staging_address(self, rank: int) -> int:
        """Address of a rank's staging in this process."""
        assert self._staging is not None
        return self._staging.addresses[rank]

    def bytes_by_part(self) -> dict[str, int]:
        """Device memory of this rank by part."""
        return dict(self._bytes)

    def close(self) -> None:
        """Stop the watchdog and let go of the memory."""
        if self.trace is not None:
            self.trace.close()
        self.watchdog.close()
        self.host.close()

    def _share(self, nbytes: int, part: str) -> SharedAllocation:
        shared = share_allocation(self._exchange, self.rank, self.topology.ranks, self.timeout_s, self.device, nbytes)
        self._bytes[part] = self._bytes.get(part, 0) + shared.own.bytes
        return shared


class CudaCollective:
    """A schedule bound to an engine; its streams are enqueued on CUDA streams given by handle."""

    def __init__(self, engine: CudaEngine, encoded: Encoded, label: str) -> None:
        self._engine, self._encoded, self.label = engine, encoded, label
        self._counters: dict[int, list[int]] = {}

    @property
    def program(self) -> cuda.Program:
        """The native program."""
        return self._encoded.program

    def addresses(self, landing: Sequence[int] = (), output: int = 0) -> list[int]:
        """Addresses of everything but the inputs; ``landing`` has one per rank."""
        own = self._engine.rank
        where = {
            Space.LANDING: lambda at: landing[own if at < 0 else at],
            Space.STAGING: self._engine.staging_address,
            Space.OUTPUT: lambda at: output,
        }
        return [where[space](at) for space, _, at in self._encoded.bases]

    def begin(
        self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int = 0, divisor: float = 1.0
    ) -> cuda.Call:
        """Take the next place in the order of calls.

        Raises:
            TidePeerError: the watchdog has stopped this group.
        """
        engine = self._engine
        engine.watchdog.check()
        counters = self._counters.get(slot)
        if counters is None:
            counters = self._counters[slot] = [engine.book.counter(c, slot) for c in self._encoded.counters]
        return self._encoded.program.begin(engine.control, [*inputs, *others], counters, tag, divisor)

    def enqueue_all(self, call: cuda.Call, cuda_streams: dict[str, int]) -> None:
        """Enqueue all streams of a call whose schedule has an order of issue, in that order. Returns at once."""
        call.enqueue_lanes([cuda_streams[name] for name in self._encoded.streams])

    def enqueue(self, call: cuda.Call, stream: str, cuda_stream: int) -> None:
        """Enqueue one stream of a call on the CUDA stream with this handle. Returns at once."""
        call.enqueue(self._encoded.streams[stream], cuda_stream)
