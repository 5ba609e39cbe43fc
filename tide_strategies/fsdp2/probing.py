"""Measure a machine's rates with the probes of ``planner/probes.py``, on the executors that will train.

Memory of its own is shared for it and given back; nothing of the model is touched.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideArenaError
from tide_strategies.fsdp2.connect import cpu_engine
from tide_strategies.planner import probes
from tide_strategies.planner.rates import Rates, built_in
from tide_strategies.runtime.exchange import Exchange, exchange_json

_log = logging.getLogger("tide_strategies")

#: Rounds over all probes at most, of which the first is not counted: pages are touched, connections begin.
_ROUNDS = 6


def measure_rates(
    exchange: Exchange, ranks: dist.ProcessGroup, device: torch.device, config: TideConfig, budget_s: float
) -> Rates | None:
    """Measure, within about ``budget_s``; alike on all ranks, which call it together.

    To connect the ranks and to compile kernels counts, but takes the time that it takes; two rounds of the probes,
    which are milliseconds on GPUs, are run in any case.

    None, with a line of the log, if memory for it cannot be shared or the times make no rates.
    """
    one_thread, begin, progress = device.type == "cpu", time.perf_counter(), _Progress(ranks.rank())
    if not one_thread:
        from tide_strategies.fsdp2.device_probing import LANDING_CTAS, SUM_CTAS, gpu_probes
    try:
        progress.say("connecting its ranks")
        with (_cpu_probes if one_thread else gpu_probes)(exchange, ranks, config) as ready:
            connected_s, topology = time.perf_counter() - begin, ready.topology
            seconds, rounds = _timed(exchange, ready.every, ready.runs, begin + budget_s, progress)
    except TideArenaError as e:  # on every rank alike; connecting the model will say so as well, if it matters there
        _log.info("TIDE: the rates of this machine are not measured: %s", e)
        return None
    finally:
        progress.end()
    where = f"{topology} {device.type} ranks"
    ctas = {} if one_thread else {"ctas": SUM_CTAS, "landing_ctas": LANDING_CTAS}
    try:
        rates = probes.rates_of(
            seconds, topology, built_in(device.type), f"measured on {where}", one_thread=one_thread, **ctas
        )
    except ValueError as e:
        _log.warning("TIDE: the rates of %s cannot be told from the times of probes (%s)", where, e)
        return None
    if ranks.rank() == 0:
        took = f"after {connected_s:.2f} s of connecting and compiling, {rounds} rounds"
        _log.info("TIDE: rates of %s: %s (%s)", where, words(rates), took)
    return rates


def words(rates: Rates) -> str:
    """What knobs are solved from, in words."""
    rail = f", rail {rates.rail / 1e9:.3g} GB/s, a round {rates.round_wait_s * 1e3:.3g} ms" if rates.rail else ""
    return (
        f"push {rates.push / 1e9:.3g} GB/s, sum {rates.sum_per_cta / 1e9:.3g} GB/s a thread block, "
        f"wait {rates.signal_s * 1e6:.3g} us{rail}"
    )


@contextlib.contextmanager
def _cpu_probes(exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig) -> Iterator[probes.Prepared]:
    engine, _ = cpu_engine(exchange, ranks, config, slots=1)
    try:
        topology = engine.topology
        every = probes.probes(topology, ranks.rank(), one_thread=True)
        engine.reserve(probes.memory(every))
        large = probes.bulk_bytes(topology, one_thread=True)
        source, output = torch.zeros(large, dtype=torch.uint8), torch.zeros(2 * large, dtype=torch.uint8)

        def prepared(probe: probes.Probe) -> probes.Run:
            label = f"measuring {probe.name} {probe.size}"
            collective = engine.collective(probe.schedule, 1, label)
            tag, addresses = engine.book.tag(label), collective.addresses(output=output.data_ptr())

            def run() -> None:
                collective.replay([source.data_ptr()], addresses, tag, 1.0)

            return run

        yield probes.Prepared(topology, every, [prepared(p) for p in every])
    finally:
        engine.close()


class _Progress:
    """A line on rank 0's terminal that says what is being measured, and is gone afterwards."""

    def __init__(self, rank: int) -> None:
        self._shown = rank == 0 and sys.stderr.isatty()

    def say(self, what: str) -> None:
        self._write(f"TIDE measures this machine: {what:<30}")

    def end(self) -> None:
        self._write(" " * 60 + "\r")

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write("\r" + text)
            sys.stderr.flush()


def _timed(
    exchange: Exchange,
    every: Sequence[probes.Probe],
    runs: Sequence[probes.Run],
    until: float,
    progress: _Progress,
) -> tuple[dict[tuple[str, int], float], int]:
    """Seconds of each probe (the fastest round's, in which the slowest rank counts), and how many rounds there were.

    The fastest, since whatever else a machine does only ever adds to a time. No round begins after ``until``, on the
    first rank's clock, but for the second one.
    """
    best: list[float] = []
    number = 0
    for number in range(_ROUNDS):
        own = []
        for at, (probe, run) in enumerate(zip(every, runs, strict=True)):
            progress.say(f"{number * len(runs) + at + 1}/{_ROUNDS * len(runs)} {probe.name}")
            exchange(b"")  # all ranks begin together
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
        stated = exchange_json(exchange, [own, time.perf_counter() >= until])
        slowest = [max(times) for times in zip(*(s[0] for s in stated), strict=True)]
        if number:
            best = [min(pair) for pair in zip(best, slowest, strict=True)] if best else slowest
            if stated[0][1]:
                break
    return {(p.name, p.size): t for p, t in zip(every, best, strict=True)}, number + 1
