"""Collectives between GPUs give the bytes of the CPU's runtime: the same schedules, the same order of additions."""

from __future__ import annotations

import pytest
import torch
from cards import backend
from harness import launch

from tide_strategies._native import cuda
from tide_strategies.cli.bench.pairs import world_exchange
from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.cuda.engine import CudaEngine
from tide_strategies.runtime.cuda.group import CudaGroup, needed_device_memory
from tide_strategies.runtime.cuda.sum_kernels import sum_kernels
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.exchange import Exchange
from tide_strategies.runtime.group import GroupCollectives, needed_memory
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

#: Rows that do not divide, a parameter of one item, one of fewer rows than ranks, and one of several chunks.
SHAPES = [(33, 24), (1, 1), (3, 40), (260, 96)]
CHUNK, TIMEOUT_S = 8192, 40.0
CASES = [(topology, out) for topology in ("1x4", "2x2", "4x1") for out in (Item.F32, Item.BF16)]
TORCH = {Item.F32: torch.float32, Item.BF16: torch.bfloat16}
PARAMS = tuple(range(len(SHAPES)))


def _inputs(rank: int, layout: GroupLayout, shards: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's padded shards and its gradients, magnitudes far apart."""
    made = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(s, generator=made) * 10.0 ** torch.randint(-6, 7, s, generator=made) for s in SHAPES]
    own = [torch.randn(layout.shard_items(p), generator=made).to(shards) for p in PARAMS]
    return own, [g.bfloat16() for g in gradients]


def _on_cpu(exchange: Exchange, rank: int, topology: Topology, layout: GroupLayout, out: Item, own, gradients):
    engine = Engine(exchange, rank, topology, slots=1, timeout_s=TIMEOUT_S)
    engine.reserve(needed_memory([layout], topology, rank, CHUNK))
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), 1)
    group = GroupCollectives(engine, "cpu", layout, _items(own), ring, CHUNK)
    group.issue([s.data_ptr() for s in own], None)
    group.complete()
    landing = torch.from_dlpack(group.landing.window.tensor(0, layout.landing_bytes, "uint8")).clone()
    exchange(b"looked")
    group.vacate()
    output = torch.full((layout.output_items,), -1.0, dtype=TORCH[out])
    group.reduce_scatter(PARAMS, Item.BF16, out, [g.data_ptr() for g in gradients], output.data_ptr(), 3.0)
    exchange(b"done")
    engine.close()
    return landing, output


def _on_gpu(exchange: Exchange, rank: int, topology: Topology, layout: GroupLayout, out: Item, own, gradients):
    index = torch.cuda.current_device()
    memory = needed_device_memory([layout], topology, rank, CHUNK)
    engine = CudaEngine(exchange, rank, topology, index, slots=1, memory=memory, timeout_s=TIMEOUT_S)
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), 1)
    kernels = sum_kernels(index)
    group = CudaGroup(engine, "gpu", layout, ring, CHUNK, kernels, 8, shard_items=_items(own))
    streams = [torch.cuda.Stream() for _ in range(8)]
    first, place, rail, completion, readiness, push, total, network = (s.cuda_stream for s in streams)
    own, gradients = [s.cuda() for s in own], [g.cuda() for g in gradients]
    output = torch.full((layout.output_items,), -1.0, dtype=TORCH[out], device="cuda")
    landing = torch.from_dlpack(group.landing.window.tensor(0, layout.landing_bytes, "uint8"))
    torch.cuda.synchronize()
    group.open(group.occupy(), [s.data_ptr() for s in own])
    group.send(first, place if group.staged else first, rail)
    for stream in (first, place):
        cuda.order(stream, completion)
    group.complete(completion)
    torch.cuda.synchronize()
    landed = landing.cpu()
    exchange(b"looked")
    group.vacate(readiness)
    addresses = [g.data_ptr() for g in gradients]
    group.reduce_scatter(PARAMS, Item.BF16, out, addresses, output.data_ptr(), 3.0, (push, total, network))
    torch.cuda.synchronize()
    exchange(b"done")
    engine.close()
    return landed, output.cpu()


def _items(own: list[torch.Tensor]) -> list[Item]:
    return [Item.F32 if s.dtype is torch.float32 else Item.RAW2 for s in own]


def _compared(rank: int, world: int, cases: list[tuple[str, Item]]) -> dict[tuple[str, Item, bool], tuple[bool, bool]]:
    """For each case, with shards that are cast and without: whether landings and outputs have the same bytes."""
    exchange, found = world_exchange(TIMEOUT_S), {}
    layout = GroupLayout(tuple(ParamShape(*s, 2) for s in SHAPES), world)
    for topology, out in cases:
        for cast in (False, True):
            own, gradients = _inputs(rank, layout, torch.float32 if cast else torch.bfloat16)
            nodes, local = map(int, topology.split("x"))
            where = exchange, rank, Topology(nodes, local), layout, out, own, gradients
            (landing, output), (landed, summed) = _on_cpu(*where), _on_gpu(*where)
            bits = torch.int32 if out is Item.F32 else torch.int16
            found[topology, out, cast] = (
                _same_parameters(layout, landing, landed),
                torch.equal(output.view(bits), summed.view(bits)),
            )
    return found


def _same_parameters(layout: GroupLayout, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two landings have the same parameters, padding aside."""

    def part(landing: torch.Tensor, p: int) -> torch.Tensor:
        rows, columns = SHAPES[p]
        base = layout.landing_base(p)
        return landing[base : base + rows * columns * 2]

    return all(torch.equal(part(a, p), part(b, p)) for p in PARAMS)


@pytest.fixture(scope="module")
def four_ranks():
    return launch(4, _compared, CASES, timeout=150, backend=backend(4))


@pytest.mark.parametrize(("topology", "out"), CASES, ids=lambda x: getattr(x, "value", x))
@pytest.mark.parametrize("cast", [False, True], ids=["as they are", "cast"])
def test_landings_and_sums_have_the_bytes_of_the_cpus_runtime(four_ranks, topology: str, out: Item, cast: bool) -> None:
    for found in four_ranks:
        assert found[topology, out, cast] == (True, True)
