"""Messages as the rail between GPUs of one host that stand for nodes, and training over them: two cards or one.

What goes over a rail here goes through the host; stock FSDP2 is not needed. Rates are printed and not judged.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards import backend
from harness import launch
from rail_checks import HALF, MIB, PLACE, TRAINED, all_ready, out_of_order, train_over, wrong_bytes

from tide_strategies._native import cuda
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.p2p_rail import CudaP2PRail
from tide_strategies.runtime.cuda.rail import Part
from tide_strategies.runtime.exchange import process_group_exchange
from tide_strategies.runtime.rails.gloo import connect_gloo
from tide_strategies.topology import Topology


def _work(rank: int, world: int, _: None) -> dict[str, Any]:
    device, topology, group = torch.cuda.current_device(), Topology(world, 1), dist.group.WORLD
    assert group is not None
    exchange = process_group_exchange(group, 60.0, "the test of the rail")
    gloo = connect_gloo(group, topology, rank, "test", 60.0)
    rail = CudaP2PRail(gloo, exchange, rank, topology, device, 60.0, CallBook(topology, 2))
    arena = cuda.Mapping(cuda.Allocation(device, 2 * HALF), device)
    rail.register(*PLACE, arena)
    memory = torch.from_dlpack(arena.tensor(0, arena.bytes, "uint8"))
    out = {
        "wrong": wrong_bytes(rank, rail, memory),
        "out_of_order": out_of_order(rank, rail, memory),
        "rates": {nbytes: _rate(rank, rail, memory, nbytes) for nbytes in (MIB, 16 * MIB, 64 * MIB)},
    }
    rail.check()
    torch.cuda.synchronize()
    dist.barrier()
    started = time.monotonic()
    rail.close()
    return {**out, "closing_s": time.monotonic() - started, "left": rail.outstanding()}


def _rate(rank: int, rail: CudaP2PRail, memory: torch.Tensor, nbytes: int, repeats: int = 8) -> tuple[float, float]:
    """GB/s from the device of rank 0 to that of rank 1, and microseconds of the host for a put."""
    all_ready()
    stream, started = torch.cuda.Stream(), time.monotonic()
    for _ in range(repeats):
        if rank == 0:
            rail.put(1, memory.data_ptr(), nbytes, *PLACE, HALF, 0, stream.cuda_stream)
        else:
            rail.take(0, 0, 1, stream.cuda_stream, [Part(*PLACE, HALF, nbytes)])
    enqueued = time.monotonic() - started
    all_ready()
    return nbytes * repeats / (time.monotonic() - started) / 1e9, enqueued / repeats * 1e6


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(2, _work, timeout=300, backend=backend())


def test_every_byte_of_a_put_arrives_and_no_other(found) -> None:
    assert [f["wrong"] for f in found] == [[], []]


def test_a_put_is_there_when_its_signal_is(found) -> None:
    assert [f["out_of_order"] for f in found] == [[], []]


def test_it_ends_in_order(found, capsys) -> None:
    assert all(f["left"] == 0 and f["closing_s"] < 10 for f in found)
    with capsys.disabled():
        print(f"\nmessages between two ranks on {torch.cuda.device_count()} GPUs")
        for nbytes, (rate, host) in found[0]["rates"].items():
            print(f"  put of {nbytes // MIB} MiB: {rate:.2f} GB/s; {host:.1f} us of the host")


@pytest.fixture(scope="module")
def trained() -> list[dict[str, dict[str, Any]]]:
    return launch(2, train_over, ("p2p", "2x1", TRAINED), timeout=300, backend=backend())


@pytest.mark.parametrize("name", [c.name for c in TRAINED])
def test_training_over_messages_keeps_every_bit(trained, name: str) -> None:
    for rank in trained:
        assert rank[name]["placed"] == [{("tide", "2x1", "local")}, {("tide", "2x1", "p2p")}]
        assert rank[name]["pinned"] == [set(), {"control", "stage", "inbox", "pieces"}]
        assert rank[name]["losses"] > 0
        assert rank[name]["equal"]


@pytest.mark.parametrize("topology", ["2x2", "4x1"])
def test_four_ranks_train_over_them_too(topology: str) -> None:
    for by_case in launch(4, train_over, ("p2p", topology, TRAINED[1:4]), timeout=300, backend="cpu:gloo,cuda:gloo"):
        for case in TRAINED[1:4]:
            one = by_case[case.name]
            assert one["placed"] == [{("tide", topology, "local")}, {("tide", topology, "p2p")}]
            assert one["losses"] > 0
            assert one["equal"]
