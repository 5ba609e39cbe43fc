"""Training through TIDE equals training through stock FSDP2, feature by feature."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch
from harness import launch
from models import BF16, Case, build, full_parameters, train
from stock_in_order import add_in_our_order

from tide_strategies import apply_tide

CASES = [
    Case("fp32"),
    Case("bf16 with fp32 reduction", policy=BF16),
    Case("bf16 with bf16 reduction", policy={"param_dtype": torch.bfloat16}),
    Case("bf16 parameters", param_dtype=torch.bfloat16),
    Case("bf16 parameters, fp32 reduction", param_dtype=torch.bfloat16, policy={"reduce_dtype": torch.float32}),
    Case("uneven rows", uneven=True),
    Case("uneven rows in bf16", uneven=True, policy=BF16),
    Case("one group", root_only=True),
    Case("one block", blocks=1),
    Case("tied embedding", tied=True, policy=BF16),
    Case("frozen parameters", frozen=True, policy=BF16),
    Case("unused parameters", unused=True),
    Case("a model used twice in a step", twice=True, policy=BF16),
    Case("activation checkpointing", activation_checkpointing=True, policy=BF16),
    Case("accumulation with sync", accumulate=3, policy=BF16),
    Case("accumulation without sync", accumulate=3, sync_every=False, policy=BF16),
    Case("accumulation without sync in fp32", accumulate=2, sync_every=False),
    Case("gradient clipping", clip=0.1),
    Case("evaluation without grad", evaluate="no_grad", policy=BF16),
    Case("state dict", checkpoint="copy", policy=BF16),
    Case("state dict assigned", checkpoint="assign"),
    Case("distributed checkpoint", checkpoint="dcp", policy=BF16),
    Case("prefetch two ahead", prefetch=2, policy=BF16),
    Case("unshard of all modules", unshard_all=True, policy=BF16),
    Case("no reshard after forward", reshard=False),
    Case("summed gradients", force_sum=True, divide_factor=3.0),
    Case(
        "reduction settings of torch 2.13",
        unused=True,
        policy=BF16,
        setters={
            "set_reduce_scatter_unused_params": True,
            "set_reduce_scatter_max_input_buffers": 2,
            "set_separate_reduce_scatter_group": True,
        },
    ),
    Case("compiled blocks", compile="aot_eager", policy=BF16),
    Case("poisoned slots", poison=True, policy=BF16, twice=True),
    Case("post-accumulate hooks", hook=True),
    Case("no cache", config={"all_gather.cache": "off"}),
    Case("one slot", config={"all_gather.slots": 1}),
    Case("a budget for the ring", config={"all_gather.memory_budget": 1 << 20, "all_gather.cache": "microbatch"}),
    Case("last block stays unsharded", last_stays=True, policy=BF16),
    Case("last block stays unsharded, twice", last_stays=True, twice=True),
    Case("microbatch cache", accumulate=3, config={"all_gather.cache": "microbatch", "all_gather.slots": 3}),
    Case(
        "microbatch cache, and an optimizer that is not fused",
        accumulate=3,
        fused=False,
        config={"all_gather.cache": "microbatch", "all_gather.slots": 4},
    ),
    Case(
        "microbatch cache without sync",
        accumulate=3,
        sync_every=False,
        policy=BF16,
        config={"all_gather.cache": "microbatch", "all_gather.slots": 4},
    ),
    Case(
        "parameters edited between micro-batches",
        accumulate=3,
        edit=True,
        config={"all_gather.cache": "microbatch", "all_gather.slots": 4},
    ),
    Case(
        "state dict loaded with everything cached",
        checkpoint="copy",
        config={"all_gather.cache": "microbatch", "all_gather.slots": 4},
    ),
]
FOUR = [
    Case("fp32"),
    Case("uneven rows in bf16", uneven=True, policy=BF16),
    Case("hybrid sharding", hsdp=True, policy=BF16),
    Case("hybrid sharding, deferred all-reduce", hsdp=True, accumulate=2, defer_all_reduce=True, policy=BF16),
    Case("accumulation without sync", accumulate=3, sync_every=False, policy=BF16),
]


Prepare = Callable[[torch.nn.Module], None]


def run(case: Case, rank: int, world: int, tide: bool, device: str = "cpu", stock: Prepare | None = None):
    """Train a case; returns losses, final parameters and hook calls. ``stock`` prepares the model of the other side."""
    model, seen = build(case, world, device=device), []
    if stock is not None and not tide:
        stock(model)
    handle = apply_tide(model, {"timeout_s": 30, "debug.poison_slots": case.poison, **case.config}) if tide else None
    losses = train(model, case, rank, seen)
    if handle is not None:
        report = handle.report()
        assert report.installed
        assert all(g.path == "tide" for g in report.groups), str(report)
        assert all(g.all_gather.calls > 0 for g in report.groups), str(report)
        assert not any(g.reduce_scatter.stock_calls for g in report.groups), str(report)
        assert sum(g.reduce_scatter.calls for g in report.groups) > 0
    values = full_parameters(model)
    if handle is not None:
        handle.close()
    return losses, values, seen


def compare(
    rank: int, world: int, cases: list[Case], device: str = "cpu", stock: Prepare | None = None
) -> dict[str, float]:
    """Largest difference between TIDE and stock for each case; 0.0 means equal to the last bit."""
    worst = {}
    gc.freeze()  # the modules that are there for good need not be looked at after every case
    for case in cases:
        losses, want, hooks = run(case, rank, world, tide=False, device=device, stock=stock)
        tide_losses, got, tide_hooks = run(case, rank, world, tide=True, device=device)
        assert hooks == tide_hooks, case.name
        assert want.keys() == got.keys()
        differences = [(got[n].float() - want[n].float()).abs().max().item() for n in want if want[n].numel()]
        differences += [abs(a - b) for a, b in zip(losses, tide_losses, strict=True)]
        equal = all(torch.equal(got[n], want[n]) for n in want) and losses == tide_losses
        worst[case.name] = 0.0 if equal else max(*differences, 1e-30)
        gc.collect()
    return worst


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, float]:
    return launch(2, compare, CASES, timeout=220)[0]


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_two_ranks_are_bit_equal_to_stock(two_ranks, name: str) -> None:
    assert two_ranks[name] == 0.0


def _compare_in_order(rank: int, world: int, cases: list[Case]) -> dict[str, float]:
    return compare(rank, world, cases, stock=add_in_our_order)


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, float]:
    return launch(4, _compare_in_order, FOUR, timeout=220)[0]


@pytest.mark.parametrize("name", [c.name for c in FOUR])
def test_four_ranks_are_bit_equal_to_stock(four_ranks, name: str) -> None:
    assert four_ranks[name] == 0.0


#: Evaluates under torch.inference_mode before the first step, which stock cannot, and after the second.
INFERENCE = Case("inference", evaluate="inference", policy=BF16, steps=2)


def inference_before_training(rank: int, world: int, device: str) -> tuple[bool, bool]:
    """Whether training after an inference is stock's without one to the last bit: parameters, losses."""
    model = build(INFERENCE, world, device=device)
    handle = apply_tide(model, {"timeout_s": 30})
    losses = train(model, INFERENCE, rank)
    values = full_parameters(model)
    handle.close()
    reference = build(INFERENCE, world, device=device)
    want_losses = train(reference, dataclasses.replace(INFERENCE, evaluate=None), rank)
    want = full_parameters(reference)
    # The first and the last loss are those of the evaluations.
    return all(torch.equal(values[n], want[n]) for n in want), losses[1:3] == want_losses


def test_inference_mode_before_training_works_where_stock_cannot() -> None:
    assert launch(2, inference_before_training, "cpu") == [(True, True)] * 2
