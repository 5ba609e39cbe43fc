"""Our collectives between GPUs of one host beside NCCL's. Call everything here under a stream of one's own.

Calls follow one another on the current stream, as a block's compute follows its all-gather: each one's copies begin
when the former is complete. Two groups take turns in two slots, as FSDP2's blocks do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tide_strategies._native import cuda
from tide_strategies.cli.bench.pairs import Pair, parameter_shapes, stock_copy_out, stock_pack, world_exchange
from tide_strategies.cli.bench.ranks import NO_STOCK, Place
from tide_strategies.collectives.reduce_scatter import BANKS
from tide_strategies.collectives.schedule import Item, Space
from tide_strategies.layout import GroupLayout
from tide_strategies.planner.knobs import unmeasured
from tide_strategies.runtime.cuda.engine import CudaEngine
from tide_strategies.runtime.cuda.group import CudaGroup
from tide_strategies.runtime.cuda.sum_kernels import sum_kernels
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

_TIMEOUT_S = 60.0
_GROUPS = 2


def pair(
    place: Place, collective: str, shard_bytes: int, params: int, sum_ctas: int | None, chunk_bytes: int | None
) -> Pair:
    """The named collective over ``params`` parameters. Collective.

    Args:
        sum_ctas: thread blocks of the sum; None for the default.
        chunk_bytes: bytes of a contribution staged at a time; None for the default.

    Raises:
        ValueError: there is no such collective.
    """
    layout = GroupLayout(parameter_shapes(shard_bytes // 4, place.ranks, params), place.ranks)
    knobs = unmeasured("cuda", Topology(1, place.ranks), [layout])
    ctas, chunk = sum_ctas or knobs.sum_ctas, chunk_bytes or knobs.chunk_bytes
    if collective == "reduce_scatter":
        return _reduce_scatter(place, shard_bytes, params, ctas, chunk)
    if collective in ("all_gather", "all_gather_cast"):
        return _all_gather(place, shard_bytes, params, collective == "all_gather_cast", ctas, chunk)
    raise ValueError(f"no collective {collective!r}")


def _groups(
    place: Place, layout: GroupLayout, ctas: int, chunk: int, shards: Item = Item.RAW2
) -> tuple[CudaEngine, list[CudaGroup]]:
    index = torch.cuda.current_device()
    engine = CudaEngine(
        world_exchange(_TIMEOUT_S),
        place.rank,
        Topology(1, place.ranks),
        index,
        slots=_GROUPS,
        memory={(Space.STAGING, 0): BANKS * (place.ranks - 1) * chunk},
        timeout_s=_TIMEOUT_S,
    )
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), _GROUPS)
    kernels = sum_kernels(index)
    items = [shards] * len(layout.params)
    return engine, [
        CudaGroup(engine, f"bench {g}", layout, ring, chunk, kernels, ctas, shard_items=items) for g in range(_GROUPS)
    ]


def _all_gather(place: Place, shard_bytes: int, params: int, cast: bool, ctas: int, chunk: int) -> Pair:
    ranks, device = place.ranks, place.device
    layout = GroupLayout(parameter_shapes(shard_bytes // 2, ranks, params), ranks)
    sizes = [layout.shard_items(p) for p in range(params)]
    dtype = torch.float32 if cast else torch.bfloat16
    shards = [torch.randn(n, device=device).to(dtype) for n in sizes]
    engine, groups = _groups(place, layout, ctas, chunk, Item.F32 if cast else Item.RAW2)
    packed = torch.cat(shards).bfloat16()
    gathered = torch.empty(ranks * sum(sizes), dtype=torch.bfloat16, device=device)
    outputs = [torch.empty(ranks * n, dtype=torch.bfloat16, device=device) for n in sizes]
    parts = list(packed.split(sizes))

    def stock() -> None:
        if cast:
            torch._foreach_copy_(parts, shards)
        dist.all_gather_into_tensor(gathered, packed)
        stock_copy_out(gathered, sizes, outputs, ranks)

    name = "all_gather_cast" if cast else "all_gather"
    return Pair(
        name,
        layout,
        2 * layout.output_items,
        _gather_in_turn(groups, place, shards),
        stock if place.stock_runs else None,
        _pushes(place, 2 * layout.output_items),
        engine.close,
        [] if place.stock_runs else [f"{NO_STOCK}: no stock column"],
    )


def _gather_in_turn(groups: list[CudaGroup], place: Place, shards: list[torch.Tensor]) -> Callable[[], None]:
    """Our all-gather of the shards, ordered as ``fsdp2.cuda_path`` does."""
    streams = [torch.cuda.Stream(place.device, priority=-1) for _ in range(3)]
    gather, completion, readiness = (s.cuda_stream for s in streams)
    addresses = [s.data_ptr() for s in shards]
    turn = 0

    def call() -> None:
        nonlocal turn
        group = groups[turn]
        turn = 1 - turn
        current = torch.cuda.current_stream().cuda_stream
        cuda.order(current, gather)
        group.open(group.occupy(), addresses)
        if group.sends_from_shards:
            cuda.order(gather, completion)
        group.send(completion if group.sends_from_shards else gather, gather)
        cuda.order(gather, completion)
        group.complete(completion)
        cuda.order(completion, current)
        cuda.order(current, readiness)
        group.vacate(readiness)

    return call


def _reduce_scatter(place: Place, shard_bytes: int, params: int, ctas: int, chunk: int) -> Pair:
    ranks, device = place.ranks, place.device
    layout = GroupLayout(parameter_shapes(shard_bytes // 4, ranks, params), ranks)
    gradients = [torch.randn(s.rows, s.row_items, device=device).bfloat16() for s in layout.params]
    engine, (group, _) = _groups(place, layout, ctas, chunk)
    output = torch.empty(layout.output_items, device=device)
    packed = torch.empty(ranks * layout.output_items, device=device)
    push = torch.cuda.Stream(device, priority=-1)
    addresses, everything = [g.data_ptr() for g in gradients], tuple(range(params))

    def ours() -> None:
        streams = (push.cuda_stream, torch.cuda.current_stream().cuda_stream)
        cuda.order(streams[1], streams[0])
        group.reduce_scatter(everything, Item.BF16, Item.F32, addresses, output.data_ptr(), float(ranks), streams)
        cuda.order(*streams)

    def stock() -> None:
        stock_pack(gradients, packed, ranks)
        dist.reduce_scatter_tensor(output, packed, op=dist.ReduceOp.AVG)

    push_limit = _pushes(place, 2 * layout.output_items)
    summed = (ranks * 2 + 4) * layout.output_items // 8  # a kernel reads and writes each word
    source = torch.randn(summed, device=device)
    target = torch.empty_like(source)

    def limit() -> None:
        push_limit()
        torch.neg(source, out=target)

    return Pair(
        "reduce_scatter",
        layout,
        4 * layout.output_items,
        ours,
        stock if place.stock_runs else None,
        limit,
        engine.close,
        [] if place.stock_runs else [f"{NO_STOCK}: no stock column"],
    )


def _pushes(place: Place, nbytes: int) -> Callable[[], None]:
    """Raw copies of ``nbytes`` to a peer's GPU (or within a shared one), as many as there are peers.

    Every rank sends to the next one: no two send to the same GPU. The driver gets them from us: torch's copies between
    devices order streams of both, which is no part of a copy.
    """
    gpus = torch.cuda.device_count()
    peer = torch.device("cuda", (place.rank + 1) % place.ranks % gpus)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=place.device)
    target = torch.empty(nbytes, dtype=torch.uint8, device=peer)
    target.copy_(source)  # from here on, each GPU's memory is open to the other

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(place.ranks - 1):
            cuda.copy(target.data_ptr(), source.data_ptr(), nbytes, stream)

    return call
