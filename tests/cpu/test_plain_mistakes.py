"""The likeliest mistakes of a user of plain PyTorch: each ends in words that say what to do.

Before anything runs: a misspelt option, one of another section, a wrong value, a file's name for its content, a whole
configuration, something else than a module, a model that is not sharded. On ranks: DDP or FSDP1 instead of
``fully_shard``, TIDE applied twice, other options or another model on one rank, parameters without memory, a dtype
changed afterwards, ``strict`` where a group cannot, a step that only one rank makes, no process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import launch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from tide_strategies import apply_tide
from tide_strategies.errors import TideConfigError

TIMEOUT_S = 2


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Linear(2, 2), {"timout_s": 5}, "unknown TIDE option 'timout_s'; did you mean 'timeout_s'?"),
        (nn.Linear(2, 2), {"all_gather": {"slot": 3}}, "did you mean 'all_gather.slots'?"),
        (nn.Linear(2, 2), {"slots": 3}, "unknown TIDE option 'slots'; did you mean 'all_gather.slots'?"),
        (nn.Linear(2, 2), {"cache": "off"}, "did you mean 'all_gather.cache' or 'calibration.cache'?"),
        (nn.Linear(2, 2), {"timeout_s": "5"}, "'timeout_s' must be a number; got '5'"),
        (nn.Linear(2, 2), {"plan": "tied"}, "'plan' must be "),
        (nn.Linear(2, 2), "tide.yaml", "not str: 'tide.yaml'. Read a file first: yaml.safe_load"),
        (nn.Linear(2, 2), {"lr": 0.1, "tide": {"timeout_s": 5}}, "give that section (config.tide)"),
        ([nn.Linear(2, 2)], None, "needs a module, one a call; got list. Give the model itself"),
        (nn.Linear(2, 2).parameters(), None, "got generator. Give the model itself"),
        (nn.Linear(2, 2), None, "Linear has no FSDPModule. Call torch.distributed.fsdp.fully_shard on its blocks"),
    ],
)
def test_before_anything_runs(model: Any, options: Any, words: str) -> None:
    with pytest.raises(TideConfigError) as caught:
        apply_tide(model, options)
    assert words in str(caught.value)


class Pieces(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _ranks(rank: int, world: int, _: Any) -> dict[str, str]:
    x, options = torch.ones(2, 8), {"timeout_s": TIMEOUT_S, "plan": "tide"}

    def sharded(model: nn.Module | None = None, **how: Any) -> nn.Module:
        model = model or Pieces()
        fully_shard(model.first, **how)
        return fully_shard(model)

    def step(model: nn.Module, **more: Any) -> None:
        apply_tide(model, {**options, **more})
        model(x).sum().backward()

    def twice() -> None:
        model = sharded()
        apply_tide(model, options)
        apply_tide(model, options)

    def without_memory() -> None:
        with torch.device("meta"):
            model = Pieces()
        step(sharded(model))

    def another_dtype() -> None:
        model = sharded()
        step(model)
        model.double()(x.double())

    def only_one_steps() -> None:
        model = sharded()
        step(model)
        if rank == 0:
            model(x)
        time.sleep(2 * TIMEOUT_S * rank)

    def no_group() -> None:
        model = sharded()
        dist.destroy_process_group()
        apply_tide(model, options)

    mistakes: dict[str, Callable[[], Any]] = {
        "DDP": lambda: apply_tide(nn.Sequential(DistributedDataParallel(Pieces()))),
        "FSDP1": lambda: apply_tide(FullyShardedDataParallel(Pieces(), device_id=torch.device("cpu"))),
        "twice": twice,
        "other options": lambda: apply_tide(sharded(), {**options, "all_gather.slots": 2 + rank}),
        "another model": lambda: step(sharded(Pieces(8 + rank))),
        "without memory": without_memory,
        "another dtype": another_dtype,
        "strict": lambda: step(sharded(shard_placement_fn=lambda p: Shard(p.ndim - 1)), strict=True),
        "only one steps": only_one_steps,
        "no group": no_group,
    }
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            said[name] = "nothing"
        except Exception as e:
            said[name] = f"{type(e).__name__}: {e}"
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return launch(2, _ranks)


WORDS = {
    "DDP": ["TideConfigError", "Use torch.distributed.fsdp.fully_shard instead of DistributedDataParallel"],
    "FSDP1": ["TideConfigError", "Use torch.distributed.fsdp.fully_shard instead of FullyShardedDataParallel"],
    "twice": ["TideConfigError", "already applied", "Call close() on the handle"],
    "other options": ["'all_gather.slots'", "rank 0 has 2, rank 1 has 3", "Give every rank the same"],
    "another model": ["second.weight", "rank 0 has [[8, 8]", "rank 1 has [[8, 9]", "Give every rank the same model"],
    "without memory": ["on the meta device", "to_empty and initialise, or load a checkpoint"],
    "another dtype": ["has become torch.float64", "close the handle before changing dtypes and apply TIDE again"],
    "strict": ["TideFallbackError", "TIDE-F003", "shard on dimension 0 to accelerate this group"],
    "no group": ["TideConfigError", "needs the process group that fully_shard was given"],
}


@pytest.mark.parametrize("mistake", WORDS)
def test_on_every_rank(said: list[dict[str, str]], mistake: str) -> None:
    for words in said:
        assert [w for w in WORDS[mistake] if w not in words[mistake]] == [], words[mistake]


def test_a_step_that_only_one_rank_makes(said: list[dict[str, str]]) -> None:
    """The other one made nothing wrong that it could be told of."""
    first, second = (words["only one steps"] for words in said)
    assert first.startswith("TideTimeoutError")
    assert "rank 0 in all-gather of '(root)'" in first
    assert "awaits counter" in first
    assert "raise timeout_s" in first
    assert second == "nothing"
