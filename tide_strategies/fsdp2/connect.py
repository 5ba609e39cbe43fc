"""Connecting the parameter groups of one process group: an engine, landing slots, and each group's path."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tide_strategies.collectives.schedule import Item, Space
from tide_strategies.config import TideConfig
from tide_strategies.detect import fallback
from tide_strategies.errors import TideArenaError, TideConfigError, TideFallbackError
from tide_strategies.fsdp2.access import unsharded_dtype
from tide_strategies.fsdp2.ahead import GatherAhead
from tide_strategies.fsdp2.board import open_board
from tide_strategies.fsdp2.cpu_path import CpuPath
from tide_strategies.fsdp2.eligibility import REDUCIBLE, shard_item, stated_topology
from tide_strategies.fsdp2.param_group import GroupBinding, adopt, landing_tensors
from tide_strategies.layout import GroupLayout
from tide_strategies.planner.knobs import Knobs, choose
from tide_strategies.planner.rates import Rates, built_in
from tide_strategies.runtime import bootstrap, trace
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.exchange import Exchange, exchange_json, process_group_exchange
from tide_strategies.runtime.group import GroupCollectives, needed_memory
from tide_strategies.runtime.hosts import Placement, by_messages, place, place_devices
from tide_strategies.runtime.rails.gloo import connect_gloo
from tide_strategies.runtime.rails.p2p import P2PRail, open_rail
from tide_strategies.runtime.slots import Slot, SlotRing
from tide_strategies.topology import Topology

_log = logging.getLogger("tide_strategies")

if TYPE_CHECKING:
    from tide_strategies.runtime.cuda.engine import CudaEngine
    from tide_strategies.runtime.cuda.group import CudaGroup, Kernels
    from tide_strategies.runtime.cuda.p2p_rail import CudaP2PRail
    from tide_strategies.runtime.cuda.rail import DeviceRail

#: A rail of messages.
R = TypeVar("R", bound="P2PRail | CudaP2PRail")


class Member(Protocol):
    """A parameter group to connect; ``binding`` and ``placement`` are set by doing so."""

    group: Any
    name: str
    layout: GroupLayout
    binding: GroupBinding | None
    placement: Placement | None


class AnyEngine(Protocol):
    """What this package needs of an engine, whichever device it is for."""

    def add_slot(self, nbytes: int, part: str) -> Slot:
        """Make a landing slot on every rank."""

    def bytes_by_part(self) -> dict[str, int]:
        """Arena memory by part."""

    def pinned_by_part(self) -> dict[str, int]:
        """Pinned host memory of the rail by part."""

    def close(self) -> None:
        """Release it."""


def connect(
    ranks: dist.ProcessGroup, members: Sequence[Member], config: TideConfig, rates: Rates | None = None
) -> tuple[AnyEngine, Knobs]:
    """Set up memory that ``ranks`` share and move ``members`` into it; also says which knobs were taken. Collective.

    Knobs are solved from ``rates`` (None: built-in ones) where ``config`` states none.

    Raises:
        TideArenaError: on every rank alike, if that cannot be.
    """
    exchange = process_group_exchange(ranks, config.timeout_s, "setting up shared memory")
    device = members[0].group.device.type

    def knobs(topology: Topology) -> Knobs:
        layouts = [m.layout for m in members]
        return choose(rates or built_in(device), topology, layouts, device, config.stated_knobs())

    return (_connect_cuda if device == "cuda" else _connect_cpu)(exchange, ranks, members, config, knobs)


def cpu_engine(
    exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig, slots: int
) -> tuple[Engine, Placement]:
    """An engine for CPU ranks, with the topology and the rail that the options and the hosts make. Collective.

    Raises:
        TideArenaError: on every rank alike, if that cannot be.
    """
    identities = exchange_json(exchange, bootstrap.host_identity())
    placement = place(identities, stated_topology(config, ranks), config.rail)
    topology = placement.topology
    rail = None
    if placement.rail == "p2p":
        rail = _opened(exchange, ranks.rank(), lambda n: open_rail(ranks, topology, ranks.rank(), n, config.timeout_s))
    return Engine(exchange, ranks.rank(), topology, slots=slots, timeout_s=config.timeout_s, rail=rail), placement


def _connect_cpu(
    exchange: Exchange,
    ranks: dist.ProcessGroup,
    members: Sequence[Member],
    config: TideConfig,
    solve: Callable[[Topology], Knobs],
) -> tuple[Engine, Knobs]:
    engine, placement = cpu_engine(exchange, ranks, config, len(members) + config.all_gather.slots)
    try:
        topology = engine.topology
        knobs = solve(topology)
        chunk_bytes, plan = knobs.chunk_bytes, knobs.base_plan(topology)
        homes = _homes(engine, members, config)
        engine.reserve(needed_memory((m.layout for m in members), topology, ranks.rank(), chunk_bytes, plan))
        engine.trace = trace.begin(config.debug.trace, exchange, dist.get_rank())
    except BaseException:
        engine.close()
        raise
    ahead = GatherAhead() if engine.topology.nodes > 1 else None
    for member, home in zip(members, homes, strict=True):
        _reshard(member.group)
        items = [shard_item(p) for p in member.group.fsdp_params]
        collectives = GroupCollectives(engine, member.name, member.layout, items, home, chunk_bytes, plan)
        landings = landing_tensors(member.group, member.layout, collectives.landing.window)
        member.binding = GroupBinding(CpuPath(collectives), config.all_gather.cache, ahead)
        member.placement = placement
        adopt(member.group, landings, member.binding)
    return engine, knobs


def _connect_cuda(
    exchange: Exchange,
    ranks: dist.ProcessGroup,
    members: Sequence[Member],
    config: TideConfig,
    solve: Callable[[Topology], Knobs],
) -> tuple[AnyEngine, Knobs]:
    placement = place_gpus(exchange, ranks, config)
    knobs = solve(placement.topology)

    def connected(placement: Placement) -> CudaEngine:
        _tell_of_messages(ranks.rank(), config, placement)
        return _with_or_without_multicast(exchange, ranks, members, config, knobs, placement)

    try:
        return connected(placement), knobs
    except TideArenaError as e:  # on every rank alike
        placement = instead(config, placement, e)
    return connected(placement), knobs


def place_gpus(exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig) -> Placement:
    """The topology, rail and multicast of ranks that drive GPUs, which the options and the hosts make. Collective.

    Raises:
        TideArenaError: on every rank alike, if there is none.
    """
    from tide_strategies.runtime.cuda.multicast import multicast_facts, why_unicast
    from tide_strategies.runtime.cuda.nccl_domains import missing_nccl

    facts = {"nccl": missing_nccl(), "multicast": multicast_facts(torch.cuda.current_device())}
    identities = exchange_json(exchange, {**bootstrap.host_identity(), **facts})
    placement = place_devices(identities, stated_topology(config, ranks), config.rail)
    why = why_unicast([i["multicast"] for i in identities], placement.topology, config.all_gather.multicast)
    return without_multicast(placement, why) if why else replace(placement, multicast="on")


def without_multicast(placement: Placement, why: str) -> Placement:
    """The same without multicast, and why."""
    return replace(placement, multicast=f"off ({why})")


def instead(config: TideConfig, placement: Placement, error: TideArenaError) -> Placement:
    """Where GPU ranks are to be connected in another way after ``error``, or that error again."""
    if config.rail != "auto" or placement.rail != "nccl_rma" or error.code != "TIDE-F029":
        raise error
    return by_messages(placement, str(error))


def gpu_engine(
    exchange: Exchange,
    ranks: dist.ProcessGroup,
    config: TideConfig,
    placement: Placement,
    slots: int,
    memory: Mapping[tuple[Space, int], int],
) -> CudaEngine:
    """An engine for GPU ranks that are placed like that, with its rail. Collective; ``memory`` as of ``CudaEngine``.

    Raises:
        TideArenaError: on every rank alike, if that cannot be.
    """
    from tide_strategies.runtime.cuda.engine import CudaEngine

    device = torch.cuda.current_device()
    return CudaEngine(
        exchange,
        ranks.rank(),
        placement.topology,
        device,
        slots=slots,
        memory=memory,
        timeout_s=config.timeout_s,
        rail=_device_rail(exchange, ranks, placement, device, config, slots),
        multicast=placement.multicast == "on",
        host_ranks=placement.host_ranks,
        board=open_board(exchange, ranks, placement),
    )


def _tell_of_messages(rank: int, config: TideConfig, placement: Placement) -> None:
    """Say that nodes have a slower rail than they might; an error, if the user wants to have no such thing."""
    if not placement.instead_of_nccl:
        return
    verdict = fallback("TIDE-F032", placement.instead_of_nccl)
    words = f"{verdict.code} {verdict.reason}; {verdict.remedy}"
    if config.strict:
        raise TideFallbackError(f"TIDE (strict): {words}")
    if rank == 0:
        _log.warning("TIDE: %s", words)


def _with_or_without_multicast(
    exchange: Exchange,
    ranks: dist.ProcessGroup,
    members: Sequence[Member],
    config: TideConfig,
    knobs: Knobs,
    placement: Placement,
) -> CudaEngine:
    """Connect them as ``placement`` says, or without multicast if that fails."""
    wanted, failed = config.all_gather.multicast, ""
    if placement.multicast == "on":
        try:
            return _connect_devices(exchange, ranks, members, config, knobs, placement)
        except TideArenaError as e:  # on every rank alike; what has nothing to do with multicast fails again below
            failed = str(e)
            placement = without_multicast(placement, failed)
    if wanted is True:
        why = placement.multicast.removeprefix("off (").removesuffix(")")
        words = f"all_gather.multicast is true, and cannot be: {why}"
        if config.strict:
            raise TideFallbackError(f"TIDE (strict): {words}")
        if ranks.rank() == 0:
            _log.warning("TIDE: %s. Shards go to each peer by a copy of their own.", words)
    engine = _connect_devices(exchange, ranks, members, config, knobs, placement)
    if failed and wanted is not True and ranks.rank() == 0:
        _log.warning("TIDE: multicast was to be used, and failed: %s. Shards go to each peer by a copy.", failed)
    return engine


def _connect_devices(
    exchange: Exchange,
    ranks: dist.ProcessGroup,
    members: Sequence[Member],
    config: TideConfig,
    knobs: Knobs,
    placement: Placement,
) -> CudaEngine:
    """Connect them as ``placement`` says, on every rank, or with a TideArenaError on each."""
    from tide_strategies.fsdp2.cuda_path import CudaLanding, CudaPath, CudaStreams
    from tide_strategies.fsdp2.device_trace import DeviceTrace
    from tide_strategies.runtime.cuda.group import needed_device_memory
    from tide_strategies.runtime.cuda.sum_kernels import sum_kernels

    topology, device = placement.topology, torch.cuda.current_device()
    slot_reuse = config.reduce_scatter.mode == "slot_reuse"
    memory = needed_device_memory(
        (m.layout for m in members),
        topology,
        ranks.rank(),
        knobs.chunk_bytes,
        slot_reuse,
        plan=knobs.base_plan(topology),
        multicast=placement.multicast == "on",
    )
    engine = gpu_engine(exchange, ranks, config, placement, len(members) + config.all_gather.slots, memory)
    try:
        groups = _device_groups(engine, members, config, knobs, sum_kernels(device))
        _prepare(exchange, ranks.rank(), members, groups)
        engine.trace = trace.begin(config.debug.trace, exchange, dist.get_rank())
        device_trace = None if engine.trace is None else DeviceTrace(engine.trace)
    except BaseException:
        engine.close()
        raise
    streams = CudaStreams(torch.device("cuda", device))
    # Under Slot-Reuse the slot is not free by then: it has the gradients.
    ahead = GatherAhead() if topology.nodes > 1 and not slot_reuse else None
    for member, collectives in zip(members, groups, strict=True):
        _reshard(member.group)
        window = collectives.landing.window
        landing = CudaLanding(
            gradients=landing_tensors(member.group, member.layout, window) if slot_reuse else None,
            poison=torch.from_dlpack(window.tensor(0, member.layout.landing_bytes, "uint8"))
            if config.debug.poison_slots
            else None,
        )
        path = CudaPath(collectives, streams, landing, device_trace)
        member.binding = GroupBinding(path, config.all_gather.cache, ahead)
        member.placement = placement
        adopt(member.group, landing_tensors(member.group, member.layout, window), member.binding)
    return engine


def _device_rail(
    exchange: Exchange, ranks: dist.ProcessGroup, placement: Placement, device: int, config: TideConfig, slots: int
) -> DeviceRail | None:
    """The rail of an engine with so many slots, if it has one; on every rank, or with a TideArenaError on each."""
    from tide_strategies.runtime.cuda.nccl_rail import connect_rail
    from tide_strategies.runtime.cuda.p2p_rail import CudaP2PRail

    rank, topology, timeout_s = ranks.rank(), placement.topology, config.timeout_s
    book = CallBook(topology, slots)
    if placement.rail == "nccl_rma":
        multicast = config.all_gather.multicast is not False
        return connect_rail(exchange, rank, topology, device, timeout_s, book, multicast=multicast)
    if placement.rail == "p2p":

        def open_messages(name: str) -> CudaP2PRail:
            group = connect_gloo(ranks, topology, rank, name, timeout_s)
            return CudaP2PRail(group, exchange, rank, topology, device, timeout_s, book)

        return _opened(exchange, rank, open_messages)
    return None


def _device_groups(
    engine: CudaEngine, members: Sequence[Member], config: TideConfig, knobs: Knobs, kernels: Kernels
) -> list[CudaGroup]:
    """The collectives of each group, all with the same knobs and options."""
    from tide_strategies.runtime.cuda.group import CudaGroup

    return [
        CudaGroup(
            engine,
            member.name,
            member.layout,
            home,
            knobs.chunk_bytes,
            kernels,
            knobs.sum_ctas,
            shard_items=[shard_item(p) for p in member.group.fsdp_params],
            landing_ctas=knobs.landing_ctas,
            slot_reuse=config.reduce_scatter.mode == "slot_reuse",
            plan=knobs.base_plan(engine.topology),
        )
        for member, home in zip(members, _homes(engine, members, config), strict=True)
    ]


def _prepare(exchange: Exchange, rank: int, members: Sequence[Member], groups: Sequence[CudaGroup]) -> None:
    """Compile what steps will need, on all ranks or, with a TideArenaError on each, on none."""
    from tide_strategies.kernels.compile import KernelUnavailableError

    error = None
    try:
        for member, collectives in zip(members, groups, strict=True):
            for reduction in _expected_reductions(member.group):
                collectives.prepare(*reduction)
            collectives.prepare_all_gather()
    except KernelUnavailableError as e:
        error = str(e)
    bootstrap.agree(exchange, rank, error, "compiling the kernels of sums and casts", code="TIDE-F016")


def _expected_reductions(group: Any) -> list[tuple[tuple[int, ...], Item, Item]]:
    """(parameters, element of the gradients, element of their sum) of a group's usual reduction, if they are known."""
    trained = tuple(i for i, p in enumerate(group.fsdp_params) if p.sharded_param.requires_grad)
    dtypes = {unsharded_dtype(group.fsdp_params[i]) for i in trained}
    if len(dtypes) != 1:
        return []
    dtype = dtypes.pop()
    reduced = getattr(group, "_reduce_dtype", None) or dtype
    return [(trained, REDUCIBLE[dtype], REDUCIBLE[reduced])] if {dtype, reduced} <= REDUCIBLE.keys() else []


