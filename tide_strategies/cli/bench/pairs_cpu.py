"""Our collectives between CPU processes beside gloo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies.cli.bench.pairs import Pair, parameter_shapes, stock_copy_out, stock_pack, world_exchange
from tide_strategies.cli.bench.ranks import Place
from tide_strategies.cli.bench.timing import median_ms
from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.knobs import unmeasured
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.group import GroupCollectives, needed_memory
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

_TIMEOUT_S = 300.0
_HOST_CALLS = 50


def pair(place: Place, collective: str, shard_bytes: int, params: int) -> Pair:
    """The named collective over ``params`` parameters. Collective.

    Raises:
        ValueError: there is no such collective.
    """
    if collective == "reduce_scatter":
        return _reduce_scatter(place, shard_bytes, params)
    if collective in ("all_gather", "all_gather_cast"):
        return _all_gather(place, shard_bytes, params, cast=collective == "all_gather_cast")
    raise ValueError(f"no collective {collective!r}")


def host_us(place: Place, collective: str, params: int) -> float:
    """Microseconds of a call where there is next to nothing to copy, waits for the peers included. Collective."""
    layout = GroupLayout(tuple(ParamShape(place.ranks, 8, 2) for _ in range(params)), place.ranks)
    engine, group = _group(place, layout, Item.RAW2)
    shards = [torch.ones(8).bfloat16() for _ in range(params)]
    gradients = [torch.ones(place.ranks, 8).bfloat16() for _ in range(params)]
    if collective == "reduce_scatter":
        call = _reduce(group, gradients, layout.output_items, place.ranks)
    else:
        call = _gather(group, shards)

    def calls() -> None:
        for _ in range(_HOST_CALLS):
            call()

    measured = median_ms(place, 9, {"calls": calls})["calls"]
    engine.close()
    assert measured is not None
    return measured * 1e3 / _HOST_CALLS


def _group(place: Place, layout: GroupLayout, shard: Item) -> tuple[Engine, GroupCollectives]:
    exchange = world_exchange(_TIMEOUT_S)
    engine = Engine(exchange, place.rank, Topology(1, place.ranks), slots=2, timeout_s=_TIMEOUT_S)
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), 2)
    chunk_bytes = unmeasured("cpu", engine.topology, [layout]).chunk_bytes
    engine.reserve(needed_memory([layout], engine.topology, engine.rank, chunk_bytes))
    items = [shard] * len(layout.params)
    return engine, GroupCollectives(engine, "bench", layout, items, ring, chunk_bytes)


def _gather(group: GroupCollectives, shards: list[torch.Tensor]) -> Callable[[], None]:
    addresses = [s.data_ptr() for s in shards]

    def call(shards: Any = shards) -> None:  # holds the shards, whose addresses it uses
        group.issue(addresses)
        group.complete()
        group.vacate()

    return call


def _reduce(
    group: GroupCollectives, gradients: list[torch.Tensor], output_items: int, ranks: int
) -> Callable[[], None]:
    addresses, everything = [g.data_ptr() for g in gradients], tuple(range(len(gradients)))

    def call(gradients: Any = gradients) -> None:
        output = torch.empty(output_items)  # fresh in each call, as FSDP2 has it
        group.reduce_scatter(everything, Item.BF16, Item.F32, addresses, output.data_ptr(), float(ranks))

    return call


def _all_gather(place: Place, shard_bytes: int, params: int, cast: bool) -> Pair:
    ranks = place.ranks
    layout = GroupLayout(parameter_shapes(shard_bytes // 2, ranks, params), ranks)
    sizes = [layout.shard_items(p) for p in range(params)]
    shards = [torch.randn(n) if cast else torch.randn(n).bfloat16() for n in sizes]
    engine, group = _group(place, layout, Item.F32 if cast else Item.RAW2)
    packed = torch.empty(sum(sizes), dtype=torch.bfloat16)
    gathered = torch.empty(ranks * sum(sizes), dtype=torch.bfloat16)
    outputs = [torch.empty(ranks * n, dtype=torch.bfloat16) for n in sizes]

    def stock() -> None:
        torch._foreach_copy_(list(packed.split(sizes)), shards)
        dist.all_gather_into_tensor(gathered, packed)
        stock_copy_out(gathered, sizes, outputs, ranks)

    source, target = torch.cat(shards), torch.empty(sum(sizes), dtype=torch.bfloat16)
    limit = _copy(source, target)
    name = "all_gather_cast" if cast else "all_gather"
    return Pair(name, layout, 2 * layout.output_items, _gather(group, shards), stock, limit, engine.close)


def _reduce_scatter(place: Place, shard_bytes: int, params: int) -> Pair:
    ranks = place.ranks
    layout = GroupLayout(parameter_shapes(shard_bytes // 4, ranks, params), ranks)
    gradients = [torch.randn(s.rows, s.row_items).bfloat16() for s in layout.params]
    engine, group = _group(place, layout, Item.RAW2)

    def stock() -> None:
        packed = torch.empty(ranks * layout.output_items)
        result = torch.empty(layout.output_items)
        stock_pack(gradients, packed, ranks)
        dist.reduce_scatter_tensor(result, packed, op=dist.ReduceOp.AVG)

    pushed = (ranks - 1) * layout.output_items * 2
    summed = (ranks * 2 + 4) * layout.output_items // 2
    source, target = (torch.ones(pushed + summed, dtype=torch.uint8) for _ in range(2))
    ours, limit = _reduce(group, gradients, layout.output_items, ranks), _copy(source, target)
    return Pair("reduce_scatter", layout, 4 * layout.output_items, ours, stock, limit, engine.close)


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        target.copy_(source)

    return call
