"""The collectives of one parameter group: its landing, its all-gather, its reduce-scatters.

No torch here: shards, gradients and outputs come as addresses. The order of use is issue, complete, vacate, and round
again; ``fsdp2`` sees to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tide_strategies import _native
from tide_strategies.collectives.all_gather import all_gather, reuse
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import BANKS, reduce_scatter
from tide_strategies.collectives.schedule import Item, Space
from tide_strategies.collectives.two_level import default_plan
from tide_strategies.layout import GroupLayout
from tide_strategies.runtime.engine import Collective, Engine
from tide_strategies.runtime.slots import Landing, Slot, SlotRing
from tide_strategies.topology import Topology

#: Outputs from this size on are likely to be fresh from the kernel, page by page.
_HUGE_FROM_BYTES = 4 * 1024 * 1024


def needed_memory(
    layouts: Iterable[GroupLayout], topology: Topology, rank: int, chunk_bytes: int, plan: BasePlan | None = None
) -> dict[tuple[Space, int], int]:
    """Bytes that the collectives of groups with these layouts need on every rank beside their arguments.

    ``chunk_bytes`` and ``plan`` are as of :class:`GroupCollectives`.
    """
    needed: dict[tuple[Space, int], int] = {}
    for layout in dict.fromkeys(layouts):
        items = [Item.of_size(p.itemsize) for p in layout.params]
        schedules = [all_gather(layout, topology, rank, items)]
        for bank in range(BANKS if topology.nodes > 1 else 1):  # of the element types, these need most
            schedules.append(
                reduce_scatter(
                    layout,
                    topology,
                    rank,
                    grad=Item.F32,
                    output=Item.BF16,
                    chunk_bytes=chunk_bytes,
                    plan=_plan(topology, plan),
                    bank=bank,
                )
            )
        for schedule in schedules:
            for which, nbytes in schedule.memory.items():
                needed[which] = max(needed.get(which, 0), nbytes)
    return {which: nbytes for which, nbytes in needed.items() if nbytes}


def _plan(topology: Topology, stated: BasePlan | None) -> BasePlan | None:
    """Of reductions across nodes, unless there is one rank a node, which has a plan of its own (``rail_lane``).

    All calls of an engine have the same plan.
    """
    return stated or default_plan(topology) if topology.nodes > 1 and not topology.lane else None


@dataclass
class Tally:
    """Running totals of one kind of collective (see ``report.CollectiveStats``)."""

    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    slot_wait_seconds: float = 0.0
    bytes: int = 0
    reused: int = 0
    ahead: int = 0
    stock_calls: int = 0
    stock_reason: str = ""


class LandingGroup:
    """What one parameter group has on every kind of device: a name, a geometry, a landing and where it lives.

    Args:
        name: the group's name, alike on all ranks.
        layout: its geometry.
        landing: its unsharded parameters.
        home: the ring that the landing rotates through, or its own pinned slot.
    """

    def __init__(self, name: str, layout: GroupLayout, landing: Landing, home: SlotRing | Slot) -> None:
        self.name, self.layout, self.landing = name, layout, landing
        self.all_gathers, self.reduce_scatters = Tally(), Tally()
        self._home = home
        self._versions: tuple[int, ...] | None = None

    @property
    def pinned(self) -> bool:
        """Whether the landing has a slot of its own."""
        return isinstance(self._home, Slot)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free for the landing, so that the ring need not grow."""
        return self._home.has_room if isinstance(self._home, SlotRing) else self._home.occupant is None

    def reusable(self, versions: tuple[int, ...] | None) -> bool:
        """Whether the vacated landing still holds the values that shards of these versions would be gathered to."""
        return versions is not None and versions == self._versions and self.landing.intact

    def forget(self) -> None:
        """Make the values in the landing not reusable."""
        self._versions = None

    def _enter(self) -> Slot:
        """Back the landing with a slot."""
        if isinstance(self._home, SlotRing):
            return self._home.acquire(self.landing)
        self.landing.occupy(self._home)
        return self._home

    def _leave(self) -> None:
        """Give the slot up."""
        if isinstance(self._home, SlotRing):
            self._home.release(self.landing)
        else:
            self.landing.vacate(0, poison=False)

    def _reduction_label(self, params: tuple[int, ...], grad: Item, output: Item) -> str:
        which = "all" if len(params) == len(self.layout.params) else f"parameters {list(params)}"
        return f"reduce-scatter of {self.name!r} ({which}, {grad.value} to {output.value})"

    def _sent_bytes(self, params: tuple[int, ...], grad: Item, rank: int) -> int:
        """Bytes of gradient slices that ``rank`` sends to peers."""
        others = [r for r in range(self.layout.ranks) if r != rank]
        return sum(self.layout.valid_items(p, r) * grad.size for p in params for r in others)


