"""Rails of NCCL's host RMA between two ranks of one host, each standing for a node, and training over them.

Needs NCCL 2.31.2 or newer in the process, which torch may not bring: ``LD_PRELOAD=.../libnccl.so.2``. Multicast stays
off, whatever the hardware has. Rates are printed and not judged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lost_peer
import pytest
import torch
import torch.distributed as dist
from cards import backend
from harness import launch, launch_raw
from rail_checks import HALF, MIB, PLACE, TRAINED, all_ready, out_of_order, train_over, wrong_bytes

from tide_strategies.runtime.cuda.nccl_domains import NcclArena, NcclDomains, missing_nccl
from tide_strategies.runtime.cuda.nccl_rail import NcclRail
from tide_strategies.runtime.exchange import process_group_exchange
from tide_strategies.topology import Topology

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@pytest.fixture(scope="module", autouse=True)
def no_multicast(environment: None) -> Iterator[None]:
    with mock.patch.dict(os.environ, NO_MULTICAST):
        yield


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    missing = missing_nccl()
    if missing is not None:
        pytest.skip(missing)
    return launch(2, _work, timeout=300)


def _work(rank: int, world: int, _: None) -> dict[str, Any]:
    exchange = process_group_exchange(dist.group.WORLD, 60.0, "the test of the rail")
    started = time.monotonic()
    domains = NcclDomains(exchange, rank, Topology(world, 1), rank, 60.0, signals=4, multicast=False)
    arena = domains.arena(2 * HALF)
    rail = NcclRail(domains)
    rail.register(*PLACE, arena.memory)
    took = time.monotonic() - started
    memory = torch.from_dlpack(arena.memory.tensor(0, arena.bytes, "uint8"))
    out = {
        "connecting_s": took,
        "multimem": domains.main.multimem,
        "reachable": arena.peer_address(1 - rank) is not None,
        "wrong": wrong_bytes(rank, rail, memory),
        "out_of_order": out_of_order(rank, rail, memory),
        "rates": _rates(rank, arena, rail),
    }
    rail.check()
    torch.cuda.synchronize()
    dist.barrier()
    rail.close()
    return {**out, "closed": all(comm.closed for comm in (domains.main, *domains.rails))}


def _rates(rank: int, arena: NcclArena, rail: NcclRail) -> dict[int, tuple[float, float, float]]:
    """By size: GB/s of puts from rank 0 to 1, GB/s of copies to the peer's memory, microseconds of a call of put."""
    out, at = {}, arena.address
    for nbytes in (MIB, 16 * MIB, 64 * MIB):
        all_ready()
        if rank == 0:
            source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
            target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{1 % torch.cuda.device_count()}")
            stream = torch.cuda.Stream()
            put, host = _rate(stream, nbytes, lambda s, n=nbytes: rail.put(1, at, n, *PLACE, HALF, 0, s.cuda_stream))
            with torch.cuda.stream(stream):
                copy, _ = _rate(stream, nbytes, lambda s, t=target, o=source: t.copy_(o, non_blocking=True))
            out[nbytes] = (put, copy, host)
        all_ready()
    return out


def _rate(stream: torch.cuda.Stream, nbytes: int, work: Any, repeats: int = 20) -> tuple[float, float]:
    for _ in range(3):
        work(stream)
    stream.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    started = time.monotonic()
    for _ in range(repeats):
        work(stream)
    host = (time.monotonic() - started) / repeats
    end.record(stream)
    stream.synchronize()
    return nbytes * repeats / begin.elapsed_time(end) / 1e6, host * 1e6


def test_every_byte_of_a_put_arrives_and_no_other(found) -> None:
    assert [f["wrong"] for f in found] == [[], []]


def test_a_put_is_there_when_its_signal_is(found) -> None:
    assert [f["out_of_order"] for f in found] == [[], []]


def test_memory_is_shared_without_multicast(found) -> None:
    assert all(f["reachable"] and not f["multimem"] and f["closed"] for f in found)


def test_rates_are_told(found, capsys) -> None:
    rates = found[0]["rates"]
    assert set(rates) == {MIB, 16 * MIB, 64 * MIB}
    with capsys.disabled():
        cards, took = torch.cuda.device_count(), found[0]["connecting_s"]
        print(f"\nNCCL rail between two ranks on {cards} GPUs, connected in {took:.1f} s")
        for nbytes, (put, copy, host) in rates.items():
            share = f"{put / copy:.0%} of a copy's {copy:.0f}"
            print(f"  put of {nbytes // MIB} MiB: {put:.0f} GB/s, {share}; {host:.1f} us of the host")


# --- training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(found: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """After the tests of the rail itself: without it there is nothing to train over."""
    return launch(2, train_over, ("nccl_rma", "2x1", TRAINED), timeout=300, backend=backend())


@pytest.mark.parametrize("name", [c.name for c in TRAINED])
def test_training_over_nccls_rail_keeps_every_bit(trained, name: str) -> None:
    for rank in trained:
        assert rank[name]["placed"] == [{("tide", "2x1", "local")}, {("tide", "2x1", "nccl_rma")}]
        assert rank[name]["losses"] > 0
        assert rank[name]["equal"]


@pytest.mark.parametrize("topology", ["2x2", "4x1"])
def test_several_ranks_a_card_train_over_it_too(found, topology: str) -> None:
    results = launch_raw(4, train_over, ("nccl_rma", topology, TRAINED[1:3]), timeout=200, backend="cpu:gloo,cuda:gloo")
    words = [str(r.error) for r in results]
    if all(r.error_type == "TideFallbackError" and "TIDE-F029" in w for r, w in zip(results, words, strict=True)):
        pytest.skip(f"this NCCL does not connect several ranks of a card: {words[0].splitlines()[-1]}")
    assert [r.error for r in results] == [None] * 4
    for found_by_rank in (r.value for r in results):
        for case in TRAINED[1:3]:
            one = found_by_rank[case.name]
            assert one["placed"] == [{("tide", topology, "local")}, {("tide", topology, "nccl_rma")}]
            assert one["equal"]


@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_a_lost_peer_ends_the_others_in_time(found, how: str, tmp_path: Path) -> None:
    lost_peer.check(f"{how} 2x1 nccl_rma", tmp_path, backend(), torch.cuda.device_count())
