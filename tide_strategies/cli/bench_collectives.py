"""Processes and timing behind ``tide bench collectives``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tide_strategies.collectives.reduce_scatter import BANKS
from tide_strategies.collectives.schedule import Item
from tide_strategies.errors import TideError
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.exchange import process_group_exchange
from tide_strategies.runtime.group import AUTO_CHUNK_BYTES, GroupCollectives
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.runtime.teardown import orderly_teardown
from tide_strategies.topology import Topology

#: Seconds that one measurement of one rank count may take.
TIMEOUT_S = 600.0
_COLUMNS = 1024
_BLOCKS = 3
_HOST_CALLS = 50
_FAILURES = (mp.ProcessExitedException, mp.ProcessRaisedException)


@dataclass(frozen=True)
class Row:
    """One measured collective; times in milliseconds, medians over calls of the slowest rank."""

    collective: str
    ranks: int
    shard_bytes: int
    params: int
    ours_ms: float
    stock_ms: float
    limit_ms: float
    host_us: float


def measure(ranks: int, shard_bytes: list[int], params: int, repeats: int) -> Iterator[Row]:
    """Measure both collectives for each shard size among ``ranks`` new processes.

    Raises:
        TideError: a process failed; its words are in the message.
    """
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = (ranks, str(Path(folder) / "store"), shard_bytes, params, repeats, out)
        processes = mp.spawn(_rank, work, nprocs=ranks, join=False)
        for _ in range(2 * len(shard_bytes)):
            yield _next(out, processes)
        try:
            while not processes.join(timeout=TIMEOUT_S):
                pass
        except _FAILURES as e:
            raise TideError(f"a benchmark process failed: {e}") from e


def _next(out: Any, processes: Any) -> Row:
    import queue

    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            return Row(**out.get(timeout=0.5))
        except queue.Empty:
            try:
                processes.join(timeout=0.0)
            except _FAILURES as e:
                raise TideError(f"a benchmark process failed: {e}") from e
    for process in processes.processes:
        process.kill()
    raise TideError(f"no result within {TIMEOUT_S:g} s; the benchmark processes were killed")


def _rank(rank: int, ranks: int, store: str, sizes: list[int], params: int, repeats: int, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        for shard_bytes in sizes:
            for row in (_all_gather, _reduce_scatter):
                result = row(rank, ranks, shard_bytes, params, repeats)
                if rank == 0:
                    out.put(result)
        dist.barrier()
    finally:
        orderly_teardown()


def _shapes(items: int, ranks: int, params: int) -> tuple[ParamShape, ...]:
    """``params`` parameters, small and large in turn, with ``items`` items of shard in all (at least one each)."""
    columns = min(_COLUMNS, max(1, items // (4 * params)))
    rows = max(params, items // columns)
    small = max(1, rows // (2 * params))
    sizes = [small if p % 2 == 0 else 3 * small for p in range(params)]
    sizes[-1] = max(1, rows - sum(sizes[:-1]))
    return tuple(ParamShape(ranks * n, columns, 2) for n in sizes)


def _group(rank: int, layout: GroupLayout) -> tuple[Engine, GroupCollectives]:
    group = dist.group.WORLD
    assert group is not None
    exchange = process_group_exchange(group, TIMEOUT_S, "the benchmark's set-up")
    engine = Engine(exchange, rank, Topology(1, layout.ranks), slots=2, timeout_s=TIMEOUT_S)
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), 2)
    engine.ensure_staging(BANKS * (layout.ranks - 1) * AUTO_CHUNK_BYTES)
    items = [Item.RAW2] * len(layout.params)
    return engine, GroupCollectives(engine, "bench", layout, items, ring, AUTO_CHUNK_BYTES)


def _median_ms(repeats: int, *functions: Callable[[], None]) -> list[float]:
    """Median over repeats of each function's slowest rank.

    The functions take turns in blocks of calls, each after one call that is not timed: within a block every function
    finds the caches as it leaves them itself, and a drift of the machine meets all of them.
    """
    per_block = -(-repeats // _BLOCKS)
    times = torch.zeros(len(functions), _BLOCKS * per_block, dtype=torch.float64)
    for block in range(_BLOCKS):
        for j, function in enumerate(functions):
            for i in range(-1, per_block):
                dist.barrier()
                start = time.perf_counter()
                function()
                if i >= 0:
                    times[j, block * per_block + i] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [statistics.median(t.tolist()) * 1e3 for t in times]


def _all_gather(rank: int, ranks: int, shard_bytes: int, params: int, repeats: int) -> dict[str, Any]:
    layout = GroupLayout(_shapes(shard_bytes // 2, ranks, params), ranks)
    sizes = [layout.shard_items(p) for p in range(params)]
    shards = [torch.randn(n).bfloat16() for n in sizes]
    engine, group = _group(rank, layout)
    addresses = [s.data_ptr() for s in shards]

    def ours() -> None:
        group.issue(addresses)
        group.complete()
        group.vacate()

    packed = torch.empty(sum(sizes), dtype=torch.bfloat16)
    gathered = torch.empty(ranks * sum(sizes), dtype=torch.bfloat16)
    outputs = [torch.empty(ranks * n, dtype=torch.bfloat16) for n in sizes]
    views = [o.view(ranks, -1) for o in outputs]

    def stock() -> None:
        torch._foreach_copy_(list(packed.split(sizes)), shards)
        dist.all_gather_into_tensor(gathered, packed)
        torch.split_with_sizes_copy(gathered.view(ranks, -1), sizes, dim=1, out=views)

    source, target = torch.cat(shards), torch.empty(sum(sizes), dtype=torch.bfloat16)

    def limit() -> None:
        target.copy_(source)

    times = _median_ms(repeats, ours, stock, limit)
    row = _row("all_gather", layout, 2, times, _host_us(rank, ranks, params)[0])
    engine.close()
    return row


def _reduce_scatter(rank: int, ranks: int, shard_bytes: int, params: int, repeats: int) -> dict[str, Any]:
    layout = GroupLayout(_shapes(shard_bytes // 4, ranks, params), ranks)
    gradients = [torch.randn(s.rows, s.row_items).bfloat16() for s in layout.params]
    engine, group = _group(rank, layout)
    everything = tuple(range(params))
    addresses = [g.data_ptr() for g in gradients]

    def ours() -> None:
        output = torch.empty(layout.output_items)
        group.reduce_scatter(everything, Item.BF16, Item.F32, addresses, output.data_ptr(), float(ranks))

    def stock() -> None:
        packed = torch.empty(ranks * layout.output_items)
        output = torch.empty(layout.output_items)
        torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=packed.view(ranks, -1))
        dist.reduce_scatter_tensor(output, packed, op=dist.ReduceOp.AVG)

    pushed = (ranks - 1) * layout.output_items * 2
    summed = (ranks * 2 + 4) * layout.output_items // 2
    source, target = (torch.empty(pushed + summed, dtype=torch.uint8) for _ in range(2))

    def limit() -> None:
        target.copy_(source)

    times = _median_ms(repeats, ours, stock, limit)
    row = _row("reduce_scatter", layout, 4, times, _host_us(rank, ranks, params)[1])
    engine.close()
    return row


def _row(name: str, layout: GroupLayout, itemsize: int, times: list[float], host_us: float) -> dict[str, Any]:
    return {
        "collective": name,
        "ranks": layout.ranks,
        "shard_bytes": layout.output_items * itemsize,
        "params": len(layout.params),
        "ours_ms": times[0],
        "stock_ms": times[1],
        "limit_ms": times[2],
        "host_us": host_us,
    }


def _host_us(rank: int, ranks: int, params: int) -> tuple[float, float]:
    """Microseconds of an all-gather and of a reduce-scatter call where there is next to nothing to copy."""
    layout = GroupLayout(tuple(ParamShape(ranks, 8, 2) for _ in range(params)), ranks)
    engine, group = _group(rank, layout)
    shards = [torch.ones(8).bfloat16() for _ in range(params)]
    gradients = [torch.ones(ranks, 8).bfloat16() for _ in range(params)]
    shard_addresses, addresses = [s.data_ptr() for s in shards], [g.data_ptr() for g in gradients]
    output = torch.empty(layout.output_items)

    def gather() -> None:
        group.issue(shard_addresses)
        group.complete()
        group.vacate()

    def reduce() -> None:
        group.reduce_scatter(tuple(range(params)), Item.BF16, Item.F32, addresses, output.data_ptr(), float(ranks))

    def repeated(call: Callable[[], None]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(_HOST_CALLS):
                call()

        return calls

    times = _median_ms(9, repeated(gather), repeated(reduce))
    engine.close()
    return times[0] * 1e3 / _HOST_CALLS, times[1] * 1e3 / _HOST_CALLS
