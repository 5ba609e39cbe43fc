"""Stock FSDP2 where NCCL cannot run (several ranks on one card): its collectives through host memory and gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class StagedAllGather(_Allocates):
    """FSDP2's ``AllGather`` protocol."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_into_tensor(out, input_tensor.cpu(), group=group)
        output_tensor.copy_(out)


class StagedReduceScatter(_Allocates):
    """FSDP2's ``ReduceScatter`` protocol."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.reduce_scatter_tensor(out, input_tensor.cpu(), dist.ReduceOp.SUM, group=group)
        if op == dist.ReduceOp.AVG:
            out /= group.size()
        output_tensor.copy_(out)


def through_the_host(model: torch.nn.Module) -> None:
    """Give every FSDP2 module of ``model`` these collectives."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(StagedAllGather())
            module.set_custom_reduce_scatter(StagedReduceScatter())
