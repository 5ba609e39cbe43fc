"""Several ranks on one card: the same results as stock FSDP2, and the same ends when a peer fails.

Stock communicates through the host here, since NCCL refuses two ranks on one card; a sum of two addends is the same in
any order.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from harness import launch, launch_raw
from models import BF16, Case, batch, build
from staged import through_the_host
from test_fsdp2_gpu import GPU_CASES, deterministic
from test_fsdp2_parity import compare

from tide_strategies import apply_tide

BACKEND = "cpu:gloo,cuda:gloo"
FOUR = [
    Case("fp32"),
    Case("uneven rows in bf16", uneven=True, policy=BF16),
    Case("hybrid sharding", hsdp=True, force_sum=True),
]


def _compare(rank: int, world: int, cases: list[Case]) -> dict[str, float]:
    torch.cuda.set_device(0)
    deterministic()
    return compare(rank, world, cases, device="cuda", stock=through_the_host)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, float]:
    return launch(2, _compare, GPU_CASES, timeout=300, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in GPU_CASES])
def test_two_ranks_are_bit_equal_to_stock(two_ranks, name: str) -> None:
    assert two_ranks[name] == 0.0


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, float]:
    return launch(4, _compare, FOUR, timeout=300, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in FOUR])
def test_four_ranks_agree_with_stock_within_rounding(four_ranks, name: str) -> None:
    # The bound of test_fsdp2_parity.py: four addends in another order.
    assert four_ranks[name] < 1e-4


TIMEOUT_S = 4.0


def _fail(rank: int, world: int, how: str) -> None:
    """Train until rank 1 stops in the way named; every rank says what it saw and when."""
    torch.cuda.set_device(0)
    model = build(Case("victim", policy=BF16), world, device="cuda")
    apply_tide(model, {"timeout_s": TIMEOUT_S})
    for step in range(4):
        if step == 2 and rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * TIMEOUT_S)
        started = time.monotonic()
        try:
            model(batch(step, rank).cuda()).sum().backward()
            torch.cuda.synchronize()
        except Exception as e:
            took = time.monotonic() - started
            raise RuntimeError(f"{type(e).__name__} after {took:.1f} s: {e}") from e


@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_a_lost_peer_ends_the_others_in_time(how: str, capfd: Any) -> None:
    results = launch_raw(2, _fail, how, timeout=90, backend=BACKEND)
    words = capfd.readouterr().err
    error = str(results[0].error)
    if how == "stalled":
        assert "TideTimeoutError" in error, error
        assert f"no progress within timeout_s={TIMEOUT_S:g}: rank 0" in words
        assert "of rank 1: expected" in words
        assert "TidePeerError" in str(results[1].error), results[1].error
    else:
        assert "TidePeerError" in error, error
        assert "rank 1 is dead" in words
        assert results[1].exit_code == -signal.SIGKILL
    took = re.search(r"Error after ([0-9.]+) s:", error)
    assert took is not None, error
    assert float(took[1]) < 2 * TIMEOUT_S + 2
