"""A thousand steps of a small GPT on real text: the loss curve of TIDE beside two of stock FSDP2."""

from __future__ import annotations

import torch
from cards import backend, stock_runs
from harness import launch
from sharded_gpt import shard
from stock_in_order import add_in_our_order
from test_fsdp2_gpu import deterministic

from tide_strategies import apply_tide
from tide_strategies.cli.demo_model import GPT, GPTConfig, Windows, library_text

STEPS, WINDOW, BATCH = 1000, 50, 8
SMALL = GPTConfig(layers=2, width=128, heads=4, context=128)


def _curve(rank: int, world: int, run: str) -> list[float]:
    """Losses of this rank, step by step."""
    torch.manual_seed(0)
    model = GPT(SMALL).cuda()
    shard(model, world)
    handle = (
        apply_tide(model, {"timeout_s": 60, "strict": True, "reduce_scatter.mode": run}) if run != "stock" else None
    )
    if handle is None and not stock_runs(world):
        add_in_our_order(model)
    windows = Windows(library_text()[0], STEPS * BATCH, SMALL.context, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens = torch.stack([windows[step * BATCH + i] for i in range(BATCH)]).cuda()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if handle is not None:
        handle.close()
    return [x.item() for x in losses]


def _curves(rank: int, world: int, _: None) -> dict[str, list[float]]:
    deterministic()
    return {name: _curve(rank, world, name.split()[0]) for name in ("stock 1", "stock 2", "in_place", "slot_reuse")}


def _averages(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses, dtype=torch.float64).unfold(0, WINDOW, 1).mean(1)


def test_curves_differ_from_stock_no_more_than_stock_from_stock() -> None:
    for curves in launch(2, _curves, backend=backend(), timeout=230):
        averages = {name: _averages(losses) for name, losses in curves.items()}
        allowed = (averages["stock 1"] - averages["stock 2"]).abs().max().item()
        assert averages["stock 1"][-1] < 0.6 * averages["stock 1"][0], "nothing was learnt"
        for mode in ("in_place", "slot_reuse"):
            difference = (averages[mode] - averages["stock 1"]).abs().max().item()
            print(f"largest difference of {WINDOW}-step averages: {mode} {difference:g}, stock itself {allowed:g}")
            assert difference <= allowed
