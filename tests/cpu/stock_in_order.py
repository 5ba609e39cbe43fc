"""Stock FSDP2 with collectives of gloo's that add in the order that TIDE promises on one node.

The other ranks' contributions in their order, then the own one; in fp32, rounded once. So results of any number of
ranks can be compared to the bit. GPU ranks go through the host, where NCCL cannot run (several of them on one card).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """FSDP2's ``AllGather`` protocol."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        out = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_into_tensor(out, input_tensor.cpu(), group=group)
        output_tensor.copy_(out)


class OrderedReduceScatter(_Allocates):
    """FSDP2's ``ReduceScatter`` protocol."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        ranks, rank = group.size(), group.rank()
        every = torch.empty(ranks * input_tensor.numel(), dtype=input_tensor.dtype)
        dist.all_gather_into_tensor(every, input_tensor.cpu(), group=group)
        parts = every.view(ranks, ranks, -1)[:, rank].float()
        total = torch.zeros_like(parts[0])
        for r in [*(r for r in range(ranks) if r != rank), rank]:
            total += parts[r]
        if op == dist.ReduceOp.AVG:
            total /= ranks
        output_tensor.copy_(total)


def add_in_our_order(model: torch.nn.Module) -> None:
    """Give every FSDP2 module of ``model`` these collectives."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(OrderedReduceScatter())
