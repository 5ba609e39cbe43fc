"""Turn an ordinary module into an FSDP2 one: the same steps for every framework that does not do it itself.

The model is walked unit by unit, innermost first. Each unit is materialised (if it was built on the meta
device), given rank 0's values, and sharded, before the next is touched: the full model never has to fit on a
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.experts import ExpertGroups
from tide_strategies.integrations.materialize import check_can_materialize, has_meta_tensors, materialize
from tide_strategies.integrations.wrapping import WrapPolicy, plan_units

_BROADCAST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How to shard a module.

    Args:
        auto_wrap_policy: which modules become units; see :func:`~tide_strategies.integrations.wrapping.plan_units`.
        min_num_params: units with fewer parameters join the group around them.
        reshard_after_forward: of the units, as in ``fully_shard``. The root always keeps its parameters.
        mp_policy: mixed precision of the units.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory.
        sync_module_states: start from rank 0's parameters and buffers on all ranks.
    """

    auto_wrap_policy: WrapPolicy | None = None
    min_num_params: int = 0
    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy | None = None
    cpu_offload: bool = False
    sync_module_states: bool = True

    def __post_init__(self) -> None:
        if type(self.min_num_params) is not int or self.min_num_params < 0:
            raise TideConfigError(f"min_num_params must be a whole number, 0 or more; got {self.min_num_params!r}")
        if not isinstance(self.reshard_after_forward, int):
            raise TideConfigError(
                f"reshard_after_forward must be true, false, or the number of ranks to reshard to; "
                f"got {self.reshard_after_forward!r}"
            )
        if self.mp_policy is not None and not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise TideConfigError(
                f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy; got {self.mp_policy!r}"
            )
        for name in ("cpu_offload", "sync_module_states"):
            if type(getattr(self, name)) is not bool:
                raise TideConfigError(f"{name} must be true or false; got {getattr(self, name)!r}")


_POLICIES = {
    "32-true": MixedPrecisionPolicy(),
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    # Gradients arrive in half precision; adding them up in fp32 costs nothing with TIDE.
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}


def policy_for_precision(precision: str) -> MixedPrecisionPolicy:
    """The FSDP2 policy for a precision as Lightning names it.

    Raises:
        TideConfigError: for precisions that do not work with FSDP2, or were never tried with it.
    """
    if precision not in _POLICIES:
        raise TideConfigError(
            f"precision={precision!r} is not supported with tide_fsdp; choose one of "
            f"{', '.join(repr(p) for p in _POLICIES)}."
        )
    return _POLICIES[precision]


def shard_module(
    root: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    options: ShardingOptions,
    mp_policy: MixedPrecisionPolicy,
    experts: ExpertGroups | None = None,
) -> None:
    """Shard ``root`` in place over ``mesh`` (1-D, or 2-D to replicate over its first dimension).

    Experts are sharded among the ranks that hold the same ones.

    A module that is an FSDP2 root already is left alone. Where the user has sharded parts of it, those parts
    stay as they are and the rest becomes the root's group.

    Raises:
        TideConfigError: if the module is wrapped by FSDP1, its wrap policy does not fit it, or a meta tensor of it
            cannot be initialised.
    """
    if isinstance(root, FSDPModule):
        return
    wrapped = [
        name or "the model itself" for name, m in root.named_modules() if isinstance(m, FullyShardedDataParallel)
    ]
    if wrapped:
        raise TideConfigError(
            f"tide_fsdp works with FSDP2 (fully_shard), but FSDP1's FullyShardedDataParallel wraps "
            f"{', '.join(wrapped)}. Leave the model unwrapped: the strategy shards it."
        )
    _refuse_other_dtensors(root)
    if has_meta_tensors(root):
        check_can_materialize(root)
    by_user = any(isinstance(m, FSDPModule) for m in root.modules())
    apart = experts.modules(root, device) if experts is not None else []
    units = [] if by_user else plan_units(root, options.auto_wrap_policy, options.min_num_params, apart)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy()

    replaced: dict[Tensor, Tensor] = {}

    def shard(
        module: nn.Module, policy: MixedPrecisionPolicy, reshard: bool | int | None, over: DeviceMesh = mesh
    ) -> None:
        materialize(module, device, replaced)
        if options.sync_module_states:
            broadcast_from_rank0(module, device, None if over is mesh else over.get_group())
        fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    for module in apart:
        assert experts is not None
        shard(module, mp_policy, options.reshard_after_forward, experts.shard_mesh)
        assert isinstance(module, FSDPModule)
        # An expert sees the tokens of all ranks: its gradient is the mean over all of them, not over its group.
        module.set_gradient_divide_factor(experts.mesh.size())
    in_experts = {id(m) for module in apart for m in module.modules()}
    if mp_policy.param_dtype is not None and not by_user:
        # Batch norm keeps running statistics in fp32 buffers next to its parameters: all of it stays in fp32.
        norms = [
            m
            for m in root.modules()
            if isinstance(m, _BatchNorm) and any(True for _ in m.parameters()) and id(m) not in in_experts
        ]
        for norm in norms:
            shard(norm, MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype), options.reshard_after_forward)
        units = [m for m in units if not isinstance(m, _BatchNorm)]
    for unit in units:
        shard(unit, mp_policy, options.reshard_after_forward)
    # The root's inputs are the batch. Casting it would also round labels and targets, so it stays as it is.
    shard(root, replace(mp_policy, cast_forward_inputs=False), None)


def _refuse_other_dtensors(root: nn.Module) -> None:
    """Raise if a parameter is a DTensor for another reason than ``fully_shard``."""
    sharded = {id(p) for m in root.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    others = [n for n, p in root.named_parameters() if isinstance(p, DTensor) and id(p) not in sharded]
    if others:
        raise TideConfigError(
            f"{', '.join(others)}: DTensors before sharding, as tensor parallelism makes them. tide_fsdp does data "
            f"parallelism only; use Lightning's ModelParallelStrategy for both, or fully_shard and "
            f"tide_strategies.apply_tide in plain PyTorch, where such groups keep stock collectives (TIDE-F012)."
        )


@torch.no_grad()
def broadcast_from_rank0(module: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite parameters and buffers with those of rank 0 (of the group); those sharded already are left out.

    A collective call of all ranks, or of the group's.

    Tensors travel in buckets through ``device``, since a process group may serve that device only.
    """
    tensors = [*module.parameters(), *module.buffers()]
    bucket: list[Tensor] = []
    size = 0
    for tensor in (t for t in tensors if not isinstance(t, DTensor)):
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BROADCAST_BYTES:
            _broadcast_bucket(bucket, device, group)
            bucket, size = [], 0
    _broadcast_bucket(bucket, device, group)


def _broadcast_bucket(bucket: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in bucket:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([t.detach().reshape(-1).to(device) for t in tensors])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Switch the reduction of gradients in backward, for every FSDP2 module in ``root``."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(enabled, recurse=False)
