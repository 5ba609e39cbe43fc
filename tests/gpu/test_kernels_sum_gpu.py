"""The sum kernel on a GPU: the promised bytes for every dtype, alignment, grid and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tide_strategies.kernels.compile import compile_sum, launch_with_triton
from tide_strategies.kernels.reference import Trial, make_trial
from tide_strategies.kernels.tiles import POINTER_COUNTS, SumShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")]


@pytest.fixture(autouse=True)
def _needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def check(
    staged: int,
    gradients: int,
    grad: str,
    out: str,
    aligned: bool,
    *,
    tiles: int = 21,
    grid: int = 4,
    shape: SumShape | None = None,
    special: bool = False,
    factor: float = 3.0,
    divides: bool = True,
) -> None:
    kernel = compile_sum(staged, gradients, grad, out, aligned, torch.cuda.current_device(), shape=shape)
    scaling: dict[str, Any] = {"factor": factor, "divides": divides}
    trial = make_trial(staged, gradients, kernel.tile, grad, out, aligned, "cuda", tiles=tiles, seed=3, **scaling)
    if special:
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38])
        random = torch.Generator().manual_seed(4)
        for tensor in (trial.staging, *trial.gradients):
            chosen = (torch.rand(tensor.shape, generator=random) < 0.3).cuda()
            picks = torch.randint(0, len(values), tensor.shape, generator=random).cuda()
            tensor[chosen] = values.to("cuda", tensor.dtype)[picks[chosen]]

    def launch(trial: Trial) -> None:
        launch_with_triton(kernel, trial, grid)
        torch.cuda.synchronize()

    assert trial.passes(launch)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("grad", "out"), DTYPES)
@pytest.mark.parametrize("staged", [0, 1, 3, 7])
def test_bytes_are_the_promised_ones(staged: int, grad: str, out: str, aligned: bool) -> None:
    for factor, divides in ((3.0, True), (0.25, False), (1.0, False)):
        check(staged, 4, grad, out, aligned, factor=factor, divides=divides)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("grad", "out"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_nan_infinities_signed_zeros_and_subnormals(grad: str, out: str, aligned: bool) -> None:
    for factor, divides in ((3.0, True), (0.5, False)):
        check(3, 4, grad, out, aligned, special=True, factor=factor, divides=divides)


@pytest.mark.parametrize("pointers", POINTER_COUNTS)
def test_every_gradient_is_found(pointers: int) -> None:
    check(1, pointers, "bf16", "fp32", True, tiles=2 * pointers, grid=8)


@pytest.mark.parametrize("grid", [1, 8, 32, 132])
def test_any_grid_gives_the_same_bytes(grid: int) -> None:
    check(1, 4, "bf16", "fp32", True, tiles=70, grid=grid)


@pytest.mark.parametrize("shape", [SumShape(4096, 8, 1), SumShape(4096, 8, 3), SumShape(2048, 4, 4)], ids=str)
@pytest.mark.parametrize("staged", [1, 7])
def test_any_shape_gives_the_same_bytes(staged: int, shape: SumShape) -> None:
    check(staged, 4, "bf16", "fp32", True, shape=shape, tiles=70)


def test_kernels_are_compiled_once_and_do_not_spill() -> None:
    first = compile_sum(7, 13, "bf16", "fp32", True, 0)
    assert compile_sum(7, 16, "bfloat16", "float32", True, 0) is first
    assert first.pointers == 16
    assert first.spills == 0
    assert first.function != 0
    assert first.threads == 32 * first.shape.warps
