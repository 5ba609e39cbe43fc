"""What one handle does to one model: applied, closed, forgotten, applied again, and refused where it cannot be."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import launch
from stacks import (
    WIDTH,
    Stack,
    attempt,
    codes,
    equal,
    groups_of,
    local,
    plain,
    shard,
    train,
    trained,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_strategies import apply_tide


def _handles(rank: int, world: int, _: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    options = {"timeout_s": 30, "strict": True}
    want = trained(plain())
    want_more = trained(plain(), steps=5)

    # Twice on one model, or on a part of it, whether installed yet or not; a copy of the options changes nothing.
    model = plain()
    tide = apply_tide(model, options)
    twice = [attempt(lambda: apply_tide(model, options)), attempt(lambda: apply_tide(model.blocks[0], options))]
    model(torch.randn(2, WIDTH))
    twice.append(attempt(lambda: apply_tide(nn.Sequential(model), options)))
    out["twice"] = twice
    assert tide.report().installed
    tide.close()
    tide.close()
    assert not tide.report().installed
    out["closed"] = tide.report().status
    apply_tide(model, options).close()  # free again

    # Closing puts stock back: in the middle of training, before any, and twice.
    model = plain()
    tide = apply_tide(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for step in range(5):
        if step == 3:
            tide.close()
            tide.close()
            kinds = {type(g) for m in model.modules() if isinstance(m, FSDPModule) for g in groups_of(m)}
            assert kinds == {FSDPParamGroup}
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    out["close, then train"] = equal((losses, [local(p).clone() for p in model.parameters()]), want_more)
    model = plain()
    apply_tide(model, options).close()
    out["close at once"] = equal(trained(model), want) and not any(
        type(g) is not FSDPParamGroup for m in model.modules() if isinstance(m, FSDPModule) for g in groups_of(m)
    )

    # Two models with a handle each, in turns; one closes, the other goes on.
    one, other = plain(), plain()
    first, second = apply_tide(one, options), apply_tide(other, {**options, "all_gather.slots": 1})
    results = [trained(one), trained(other)]
    first.close()
    out["two models"] = all(equal(r, want) for r in results) and second.report().installed
    again = trained(plain(), steps=3)
    assert equal(again, want)
    train(other, steps=2, first=3)
    assert second.report().groups[0].all_gather.calls >= 5
    second.close()

    # A handle that nobody keeps still works, and off means off.
    model = plain()
    apply_tide(model, options)
    gc.collect()
    out["forgotten handle"] = equal(trained(model), want)
    model = plain()
    off = apply_tide(model, {"enabled": False, "strict": True})
    out["off"] = equal(trained(model), want) and off.report().status == "off (enabled: false); stock FSDP2"
    apply_tide(model, options).close()  # a handle that does nothing holds nothing

    # Parameters on the meta device, at the first forward.
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack()
    shard(model)
    tide = apply_tide(model, options)
    out["meta"] = attempt(lambda: train(model, 1))
    model.to_empty(device="cpu")
    for p, q in zip(model.parameters(), plain().parameters(), strict=True):
        local(p).copy_(local(q))
    tide = apply_tide(model, options)
    out["meta, then right"] = equal(trained(model), want) and tide.report().installed
    tide.close()
    return out


@pytest.fixture(scope="module")
def handles() -> list[dict[str, Any]]:
    return launch(2, _handles)


@pytest.mark.parametrize(
    "what",
    ["close, then train", "close at once", "two models", "forgotten handle", "off", "meta, then right"],
)
def test_a_handle_leaves_training_equal_to_stock(handles: list[dict[str, Any]], what: str) -> None:
    assert [h[what] for h in handles] == [True, True]


def test_a_model_takes_one_handle_at_a_time(handles: list[dict[str, Any]]) -> None:
    for result in handles:
        assert [kind for kind, _, _ in result["twice"]] == ["TideConfigError"] * 3
        assert all("already applied" in words and "close()" in words for _, words, _ in result["twice"])
        assert result["closed"] == "closed; stock FSDP2"


def test_parameters_on_the_meta_device_are_named_with_the_remedy(handles: list[dict[str, Any]]) -> None:
    for result in handles:
        kind, words, _ = result["meta"]
        assert kind == "TideError"
        assert "blocks.0.norm.weight" in words
        assert "to_empty" in words


def _without_group(rank: int, world: int, _: Any) -> list[tuple[str, str, float]]:
    model = plain()
    out = []
    tide = apply_tide(model, {"timeout_s": 5})
    train(model, 1)
    out.append(codes(tide.report()))
    tide.close()
    out.append(attempt(lambda: apply_tide(model, {"timeout_s": 5, "strict": True}) and train(model, 1)))
    tide = apply_tide(plain())
    dist.destroy_process_group()
    out.append(attempt(lambda: apply_tide(model, {"timeout_s": 5})))
    return out


def test_one_rank_has_nothing_to_communicate_and_none_at_all_is_an_error() -> None:
    ((one, strict, none),) = launch(1, _without_group)
    assert set(one.values()) == {"TIDE-F010"}
    assert strict[0] == "TideFallbackError"
    assert none[0] == "TideConfigError"
    assert "process group" in none[1]
