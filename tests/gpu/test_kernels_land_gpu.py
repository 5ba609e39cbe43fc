"""The landing kernel on a GPU: the promised bytes for every number of partials, dtype, alignment and grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tide_strategies.kernels.compile import compile_land, launch_with_triton
from tide_strategies.kernels.reference import Trial, make_land_trial


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("out", "accumulate"), [("fp32", False), ("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("sources", [1, 2, 8])
def test_bytes_are_the_promised_ones(sources: int, out: str, accumulate: bool, aligned: bool, monkeypatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.cuda.current_device()
    kernel = compile_land(sources, 6, out, accumulate, aligned, device)
    for grid, factor, divides in ((1, 3.0, True), (8, 6.0, True), (8, 0.25, False), (132, 3.0, True)):
        made: dict[str, Any] = {"tiles": 21, "seed": grid, "factor": factor, "divides": divides}
        trial = make_land_trial(sources, 6, kernel.tile, out, accumulate, aligned, "cuda", **made)

        def launch(trial: Trial, grid: int = grid) -> None:
            launch_with_triton(kernel, trial, grid)
            torch.cuda.synchronize()

        assert trial.passes(launch)
    assert kernel.spills == 0
