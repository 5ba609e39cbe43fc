"""Ranks that use different parameters: what stock FSDP2 allows, TIDE allows."""

from __future__ import annotations

import pytest
import torch
from harness import launch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies import apply_tide


class Branches(nn.Module):
    """Two parameters, either of which a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        parts = [x @ p for name, p in (("w", self.w), ("v", self.v)) if name in use]
        return sum(parts) if parts else x * 1


class Net(nn.Module):
    """A block with branches and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Branches(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return self.head(self.block(x, use))


def _gradients(rank: int, world: int, used_by_rank_0: str) -> list[bool]:
    """Accumulate over two micro-batches; in the first, rank 0 uses only some parameters of the block."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for tide in (False, True):
        torch.manual_seed(0)
        model = Net()
        fully_shard(model.block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        handle = apply_tide(model, {"timeout_s": 20}) if tide else None
        torch.manual_seed(7 + rank)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            use = used_by_rank_0 if micro == 0 and rank == 0 else "wv"
            model(torch.randn(4, 8), use).float().sum().backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
        if handle is not None:
            assert not any(g.reduce_scatter.stock_calls for g in handle.report().groups)
            handle.close()
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("used", ["", "w"], ids=["no parameter", "one parameter"])
def test_a_rank_may_leave_parameters_out_of_a_micro_batch(used: str) -> None:
    if used and torch.__version__ < "2.15":
        pytest.skip("stock FSDP2 itself refuses gradients of two dtypes before torch 2.15")
    for equal in launch(2, _gradients, used):
        assert all(equal)