def _opened(exchange: Exchange, rank: int, open_one: Callable[[str], R]) -> R:
    """A rail of messages under a new name; on every rank, or with a TideArenaError on each."""
    name = exchange_json(exchange, secrets.token_hex(16))[0]
    rail, error = None, None
    try:
        rail = open_one(str(name))
    except (OSError, RuntimeError, ValueError, AttributeError) as e:  # the last: a torch that keeps its store to itself
        error = f"{type(e).__name__}: {e}"
    try:
        bootstrap.agree(exchange, rank, error, "connecting the rails", code="TIDE-F028")
        assert rail is not None
    except BaseException:
        if rail is not None:
            rail.close()
        raise
    return rail


def _reshard(group: Any) -> None:
    group.wait_for_unshard()  # torch's own all-gather may be under way: unshard(async_op=True) before the first forward
    if group.is_unsharded:
        group._to_sharded()


def _homes(engine: AnyEngine, members: Sequence[Member], config: TideConfig) -> list[Any]:
    """The ring for groups that reshard after forward, a slot of its own for each of the others."""
    rotating = [m.group._reshard_after_forward for m in members]
    if not any(rotating):
        return [engine.add_slot(m.layout.landing_bytes, "pinned") for m in members]
    nbytes = max(m.layout.landing_bytes for m, rotates in zip(members, rotating, strict=True) if rotates)
    # The last block of a model is often told to stay unsharded, since its backward comes right after its forward: the
    # ring has a slot for that. (If it does not come last after all, the ring grows by one.)
    if not rotating[-1] and len(members) > 2 and members[-1].layout.landing_bytes <= nbytes:
        rotating[-1] = True
    poison = config.debug.poison_slots and members[0].group.device.type == "cpu"
    ring = SlotRing(lambda: engine.add_slot(nbytes, "ring"), _ring_slots(config, nbytes, sum(rotating)), poison)
    return [
        ring if rotates else engine.add_slot(m.layout.landing_bytes, "pinned")
        for m, rotates in zip(members, rotating, strict=True)
    ]


def _ring_slots(config: TideConfig, nbytes: int, groups: int) -> int:
    """Slots of ``nbytes`` to begin with for a ring of ``groups``."""
    budget = config.all_gather.memory_budget
    if budget is None:
        return min(config.all_gather.slots, groups)
    if budget < nbytes:
        raise TideConfigError(
            f"TIDE option 'all_gather.memory_budget' is {budget} bytes, but the largest group alone takes {nbytes}: "
            f"raise it to {2 * nbytes} or more (two slots, so that communication overlaps with computation)"
        )
    return min(budget // nbytes, groups)
