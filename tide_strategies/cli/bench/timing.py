"""Times of calls that all ranks make together, on the CPU and on GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from tide_strategies.cli.bench.ranks import Place, meet

_BLOCKS = 3
#: Calls in a row behind one time on a GPU: the ranks' different starts weigh a tenth.
_CALLS = 10
#: Clock cycles that a GPU is kept busy (a few milliseconds) while the host enqueues: no call waits for the host.
HEAD_START_CYCLES = 10_000_000

Call = Callable[[], None]


def median_ms(place: Place, repeats: int, calls: Mapping[str, Call | None]) -> dict[str, float | None]:
    """Milliseconds of each call: the median over ``repeats`` of the slowest rank. None stays None. Collective.

    The calls take turns in blocks, each after one call that is not timed: within a block every call finds the caches
    as it leaves them itself, and a drift of the machine meets all of them.
    """
    sample = _gpu_sample if place.on_gpu else _cpu_sample
    per_block = -(-repeats // _BLOCKS)
    names = [n for n, call in calls.items() if call is not None]
    times = torch.zeros(len(names), _BLOCKS * per_block, dtype=torch.float64)
    for block in range(_BLOCKS):
        for j, name in enumerate(names):
            call = calls[name]
            assert call is not None
            for i in range(-1, per_block):
                elapsed = sample(call)
                if i >= 0:
                    times[j, block * per_block + i] = elapsed
    slowest = slowest_rank(times)
    measured: dict[str, float | None] = dict.fromkeys(calls)
    measured.update({n: statistics.median(t.tolist()) for n, t in zip(names, slowest, strict=True)})
    return measured


def host_us(place: Place, call: Call | None, calls: int = 20, repeats: int = 9) -> float | None:
    """Microseconds of host time to enqueue one call on a GPU, nothing awaited: median, slowest rank. Collective."""
    if call is None:
        return None
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        meet()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(slowest_rank(torch.tensor(times, dtype=torch.float64)).tolist()) * 1e6


def slowest_rank(times: torch.Tensor) -> torch.Tensor:
    """Each time of the rank for which it was longest. Collective."""
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times


def _cpu_sample(call: Call) -> float:
    meet()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _gpu_sample(call: Call) -> float:
    """Calls in a row between two events of the current stream, after one that lets the ranks meet on their devices."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    meet()
    torch.cuda._sleep(HEAD_START_CYCLES)
    call()
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / _CALLS
