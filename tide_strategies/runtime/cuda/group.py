"""The collectives of one parameter group on GPUs: the counterpart of ``runtime/group.py``.

Calls are enqueued on CUDA streams given by handle; ordering between streams (events) is the caller's. The order of use
is occupy, open, send, complete, vacate, and round again; or occupy, reuse, complete, vacate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tide_strategies.collectives.all_gather import CAST_CTAS, all_gather, reuse
from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.rail_lane import one_wave
from tide_strategies.collectives.reduce_scatter import BANKS, reduce_scatter
from tide_strategies.collectives.schedule import Item, Schedule, Space
from tide_strategies.collectives.two_level import default_plan
from tide_strategies.layout import GroupLayout
from tide_strategies.runtime.cuda.engine import CudaCollective, CudaEngine, DeviceSlot
from tide_strategies.runtime.cuda.fit import sums_aligned, with_casts
from tide_strategies.runtime.group import LandingGroup
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

#: Where partials are that land.
_PARTIALS = (Space.INBOX, Space.SPARE, Space.RUNNING)
#: Elements of sums, as the native table numbers them.
_ITEMS = (Item.F32, Item.BF16)


def needed_device_memory(
    layouts: Iterable[GroupLayout],
    topology: Topology,
    rank: int,
    chunk_bytes: int,
    slot_reuse: bool = False,
    *,
    plan: BasePlan | None = None,
    multicast: bool = False,
) -> dict[tuple[Space, int], int]:
    """Bytes that the collectives of groups with these layouts need on every rank beside their arguments.

    ``chunk_bytes``, ``slot_reuse`` and ``plan`` are as of :class:`CudaGroup`, ``multicast`` as of the engine.
    """
    needed: dict[tuple[Space, int], int] = {}
    for layout in dict.fromkeys(layouts):
        schedules = [_all_gather_schedule(layout, topology, rank, multicast, _uncast(layout))]
        for bank in range(BANKS if topology.nodes > 1 else 1):  # of the element types, these need most
            schedules.append(
                reduce_scatter(
                    layout,
                    topology,
                    rank,
                    grad=Item.F32,
                    output=Item.BF16,
                    chunk_bytes=chunk_bytes,
                    interleave=False,
                    plan=_plan(topology, slot_reuse, plan),
                    bank=bank,
                    multicast=multicast,
                )
            )
        for schedule in schedules:
            for which, nbytes in schedule.memory.items():
                needed[which] = max(needed.get(which, 0), nbytes)
    return {which: nbytes for which, nbytes in needed.items() if nbytes}


def _uncast(layout: GroupLayout) -> list[Item]:
    return [Item.of_size(p.itemsize) for p in layout.params]


def _all_gather_schedule(
    layout: GroupLayout, topology: Topology, rank: int, multicast: bool, items: Sequence[Item]
) -> Schedule:
    # With one rank a node too: leave to write into a landing comes when compute is through with it, and a rail that
    # does one thing after the other (``nccl_rail``) would hold up all later all-gathers until then.
    build = all_gather_nodes if topology.nodes > 1 or multicast else all_gather
    return with_casts(build(layout, topology, rank, items, shared_landing=multicast, interleave=False))


def _plan(topology: Topology, slot_reuse: bool, stated: BasePlan | None) -> BasePlan | None:
    """Of reductions across nodes, but for lanes; all calls of an engine have the same but for the mode.

    Lanes of several waves are no lanes here: the summing kernel does not add to what an earlier wave has left.
    """
    if topology.nodes == 1 or one_wave(topology):
        return None
    return replace(stated or default_plan(topology), slot_reuse=slot_reuse)


def _reuse_schedule(topology: Topology, rank: int) -> Schedule:
    if not topology.lane:
        return reuse(topology, rank)
    # Nobody else writes into the landing (:func:`_all_gather_schedule`), and so nobody is told.
    return Schedule("reuse", rank, topology.ranks, {"completion": (), "readiness": ()}, {})


class SumKernel(Protocol):
    """A compiled kernel (``tide_strategies.kernels``)."""

    function: int
    threads: int
    shared_bytes: int
    tile: int
    pointers: int
    extra_null_pointers: int


class Kernels(Protocol):
    """Where kernels come from."""

    def sum(self, staged: int, pointers: int, grad: Item, output: Item, aligned: bool) -> SumKernel:
        """The kernel that adds ``staged`` contributions and one of ``pointers`` gradients."""

    def land(self, sources: int, pointers: int, output: Item, accumulate: bool, aligned: bool) -> SumKernel:
        """The kernel that adds ``sources`` node partials, which lie in ``pointers`` places."""

    def land_multicast(self, output: Item, accumulate: bool) -> SumKernel:
        """The kernel that lets the NVSwitch add what all GPUs of the node hold."""


def set_kernels(
    engine: CudaEngine,
    collective: CudaCollective,
    kernels: Kernels,
    pointers: int,
    aligned: Mapping[bool, bool],
    ctas: tuple[int, int],
) -> tuple[SumKernel, ...]:
    """Choose the kernels of a collective's sums and landings; the caller keeps them, and with them their modules.

    Args:
        engine: the collective's.
        collective: a reduction, a part of one, or an all-gather, whose casts are sums.
        kernels: compiles them.
        pointers: gradients (or shards) that a sum reads.
        aligned: whether sums (False) and landings (True) can move 16 bytes at a time.
        ctas: thread blocks of a sum and of a landing.
    """
    places = sum(space in _PARTIALS for space, _, _ in collective.bases)
    running = any(space is Space.RUNNING for space, _, _ in collective.bases)
    found: list[SumKernel] = []
    for number, (landing, sources, src, dst, accumulate) in enumerate(collective.program.sum_kinds):
        # What has been added up beside a narrower output is no longer anywhere else.
        if landing and engine.multicast and not (running and _ITEMS[dst] is not Item.F32):
            kernel = kernels.land_multicast(_ITEMS[dst], accumulate)
        elif landing:
            kernel = kernels.land(sources, places, _ITEMS[dst], accumulate, aligned[True])
        else:
            kernel = kernels.sum(sources - 1, pointers, _ITEMS[src], _ITEMS[dst], aligned[False])
        found.append(kernel)
        collective.program.set_sum_kernel(
            kernel.function,
            kernel.threads,
            kernel.shared_bytes,
            ctas[landing],
            kernel.pointers,
            kernel.tile,
            kernel.extra_null_pointers,
            device=engine.device,
            kind=number,
        )
    return tuple(found)


class CudaGroup(LandingGroup):
    """Collectives of one parameter group on this rank.

    Args:
        engine: device memory and call order.
        name: the group's name, alike on all ranks.
        layout: its geometry.
        home: the ring that the landing rotates through, or its own pinned slot.
        chunk_bytes: bytes of one contribution staged at a time.
        kernels: compiles kernels.
        sum_ctas: thread blocks of a sum.
        shard_items: element of each parameter's shard; None where nothing is cast.
        landing_ctas: thread blocks of a landing; by default as many.
        slot_reuse: reductions across nodes have the small outbox.
        plan: rounds and passes of reductions across nodes, alike for all groups of the engine; None for the default.
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
        *,
        shard_items: Sequence[Item] | None = None,
        landing_ctas: int | None = None,
        slot_reuse: bool = False,
        plan: BasePlan | None = None,
    ) -> None:
        super().__init__(name, layout, engine.landing(layout.landing_bytes), home)
        self._engine, self._chunk_bytes = engine, chunk_bytes
        self._kernels, self._ctas = kernels, (sum_ctas, landing_ctas or sum_ctas)
        self._plan = _plan(engine.topology, slot_reuse, plan)
        self._shard_items = list(_uncast(layout) if shard_items is None else shard_items)
        self._casts = self._shard_items != _uncast(layout)
        self._gathers: dict[bool, _Gather] = {}

        def again(rank: int) -> Schedule:
            return _reuse_schedule(engine.topology, rank)

        self._reuse = engine.collective(again(engine.rank), 0, f"reuse of {name!r}", again)
        self._bytes = sum(layout.valid_items(p, engine.rank) * s.itemsize for p, s in enumerate(layout.params))
        self._reductions: dict[tuple[tuple[int, ...], Item, Item, int, bool], _Reduction] = {}
        self._running: tuple[CudaCollective, Any] | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that one all-gather sends to peers."""
        return self._bytes * (self.layout.ranks - 1)

    @property
    def several_nodes(self) -> bool:
        """Whether reductions have a network phase, on a stream of its own."""
        return self._engine.topology.nodes > 1

    @property
    def staged(self) -> bool:
        """Whether own shards are sent from the stage, by streams of the rail's and the landing's own."""
        return self.several_nodes or self._engine.multicast

    @property
    def sends_from_shards(self) -> bool:
        """Whether peers get the own shards from where they lie, and not from the own landing or stage."""
        return not (self.staged or self._casts)

    def occupy(self) -> DeviceSlot:
        """Back the landing with a slot. The caller waits until its own streams are through with that slot."""
        slot = self._enter()
        assert isinstance(slot, DeviceSlot)
        return slot

    def open(self, slot: DeviceSlot, shards: Sequence[int], versions: tuple[int, ...] | None = None) -> None:
        """Begin an all-gather into ``slot`` of this rank's padded shards, which lie at these addresses."""
        gather = self._gather(not (self._casts and any(a % 16 for a in shards)))
        send = gather.sends.get(slot.index)
        if send is None:  # a slot's addresses stay what they are
            tag = self._engine.book.tag(f"{gather.collective.label} into slot {slot.index}")
            send = gather.sends[slot.index] = tag, gather.collective.addresses(slot)
        tag, others = send
        self._running = (gather.collective, gather.collective.begin(shards, others, tag, slot.index))
        self._versions = versions

    def send(self, own: int, copy: int, rail: int = 0) -> None:
        """Enqueue what brings the own shards to every rank.

        Stream ``own`` brings them, cast if need be, to the own landing, or to the stage if they are :attr:`staged`.
        Then ``rail`` exchanges them with other nodes, if there are any, and ``copy`` brings them and what arrives to
        every landing of the node. Otherwise ``copy`` sends them to the peers' landings: after ``own``, unless
        :attr:`sends_from_shards`.
        """
        assert self._running is not None
        collective, call = self._running
        streams = {"cast": own, "copy": copy}
        if self.staged:
            streams["rail"] = rail
        collective.enqueue_streams(call, streams)
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

    def arrive(self) -> None:
        """Wait on the host, if the rail wants that, before a stream of the program's waits for the all-gather."""
        assert self._running is not None
        collective, call = self._running
        collective.arrive(call)

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
        streams: Sequence[int],
    ) -> None:
        """Enqueue the reduction of the gradients of ``params`` on the (push, sum, network) streams.

        The gradients have been read once push and sum have run (a lane has a push stream alone for that). The result is
        at ``output_address`` once network has, or sum on one node, where network may be left out.
        """
        bank = self._engine.next_bank() if self.several_nodes else 0
        reduction = self._reduction(params, grad, output, bank, self._aligned(params, [*gradients, output_address]))
        collective = reduction.collective
        call = collective.begin(gradients, collective.addresses(output=output_address), reduction.tag, 0, divisor)
        named = dict(zip(("push", "sum", "network"), streams, strict=False))
        collective.enqueue_streams(call, {**named, "read": streams[0]})
        self.reduce_scatters.calls += 1
        self.reduce_scatters.bytes += reduction.bytes

    def prepare(self, params: tuple[int, ...], grad: Item, output: Item) -> None:
        """Compile and upload what reductions of ``params`` will need, if memory comes from an allocator as it does.

        In a step this would make the host wait for the device, and the device may be waiting for peers.
        """
        for bank in range(BANKS if self.several_nodes else 1):
            self._reduction(params, grad, output, bank, self._aligned(params, ()))

    def prepare_all_gather(self) -> None:
        """The same for all-gathers."""
        self._gather(True)

    def _gather(self, aligned: bool) -> _Gather:
        gather = self._gathers.get(aligned)
        if gather is None:
            gather = self._gathers[aligned] = self._build_gather(aligned)
        return gather

    def _build_gather(self, aligned: bool) -> _Gather:
        engine, params = self._engine, range(len(self.layout.params))

        def schedule_of(rank: int) -> Schedule:
            return _all_gather_schedule(self.layout, engine.topology, rank, engine.multicast, self._shard_items)

        schedule = schedule_of(engine.rank)
        collective = engine.collective(schedule, len(params), f"all-gather of {self.name!r}", schedule_of)
        wide = {False: aligned and self._aligned(params, ()) and sums_aligned(schedule, False)}  # it lands nothing
        ctas = CAST_CTAS * self._ctas[False], 0
        return _Gather(collective, set_kernels(engine, collective, self._kernels, len(params), wide, ctas))

    def _aligned(self, params: Iterable[int], addresses: Sequence[int]) -> bool:
        """Whether every address and length lets the kernel move 16 bytes at a time."""
        lengths = all(self.layout.shard_items(p) % 8 == 0 for p in params)
        return lengths and all(a % 16 == 0 for a in addresses)

    def _reduction(self, params: tuple[int, ...], grad: Item, output: Item, bank: int, aligned: bool) -> _Reduction:
        key = (params, grad, output, bank, aligned)
        reduction = self._reductions.get(key)
        if reduction is None:
            reduction = self._reductions[key] = self._build_reduction(*key)
        return reduction

    def _build_reduction(
        self, params: tuple[int, ...], grad: Item, output: Item, bank: int, aligned: bool
    ) -> _Reduction:
        engine = self._engine
        layout = GroupLayout(tuple(self.layout.params[p] for p in params), self.layout.ranks)

        def schedule_of(rank: int) -> Schedule:
            return reduce_scatter(
                layout,
                engine.topology,
                rank,
                grad=grad,
                output=output,
                chunk_bytes=self._chunk_bytes,
                interleave=False,
                plan=self._plan,
                bank=bank,
                multicast=engine.multicast,
            )

        schedule = schedule_of(engine.rank)
        label = self._reduction_label(params, grad, output)
        collective = engine.collective(schedule, len(params), label, schedule_of)
        wide = {landing: aligned and sums_aligned(schedule, landing) for landing in (False, True)}
        kernels = set_kernels(engine, collective, self._kernels, len(params), wide, self._ctas)
        sent = self._sent_bytes(params, grad, engine.rank)
        return _Reduction(collective, engine.book.tag(label), sent, kernels)


@dataclass(frozen=True)
class _Reduction:
    collective: CudaCollective
    tag: int
    bytes: int
    kernels: tuple[SumKernel, ...]  # keeps their modules loaded


@dataclass(frozen=True)
class _Gather:
    collective: CudaCollective
    kernels: tuple[SumKernel, ...]  # keeps their modules loaded
    #: Tag of the call and addresses for each slot.
    sends: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
