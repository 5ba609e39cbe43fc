"""Rates of GPU ranks that stand for nodes: measured by FSDP2's own way to an engine, with what is torch's replaced."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from fakes import FakeKernels
from p2p_scenarios import join
from path_scenarios import Stream, Torch
from ranks import launch, values
from stage import MIB, array, calls, fake, memory, play, scenario

from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import connect, probing
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import probes
from tide_strategies.planner.knobs import choose
from tide_strategies.planner.rates import H200_PAIR
from tide_strategies.runtime.cuda import pieces, sum_kernels
from tide_strategies.topology import Topology


class Tensor:
    """As much of one as probes use: zeroed device memory."""

    def __init__(self, nbytes):
        self.memory = memory(nbytes, Torch.device.index)
        array(self.memory, "uint8")[:] = 0

    def data_ptr(self):
        return self.memory.address


class Card:
    """What torch is asked for on a rank's device, and whether it has the memory."""

    emptied, full = 0, False

    @classmethod
    def install(cls, device):
        """Put what stands for torch's part of a GPU in its place, and sizes that fit a test."""
        Torch.device = torch.device("cuda", device)
        torch.cuda.Stream, torch.cuda.current_device = Stream, lambda: Torch.device.index
        torch.cuda.synchronize, torch.cuda.empty_cache = cls.synchronize, cls.empty_cache
        torch.zeros = cls.zeros
        sum_kernels.sum_kernels = FakeKernels
        probes._GPU_BYTES, probes.REPEATS = MIB // 4, 8

    @classmethod
    def zeros(cls, nbytes, dtype, device):
        if cls.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Tensor(nbytes)

    @staticmethod
    def synchronize():
        assert fake.fake_idle(Torch.device.index, 20_000)

    @classmethod
    def empty_cache(cls):
        cls.emptied += 1


def measured(rank, exchange, form, says, group=None, **options):
    """Measure as the first step does; the rates, or None if a line says why there are none."""
    topology, lines = Topology(*form), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tide_strategies")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    group = group or SimpleNamespace(rank=lambda: rank, size=lambda: topology.ranks)
    connect.stated_topology = lambda *_: topology  # which asks a process group of torch's
    config = TideConfig.from_any({"timeout_s": 20, **options})
    found = probing.measure_rates(exchange, group, torch.device("cuda"), config, 0.0)  # two rounds
    exchange(b"")  # whatever is left is nobody's
    assert Card.emptied > 0
    logger.removeHandler(handler)
    if found is None or rank == 0:
        assert any(says in line for line in lines), lines
    return found


def check_rates(found, form):
    """Everything that nodes add has been measured, and knobs follow from it."""
    topology = Topology(*form)
    assert found.name == f"measured on {topology} cuda ranks"
    for name in ("rail", "land_per_cta", "land_cap", "push", "sum_per_cta"):
        assert 0 < getattr(found, name) != getattr(H200_PAIR, name), name
    for name in ("round_wait_s", "rail_signal_s"):  # on a busy processor a call may take as long as one with rounds
        assert 0 <= getattr(found, name) != getattr(H200_PAIR, name), name
    layout = GroupLayout((ParamShape(4096, 1024, 2),), topology.ranks)
    assert choose(found, topology, [layout], "cuda") == choose(found, topology, [layout], "cuda")
    assert choose(replace(found, rail=1e12), topology, [layout], "cuda") != choose(
        replace(found, rail=1.0), topology, [layout], "cuda"
    )


def _measure(rank, exchange, form, full):
    Card.install(rank % 2)
    before = fake.fake_used_memory(rank % 2)
    Card.full = full and rank == 1
    says = "rank 1: OutOfMemoryError: CUDA out of memory" if full else "cuda ranks: push"
    found = measured(rank, exchange, form, says)
    assert launched() or full
    gc.collect()
    exchange(b"")
    assert fake.fake_used_memory(rank % 2) == before
    if not full:
        check_rates(found, form)
    return found


def launched():
    return calls("cuLaunchKernel")


def _measure_over_messages(rank, exchange, form):
    """Between ranks that do not reach each other's memory, by messages that are as long as ever."""
    pieces._LEAST = pieces._MOST = 1 << 16
    join(exchange, rank, form[0] * form[1])
    Card.install(rank % 2)
    found = measured(rank, exchange, form, "cuda ranks: push", dist.group.WORLD, rail="p2p")
    check_rates(found, form)
    return found


@scenario
def rates_of_nodes_are_measured_over_their_own_rail():
    """Alike on all ranks, on no default stream, and all memory is given back; one rank without memory is no trap."""
    for form in ((2, 1), (2, 2)):
        for work in ((_measure, form, False), (_measure_over_messages, form)):
            found = values(launch(form[0] * form[1], *work))
            assert all(rates == found[0] for rates in found)
    assert values(launch(2, _measure, (2, 1), True)) == [None, None]


if __name__ == "__main__":
    play(globals())
