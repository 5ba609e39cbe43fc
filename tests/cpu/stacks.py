"""A small stack of sharded blocks, its training, and what comes of trying something with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from models import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tide_strategies import TideReport

WIDTH, HIDDEN = 16, 24
BLOCKS = 3
ODD = 1  # the block that is made different


class Stack(nn.Module):
    """Blocks in a row; some may compute in a dtype of their own."""

    def __init__(self, dtypes: dict[int, torch.dtype] | None = None, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, hidden) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.dtypes = dtypes or {}
        for i, dtype in self.dtypes.items():
            self.blocks[i].to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x.to(self.dtypes.get(i, x.dtype))).to(x.dtype)
        return self.head(x)


def shard(model: nn.Module, odd: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """fully_shard on every block and the model; the odd block with options of its own."""
    kwargs.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for i, block in enumerate(model.blocks):
        fully_shard(block, **{**kwargs, **((odd or {}) if i == ODD else {})})
    return fully_shard(model, **kwargs)


def plain(seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return shard(Stack(**kwargs))


def local(parameter: torch.Tensor) -> torch.Tensor:
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return getattr(shard, "_data", shard).detach()


def train(model: nn.Module, steps: int = 3, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, **kwargs: Any) -> tuple[list[float], list[torch.Tensor]]:
    return train(model, **kwargs), [local(p).clone() for p in model.parameters()]


def equal(a: tuple[list[float], list[torch.Tensor]], b: tuple[list[float], list[torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def attempt(function: Callable[[], Any]) -> tuple[str, str, float]:
    """Type and words of the exception, and the seconds it took; the type is "none" if there was none."""
    start = time.monotonic()
    try:
        function()
    except Exception as e:
        return type(e).__name__, str(e), time.monotonic() - start
    return "none", "", time.monotonic() - start


@contextmanager
def warnings_of_tide() -> Iterator[list[str]]:
    """What TIDE logs as warnings."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tide_strategies")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)


def codes(report: TideReport) -> dict[str, str]:
    return {g.name: g.code for g in report.groups}


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]
