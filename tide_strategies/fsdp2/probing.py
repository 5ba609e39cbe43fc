"""Measure a machine's rates with the probes of ``planner/probes.py``, on the executors that will train.

Memory of its own is shared for it and given back; nothing of the model is touched.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tide_strategies.collectives.schedule import Item
from tide_strategies.config import TideConfig
from tide_strategies.errors import TideArenaError
from tide_strategies.fsdp2.connect import cpu_engine
from tide_strategies.planner import probes
from tide_strategies.planner.rates import Rates, built_in
from tide_strategies.runtime.exchange import Exchange, exchange_json
from tide_strategies.topology import Topology

_log = logging.getLogger("tide_strategies")

#: Rounds over all probes at most, of which the first is not counted: pages are touched, connections begin.
_ROUNDS = 6
#: Thread blocks of the sum that is timed on a GPU: enough to be timed, few enough that each adds its full rate.
_SUM_CTAS = 8

#: Runs a probe once and returns when this rank's part is done.
Run = Callable[[], None]


def measure_rates(
    exchange: Exchange, ranks: dist.ProcessGroup, device: torch.device, config: TideConfig, budget_s: float
) -> Rates | None:
    """Measure, within about ``budget_s``; alike on all ranks, which call it together.

    None, with a line of the log, if memory for it cannot be shared or the times make no rates.
    """
    one_thread = device.type == "cpu"
    try:
        topology, seconds = (_on_cpu if one_thread else _on_gpu)(exchange, ranks, config, budget_s)
    except TideArenaError as e:  # on every rank alike; connecting the model will say so as well, if it matters there
        _log.info("TIDE: the rates of this machine are not measured: %s", e)
        return None
    where = f"{topology} {device.type} ranks"
    try:
        rates = probes.rates_of(
            seconds,
            topology,
            built_in(device.type),
            f"measured on {where}",
            one_thread=one_thread,
            ctas=1 if one_thread else _SUM_CTAS,
        )
    except ValueError as e:
        _log.warning("TIDE: the rates of %s cannot be told from the times of probes (%s)", where, e)
        return None
    if ranks.rank() == 0:
        _log.info("TIDE: rates of %s: %s", where, words(rates))
    return rates


def words(rates: Rates) -> str:
    """What knobs are solved from, in words."""
    rail = f", rail {rates.rail / 1e9:.3g} GB/s, a round {rates.round_wait_s * 1e3:.3g} ms" if rates.rail else ""
    return (
        f"push {rates.push / 1e9:.3g} GB/s, sum {rates.sum_per_cta / 1e9:.3g} GB/s a thread block, "
        f"wait {rates.signal_s * 1e6:.3g} us{rail}"
    )


def _on_cpu(
    exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig, budget_s: float
) -> tuple[Topology, dict[tuple[str, int], float]]:
    engine, _ = cpu_engine(exchange, ranks, config, slots=1)
    try:
        topology = engine.topology
        every = probes.probes(topology, ranks.rank(), one_thread=True)
        engine.reserve(probes.memory(every))
        large = probes.bulk_bytes(topology, one_thread=True)
        source, output = torch.zeros(large, dtype=torch.uint8), torch.zeros(2 * large, dtype=torch.uint8)

        def prepared(probe: probes.Probe) -> Run:
            label = f"measuring {probe.name} {probe.size}"
            collective = engine.collective(probe.schedule, 1, label)
            tag, addresses = engine.book.tag(label), collective.addresses(output=output.data_ptr())

            def run() -> None:
                collective.replay([source.data_ptr()], addresses, tag, 1.0)

            return run

        runs = [prepared(p) for p in every]
        return topology, _timed(exchange, every, runs, budget_s, _Progress(ranks.rank()))
    finally:
        engine.close()


def _on_gpu(
    exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig, budget_s: float
) -> tuple[Topology, dict[tuple[str, int], float]]:
    from tide_strategies.runtime.cuda.engine import CudaEngine
    from tide_strategies.runtime.cuda.sum_kernels import sum_kernels

    index, topology = torch.cuda.current_device(), Topology(1, ranks.size())
    every = probes.probes(topology, ranks.rank(), one_thread=False)
    large = probes.bulk_bytes(topology, one_thread=False)
    staging = probes.staging_bytes(every)
    engine = CudaEngine(
        exchange, ranks.rank(), topology, index, slots=1, staging_bytes=staging, timeout_s=config.timeout_s
    )
    try:
        source = torch.zeros(large, dtype=torch.uint8, device="cuda")
        output = torch.zeros(2 * large, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        kernel = sum_kernels(index)(topology.ranks - 1, 1, Item.BF16, Item.F32, True)

        def prepared(probe: probes.Probe) -> Run:
            label = f"measuring {probe.name} {probe.size}"
            collective = engine.collective(probe.schedule, 1, label)
            if probe.name == "sum":
                collective.program.set_sum_kernel(
                    kernel.function,
                    kernel.threads,
                    kernel.shared_bytes,
                    _SUM_CTAS,
                    kernel.pointers,
                    kernel.tile,
                    kernel.extra_null_pointers,
                )
            tag, addresses = engine.book.tag(label), collective.addresses(output=output.data_ptr())

            def run() -> None:
                call = collective.begin([source.data_ptr()], addresses, tag)
                collective.enqueue(call, "main", stream.cuda_stream)
                torch.cuda.synchronize()

            return run

        torch.cuda.synchronize()
        runs = [prepared(p) for p in every]
        return topology, _timed(exchange, every, runs, budget_s, _Progress(ranks.rank()))
    finally:
        torch.cuda.synchronize()
        engine.close()


class _Progress:
    """A line on rank 0's terminal that says what is being measured, and is gone afterwards."""

    def __init__(self, rank: int) -> None:
        self._shown = rank == 0 and sys.stderr.isatty()

    def show(self, probe: probes.Probe, number: int, of: int) -> None:
        self._write(f"TIDE measures this machine: {number}/{of} {probe.name:<10}")

    def end(self) -> None:
        self._write(" " * 60 + "\r")

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write("\r" + text)
            sys.stderr.flush()


def _timed(
    exchange: Exchange, every: Sequence[probes.Probe], runs: Sequence[Run], budget_s: float, progress: _Progress
) -> dict[tuple[str, int], float]:
    """Seconds of each probe: the fastest round's, in which the slowest rank counts. Once at least, whatever the budget.

    The fastest, since whatever else a machine does only ever adds to a time.
    """
    begin = time.perf_counter()
    best: list[float] = []
    for number in range(_ROUNDS):
        own = []
        for at, (probe, run) in enumerate(zip(every, runs, strict=True)):
            progress.show(probe, number * len(runs) + at + 1, _ROUNDS * len(runs))
            exchange(b"")  # all ranks begin together
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
        stated = exchange_json(exchange, [own, time.perf_counter() - begin])
        slowest = [max(times) for times in zip(*(s[0] for s in stated), strict=True)]
        if number:
            best = [min(pair) for pair in zip(best, slowest, strict=True)] if best else slowest
            if stated[0][1] > budget_s:
                break
    progress.end()
    return {(p.name, p.size): t for p, t in zip(every, best, strict=True)}
