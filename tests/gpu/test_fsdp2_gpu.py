"""Training on GPUs through TIDE equals training through stock FSDP2."""

from __future__ import annotations

import os

import pytest
import torch
from cards import WITHOUT_NCCL, backend, stock_runs
from harness import launch
from models import BF16, Case
from test_fsdp2_parity import CASES, compare, inference_before_training

LEFT_OUT = {"compiled blocks"}
SLOT_REUSE = {"reduce_scatter.mode": "slot_reuse"}
CACHED = {"all_gather.cache": "microbatch", "all_gather.slots": 4}
GPU_CASES = [
    *(c for c in CASES if c.name not in LEFT_OUT),
    Case("slot reuse", policy=BF16, config=SLOT_REUSE),
    Case("slot reuse with uneven rows", uneven=True, policy=BF16, config=SLOT_REUSE),
    Case("slot reuse with everything cached", policy=BF16, accumulate=3, config=SLOT_REUSE | CACHED),
    Case("slot reuse without sync", policy=BF16, accumulate=3, sync_every=False, config=SLOT_REUSE),
    Case("slot reuse of fp32", accumulate=2, sync_every=False, config=SLOT_REUSE),
    Case("slot reuse and a model used twice", twice=True, policy=BF16, config=SLOT_REUSE),
    Case("slot reuse with unused parameters", unused=True, frozen=True, policy=BF16, config=SLOT_REUSE),
    Case("slot reuse without reshard", reshard=False, policy=BF16, config=SLOT_REUSE),
    Case("slot reuse in one slot", policy=BF16, config=SLOT_REUSE | {"all_gather.slots": 1}),
    Case("blocks compiled by inductor", compile="inductor", policy=BF16, steps=2),
    Case("poisoned slots under slot reuse", poison=True, policy=BF16, config=SLOT_REUSE),
]


def deterministic() -> None:
    """Make this process's own kernels give the same bits every time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def _compare(rank: int, world: int, cases: list[Case]) -> dict[str, float]:
    deterministic()
    return compare(rank, world, cases, device="cuda")


def _everything(rank: int, world: int, _: None) -> tuple[dict[str, float], tuple[bool, bool]]:
    return _compare(rank, world, GPU_CASES), inference_before_training(rank, world, "cuda")


@pytest.fixture(scope="module")
def two_gpus() -> list[tuple[dict[str, float], tuple[bool, bool]]]:
    if not stock_runs():
        pytest.skip(WITHOUT_NCCL)
    return launch(2, _everything, timeout=220, backend=backend())


@pytest.mark.parametrize("name", [c.name for c in GPU_CASES])
def test_two_gpus_are_bit_equal_to_stock(two_gpus, name: str) -> None:
    assert two_gpus[0][0][name] == 0.0


def test_inference_mode_before_training_works_where_stock_cannot(two_gpus) -> None:
    assert [equal for _, equal in two_gpus] == [(True, True)] * 2
