"""One collective in two versions, ours and stock's, ready to be called: what the benchmarks of collectives share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.exchange import Exchange, process_group_exchange

_COLUMNS = 1024


@dataclass
class Pair:
    """Calls that all ranks make together, on inputs and outputs made beforehand.

    Args:
        collective: "all_gather", "all_gather_cast" (from fp32 shards) or "reduce_scatter".
        layout: the parameter group.
        shard_bytes: bytes of this rank's bf16 shard (all-gather) or fp32 output (reduce-scatter).
        ours: TIDE's path.
        stock: what FSDP2 runs; None where it cannot run.
        limit: moves the bytes that must move, and no more.
        close: releases what the pair holds.
        notes: what a reader of the result should know.
    """

    collective: str
    layout: GroupLayout
    shard_bytes: int
    ours: Callable[[], None]
    stock: Callable[[], None] | None
    limit: Callable[[], None]
    close: Callable[[], None]
    notes: list[str] = field(default_factory=list)


def parameter_shapes(items: int, ranks: int, params: int) -> tuple[ParamShape, ...]:
    """``params`` bf16 parameters, small and large in turn, with ``items`` items of shard in all (at least one each)."""
    columns = min(_COLUMNS, max(1, items // (4 * params)))
    rows = max(params, items // columns)
    small = max(1, rows // (2 * params))
    sizes = [small if p % 2 == 0 else 3 * small for p in range(params)]
    sizes[-1] = max(1, rows - sum(sizes[:-1]))
    return tuple(ParamShape(ranks * n, columns, 2) for n in sizes)


def world_exchange(timeout_s: float) -> Exchange:
    """Exchange of small payloads among all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return process_group_exchange(group, timeout_s, "the benchmark's set-up")


def stock_copy_out(gathered: torch.Tensor, sizes: list[int], outputs: list[torch.Tensor], ranks: int) -> None:
    """FSDP2's copy from the flat all-gather output into each parameter's own storage."""
    torch.split_with_sizes_copy(gathered.view(ranks, -1), sizes, dim=1, out=[o.view(ranks, -1) for o in outputs])


def stock_pack(gradients: list[torch.Tensor], packed: torch.Tensor, ranks: int) -> None:
    """FSDP2's copy of the gradients into the flat reduce-scatter input, in the dtype of the reduction."""
    torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=packed.view(ranks, -1))
