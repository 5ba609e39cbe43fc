"""CUDA graph capture of a first forward: TIDE stays out of it, and what happens is what happens without TIDE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards import WITHOUT_NCCL, stock_runs
from harness import launch
from models import BF16, Case, batch, build, train
from test_fsdp2_gpu import deterministic

from tide_strategies import TideError, apply_tide

CASE = Case("captured", blocks=2, steps=3, policy=BF16)


def _captured(rank: int, world: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Capture the first forward, then train as ever: how each of them went."""
    deterministic()
    model = build(CASE, world, device="cuda")
    handle = None if options is None else apply_tide(model, {"timeout_s": 20, **options})
    tokens = batch(0, rank).cuda()
    dist.all_reduce(torch.ones(1, device="cuda"))  # NCCL connects outside of the graph
    torch.cuda.synchronize()
    out: dict[str, Any] = {}

    def went(name: str, work: Any) -> None:
        try:
            out[name] = work()
        except Exception as e:  # stock's, with or without TIDE: what a graph may not have in it
            out[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:60]}"

    def capture() -> str:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            model(tokens)
        return "captured"

    went("capture", capture)
    if handle is not None:
        out["codes"] = [g.code for g in handle.report().groups]
    went("synchronize", torch.cuda.synchronize)
    went("training", lambda: train(model, CASE, rank))
    return out


def _later(rank: int, world: int, _: None) -> dict[str, Any]:
    """Train with TIDE, then capture: it is refused, in words."""
    model = build(CASE, world, device="cuda")
    handle = apply_tide(model, {"timeout_s": 20, "plan": "tide"})
    train(model, CASE, rank)
    tokens = batch(0, rank).cuda()
    torch.cuda.synchronize()
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            model(tokens)
        words = "captured"
    except TideError as e:
        words = str(e)
    return {"words": words, "paths": [g.path for g in handle.report().groups]}


@pytest.fixture(scope="module", autouse=True)
def stock() -> None:
    if not stock_runs():
        pytest.skip(WITHOUT_NCCL)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_first_forward_under_capture_goes_as_without_tide(backend: str) -> None:
    without, beside = (
        launch(2, _captured, options, timeout=150, backend=backend) for options in (None, {"plan": "tide"})
    )
    for mine, theirs in zip(beside, without, strict=True):
        codes = mine.pop("codes")
        assert codes, "TIDE was installed"
        assert set(codes) == {"TIDE-F018"}
        assert mine == theirs


def test_a_capture_that_begins_later_is_refused_in_words() -> None:
    for found in launch(2, _later, timeout=150, backend="nccl"):
        assert set(found["paths"]) == {"tide"}
        assert "TIDE-F018 a CUDA graph is being captured" in found["words"]
