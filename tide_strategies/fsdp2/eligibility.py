"""Whether a parameter group can use TIDE: its verdict, from what FSDP2 knows about it.

A group is eligible only if all of it is understood; whatever is not has a code in ``tide_strategies.detect``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_strategies.collectives.schedule import Item
from tide_strategies.config import PinnedPlan, TideConfig, TopologyConfig
from tide_strategies.detect import Verdict, fallback
from tide_strategies.fsdp2 import capture
from tide_strategies.fsdp2.access import group_name, unsharded_dtype
from tide_strategies.kernels.tiles import POINTER_COUNTS
from tide_strategies.topology import Topology

REDUCIBLE = {torch.float32: Item.F32, torch.bfloat16: Item.BF16}


def group_verdict(group: Any, config: TideConfig, imagined: str | None = None) -> Verdict:
    """The verdict of one FSDPParamGroup after its lazy initialisation.

    ``imagined``: "cpu" or "cuda", to judge the group as if its ranks were of that kind, whatever this machine has.
    """
    if type(group) is not FSDPParamGroup:
        return fallback("TIDE-F015", type(group).__name__)
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        return fallback("TIDE-F001")
    if not group.fsdp_params:
        return fallback("TIDE-F011")
    kind = imagined or group.device.type
    device = _device_verdict(kind) if imagined is None else None
    if device is not None:
        return device
    ranks = group.mesh_info.shard_process_group.size()
    if ranks == 1:
        return fallback("TIDE-F010")
    if getattr(group, "_num_param_groups", 1) > 1:
        return fallback("TIDE-F008")
    if group._use_post_forward_mesh:
        return fallback("TIDE-F007")
    return (
        _comms_verdict(group)
        or (_gpu_verdict(group, capturing=imagined is None and capture.capturing()) if kind == "cuda" else None)
        or next(filter(None, (_param_verdict(p) for p in group.fsdp_params)), None)
        or _reduction_verdict(group)
        or _topology_verdict(group, config)
        or _plan_verdict(group, config)
    )


def _plan_verdict(group: Any, config: TideConfig) -> Verdict:
    plan = config.plan.path(group_name(group)) if isinstance(config.plan, PinnedPlan) else config.plan
    return fallback("TIDE-F022") if plan == "stock" else Verdict()


def shard_item(param: Any) -> Item:
    """Element of an FSDPParam's shard as the all-gather sees it: a number only if it is cast on the way."""
    shard = param._sharded_param_data.dtype
    if shard == unsharded_dtype(param):
        return Item.of_size(shard.itemsize)
    return REDUCIBLE[shard]


def _device_verdict(device_type: str) -> Verdict | None:
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return fallback("TIDE-F009", device_type)
    from tide_strategies.runtime.cuda.capability import missing_capability

    missing = missing_capability(torch.cuda.current_device())
    return None if missing is None else fallback("TIDE-F016", missing)


def _gpu_verdict(group: Any, *, capturing: bool) -> Verdict | None:
    trained = sum(p.sharded_param.requires_grad for p in group.fsdp_params)
    if trained > POINTER_COUNTS[-1]:
        return fallback("TIDE-F017", trained, POINTER_COUNTS[-1])
    return fallback("TIDE-F018") if capturing else None


def _comms_verdict(group: Any) -> Verdict | None:
    """Collectives that the user or another library has put in place are never overruled."""
    for name, default in (
        ("_all_gather_comm", collectives.DefaultAllGather),
        ("_reduce_scatter_comm", collectives.DefaultReduceScatter),
    ):
        if type(getattr(group, name)) is not default:
            return fallback("TIDE-F002", type(getattr(group, name)).__name__)
    for name, default_name in (  # torch 2.15 has these two hooks more
        ("_all_gather_output_fn", "_default_all_gather_output_fn"),
        ("_prepare_reduce_scatter_inputs", "_default_reduce_scatter_input_fn"),
    ):
        if hasattr(group, name) and getattr(group, name) is not getattr(collectives, default_name, None):
            return fallback("TIDE-F002", name)
    return None


def _param_verdict(param: Any) -> Verdict | None:
    name = repr(param._param_fqn or param._module_info.param_name)
    local = param.sharded_param._local_tensor
    if hasattr(local, "fsdp_pre_all_gather"):
        return fallback("TIDE-F004", name)
    if param.offload_to_cpu:
        return fallback("TIDE-F005")
    if param.fsdp_placement.dim != 0:
        return fallback("TIDE-F003", name, param.fsdp_placement.dim)
    if param.is_dtensor or getattr(param, "is_spmd_types", False):
        return fallback("TIDE-F012", name)
    shard, gathered = param._sharded_param_data.dtype, unsharded_dtype(param)
    if shard != gathered and not {shard, gathered} <= set(REDUCIBLE):
        return fallback("TIDE-F013", name, shard, gathered)
    if param.sharded_param.requires_grad and gathered not in REDUCIBLE:
        return fallback("TIDE-F006", name, gathered)
    if gathered.itemsize not in (1, 2, 4, 8):
        return fallback("TIDE-F006", name, gathered)
    return None


def _reduction_verdict(group: Any) -> Verdict | None:
    for param in group.fsdp_params:
        reduce_dtype = getattr(param, "reduce_dtype", None)
        if reduce_dtype is not None and reduce_dtype not in REDUCIBLE:
            return fallback("TIDE-F014", reduce_dtype)
    return None


def stated_topology(config: TideConfig, group: dist.ProcessGroup) -> Topology | None:
    """The topology of a sharding group by what the user states: of the whole job, or of groups of that size.

    Returns:
        None if nothing is stated: then hosts are looked for.

    Raises:
        ValueError: what is stated does not fit the group; the words say why.
    """
    stated = config.topology
    if not isinstance(stated, TopologyConfig):
        return None
    topology = Topology(stated.nodes, stated.gpus_per_node)
    members, job = dist.get_process_group_ranks(group), dist.get_world_size()
    if topology.ranks == len(members):
        return topology
    if topology.ranks != job:
        raise ValueError(f"it has {topology.ranks} ranks, the group {len(members)}, the job {job}")
    return Topology.of_group(members, stated.gpus_per_node)


def _topology_verdict(group: Any, config: TideConfig) -> Verdict | None:
    try:
        stated_topology(config, group.mesh_info.shard_process_group)
    except ValueError as e:
        stated = config.topology
        assert isinstance(stated, TopologyConfig)
        return fallback("TIDE-F024", f"{stated.nodes}x{stated.gpus_per_node}", e)
    return None
