"""Gradient clipping for sharded gradients.

The norm is the norm of the whole model's gradients, whatever mix the optimizer holds: DTensors on several
meshes, empty local shards, plain tensors. (``torch.nn.utils.clip_grad_norm_`` stacks all norms into one tensor,
which fails as soon as two of them live on different meshes.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# The device on which a gradient's ranks communicate, and the process groups over which it is sharded.
_Layout = tuple[torch.device, tuple[dist.ProcessGroup, ...]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    split_further: Mapping[DeviceMesh, dist.ProcessGroup] | None = None,
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most ``max_norm``; a collective call.

    Args:
        parameters: those whose gradients count.
        max_norm: the largest norm that is left alone.
        norm_type: order of the norm.
        error_if_nonfinite: raise rather than scale by a norm that is infinite or NaN.
        split_further: mesh -> the group whose ranks hold different tensors under the names on that mesh (experts).

    Returns:
        The norm before clipping: a plain fp32 tensor with one element, equal on all ranks.

    Raises:
        RuntimeError: if ``error_if_nonfinite`` and the norm is infinite or NaN (on every rank alike).
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    total = _total_norm(grads, norm_type, split_further or {})
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total gradient norm of order {norm_type} is {total.item()}, so gradients cannot be clipped. "
            f"Pass error_if_nonfinite=False to scale them all the same."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        shard = _local(grad)
        shard.mul_(factor.to(shard.device))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient to ``[-clip_value, clip_value]`` in place; needs no communication."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(min=-clip_value, max=clip_value)


def _total_norm(grads: list[Tensor], norm_type: float, split_further: Mapping[DeviceMesh, dist.ProcessGroup]) -> Tensor:
    if not grads:
        return torch.zeros(())
    shards_by_layout: dict[_Layout, list[Tensor]] = {}
    for grad in grads:
        shards_by_layout.setdefault(_layout(grad, split_further), []).append(_local(grad))
    infinite = norm_type == float("inf")
    totals = []
    for (device, groups), shards in shards_by_layout.items():
        norms = [torch.linalg.vector_norm(s, norm_type, dtype=torch.float32) for s in shards if s.numel()]
        if norms:
            partial = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
        else:
            partial = torch.zeros((), device=device)
        partial = partial if infinite else partial**norm_type
        for group in groups:
            dist.all_reduce(partial, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        totals.append(partial if infinite else partial ** (1.0 / norm_type))
    total: Tensor = torch.linalg.vector_norm(torch.stack([t.to(totals[0].device) for t in totals]), norm_type)
    return total


def _layout(grad: Tensor, split_further: Mapping[DeviceMesh, dist.ProcessGroup]) -> _Layout:
    """Where parts of the gradient are: replicated dimensions of its mesh are left out.

    The device is the mesh's, not the tensor's: with CPU offload the gradients of a GPU mesh are in CPU memory.
    """
    if not isinstance(grad, DTensor):
        return grad.device, ()
    mesh = grad.device_mesh
    groups = tuple(mesh.get_group(dim) for dim, placement in enumerate(grad.placements) if placement.is_shard())
    further = split_further.get(mesh)
    return torch.device(mesh.device_type), (*groups, further) if further is not None else groups


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