class GroupCollectives(LandingGroup):
    """Collectives of one parameter group on this rank.

    Args:
        engine: shared memory and call order.
        name: the group's name, alike on all ranks.
        layout: its geometry.
        shard_items: element of each parameter's shard.
        home: the ring that the landing rotates through, or its own pinned slot.
        chunk_bytes: bytes of one contribution staged at a time.
        plan: rounds and passes of reductions across nodes, alike for all groups of the engine; None for the default.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        layout: GroupLayout,
        shard_items: Sequence[Item],
        home: SlotRing | Slot,
        chunk_bytes: int,
        plan: BasePlan | None = None,
    ) -> None:
        super().__init__(name, layout, engine.landing(layout.landing_bytes), home)
        self._engine, self._chunk_bytes, self._plan = engine, chunk_bytes, _plan(engine.topology, plan)
        self._label = f"all-gather of {name!r}"
        schedule = all_gather(layout, engine.topology, engine.rank, shard_items)
        self._all_gather = engine.collective(schedule, len(layout.params), self._label)
        self._reuse = engine.collective(reuse(engine.topology, engine.rank), 0, f"reuse of {name!r}")
        self._addresses: dict[int, list[int]] = {}  # by slot
        self._bytes = sum(layout.valid_items(p, engine.rank) * s.itemsize for p, s in enumerate(layout.params))
        self._reductions: dict[tuple[tuple[int, ...], Item, Item, int], _Reduction] = {}
        self._running: tuple[Collective, Any] | None = None

    def issue(self, shards: Sequence[int], versions: tuple[int, ...] | None = None) -> None:
        """Write this rank's shards, given by address, into the landing of every rank (all-gather, first half).

        ``versions`` identify the shards' values, for :meth:`reusable`; None if they cannot be known.
        """
        start = time.perf_counter()
        slot = self._enter()
        tag = self._engine.book.tag(f"{self._label} into slot {slot.index}")
        addresses = self._addresses.get(slot.index)
        if addresses is None:
            addresses = self._all_gather.addresses(landing=self.landing.window.address, slot=slot.index)
            self._addresses[slot.index] = addresses
        call = self._all_gather.begin(shards, addresses, tag, slot.index)
        self._running, self._versions = (self._all_gather, call), versions
        waited = self._all_gather.run(call, "copy")
        self.all_gathers.calls += 1
        self.all_gathers.bytes += self._bytes
        self.all_gathers.slot_wait_seconds += waited
        self._count(self.all_gathers, "copy", self._label, start, waited, self._bytes)

    def reuse(self) -> None:
        """Use the landing again in the place of an all-gather. Only if :meth:`reusable`."""
        slot = self._enter()
        tag = self._engine.book.tag(f"{self._reuse.label} in slot {slot.index}")
        self._running = (self._reuse, self._reuse.begin((), (), tag, slot.index))
        self.all_gathers.reused += 1

    def complete(self) -> None:
        """Wait until every rank's shards are in the landing (all-gather, second half)."""
        assert self._running is not None
        start = time.perf_counter()
        collective, call = self._running
        waited = collective.run(call, "completion")
        self._count(self.all_gathers, "completion", collective.label, start, waited)

    def vacate(self) -> None:
        """Give the landing up: from here on, other groups and other ranks may overwrite it."""
        assert self._running is not None
        collective, call = self._running
        collective.run(call, "readiness")
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
    ) -> None:
        """Reduce the gradients of ``params`` into the packed shard at ``output_address``, divided by ``divisor``."""
        start = time.perf_counter()
        # Across nodes, calls of all groups take turns with two banks of memory; the schedule names its bank.
        bank = self._engine.next_bank() if self._engine.topology.nodes > 1 else 0
        key = (params, grad, output, bank)
        reduction = self._reductions.get(key)
        if reduction is None:
            reduction = self._reductions[key] = self._build_reduction(*key)
        output_bytes = self.output_items(params) * output.size
        if output_bytes >= _HUGE_FROM_BYTES:
            _native.advise_huge(output_address, output_bytes)
        addresses = reduction.collective.addresses(output=output_address)
        waited = reduction.collective.replay(gradients, addresses, reduction.tag, divisor)
        self.reduce_scatters.calls += 1
        self.reduce_scatters.bytes += reduction.bytes
        label = reduction.collective.label
        self._count(self.reduce_scatters, "reduce-scatter", label, start, waited, reduction.bytes)

    def _count(self, tally: Tally, stream: str, label: str, start: float, waited: float, nbytes: int = 0) -> None:
        """Add what took from ``start`` until now to a tally, and to the trace if there is one."""
        end = time.perf_counter()
        tally.wait_seconds += waited
        tally.seconds += end - start
        if self._engine.trace is not None:
            self._engine.trace.add(stream, label, start, end, waited, nbytes)

    def output_items(self, params: tuple[int, ...]) -> int:
        """Items of the packed shard of ``params``."""
        return sum(self.layout.shard_items(p) for p in params)

    def _build_reduction(self, params: tuple[int, ...], grad: Item, output: Item, bank: int) -> _Reduction:
        engine = self._engine
        layout = GroupLayout(tuple(self.layout.params[p] for p in params), self.layout.ranks)
        schedule = reduce_scatter(
            layout,
            engine.topology,
            engine.rank,
            grad=grad,
            output=output,
            chunk_bytes=self._chunk_bytes,
            plan=self._plan,
            bank=bank,
        )
        label = self._reduction_label(params, grad, output)
        sent = self._sent_bytes(params, grad, engine.rank)
        return _Reduction(engine.collective(schedule, len(params), label), engine.book.tag(label), sent)


@dataclass(frozen=True)
class _Reduction:
    collective: Collective
    tag: int
    bytes: int
