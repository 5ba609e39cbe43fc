"""The probes of ``planner/probes.py`` on GPUs: with the topology, the rail and the kernels that reductions have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tide_strategies.collectives.schedule import Schedule
from tide_strategies.config import TideConfig
from tide_strategies.errors import TideArenaError
from tide_strategies.fsdp2.connect import gpu_engine, instead, place_gpus, without_multicast
from tide_strategies.fsdp2.cuda_path import CudaStreams
from tide_strategies.planner import probes
from tide_strategies.runtime import bootstrap
from tide_strategies.runtime.exchange import Exchange
from tide_strategies.runtime.hosts import Placement

if TYPE_CHECKING:
    from tide_strategies.runtime.cuda.engine import CudaCollective, CudaEngine
    from tide_strategies.runtime.cuda.group import SumKernel

#: Thread blocks of the sum and the landing that are timed: enough to be timed, few enough that each adds its full rate.
SUM_CTAS, LANDING_CTAS = 8, 2
#: Thread blocks of the landing that asks for all that the fabric between GPUs gives.
_FABRIC_CTAS = 32


@contextlib.contextmanager
def gpu_probes(exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig) -> Iterator[probes.Prepared]:
    """Make memory, a rail and kernels for probes; at the end they are given back. Collective.

    Raises:
        TideArenaError: on every rank alike, if some rank cannot have them.
    """
    placement = place_gpus(exchange, ranks, config)
    if placement.topology.nodes == 1:
        placement = without_multicast(placement, "nothing lands")
    engine, every = _engine(exchange, ranks, config, placement)
    runs: list[probes.Run] = []
    try:
        runs += _prepared(exchange, ranks.rank(), engine, every)
        yield probes.Prepared(engine.topology, every, runs)
    finally:
        torch.cuda.synchronize()
        engine.close()
        runs.clear()
        torch.cuda.empty_cache()  # the engine of the model is about to ask the driver for memory


def _engine(
    exchange: Exchange, ranks: dist.ProcessGroup, config: TideConfig, placement: Placement
) -> tuple[CudaEngine, list[probes.Probe]]:
    """An engine with the memory of all probes, and these; connected as the model will be, if need be in another way."""
    multicast = placement.multicast == "on"
    every = probes.probes(placement.topology, ranks.rank(), one_thread=False, multicast=multicast)
    try:
        return gpu_engine(exchange, ranks, config, placement, 1, probes.memory(every)), every
    except TideArenaError as e:
        other = without_multicast(placement, str(e)) if multicast else instead(config, placement, e)
    return _engine(exchange, ranks, config, other)


def _prepared(exchange: Exchange, rank: int, engine: CudaEngine, every: Sequence[probes.Probe]) -> list[_Run]:
    from tide_strategies.kernels.compile import KernelUnavailableError

    error, runs = None, []
    try:
        large = probes.bulk_bytes(engine.topology, one_thread=False)
        source, output = (torch.zeros(n * large, dtype=torch.uint8, device="cuda") for n in (1, 2))
        runs = _runs(engine, every, source, output)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, KernelUnavailableError) as e:
        error = f"{type(e).__name__}: {e}"
    bootstrap.agree(exchange, rank, error, "preparing to measure rates")
    return runs


def _runs(engine: CudaEngine, every: Sequence[probes.Probe], source: torch.Tensor, output: torch.Tensor) -> list[_Run]:
    from tide_strategies.runtime.cuda.group import set_kernels
    from tide_strategies.runtime.cuda.sum_kernels import sum_kernels

    kernels, streams = sum_kernels(engine.device), CudaStreams(torch.device("cuda", engine.device))
    # Where reductions do the same.
    stream_of = {"sum": streams.sum, **dict.fromkeys(("land", "fabric", "rail", "round"), streams.network)}
    aligned = dict.fromkeys((False, True), True)

    @functools.cache
    def probes_of(rank: int) -> list[probes.Probe]:
        return probes.probes(engine.topology, rank, one_thread=False, multicast=engine.multicast)

    def schedule_of(number: int, rank: int) -> Schedule:
        return probes_of(rank)[number].schedule

    out = []
    for number, probe in enumerate(every):
        label = f"measuring {probe.name} {probe.size}"
        collective = engine.collective(probe.schedule, 1, label, functools.partial(schedule_of, number))
        ctas = SUM_CTAS, _FABRIC_CTAS if probe.name == "fabric" else LANDING_CTAS
        used = set_kernels(engine, collective, kernels, 1, aligned, ctas)
        stream = stream_of.get(probe.name, streams.push)
        out.append(_Run(collective, engine.book.tag(label), stream, source, output, used))
    return out


@dataclass(frozen=True)
class _Run:
    """Runs a probe. ``kernels`` keeps their modules loaded."""

    collective: CudaCollective
    tag: int
    stream: torch.cuda.Stream
    source: torch.Tensor
    output: torch.Tensor
    kernels: tuple[SumKernel, ...]

    def __call__(self) -> None:
        addresses = self.collective.addresses(output=self.output.data_ptr())
        call = self.collective.begin([self.source.data_ptr()], addresses, self.tag)
        self.collective.enqueue(call, "main", self.stream.cuda_stream)
        self.collective.arrive(call)
        torch.cuda.synchronize()  # as long as the watchdog lets it wait
