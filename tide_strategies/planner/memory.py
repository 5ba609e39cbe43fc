"""Forecasts of memory: the arena by part, to the byte, and what a step holds beside stock FSDP2.

:func:`arena_on_cpu` and :func:`arena_on_gpu` say what this version's runtime allocates; tests compare them with what
``report()`` finds, and :func:`pinned_by_messages` with the host memory of the rail of messages between GPU nodes.
:func:`arena_across_nodes` is the paper's closed form (section 5.4). :func:`step` adds what lives outside the arena and
what the two stock paths hold.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tide_strategies.collectives.schedule import Space
from tide_strategies.collectives.signals import RAILS
from tide_strategies.errors import TideConfigError
from tide_strategies.layout import align
from tide_strategies.planner.groups import Group, Model
from tide_strategies.planner.sizing import STAGING_SLOTS, Mode, rounds_of
from tide_strategies.topology import Topology

#: Device memory that is shared comes in such pieces on all NVIDIA GPUs so far (cuMemGetAllocationGranularity).
GPU_GRANULE = 2 * 1024 * 1024

# csrc/control.h: header, ring of call tags per rank, a cache line per counter and rank; csrc/cuda/control.h: a cell,
# and a word for each of so many runs of waits.
_HEADER, _TAGS, _CELL, _CUDA_CELL, _CUDA_RECORD = 1024, 512, 64, 16, 4 * 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """How the ring begins (``all_gather.slots`` and ``all_gather.memory_budget``)."""

    slots: int = 2
    memory_budget: int | None = None

    def begin(self, slot_bytes: int, groups: int) -> int:
        """Slots of ``slot_bytes`` to begin with for ``groups`` groups (``fsdp2/connect.py``).

        Raises:
            TideConfigError: not one slot fits the budget, which the runtime refuses as well.
        """
        if self.memory_budget is not None and self.memory_budget < slot_bytes:
            raise TideConfigError(f"a ring of {self.memory_budget} bytes has no room for a slot of {slot_bytes}")
        slots = self.slots if self.memory_budget is None else self.memory_budget // slot_bytes
        return min(slots, groups)


def arena_on_cpu(
    groups: Sequence[Group],
    topology: Topology,
    *,
    counters: int,
    reserved: Mapping[tuple[Space, int], int],
    ring: Ring = Ring(),
) -> dict[str, int]:
    """Bytes of shared memory by part, which exist once for all processes of the host.

    Args:
        groups: those that TIDE accelerates, of one process group, in order.
        topology: nodes, which processes of one host may stand for, and their ranks.
        counters: of the engine (``runtime/calls.py``).
        reserved: what schedules need on every rank (``runtime.group.needed_memory``).
        ring: options of the ring.
    """
    out = {"control": align(_HEADER + (_TAGS + _CELL * counters) * topology.ranks, mmap.PAGESIZE)}
    for part, sizes in _landings(groups, topology.ranks, ring).items():
        out[part] = topology.nodes * sum(align(n, mmap.PAGESIZE) for n in sizes)
    for (space, _), nbytes in reserved.items():
        out[space.value] = out.get(space.value, 0) + topology.ranks * align(nbytes, mmap.PAGESIZE)
    return out


def arena_on_gpu(
    groups: Sequence[Group],
    ranks: int,
    *,
    counters: int,
    reserved: Mapping[tuple[Space, int], int],
    ring: Ring = Ring(),
    granule: int = GPU_GRANULE,
) -> dict[str, int]:
    """Bytes of device memory by part on each of ``ranks`` GPUs, of one node or several.

    Args:
        groups: as of :func:`arena_on_cpu`.
        ranks: GPUs of the process group.
        counters: as of :func:`arena_on_cpu`.
        reserved: what schedules need on every rank (``runtime.cuda.group.needed_device_memory``).
        ring: options of the ring.
        granule: what allocations are rounded up to, by multicast too.
    """
    out = {"control": align(_CUDA_CELL * ranks * counters, granule)}
    for (space, _), nbytes in reserved.items():
        out[space.value] = out.get(space.value, 0) + align(nbytes, granule)
    for part, sizes in _landings(groups, ranks, ring).items():
        out[part] = sum(align(n, granule) for n in sizes)
    return out


def pinned_by_messages(arena: Mapping[str, int], topology: Topology, *, counters: int, sending: int) -> dict[str, int]:
    """Bytes of pinned host memory by part of each GPU's process, if messages connect the nodes (``rail: p2p``).

    Args:
        arena: forecast of a GPU's arena: what peers put into has a twin in host memory.
        topology: nodes, of which there are several, and their ranks.
        counters: as of :func:`arena_on_cpu`.
        sending: of what is sent (``runtime.cuda.pieces.sending_bytes``).
    """
    # Cells in host memory, for the rail's own two as well, and two copies, by which they are watched and released.
    cells = 3 * _CUDA_CELL * topology.ranks * (counters + RAILS)
    twins = {part.value: arena[part.value] for part in (Space.STAGE, Space.INBOX) if part.value in arena}
    return {"control": cells + _CUDA_RECORD, **twins, "pieces": sending}


def arena_across_nodes(
    groups: Sequence[Group],
    topology: Topology,
    *,
    mode: Mode,
    round_width: int,
    ring: Ring = Ring(),
    granule: int = GPU_GRANULE,
) -> dict[str, int]:
    """Bytes by part on each GPU of several nodes: equation 10 before it is bounded, with the all-gather's stage.

    Staging, outbox, inbox and spares serve the largest group: a block holds the fp32 partials that one rank sends to
    one node, L sub-slices of ceil(S_fp32 / L).
    """
    ranks, nodes, local = topology.ranks, topology.nodes, topology.local_ranks
    layouts = [g.layout(ranks) for g in groups]
    shard = max((sum(x.shard_bytes(p) for p in range(len(x.params))) for x in layouts), default=0)
    items = max((x.output_items for x in layouts), default=0)
    block = local * align(4 * -(-items // local), 16)
    parts = {part: sum(align(n, granule) for n in sizes) for part, sizes in _landings(groups, ranks, ring).items()}
    plan = rounds_of(nodes, round_width, local, mode)
    parts["stage"] = align(nodes * shard, granule)  # M S with a cast
    parts["staging"] = align(STAGING_SLOTS * (local - 1) * block // 2, granule)
    parts["outbox"] = align(2 * plan.outbox_blocks() * block, granule)
    parts["inbox"] = align(local * plan.generations * block, granule)
    parts["spare"] = align(2 * block, granule)
    return parts


def alone(nodes: int, local: int, output_bytes: int, round_width: int) -> int:
    """Bytes that one reduce-scatter by itself needs on a GPU, its output included (the buffers of the paper's Table 8).

    One bank and no spare, as nothing follows: two staging slots, of at most 16 MiB a contribution on one node, one
    generation of inbox blocks, an outbox of one round.
    """
    if nodes == 1:
        return output_bytes + STAGING_SLOTS * local * min(output_bytes // 2, 16 * 2**20)
    blocks = 4 * STAGING_SLOTS + local * rounds_of(nodes, round_width, local).generations + min(round_width, nodes - 1)
    return (blocks + 1) * output_bytes


@dataclass(frozen=True)
class StepForecast:
    """Bytes that one GPU (or process) holds during a step, activations apart.

    Args:
        states: masters, fp32 gradients and two fp32 optimizer moments, all sharded: alike for all three.
        gradients: those of them.
        arena: TIDE's, by part.
        tide: arena plus what is live beside it.
        stock: what stock FSDP2 holds for communication at its peak, within the pool that activations share.
        gathered: of that, parameters.
        symmetric: what FSDP2 with symmetric memory holds, of which ``symmetric_private`` can hold nothing else.
    """

    states: int
    gradients: int
    arena: dict[str, int]
    tide: int
    stock: int
    gathered: int
    symmetric: int
    symmetric_private: int


def step(model: Model, topology: Topology, arena: dict[str, int], *, mode: Mode, itemsize: int = 2) -> StepForecast:
    """Forecast a step's memory on one GPU (section 5.4), for an arena forecast from this module.

    Stock holds four times the largest group: its parameters, the next all-gather's flat output, and the previous
    group's packed fp32 gradients, which are twice as large as bf16 ones; and the groups that stay unsharded. TIDE holds
    its arena, which has all of these but the gradients, and in place the previous group's gradients.
    """
    ranks = topology.ranks
    items = sum(g.layout(ranks).output_items for g in model.groups)
    gathered = {True: [0], False: [0]}
    for g in model.groups:
        gathered[g.resharded].append(itemsize * ranks * g.layout(ranks).output_items)
    kept, group = sum(gathered[False]), max(gathered[True])
    packed = 4 * max(*gathered[True], *gathered[False]) // itemsize
    gradients = max(*gathered[True], *gathered[False]) if mode == "in_place" else 0
    return StepForecast(
        states=items * (model.master_itemsize + 4 + 8),
        gradients=4 * items,
        arena=arena,
        tide=sum(arena.values()) + gradients,
        stock=kept + 2 * group + packed,
        gathered=kept + 2 * group,
        symmetric=kept + 2 * group + packed,
        symmetric_private=group + packed,
    )


@dataclass(frozen=True, slots=True)
class PeakForecast:
    """Bytes that one rank holds at the highest point of a step.

    Args:
        tide: with TIDE; of an arena that ranks share, its part.
        stock: with stock FSDP2.
        how: what is known of it: "dry run" of the step, or "bound" from stated activations.
    """

    tide: int
    stock: int
    how: Literal["dry run", "bound"]


def peak_of_dry_run(forecast: StepForecast, arena_share: int, *, tide: int, stock: int) -> PeakForecast:
    """The peak from what a dry run of the step found (``fsdp2/footprint.py``).

    Args:
        forecast: of this module.
        arena_share: bytes of the arena that count for one rank.
        tide, stock: bytes that the step itself holds at its peak, with gradients in flight and in shards.
    """
    kept = forecast.states - forecast.gradients
    return PeakForecast(kept + arena_share + tide, kept + forecast.gathered + stock, "dry run")


def peak_of_activations(forecast: StepForecast, arena_share: int, activations: int) -> PeakForecast:
    """A bound on the peak: as if all activations were still there when all gradients are."""
    beside = forecast.states + activations
    in_flight = forecast.tide - sum(forecast.arena.values())
    return PeakForecast(beside + arena_share + in_flight, beside + forecast.stock, "bound")


def _landings(groups: Sequence[Group], ranks: int, ring: Ring) -> dict[str, list[int]]:
    """Bytes of each slot: the ring's, all as large as its largest group, and one of its own for each other group.

    As ``fsdp2/connect.py`` does: a last group that stays unsharded and is no larger joins the ring.
    """
    sizes = [max(g.layout(ranks).landing_bytes, 1) for g in groups]
    rotating = [g.resharded for g in groups]
    if not any(rotating):
        return {"pinned": sizes} if sizes else {}
    slot = max(n for n, rotates in zip(sizes, rotating, strict=True) if rotates)
    if not rotating[-1] and len(groups) > 2 and sizes[-1] <= slot:
        rotating[-1] = True
    out = {"ring": [slot] * ring.begin(slot, sum(rotating))}
    pinned = [n for n, rotates in zip(sizes, rotating, strict=True) if not rotates]
    return {**out, "pinned": pinned} if pinned else out
