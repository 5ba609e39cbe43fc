"""Connecting the parameter groups of one process group: an engine, landing slots, and each group's path."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tide_strategies.collectives.reduce_scatter import BANKS, PIECE_ALIGNMENT
from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2.cpu_path import CpuPath
from tide_strategies.fsdp2.eligibility import shard_item, stated_topology
from tide_strategies.fsdp2.param_group import GroupBinding, adopt, landing_tensors
from tide_strategies.layout import GroupLayout, align
from tide_strategies.runtime import bootstrap
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.exchange import Exchange, exchange_json, process_group_exchange
from tide_strategies.runtime.group import AUTO_CHUNK_BYTES, GroupCollectives, needed_memory
from tide_strategies.runtime.hosts import Placement, place
from tide_strategies.runtime.rails.p2p import P2PRail, open_rail
from tide_strategies.runtime.slots import Slot, SlotRing
from tide_strategies.topology import Topology


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

    def close(self) -> None:
        """Release it."""


def connect(ranks: dist.ProcessGroup, members: Sequence[Member], config: TideConfig) -> AnyEngine:
    """Set up memory that ``ranks`` share and move ``members`` into it. Collective.

    Raises:
        TideArenaError: on every rank alike, if that cannot be.
    """
    exchange = process_group_exchange(ranks, config.timeout_s, "setting up shared memory")
    on_gpu = members[0].group.device.type == "cuda"
    return (_connect_cuda if on_gpu else _connect_cpu)(exchange, ranks, members, config)


def _connect_cpu(exchange: Exchange, ranks: dist.ProcessGroup, members: Sequence[Member], config: TideConfig) -> Engine:
    chunk_bytes = _chunk_bytes(config, AUTO_CHUNK_BYTES)
    slots = len(members) + config.all_gather.slots
    identities = exchange_json(exchange, bootstrap.host_identity())
    placement = place(identities, stated_topology(config, ranks), config.rail)
    topology = placement.topology
    rail = _open_rail(exchange, ranks, topology, config.timeout_s) if placement.rail == "p2p" else None
    engine = Engine(exchange, ranks.rank(), topology, slots=slots, timeout_s=config.timeout_s, rail=rail)
    try:
        homes = _homes(engine, members, config)
        engine.reserve(needed_memory((m.layout for m in members), topology, ranks.rank(), chunk_bytes))
    except BaseException:
        engine.close()
        raise
    for member, home in zip(members, homes, strict=True):
        _reshard(member.group)
        items = [shard_item(p) for p in member.group.fsdp_params]
        collectives = GroupCollectives(engine, member.name, member.layout, items, home, chunk_bytes)
        landings = landing_tensors(member.group, member.layout, collectives.landing.window)
        member.binding = GroupBinding(CpuPath(collectives), config.all_gather.cache)
        member.placement = placement
        adopt(member.group, landings, member.binding)
    return engine


def _connect_cuda(
    exchange: Exchange, ranks: dist.ProcessGroup, members: Sequence[Member], config: TideConfig
) -> AnyEngine:
    from tide_strategies.fsdp2.cuda_path import CudaLanding, CudaPath, CudaStreams
    from tide_strategies.runtime.cuda import group as cuda_group
    from tide_strategies.runtime.cuda.engine import CudaEngine
    from tide_strategies.runtime.cuda.sum_kernels import sum_kernels

    size = ranks.size()
    slices = [sum(s.itemsize * m.layout.shard_items(p) for p, s in enumerate(m.layout.params)) for m in members]
    chunk_bytes = _chunk_bytes(config, cuda_group.auto_chunk_bytes(max(slices)))
    device = torch.cuda.current_device()
    engine = CudaEngine(
        exchange,
        ranks.rank(),
        Topology(1, size),
        device,
        slots=len(members) + config.all_gather.slots,
        staging_bytes=BANKS * (size - 1) * chunk_bytes,
        timeout_s=config.timeout_s,
    )
    try:
        homes = _homes(engine, members, config)
    except BaseException:
        engine.close()
        raise
    streams = CudaStreams(torch.device("cuda", device))
    ctas = config.reduce_scatter.sum_ctas
    sum_ctas = cuda_group.auto_sum_ctas(size) if ctas == "auto" else ctas
    for member, home in zip(members, homes, strict=True):
        _reshard(member.group)
        collectives = cuda_group.CudaGroup(
            engine, member.name, member.layout, home, chunk_bytes, sum_kernels(device), sum_ctas
        )
        window = collectives.landing.window
        landing = CudaLanding(
            own=landing_tensors(member.group, member.layout, window, engine.rank),
            gradients=landing_tensors(member.group, member.layout, window)
            if config.reduce_scatter.mode == "slot_reuse"
            else None,
            poison=torch.from_dlpack(window.tensor(0, member.layout.landing_bytes, "uint8"))
            if config.debug.poison_slots
            else None,
        )
        member.binding = GroupBinding(CudaPath(collectives, streams, landing), config.all_gather.cache)
        member.placement = Placement(engine.topology, "none", "GPU ranks of a group are one node")
        adopt(member.group, landing_tensors(member.group, member.layout, window), member.binding)
    return engine


def _open_rail(exchange: Exchange, ranks: dist.ProcessGroup, topology: Topology, timeout_s: float) -> P2PRail:
    """Connect this rank's rail; on every rank, or with a TideArenaError on each."""
    name = exchange_json(exchange, secrets.token_hex(16))[0]
    rail, error = None, None
    try:
        rail = open_rail(ranks, topology, ranks.rank(), str(name), timeout_s)
    except (RuntimeError, ValueError, AttributeError) as e:  # AttributeError: a torch that keeps its store to itself
        error = f"{type(e).__name__}: {e}"
    try:
        bootstrap.agree(exchange, ranks.rank(), error, "connecting the rails", code="TIDE-F028")
        assert rail is not None
    except BaseException:
        if rail is not None:
            rail.close()
        raise
    return rail


def _chunk_bytes(config: TideConfig, auto: int) -> int:
    stated = config.reduce_scatter.chunk_bytes
    # Twice the alignment of pieces, so that chunks begin on multiples of 8 elements of either size (kernels/sum.py).
    return auto if stated == "auto" else align(stated, 2 * PIECE_ALIGNMENT)


def _reshard(group: Any) -> None:
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
