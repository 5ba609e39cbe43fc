"""The forecast of a step's peak is within 5% of what GPUs really hold."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import pytest
import torch
from cards import backend
from harness import launch
from sharded_gpt import shard
from torch import nn

from tide_strategies import apply_tide
from tide_strategies.cli.demo_model import GPT, GPTConfig, next_byte_loss
from tide_strategies.cli.main import main

SIZE = GPTConfig(layers=8, width=1024, heads=16, context=512)
WINDOWS = 8
MODES = ("in_place", "slot_reuse")


def planned(size: GPTConfig = SIZE) -> tuple[GPT, Callable[[nn.Module], torch.Tensor]]:
    """For ``tide plan``, and for the ranks."""

    def step(model: nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device
        return next_byte_loss(model, torch.zeros(WINDOWS, size.context + 1, dtype=torch.long, device=device))

    return GPT(size), step


def _peak(world: int, size: GPTConfig, mode: str) -> int:
    """Bytes above what there is without the model."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model, step = planned(size)
    shard(model, world)
    handle = apply_tide(model, {"timeout_s": 60, "strict": True, "reduce_scatter.mode": mode})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for number in range(3):
        if number == 1:  # optimizer states are made
            torch.cuda.reset_peak_memory_stats()
        step(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before + sum(handle.report().arena_bytes.values())
    handle.close()
    return held


def _peaks(rank: int, world: int, _: None) -> dict[str, int]:
    _peak(world, GPTConfig(layers=1, width=64, heads=2, context=64), "in_place")  # what the libraries take once
    return {mode: _peak(world, SIZE, mode) for mode in MODES}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, int]]:
    return launch(2, _peaks, timeout=150, backend=backend())


@pytest.mark.parametrize("mode", MODES)
def test_a_step_peaks_within_5_percent_of_the_forecast(measured, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan test_step_peak_gpu:planned --gpus 2 --device cuda --precision bf16-mixed --json --mode"
    assert main([*arguments.split(), mode]) == 0
    forecast = json.loads(capsys.readouterr().out)["peak"]["tide"]
    with capsys.disabled():
        print(f"\n{mode}: forecast {forecast / 2**20:.1f} MiB, measured {[m[mode] / 2**20 for m in measured]}")
    for peaks in measured:
        assert peaks[mode] == pytest.approx(forecast, rel=0.05)
