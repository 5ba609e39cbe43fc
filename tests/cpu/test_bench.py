"""``tide bench`` on the CPU, end to end, and the arithmetic behind its tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from tide_strategies.cli import main as command
from tide_strategies.cli.bench.interference import jobs as interference_jobs
from tide_strategies.cli.bench.interference_work import launches_of
from tide_strategies.cli.bench.kernels import KernelActivity, activity_of, busy, overlap
from tide_strategies.cli.bench.model import Block, block_batch, head_width, hidden_width
from tide_strategies.cli.bench.probe import occupied
from tide_strategies.cli.bench.rows import Column, header, heading, line, ratio
from tide_strategies.cli.bench.step import add_arguments, chosen_variants, jobs, rows_of, tide_options
from tide_strategies.cli.bench.step_trace import parts_of
from tide_strategies.cli.bench.step_work import NO_EFFECT
from tide_strategies.cli.bench.variants import (
    AUTO,
    COMPUTE,
    IN_PLACE,
    SLOT_REUSE,
    STOCK,
    STOCK_AGAIN,
    SYMM_MEM,
    VARIANTS,
    ModelSize,
)
from tide_strategies.cli.bench.victims import one_wave_shape
from tide_strategies.errors import TideConfigError

PNG = b"\x89PNG"


def bench(folder, *arguments: str) -> dict:
    """Run ``tide bench`` among two CPU processes; its JSON."""
    out, picture = folder / "rows.json", folder / "rows.png"
    common = ["--device", "cpu", "--ranks", "2", "--json", str(out), "--plot", str(picture)]
    assert command.main(["bench", arguments[0], *common, *arguments[1:]]) == 0
    pytest.importorskip("matplotlib")
    assert picture.read_bytes()[:4] == PNG
    return json.loads(out.read_text())


def test_collectives(tmp_path, capsys):
    found = bench(tmp_path, "collectives", "--shard-mib", "0.25", "--params", "3", "--repeats", "3")
    printed = capsys.readouterr().out
    assert found["failures"] == []
    assert found["about"]["torch"] == torch.__version__
    assert found["about"]["options"] == {"params": 3, "repeats": 3, "shard_mib": [0.25]}
    assert [r["collective"] for r in found["rows"]] == ["all_gather", "reduce_scatter"]
    for row in found["rows"]:
        assert row["shard_mib"] == pytest.approx(0.25, rel=0.2)
        assert min(row[k] for k in ("ours_ms", "stock_ms", "limit_ms", "ours_host_us")) > 0
        assert row["stock_to_ours"] == row["stock_ms"] / row["ours_ms"]
        assert row["percent_of_limit"] == pytest.approx(100 * row["limit_ms"] / row["ours_ms"])
        assert f"{row['ours_ms']:.3f}" in printed
    assert "# torch:" in printed


def test_steps(tmp_path, capsys):
    size = ["--widths", "64", "--depths", "2", "--tokens", "32,64", "--sequence", "32", "--steps", "3"]
    found = bench(tmp_path, "step", *size, "--optimizer", "--variants", ",".join(VARIANTS))
    assert found["failures"] == []
    for r in found["rows"]:
        r["variant"] = r["variant"].removesuffix(NO_EFFECT)
    assert [(r["tokens"], r["variant"]) for r in found["rows"]] == [(t, v) for t in (32, 64) for v in VARIANTS]
    for tokens in (32, 64):
        row = {r["variant"]: r for r in found["rows"] if r["tokens"] == tokens}
        assert row[STOCK]["to_stock"] == row[STOCK]["exposed_to_stock"] == 1.0
        assert row[STOCK]["exposed_ms"] == row[STOCK]["step_ms"] - row[COMPUTE]["step_ms"]
        losses = {name: r["loss"] for name, r in row.items() if name not in (COMPUTE, SYMM_MEM)}
        assert len(losses) == 5
        assert set(losses.values()) == {row[STOCK]["loss"]}, "the same training, bit for bit"
        assert row[IN_PLACE]["path"] == "3 of 3 groups accelerated"
        assert row[IN_PLACE]["groups"] == "3/3"
        assert row[AUTO]["groups"] in {f"{n}/3" for n in range(4)}, "what is faster here is not this test's affair"
        assert row[STOCK]["groups"] is None
        assert "step_ms" not in row[SYMM_MEM], "it needs NCCL"
    assert "Note: FSDP2+SymmMem: needs NCCL" in capsys.readouterr().out


def test_wrong_usage_is_told(tmp_path, capsys):
    if not torch.cuda.is_available():
        assert command.main(["bench", "collectives", "--device", "cuda"]) == 1
        assert "no GPU" in capsys.readouterr().err
    assert command.main(["bench", "interference", "--device", "cpu"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    missing = str(tmp_path / "no" / "rows.json")
    assert command.main(["bench", "collectives", "--device", "cpu", "--json", missing]) == 2
    assert "no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["bench", "collectives", "--ranks", "1"])
    assert "at least 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["collectives", "step", "interference"])
def test_every_column_is_explained(what, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["bench", what, "--help"])
    assert end.value.code == 0
    assert "slowest rank" in capsys.readouterr().out


def test_options_of_tide_are_read_and_checked():
    assert tide_options(["reduce_scatter.sum_ctas=32", "all_gather.cache=off"]) == {
        "reduce_scatter.sum_ctas": 32,
        "all_gather.cache": "off",
    }
    with pytest.raises(TideConfigError, match="NAME=VALUE"):
        tide_options(["reduce_scatter"])
    with pytest.raises(TideConfigError, match="unknown TIDE option"):
        tide_options(["reduce_scatter.sums=1"])


def test_variants_are_named_as_in_the_table():
    assert chosen_variants(None, sweep=False) == [COMPUTE, STOCK, SYMM_MEM, IN_PLACE, SLOT_REUSE]
    assert chosen_variants(None, sweep=True) == [COMPUTE, STOCK, STOCK_AGAIN, IN_PLACE, AUTO]
    assert chosen_variants("TIDE in-place, stock FSDP2", sweep=True) == [STOCK, IN_PLACE]
    with pytest.raises(TideConfigError, match="there are: compute only"):
        chosen_variants("stock", sweep=False)


@pytest.mark.parametrize(
    ("words", "sizes", "swept"),
    [
        ((), [(256, 2)], False),
        (("--widths", "64,128", "--depths", "1,2"), [(64, 1), (64, 2), (128, 1), (128, 2)], False),
        (("--depths", "3"), [(256, 3)], False),
        (("--sweep",), [(64, 1), (64, 8), (128, 4), (256, 4), (512, 2), (1024, 2)], True),
        (("--sweep", "1024x2,64x1", "--steps", "3"), [(1024, 2), (64, 1)], True),
        (("--sweep", "--widths", "64"), [(64, 2)], True),
    ],
)
def test_sizes_are_those_that_are_stated(words, sizes, swept):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    made = jobs(parser.parse_args(["--tokens", "32,16", *words]), "cpu")
    assert [(j.arguments["width"], j.arguments["depth"]) for j in made] == sizes
    assert all(j.arguments["tokens"] == [16, 32] for j in made)
    assert all((AUTO in j.arguments["names"]) == swept for j in made)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "64"), "sizes are WIDTHxDEPTH, such as 4096x16; got '64'"),
        (("--sweep", "64x1,x2"), "must be a whole number from 1 to 10^9; got ''"),
        (("--sweep", "64x0"), "must be a whole number from 1 to 10^9; got '0'"),
        (("--sweep", "64x1", "--widths", "64"), "state one of them"),
        (("--tokens", "1e3"), "must be a whole number from 1 to 10^9; got '1e3'"),
    ],
)
def test_sizes_that_are_none_are_refused_in_words(words, says, capsys):
    with contextlib.suppress(SystemExit):
        assert command.main(["bench", "step", "--device", "cpu", *words]) == 1
    assert says in capsys.readouterr().err


def test_rows_line_up_and_missing_values_show_as_a_dash():
    columns = [Column("name", "name"), Column("ms", "ms", ".2f"), Column("n", "a long heading")]
    assert line(columns, {"name": "x", "ms": 1.234, "n": None}).split() == ["x", "1.23", "-"]
    assert len(heading(columns)) == len(line(columns, {"name": "x", "ms": 1.0, "n": 3}))
    assert ratio(1.0, None) is None
    assert ratio(None, 1.0) is None
    assert ratio(1.0, 0.0) is None
    assert ratio(1.0, 4.0) == 0.25
    assert header({"gpus": ["A", "A", "B"], "environment": {"X": "1"}}) == "# gpus: 2 x A, B\n# environment: X=1"


def test_exposed_time_is_what_the_step_takes_beyond_compute():
    times = {COMPUTE: {"step_ms": 10.0}, STOCK: {"step_ms": 14.0}, IN_PLACE: {"step_ms": 11.0}}
    row = {r["variant"]: r for r in rows_of(VARIANTS, times, {}, {"tokens": 1}, {IN_PLACE: "ours"})}
    assert row["ours"]["exposed_ms"] == 1.0
    assert row["ours"]["exposed_to_stock"] == 0.25
    assert row["ours"]["to_stock"] == 11 / 14
    assert row[COMPUTE]["exposed_ms"] is None
    without_stock = {r["variant"]: r for r in rows_of(VARIANTS, {COMPUTE: {"step_ms": 10.0}}, {}, {}, {})}
    assert without_stock[STOCK]["exposed_ms"] is None
    assert without_stock[COMPUTE]["to_stock"] is None


def test_the_default_block_has_134_million_parameters():
    assert ModelSize(4096, hidden_width(4096), 8).block_parameters == 134_750_208
    for width in (16, 64, 256, 1024, 8192):
        assert width % head_width(width) == 0
        assert hidden_width(width) > width


def test_a_block_is_causal_and_reaches_every_parameter():
    torch.manual_seed(0)
    block = Block(32, 64)
    x = torch.randn(1, 6, 32)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(block(x)[:, :4], block(changed)[:, :4])
    assert not torch.equal(block(x)[:, 4:], block(changed)[:, 4:])
    block(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in block.parameters())


def test_tokens_divide_into_sequences():
    assert block_batch(96, 32, 8, torch.device("cpu"), 1).shape == (3, 32, 8)
    assert block_batch(16, 32, 8, torch.device("cpu"), 1).shape == (1, 16, 8)
    with pytest.raises(ValueError, match="33 tokens"):
        block_batch(33, 32, 8, torch.device("cpu"), 1)


def _event(kind, name, begin, duration, *grid, stream=7):
    return {"cat": kind, "name": name, "ts": begin, "dur": duration, "args": {"grid": list(grid), "stream": stream}}


def _kernel(name, begin, duration, *grid, stream=7):
    return _event("kernel", name, begin, duration, *grid, stream=stream)


def test_kernels_and_copies_of_a_trace_are_added_up():
    def call(at):
        """30 us: a copy of 10, beside it for 4 a sum of 16 thread blocks, 6 of nothing, a cast of 6, 4 of nothing."""
        return [
            _event("gpu_memcpy", "Memcpy PtoP", at, 10),
            _kernel("sum", at + 6, 8, 16, 1, 1),
            _kernel("cast", at + 20, 6, 100, 20, 1),
        ]

    events = [_kernel("spin_kernel", 0, 50, 1), *call(60), *call(90), *call(120)]
    assert activity_of(events, 2, 132) == KernelActivity(2.0, 14.0, 2000, 8 * 16 + 6 * 132, "sum", 1.0, 10.0, 10.0)
    copies = [_event("gpu_memcpy", "Memcpy PtoP", at, 5) for at in (0, 7)]
    assert activity_of(copies, 1, 132) == KernelActivity(0.0, 0.0, 0, 0.0, "", 1.0, 5.0, 2.0)


def test_time_under_way_is_counted_once():
    events = [_kernel("a", 0, 10), _kernel("b", 2, 3), _kernel("c", 8, 4), _kernel("d", 20, 1)]
    assert busy(events) == 13
    assert overlap(_kernel("x", 9, 12), events) == 4
    assert overlap(_kernel("x", 12, 8), events) == 0


def test_launches_beside_kernels_are_told_from_those_beside_copies_alone():
    quiet = [_kernel("gemm", at, 100) for at in (0, 100)]
    beside = [
        _event("gpu_memcpy", "Memcpy PtoP", 0, 290),
        _kernel("gemm", 0, 104),
        _kernel("gemm", 110, 130),
        _kernel("sum", 120, 20, stream=9),
        _kernel("gemm", 250, 100),  # ends after the copies: nobody was beside it to its end
    ]
    assert launches_of("gemm", quiet, beside) == {"kernel_us": 10.0, "apart_percent": pytest.approx(4.0)}
    assert launches_of("gemm", quiet, quiet) == {"kernel_us": None, "apart_percent": None}


def test_a_traced_step_is_cut_into_its_parts():
    def step(at):
        mark = _kernel("spin_kernel", at, 2, 1)
        own = [_kernel("a", at + 12, 10), _kernel("b", at + 25, 10), _kernel("c", at + 65, 5)]
        return [mark, *own[:1], _kernel("cast", at + 20, 9, stream=9), *own[1:], _kernel("spin_kernel", at + 77, 2, 1)]

    events = [e for at in (0, 100, 200, 300) for e in (*step(at), _kernel("adam", at + 90, 5))]
    assert parts_of(events) == {
        "lead_ms": 0.010,
        "kernels_ms": 0.025,
        "gaps_ms": 0.033,
        "long_gaps_ms": 0.030,
        "tail_ms": 0.007,
    }
    assert parts_of(events[:-2]) == "the trace has 7 marks"
    assert parts_of([e for e in events if e["name"] == "spin_kernel"]) == "the trace has a step without kernels"


@pytest.mark.parametrize("sms", [78, 108, 114, 131, 132, 144, 148])
def test_the_one_wave_gemm_has_a_tile_for_every_sm(sms):
    m, n, _ = one_wave_shape(sms)
    assert (m // 128) * (n // 256) == sms


_MULTIPLY = """
import torch
from tide_strategies.cli.bench.gemm_kernel import multiply
# Not bf16, which the interpreter does not multiply.
a, b = torch.randint(-2, 3, (32, 48)).half(), torch.randint(-1, 2, (64, 48)).half()
out = torch.zeros(32, 64, dtype=torch.half)
multiply[(2 * 2,)](a, b, out, 64, 48, 16, 32, 16)
assert torch.equal(out, (a.float() @ b.float().t()).half())
"""


def test_the_many_wave_gemm_multiplies():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", _MULTIPLY], env=environment, capture_output=True, text=True, timeout=60)
    if "only 0-dimensional arrays can be converted" in ran.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy (2.4 or later)")
    assert ran.returncode == 0, ran.stderr


def test_the_probe_finds_the_sms_that_kept_a_thread_block_out():
    sms, spin = 4, 1000
    sm = torch.arange(sms).repeat(2)
    on_time = torch.arange(2 * sms) + 5_000_000_000
    late = on_time.clone()
    late[2] += spin  # the first thread block of SM 2 had to wait for the other
    records = torch.stack([torch.stack([sm, on_time], dim=1), torch.stack([sm, late], dim=1)])
    assert occupied(records, sms, spin).tolist() == [[False] * 4, [False, False, True, False]]


def test_interference_has_a_job_per_victim_and_the_probe():
    import argparse

    options = argparse.Namespace(
        shard_mib=32.0, params=30, sum_ctas=None, chunk_mib=None, repeats=9, gemm=None, no_probe=False
    )
    assert [j.label for j in interference_jobs(options, "cuda")] == [
        "one-wave GEMM",
        "many-wave GEMM",
        "persistent GEMM",
        "elementwise",
        "SM-id probe",
    ]
    options.no_probe = True
    assert len(interference_jobs(options, "cuda")) == 4
    assert math.isclose(interference_jobs(options, "cuda")[0].arguments["collectives"]["shard_bytes"], 2**25)
