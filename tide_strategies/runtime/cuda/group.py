"""The collectives of one parameter group on GPUs: the counterpart of ``runtime/group.py``.

Calls are enqueued on CUDA streams given by handle; ordering between streams (events) is the caller's. The order of use
is occupy, send, complete, vacate, and round again; or occupy, reuse, complete, vacate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tide_strategies._native import cuda
from tide_strategies.collectives.all_gather import all_gather, reuse
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout
from tide_strategies.runtime.cuda.engine import CudaCollective, CudaEngine, DeviceSlot
from tide_strategies.runtime.group import LandingGroup
from tide_strategies.runtime.slots import SlotRing


class SumKernel(Protocol):
    """A compiled summing kernel (``tide_strategies.kernels``)."""

    function: int
    threads: int
    shared_bytes: int
    tile: int
    pointers: int
    extra_null_pointers: int


#: Compiles the kernel for (staged contributions, gradients, gradient element, output element, aligned).
Kernels = Callable[[int, int, Item, Item, bool], SumKernel]


class CudaGroup(LandingGroup):
    """Collectives of one parameter group on this rank.

    Args:
        engine: device memory and call order.
        name: the group's name, alike on all ranks.
        layout: its geometry.
        home: the ring that the landing rotates through, or its own pinned slot.
        chunk_bytes: bytes of one contribution staged at a time.
        kernels: compiles the summing kernel.
        sum_ctas: thread blocks of the sum.
    """

    def __init__(
        self,
        engine: CudaEngine,
        name: str,
        layout: GroupLayout,
        home: SlotRing | DeviceSlot,
        chunk_bytes: int,
        kernels: Kernels,
        sum_ctas: int,
    ) -> None:
        super().__init__(name, layout, engine.landing(layout.landing_bytes), home)
        self._engine, self._chunk_bytes = engine, chunk_bytes
        self._kernels, self._sum_ctas = kernels, sum_ctas
        items = [Item.of_size(p.itemsize) for p in layout.params]
        schedule = all_gather(layout, engine.topology, engine.rank, items, shared_landing=False)
        self._all_gather = engine.collective(schedule, len(layout.params), f"all-gather of {name!r}")
        self._reuse = engine.collective(reuse(engine.topology, engine.rank), 0, f"reuse of {name!r}")
        self._no_shards = [0] * len(layout.params)  # the caller's cast has put them into the own landing
        self._bytes = sum(layout.valid_items(p, engine.rank) * s.itemsize for p, s in enumerate(layout.params))
        self._reductions: dict[tuple[tuple[int, ...], Item, Item, bool], _Reduction] = {}
        self._running: tuple[CudaCollective, cuda.Call] | None = None
        self._sends: dict[int, tuple[int, list[int]]] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes that one all-gather sends to peers."""
        return self._bytes * (self.layout.ranks - 1)

    def occupy(self) -> DeviceSlot:
        """Back the landing with a slot. The caller waits until its own streams are through with that slot."""
        slot = self._enter()
        assert isinstance(slot, DeviceSlot)
        return slot

    def send(self, slot: DeviceSlot, stream: int, versions: tuple[int, ...] | None = None) -> None:
        """Enqueue the copies of the own shards, already in the own landing on ``stream``, to every peer's."""
        send = self._sends.get(slot.index)
        if send is None:  # a slot's addresses stay what they are
            tag = self._engine.book.tag(f"{self._all_gather.label} into slot {slot.index}")
            send = self._sends[slot.index] = tag, self._all_gather.addresses(landing=slot.addresses)
        tag, others = send
        call = self._all_gather.begin(self._no_shards, others, tag, slot.index)
        self._running, self._versions = (self._all_gather, call), versions
        self._all_gather.enqueue(call, "copy", stream)
        self.all_gathers.calls += 1
        self.all_gathers.bytes += self.sent_bytes

    def reuse(self, slot: DeviceSlot) -> None:
        """Use the landing again in the place of an all-gather. Only if :meth:`reusable`."""
        tag = self._engine.book.tag(f"{self._reuse.label} in slot {slot.index}")
        self._running = (self._reuse, self._reuse.begin((), (), tag, slot.index))
        self.all_gathers.reused += 1

    def complete(self, stream: int) -> None:
        """Enqueue the wait for every peer's shards."""
        assert self._running is not None
        collective, call = self._running
        collective.enqueue(call, "completion", stream)

    def vacate(self, stream: int) -> None:
        """Enqueue word to every peer that the landing may be overwritten, and give up the slot."""
        assert self._running is not None
        collective, call = self._running
        collective.enqueue(call, "readiness", stream)
        self._running = None
        self._leave()

    def reduce_scatter(
        self,
        params: tuple[int, ...],
        grad: Item,
        output: Item,
        gradients: Sequence[int],
        output_address: int,
        divisor: float,
        streams: tuple[int, int],
    ) -> None:
        """Enqueue the reduction of the gradients of ``params`` on the (push, sum) streams.

        The result is at ``output_address`` once the sum stream has run; the gradients have been read once both have.
        """
        aligned = self._aligned(params, gradients, output_address, grad)
        key = (params, grad, output, aligned)
        reduction = self._reductions.get(key)
        if reduction is None:
            reduction = self._reductions[key] = self._build_reduction(*key)
        collective = reduction.collective
        call = collective.begin(gradients, collective.addresses(output=output_address), reduction.tag, 0, divisor)
        collective.enqueue_all(call, {"push": streams[0], "sum": streams[1]})
        self.reduce_scatters.calls += 1
        self.reduce_scatters.bytes += reduction.bytes

    def _aligned(self, params: tuple[int, ...], gradients: Sequence[int], output: int, grad: Item) -> bool:
        """Whether every address and length lets the kernel move 16 bytes at a time."""
        lengths = all(self.layout.shard_items(p) % 8 == 0 for p in params)
        return lengths and output % 16 == 0 and all(g % 16 == 0 for g in gradients)

    def _build_reduction(self, params: tuple[int, ...], grad: Item, output: Item, aligned: bool) -> _Reduction:
        engine = self._engine
        layout = GroupLayout(tuple(self.layout.params[p] for p in params), self.layout.ranks)
        schedule = reduce_scatter(
            layout,
            engine.topology,
            engine.rank,
            grad=grad,
            output=output,
            chunk_bytes=self._chunk_bytes,
            interleave=False,
        )
        label = self._reduction_label(params, grad, output)
        collective = engine.collective(schedule, len(params), label)
        kernel = self._kernels(layout.ranks - 1, len(params), grad, output, aligned)
        collective.program.set_sum_kernel(
            kernel.function,
            kernel.threads,
            kernel.shared_bytes,
            self._sum_ctas,
            kernel.pointers,
            kernel.tile,
            kernel.extra_null_pointers,
        )
        sent = self._sent_bytes(params, grad, engine.rank)
        return _Reduction(collective, engine.book.tag(label), sent, kernel)


@dataclass(frozen=True)
class _Reduction:
    collective: CudaCollective
    tag: int
    bytes: int
    kernel: SumKernel  # keeps the module loaded
