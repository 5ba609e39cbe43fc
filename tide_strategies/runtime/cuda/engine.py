"""Device memory, counters and call order of one process group whose ranks drive GPUs.

The CUDA counterpart of ``runtime/engine.py``. Nothing here waits: calls are enqueued on CUDA streams, and waits for
peers happen on the device. A watchdog thread bounds them (``watchdog.py``).

One host may stand for several nodes. Then their ranks map each other's memory all the same, which is the rail between
them: a put is a copy and a signal, like any other. With a rail of another kind, only the ranks of a node do so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tide_strategies._native import cuda
from tide_strategies.collectives.reduce_scatter import BANKS
from tide_strategies.collectives.schedule import NODE, SELF, Schedule, Space
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.fit import counted
from tide_strategies.runtime.cuda.host_order import Board, HostOrder
from tide_strategies.runtime.cuda.memory import SharedAllocation, share_allocation
from tide_strategies.runtime.cuda.multicast import share_multicast
from tide_strategies.runtime.cuda.order import CallOrder
from tide_strategies.runtime.cuda.rail import RAILED, Arrival, Cut, DeviceRail, RailCall, cut, enqueue
from tide_strategies.runtime.cuda.watchdog import Failure, Watchdog
from tide_strategies.runtime.encode import Base, Encoded, encode
from tide_strategies.runtime.slots import Landing, Slot
from tide_strategies.runtime.trace import Trace
from tide_strategies.topology import Topology

#: The host sometimes waits for the device, which waits for peers: until the watchdog has let those waits pass.
_BEYOND_TIMEOUT_S = 60.0
_URGENT = -1


@dataclass(eq=False)
class DeviceSlot(Slot):
    """A slot of device memory on every rank, mapped by all who share memory for as long as the slot exists."""

    memory: SharedAllocation | None = None


class CudaEngine:
    """Everything that the collectives of one process group share on this rank.

    Args:
        exchange: all-gathers a small payload among the ranks, in rank order.
        rank: this rank in the group.
        topology: all ranks of the group; several nodes are virtual ones, unless there is a rail.
        device: this rank's CUDA device ordinal.
        slots: upper bound on landing slots, which sizes the counter table.
        memory: bytes that schedules need on every rank beside their arguments.
        timeout_s: bound of every wait.
        rail: carries what goes between nodes; None: their ranks reach each other's memory. The engine closes it.
        multicast: landings and inboxes can be addressed on all ranks of a node at once.
        host_ranks: so many consecutive ranks are on each host; 0: all are on one.
        board: where hosts compare what they begin; None: they do not.

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
        memory: Mapping[tuple[Space, int], int],
        timeout_s: float,
        rail: DeviceRail | None = None,
        multicast: bool = False,
        host_ranks: int = 0,
        board: Board | None = None,
    ) -> None:
        self.rank, self.topology, self.device, self.timeout_s = rank, topology, device, timeout_s
        self.rail, self.multicast = rail, multicast
        #: So many consecutive ranks map each other's memory.
        self._sharing = topology.ranks if rail is None else topology.local_ranks
        self._intakes: dict[str, cuda.Stream] = {}
        self.book = CallBook(topology, slots)
        self._exchange = exchange
        #: Where calls are noted, if they are (``runtime/trace.py``). The engine closes it.
        self.trace: Trace | None = None
        self._slots_used = self._reductions = 0
        self._arrivals: deque[Sequence[Arrival]] = deque()
        self._bytes: dict[str, int] = {}
        try:
            self._set_up(memory, host_ranks, board)
        except BaseException:
            if rail is not None:
                rail.stop("its engine could not be set up")
                rail.close()
            raise

    def _set_up(self, memory: Mapping[tuple[Space, int], int], host_ranks: int, board: Board | None) -> None:
        rank, ranks, device, counters = self.rank, self.topology.ranks, self.device, self.book.counters
        # Who the peers are, whether they live, and why one stopped: kept in a little shared host memory.
        self.host = SharedArena.create(self._exchange, rank, ranks, 1, self.timeout_s, host_ranks)
        cells = self._share(cuda.Control.control_bytes(ranks, counters), "control")
        peers = [None if r == rank else m for r, m in enumerate(cells.mappings)]
        self.control = cuda.Control(device, ranks, rank, counters, cells.mapping(rank), peers)
        wanted = sorted(memory.items(), key=lambda item: (item[0][0].value, item[0][1]))
        self._memory = {k: self._share(nbytes, k[0].value, k[0] is Space.INBOX) for k, nbytes in wanted}
        if self.rail is not None:
            for key in (k for k, _ in wanted if k[0] in RAILED):
                self.rail.register(*key, self.own(*key))
        self.order = CallOrder(self.host, self.book)
        self._exchange(b"ready")  # no rank may write into counters that their owner is still clearing
        cuda.be_patient(self.timeout_s + _BEYOND_TIMEOUT_S)
        #: Of the first rank of each host, if there are several; the others are compared with that one.
        self.host_order: HostOrder | None = None
        if board is not None and rank == self.host.host[0] and len(self.host.host) < ranks:
            self.host_order = HostOrder(self.host, self.book, board)
        orders = [o for o in (self.order, self.host_order) if o is not None]
        self.watchdog = Watchdog(self.control, self.host, self.book, rank, self.timeout_s, self.rail, orders)

    def add_slot(self, nbytes: int, part: str) -> DeviceSlot:
        """Make a landing slot of ``nbytes`` on every rank, counted as ``part``."""
        shared = self._share(max(nbytes, 1), part, everywhere=True)
        self._slots_used += 1
        return DeviceSlot(self._slots_used - 1, (shared.own,), memory=shared)

    def landing(self, nbytes: int) -> Landing:
        """A landing of ``nbytes``, not yet in any slot."""
        return Landing(cuda.Window(self.device, max(nbytes, 1)))

    def collective(
        self, schedule: Schedule, inputs: int, label: str, schedule_of: Callable[[int], Schedule] | None = None
    ) -> CudaCollective:
        """Make a schedule callable whose casts, if it has any, are sums (``fit.with_casts``).

        Args:
            schedule: this rank's.
            inputs: addresses that a call brings.
            label: names it in messages.
            schedule_of: builds the schedule of any rank; needed on several nodes whose rail fetches.
        """
        node = list(self.topology.node_ranks(self.rank))
        program = partial(cuda.Program, readers=node)
        if self.rail is None or self.topology.nodes == 1:
            return CudaCollective(self, encode(counted(schedule), inputs, program), label)
        intake = self._intakes.get(schedule.name)
        if intake is None:
            intake = self._intakes[schedule.name] = cuda.Stream(self.device, _URGENT)
        assert schedule_of is not None or not self.rail.fetches
        made = cut(schedule, node, inputs, program, schedule_of if self.rail.fetches else None)
        return RailedCollective(self, made, label, self.rail, intake.handle)

    def address(self, space: Space, index: int, at: int) -> int:
        """Address in this process of a schedule's memory on rank ``at`` (or SELF, or NODE)."""
        return self.within(self._memory[space, index], at)

    def within(self, shared: SharedAllocation, at: int) -> int:
        """Address in this process of memory on rank ``at`` (or SELF, or NODE)."""
        return shared.everywhere if at == NODE else shared.addresses[self.rank if at == SELF else at]

    def own(self, space: Space, index: int) -> cuda.Mapping:
        """A schedule's memory on this rank."""
        return self._memory[space, index].mapping(self.rank)

    def next_bank(self) -> int:
        """The bank of the next reduction across nodes: they alternate, whichever groups they belong to."""
        self._reductions += 1
        return self._reductions % BANKS

    def next_reduction(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """What had to arrive for the reduction across nodes that used the bank before the one that begins now."""
        self._arrivals.append(arrivals)
        return self._arrivals.popleft() if len(self._arrivals) > BANKS else ()

    def bytes_by_part(self) -> dict[str, int]:
        """Device memory of this rank by part."""
        return dict(self._bytes)

    def pinned_by_part(self) -> dict[str, int]:
        """Pinned host memory of this rank by part, which a rail may need."""
        return {} if self.rail is None else self.rail.pinned_by_part()

    def close(self) -> None:
        """Stop the watchdog and let go of the memory.

        With a rail, all ranks do so, and it waits for what the device has been given, which the watchdog bounds.

        Raises:
            TideMismatchError: the last calls were not the same on all ranks; everything is released all the same.
        """
        if self.trace is not None:
            self.trace.close()
        if self.rail is not None and not self.watchdog.stopped:
            cuda.settle(self.device, self.timeout_s)
        different = self._last_look()
        self.watchdog.close()
        if self.rail is not None:
            self.rail.close()
        self.host.close()
        if different is not None:
            raise different

    def _last_look(self) -> Failure | None:
        """What differs in calls that nobody has compared yet, and the watchdog has not found."""
        different = None if self.host_order is None else self.host_order.close()
        different = different or self.order.look()
        return None if different is None or self.watchdog.stopped else self.watchdog.stop(different)

    def _share(self, nbytes: int, part: str, everywhere: bool = False) -> SharedAllocation:
        """Memory on every rank, counted as ``part``; ``everywhere``: by multicast too, if the engine has that."""
        ranks, local, everywhere = self.topology.ranks, self.topology.local_ranks, everywhere and self.multicast
        if everywhere:
            nbytes = cuda.Multicast.whole_bytes(self.device, local, nbytes)
        where = self._exchange, self.rank, ranks, self.timeout_s, self.device
        shared = share_allocation(*where, nbytes, self._sharing)
        if everywhere:
            shared = replace(shared, multicast=share_multicast(*where, shared, local))
        self._bytes[part] = self._bytes.get(part, 0) + shared.own.bytes
        return shared


def refuse_default_streams(names: Iterable[str], cuda_streams: Mapping[str, int]) -> None:
    """Raise ValueError if a stream of a program is to run on the default stream: nothing would be enqueued there."""
    for name in names:
        if cuda_streams.get(name) == 0:
            raise ValueError(
                f"stream {name!r} of a collective is given CUDA's default stream; collectives run on streams of their "
                f"own (torch.cuda.Stream)"
            )


class CudaCollective:
    """A schedule bound to an engine; its streams are enqueued on CUDA streams given by handle."""

    def __init__(self, engine: CudaEngine, encoded: Encoded, label: str) -> None:
        self._engine, self._encoded, self.label = engine, encoded, label
        self._counters: dict[int, list[int]] = {}

    @property
    def program(self) -> cuda.Program:
        """The native program."""
        return self._encoded.program

    @property
    def bases(self) -> tuple[Base, ...]:
        """Memory that a call needs addresses of, after its inputs."""
        return self._encoded.bases

    def addresses(self, slot: DeviceSlot | None = None, output: int = 0) -> list[int]:
        """Addresses of everything but the inputs; ``slot`` is where the landing is."""
        engine = self._engine

        def address(space: Space, index: int, at: int) -> int:
            if space is Space.OUTPUT:
                return output
            if space is not Space.LANDING:
                return engine.address(space, index, at)
            assert slot is not None
            assert slot.memory is not None
            return engine.within(slot.memory, at)

        return [address(*base) for base in self._encoded.bases]

    def begin(self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int = 0, divisor: float = 1.0) -> Any:
        """Take the next place in the order of calls.

        Raises:
            TideMismatchError: another rank of the host begins another collective in its place.
            TidePeerError: the watchdog has stopped this group.
        """
        engine = self._engine
        engine.watchdog.check()
        different = engine.order.note(tag)
        if different is not None:
            raise engine.watchdog.stop(different)
        if engine.host_order is not None:
            engine.host_order.note(tag)
        counters = self._counters.get(slot)
        if counters is None:
            counters = self._counters[slot] = [engine.book.counter(c, slot) for c in self._encoded.counters]
        return self._encoded.program.begin(engine.control, [*inputs, *others], counters, tag, divisor)

    def enqueue_streams(self, call: Any, cuda_streams: Mapping[str, int]) -> None:
        """Enqueue those streams of a call that are named, each on the CUDA stream with its handle. Returns at once.

        They are enqueued in the schedule's order of issue, whatever the order here.

        Raises:
            ValueError: one of them is the default stream, whose handle is 0.
        """
        refuse_default_streams(self._encoded.streams, cuda_streams)
        call.enqueue_lanes([cuda_streams.get(name, 0) for name in self._encoded.streams])

    def arrive(self, call: Any) -> None:
        """Wait on the host, if the rail wants that, until what other nodes send for what was enqueued has arrived.

        Before a stream of the program's waits for the call.
        """

    def enqueue(self, call: Any, stream: str, cuda_stream: int) -> None:
        """Enqueue one stream of a call on the CUDA stream with this handle. Returns at once."""
        self.enqueue_streams(call, {stream: cuda_stream})


class RailedCollective(CudaCollective):
    """A collective between nodes that a rail connects."""

    def __init__(self, engine: CudaEngine, made: Cut, label: str, rail: DeviceRail, intake: int) -> None:
        super().__init__(engine, made.encoded, label)
        self._made, self._rail, self._intake = made, rail, intake

    def begin(
        self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int = 0, divisor: float = 1.0
    ) -> RailCall:
        """See :meth:`CudaCollective.begin`."""
        return RailCall(super().begin(inputs, others, tag, slot, divisor), [*inputs, *others])

    def arrive(self, call: Any) -> None:
        """See :meth:`CudaCollective.arrive`."""
        self._arrive(call.arrivals)

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        try:
            self._rail.arrive(arrivals)
        except (TidePeerError, TideTimeoutError) as e:
            raise self._engine.watchdog.stop(e) from e
        self._engine.watchdog.check()

    def enqueue_streams(self, call: Any, cuda_streams: Mapping[str, int]) -> None:
        """See :meth:`CudaCollective.enqueue_streams`."""
        refuse_default_streams(self._encoded.streams, cuda_streams)
        if "network" in cuda_streams:  # pushes, which the program's streams wait for, wait for the bank
            self._arrive(self._engine.next_reduction(call.arrivals))
        enqueue(self._made, call, self._rail, self._engine.book.counter, cuda_streams, self._intake)
