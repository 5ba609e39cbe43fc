"""How many all-gathers a step takes, and how many the slots save."""

from __future__ import annotations

import pytest
import torch
from harness import launch
from models import Block, Case, Net, build, full_parameters, train
from torch import nn
from torch.distributed.fsdp import fully_shard

from tide_strategies import apply_tide
from tide_strategies.errors import TideConfigError


def _counts(rank: int, world: int, cases: list[Case]) -> list[dict[str, tuple[int, int]]]:
    out = []
    for case in cases:
        model = build(case, world)
        handle = apply_tide(model, {"timeout_s": 30, **case.config})
        train(model, case, rank)
        report = handle.report()
        out.append({g.name: (g.all_gather.calls, g.all_gather.reused) for g in report.groups})
        handle.close()
    return out


def test_slots_save_the_all_gathers_of_values_that_are_still_there() -> None:
    off = Case("off", steps=2, config={"all_gather.cache": "off"})
    turnaround = Case("turnaround", steps=2)
    roomy = Case("roomy", steps=2, config={"all_gather.slots": 3})
    micro = Case("micro", steps=2, accumulate=3, config={"all_gather.cache": "microbatch", "all_gather.slots": 4})
    counts = launch(2, _counts, [off, turnaround, roomy, micro])[0]
    blocks = [f"blocks.{i}" for i in range(4)]
    # two steps, each gathers a block for its forward and again for its backward; the root stays throughout
    assert [counts[0][b] for b in blocks] == [(4, 0)] * 4
    assert counts[0]["(root)"] == (2, 0)
    # the last two blocks of the forward are still in the two slots when the backward begins
    assert [counts[1][b] for b in blocks] == [(4, 0), (4, 0), (2, 2), (2, 2)]
    assert [counts[2][b] for b in blocks] == [(4, 0), (2, 2), (2, 2), (2, 2)]
    # everything fits: one all-gather per optimizer step, five more uses saved (3 forwards, 3 backwards)
    assert [counts[3][b] for b in blocks] == [(2, 10)] * 4
    assert counts[3]["(root)"] == (2, 4)


def _arenas(rank: int, world: int, cases: list[Case]) -> list[dict[str, int]]:
    out = []
    for case in cases:
        model = build(case, world)
        handle = apply_tide(model, {"timeout_s": 30, **case.config})
        train(model, case, rank)
        report = handle.report()
        out.append({**report.arena_bytes, "block": report.groups[-1].unsharded_bytes})
        handle.close()
    return out


def test_the_ring_takes_what_its_budget_allows_and_a_last_block_that_stays() -> None:
    plain, last = Case("plain"), Case("last stays", last_stays=True)
    narrow = Case("not last after all", last_stays=True, twice=True, config={"all_gather.slots": 1})
    alone = launch(2, _arenas, [plain])[0][0]
    slot, block = alone["ring"] // 2, alone["block"]  # a slot has whole pages; the budget is for what is in them
    budget = Case("budget", config={"all_gather.memory_budget": 3 * block + block // 2})
    more = Case("more than all", config={"all_gather.memory_budget": 99 * block})
    plain_, last_, narrow_, budget_, more_ = launch(2, _arenas, [plain, last, narrow, budget, more])[0]
    assert plain_["ring"] == last_["ring"] == 2 * slot
    assert plain_["pinned"] == last_["pinned"], "only the root has a slot of its own"
    assert narrow_["ring"] == 2 * slot, "a block that does not come last after all is no conflict, but a slot more"
    assert budget_["ring"] == 3 * slot
    assert more_["ring"] == 4 * slot, "no more slots than groups"


def _too_small(rank: int, world: int, _: None) -> str:
    model = build(Case("too small"), world)
    apply_tide(model, {"timeout_s": 30, "all_gather.memory_budget": 100})
    with pytest.raises(TideConfigError) as refused:
        train(model, Case("too small"), rank)
    return str(refused.value)


def test_a_budget_that_no_slot_fits_into_is_refused() -> None:
    for words in launch(2, _too_small):
        assert "'all_gather.memory_budget' is 100 bytes, but the largest group alone takes" in words


class Clamped(Block):
    """A block that edits its gathered weight in every forward, in a way that doing twice does not change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


def _edits(rank: int, world: int, _: None) -> bool:
    case = Case("edits", steps=2)
    results = []
    for tide in (False, True):
        torch.manual_seed(0)
        model = Net(case)
        model.blocks = nn.ModuleList(Clamped() for _ in range(3))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        handle = apply_tide(model, {"timeout_s": 30}) if tide else None
        train(model, case, rank)
        results.append(full_parameters(model))
        if handle is not None:
            assert sum(g.all_gather.reused for g in handle.report().groups) == 0
            handle.close()
    return all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_an_edited_landing_is_gathered_again() -> None:
    assert all(launch(2, _edits))
