"""The host side of the GPU benchmarks, with stand-ins for CUDA: complete rows, and the same calls on all ranks."""

from __future__ import annotations

import importlib
import sys
import types
import weakref

import pytest
import torch
from harness import launch

from tide_strategies.cli.bench.rows import heading, line, write_picture

TUNING = {"sum_ctas": None, "chunk_bytes": None}
COLLECTIVES = {"shard_bytes": 2**18, "params": 5, **TUNING}


def _measure(rank, world, arg):
    import cuda_stand_in

    cuda_stand_in.install()
    from tide_strategies.cli.bench import collectives, interference, pairs_cuda, step, victims
    from tide_strategies.cli.bench.ranks import Place

    class GpuPlace(Place):
        on_gpu = True

    place = GpuPlace(rank, world, torch.device("cpu"))
    pairs_cuda.CudaEngine, pairs_cuda.CudaGroup = cuda_stand_in.CudaEngine, cuda_stand_in.CudaGroup
    pairs_cuda.sum_kernels = lambda device: None
    pairs_cuda.cuda = types.SimpleNamespace(order=cuda_stand_in.order)
    pairs_cuda._pushes = lambda place, nbytes: lambda: None
    victims._LARGE, victims._ELEMENTWISE_BYTES = (64, 64, 64), 2**16
    probe = types.ModuleType("tide_strategies.cli.bench.probe_kernel")
    sys.modules[probe.__name__] = probe

    class Kernel:
        def __getitem__(self, grid):
            def launch(record, spin_ns, num_warps):
                assert record.shape == (*grid, 2)
                record[:, 0] = torch.arange(*grid) % cuda_stand_in.SMS
                record[:, 1] = 5_000_000_000

            return launch

    probe.note_sm = Kernel()
    gemm = types.ModuleType("tide_strategies.cli.bench.gemm_kernel")
    sys.modules[gemm.__name__] = gemm
    gemm.TILE_M, gemm.TILE_N, gemm.TILE_K, gemm.WARPS, gemm.STAGES = 32, 32, 16, 4, 2

    class Gemm:
        def __getitem__(self, grid):
            def launch(a, b, out, n, k, *tiles, num_warps, num_stages):
                assert grid == (4,)
                assert (n, k, *tiles) == (64, 64, 32, 32, 16)
                out.copy_(a @ b.t())

            return launch

    gemm.multiply = Gemm()
    names = ("all_gather", "all_gather_cast", "reduce_scatter")
    found = {
        "collectives": [r for n in names for r in collectives.measure(place, n, 2**18, 5, 3, TUNING)],
        "victims": [
            row
            for victim in interference.VICTIMS
            for row in interference.measure(place, victim, (64, 64, 64), COLLECTIVES, 2)
        ],
        "probe": list(interference.probe(place, COLLECTIVES)),
        "steps": list(
            step.measure(
                place,
                tokens=[32],
                names=["compute only", "stock FSDP2"],
                width=32,
                hidden=64,
                depth=1,
                sequence=32,
                steps=3,
                optimizer=False,
                options={},
                trace=True,
            )
        ),
    }
    from tide_strategies.cli.bench.variants import IN_PLACE, ModelSize, build, dispose

    held = [build(IN_PLACE, Place(rank, world, torch.device("cpu")), ModelSize(32, 64, 1), {})]
    held[0].forward_backward(torch.randn(1, 4, 32).bfloat16())
    model = weakref.ref(held[0].model)
    dispose(held, place)
    found["model is gone"] = model() is None
    return {"rows": found, "calls": len(cuda_stand_in.CudaGroup.log), "last": cuda_stand_in.CudaGroup.log[-8:]}


@pytest.fixture(scope="module")
def ranks():
    return launch(2, _measure, timeout=200)


def test_all_ranks_make_the_same_calls(ranks):
    assert ranks[0]["calls"] == ranks[1]["calls"] > 100
    assert ranks[0]["last"] == ranks[1]["last"]


def test_what_was_measured_is_let_go(ranks):
    assert ranks[0]["rows"]["model is gone"]
    assert ranks[1]["rows"]["model is gone"]


def test_rows_of_collectives_are_complete(ranks):
    rows = ranks[0]["rows"]["collectives"]
    assert [r["collective"] for r in rows] == ["all_gather", "all_gather_cast", "reduce_scatter"]
    for row in rows:
        assert min(row[k] for k in ("ours_ms", "stock_ms", "limit_ms", "ours_host_us", "stock_host_us")) > 0
        assert [n for n in row["notes"] if "no SM time: the profiler" in n], (
            "there is no GPU to profile, and it says so"
        )
        assert "ours_kernels" not in row
    assert rows[0]["limit_gbps"] > 0


def test_rows_of_victims_are_complete(ranks):
    rows = ranks[0]["rows"]["victims"]
    beside = ["ours all-gather", "stock all-gather", "ours reduce-scatter", "stock reduce-scatter", "raw copies"]
    assert [r["beside"] for r in rows] == 4 * beside
    for row in rows:
        assert row["slowdown_percent"] == pytest.approx(100 * (row["beside_ms"] / row["alone_ms"] - 1))
        assert row["covered_percent"] == 100, "collectives are enqueued last, and here run as they are enqueued"
        assert row["collective_beside_ms"] is None, "so none of them ended while the victim ran"


@pytest.mark.parametrize(
    ("benchmark", "rows"),
    [("collectives", "collectives"), ("interference", "victims"), ("interference", "probe"), ("step", "steps")],
)
def test_rows_can_be_written_and_drawn(ranks, benchmark, rows, tmp_path):
    pytest.importorskip("matplotlib")
    module = importlib.import_module(f"tide_strategies.cli.bench.{benchmark}")
    found = ranks[0]["rows"][rows]
    widths = {len(line(module.columns("cuda"), row)) for row in found}
    assert widths == {len(heading(module.columns("cuda")))}, "cells fit their columns"
    assert write_picture(tmp_path / "rows.png", benchmark, module.draw, found)
    assert (tmp_path / "rows.png").stat().st_size > 1000


def test_a_probe_that_meets_nobody_finds_no_sm(ranks):
    rows = ranks[0]["rows"]["probe"]
    assert rows[0]["beside"] == "nothing"
    assert {(r["sms"], r["displaced_percent"], len(r["share_of_launches_by_sm"])) for r in rows} == {(0, 0.0, 132)}


def test_rows_of_steps_have_host_time_and_memory(ranks):
    compute, stock = ranks[0]["rows"]["steps"]
    assert stock["exposed_ms"] == stock["step_ms"] - compute["step_ms"]
    for row in (compute, stock):
        assert row["host_ms"] > 0
        assert row["allocated_gib"] == 3
        assert row["device_gib"] == 0
        assert row["arena_gib"] is None
        assert [n for n in row["notes"] if "no trace: the profiler" in n], "there is no GPU to record"
