"""``tide bench`` on GPUs, at sizes that say nothing about speed: everything runs, on one card or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import stock_runs

from tide_strategies.cli import main as command

cards = torch.cuda.device_count()


def bench(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "rows.json"
    code = command.main(["bench", arguments[0], "--device", "cuda", "--json", str(out), *arguments[1:]])
    found = json.loads(out.read_text())
    assert found["failures"] == []
    assert code == 0
    return found["rows"]


def test_collectives(tmp_path: Path) -> None:
    rows = bench(tmp_path, "collectives", "--shard-mib", "1", "--params", "5", "--repeats", "3")
    assert [r["collective"] for r in rows] == ["all_gather", "all_gather_cast", "reduce_scatter"]
    for row in rows:
        assert min(row["ours_ms"], row["limit_ms"], row["ours_host_us"]) > 0
        assert (row["stock_ms"] is not None) == stock_runs(max(cards, 2))
    if "ours_kernels" in rows[0]:
        assert rows[0]["ours_kernels"] == 0, "an all-gather without a cast runs on copy engines alone"
        assert rows[0]["ours_copies"] == 5 * max(cards, 2), "a shard goes to every peer and to the own landing"
        assert min(r["ours_copy_us"] for r in rows) > 0
        assert rows[2]["ours_kernels"] > 0
        assert rows[2]["ours_ctas"] <= 132
    else:
        assert any("no SM time" in n for n in rows[0]["notes"])


def test_steps(tmp_path: Path) -> None:
    rows = bench(tmp_path, "step", "--widths", "512", "--depths", "3", "--tokens", "128", "--steps", "3", "--trace")
    found = {r["variant"]: r for r in rows}
    ours = found["TIDE in-place"]
    assert ours["path"] == "4 of 4 groups accelerated"
    assert ours["arena_gib"] > 0
    assert ours["device_gib"] >= ours["arena_gib"]
    traced = [r for r in rows if "kernels_ms" in r]
    assert traced or any("no trace" in n for n in ours["notes"])
    for row in traced:
        assert row["kernels_ms"] > 0
        assert row["long_gaps_ms"] <= row["gaps_ms"]
    if stock_runs(max(cards, 2)):
        stock = found["stock FSDP2"]
        assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-3)
        assert stock["exposed_ms"] == stock["step_ms"] - found["compute only"]["step_ms"]


def test_interference(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    rows = bench(tmp_path, "interference", "--shard-mib", "4", "--params", "5", "--repeats", "2")
    beside = 5 if stock_runs(max(cards, 2)) else 3
    assert len(rows) == 4 * beside + beside + 1
    for row in rows[: 4 * beside]:
        assert min(row["alone_ms"], row["beside_ms"], row["collective_ms"]) > 0
    quiet = rows[4 * beside]
    assert quiet["beside"] == "nothing"
    if cards > 1:  # on a shared card the other rank's probe is there as well
        assert quiet["sms"] == 0, "nobody kept the probe's thread blocks out"
