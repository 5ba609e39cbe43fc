"""Reading torch's FSDP2 objects: roots, states, parameter groups, process groups.

With ``guards``, ``param_group``, ``reduce`` and ``eligibility`` this package is the only place that touches private
FSDP2 names; what it relies on is checked by ``guards`` before anything here is used on a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def outermost_fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that ``fully_shard`` was applied to and that no other such module contains."""
    if isinstance(model, FSDPModule):
        return [model]
    return [m for child in model.children() for m in outermost_fsdp_modules(child)]


def fsdp_modules(root: FSDPModule) -> list[Any]:
    """``root`` and every module under it that ``fully_shard`` was applied to, in module order."""
    return [m for m in root.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]


def param_groups(root: FSDPModule) -> list[Any]:
    """Every FSDPParamGroup under ``root``, once each, in module order."""
    seen: dict[int, Any] = {}
    for module in fsdp_modules(root):
        for group in _groups_of_state(module._get_fsdp_state()):
            seen.setdefault(id(group), group)
    return list(seen.values())


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11: one group or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def lazy_init(root: FSDPModule) -> None:
    """What FSDP2 does itself at the root's first forward: decide roots, names and dtypes. Idempotent."""
    root._get_fsdp_state()._lazy_init()


def group_name(group: Any) -> str:
    """The group's fully qualified module name, "(root)" for the root's own group."""
    return group._module_fqn or "(root)"


def prefetches_by_hand(group: Any) -> bool:
    """Whether the user said what to prefetch in the group's backward (``set_modules_to_backward_prefetch``)."""
    return bool(group.modules[0]._get_fsdp_state()._states_to_backward_prefetch)


def unsharded_dtype(param: Any) -> Any:
    """The dtype that an FSDPParam has once gathered."""
    return param.param_dtype or param.orig_dtype


def meshes(model: nn.Module) -> list[DeviceMesh]:
    """The device meshes that the model's sharded parameters are on, in order of first use."""
    return list(dict.fromkeys(p.device_mesh for p in model.parameters() if isinstance(p, DTensor)))


def mesh_groups(meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """One process group per mesh dimension, so that a value passed along all of them reaches every rank."""
    return [mesh.get_group(dim) for mesh in dict.fromkeys(meshes) for dim in range(mesh.ndim)]
