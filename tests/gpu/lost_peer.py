"""What becomes of the others when a rank on a GPU stalls or is killed, whatever connects them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import torch
from harness import launch_raw
from models import BF16, Case, batch, build

from tide_strategies import apply_tide

TIMEOUT_S = 4.0


def _fail(rank: int, world: int, given: tuple[str, Path, int]) -> None:
    """Train until rank 1 stops in the way named; every rank says what it saw and when, and logs into its own file."""
    how, folder, cards = given
    os.dup2(os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    torch.cuda.set_device(rank % cards)
    model = build(Case("victim", policy=BF16), world, device="cuda")
    how, *nodes = how.split()
    apply_tide(model, {"timeout_s": TIMEOUT_S, **dict(zip(("topology", "rail"), nodes, strict=False))})
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


def check(how: str, folder: Path, backend: str, cards: int) -> None:
    """Rank 1 of two is lost: rank 0 ends in time, with the error and the words for it.

    Args:
        how: "stalled" or "killed", then the topology and the rail where they are not the usual ones.
        folder: for the ranks' logs.
        backend: of the process group.
        cards: how many the ranks share.
    """
    results = launch_raw(2, _fail, (how, folder, cards), timeout=90, backend=backend)
    words = (folder / "rank0.log").read_text()
    error = str(results[0].error)
    if how.startswith("stalled"):
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
