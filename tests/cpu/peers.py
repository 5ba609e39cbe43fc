"""What users of FSDP2 rely on, one property a case: the properties that PyTorch tests for its own FSDP2.

A case is a function that builds, shards and trains something and returns what came of it. It runs twice, as stock and
with TIDE; both must end with the same values, to the last bit. What a case asserts holds on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import full_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tide_strategies import TideHandle, apply_tide

WIDTH = 10


class Side:
    """One of the two trainings that are compared: stock, or with TIDE."""

    def __init__(self, rank: int, tide: bool) -> None:
        self.rank, self.tide = rank, tide
        self.handles: list[TideHandle] = []

    def ready(self, model: Any, **options: Any) -> Any:
        """The sharded model, with TIDE applied on that side."""
        if self.tide:
            self.handles.append(apply_tide(model, {"timeout_s": 20, **options}))
        return model

    def data(self, step: int, width: int = WIDTH) -> torch.Tensor:
        """Inputs ``[4, width]`` of a micro-batch, different per step and rank."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(4, width, generator=generator)

    def steps(self, model: Any, count: int = 3, first: int = 0, width: int = WIDTH) -> tuple[list[float], Any]:
        """Train; returns losses and final parameters."""
        optimizer = adam(model)
        losses = []
        for step in range(first, first + count):
            loss = model(self.data(step, width)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(loss.item())
        return losses, full_parameters(model)


Case = Callable[[Side], Any]
#: Cases by their names.
PEERS: dict[str, Case] = {}
#: Cases at which stock FSDP2 itself fails before a release of torch.
SINCE: dict[str, str] = {}


def peer(name: str, since: str = "") -> Callable[[Case], Case]:
    """Register a case; ``since``: the first release of torch whose own FSDP2 manages it."""

    def register(case: Case) -> Case:
        assert name not in PEERS
        PEERS[name] = case
        if torch.__version__ < since:
            SINCE[name] = since
        return case

    return register


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


class Block(nn.Module):
    """Two linear layers whose rows do not divide evenly, around a residual."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(model: Any = None, **kwargs: Any) -> Any:
    """A stack of the same values at every call, its blocks and itself sharded."""
    if model is None:
        torch.manual_seed(0)
        model = Stack()
    for block in model.blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


class Tied(nn.Module):
    """Layers that share weights: head and embedding in the root, both linears inside the block."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.block[2].weight = self.block[0].weight
        self.head = nn.Linear(WIDTH, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x.abs().long())))
