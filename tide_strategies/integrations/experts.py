"""Expert subgroups: each part of a mixture of experts is sharded among the ranks that hold it.

With E parts, rank r holds part r mod E. The ranks with the same part shard it among each other; tokens travel between
the ranks of different parts, which is the model's business. To FSDP2 an expert's parameters have the same name and
shape everywhere, so whatever looks at all ranks (checkpoints, gradient norms) has to be told that parts differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.wrapping import WrapPolicy, modules_by_policy

PARTS, SHARDS = "expert_parallel", "expert_shard"


@dataclass(frozen=True)
class ExpertGroups:
    """Which modules are experts, and which ranks hold the same ones.

    Attributes:
        mesh: all ranks, 2-D: ``expert_parallel`` (between parts), ``expert_shard`` (between the shards of a part).
        policy: which modules hold experts of this rank's part.
    """

    mesh: DeviceMesh
    policy: WrapPolicy

    @staticmethod
    def over(device_type: str, world: int, parts: int, policy: WrapPolicy) -> ExpertGroups:
        """Lay out ``parts`` parts over ``world`` ranks; a collective call."""
        ranks = torch.arange(world).view(world // parts, parts).t().contiguous()
        return ExpertGroups(DeviceMesh(device_type, ranks, mesh_dim_names=(PARTS, SHARDS)), policy)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that hold the same part as this one."""
        return self.mesh[SHARDS]

    @property
    def split_further(self) -> Mapping[DeviceMesh, dist.ProcessGroup]:
        """For gradient norms: where shards of this mesh are not all there is, the group that holds the rest."""
        return {self.shard_mesh: self.mesh.get_group(PARTS)}

    def modules(self, root: nn.Module, device: torch.device) -> list[nn.Module]:
        """The experts in ``root``, none of them inside another; a collective call.

        Raises:
            TideConfigError: if there are none, they are sharded already or have buffers that checkpoints would hold,
                or parts differ in shapes.
        """
        found = modules_by_policy(root, self.policy, "expert_policy")
        inside = {id(m) for expert in found for m in expert.modules() if m is not expert}
        experts = [m for m in found if id(m) not in inside]
        if not experts:
            raise TideConfigError("expert_policy finds no module in the model; it has to name the modules of experts")
        if any(isinstance(p, DTensor) for m in experts for p in m.parameters()):
            raise TideConfigError(
                "experts named by expert_policy are sharded already. Leave them unsharded in configure_model, or leave "
                "out expert_policy."
            )
        kept = [name for m in experts for name in m.state_dict() if name in dict(m.named_buffers())]
        if kept:
            raise TideConfigError(
                f"experts have the buffers {', '.join(kept)}, which checkpoints hold for one part only. Make them "
                f"parameters with requires_grad=False, or register them with persistent=False."
            )
        shapes = [(name, tuple(p.shape)) for m in experts for name, p in m.named_parameters()]
        mark = torch.tensor([zlib.crc32(repr(shapes).encode())], device=device)
        most = mark.clone()
        for seen, op in ((mark, dist.ReduceOp.MIN), (most, dist.ReduceOp.MAX)):
            dist.all_reduce(seen, op=op, group=self.mesh.get_group(PARTS))
        if mark.item() != most.item():
            raise TideConfigError(
                f"the experts of this rank have other names or shapes than those of another part; every part needs "
                f"equally many experts. Here: {', '.join(f'{name} {shape}' for name, shape in shapes)}"
            )
        return experts

    def whole(self, state: Any) -> Any:
        """A state with the experts of all parts in each tensor, in order of dimension 0; nothing is copied."""
        parts = self.mesh.size(0)

        def widen(tensor: DTensor) -> DTensor:
            if tensor.device_mesh != self.shard_mesh:
                return tensor
            shape = torch.Size([parts * tensor.shape[0], *tensor.shape[1:]])
            return _from_local(tensor, self.mesh, (Shard(0), Shard(0)), shape)

        return _map_dtensors(state, widen)

    def own(self, state: Any) -> Any:
        """The reverse of :meth:`whole`."""
        parts = self.mesh.size(0)

        def narrow(tensor: DTensor) -> DTensor:
            if tensor.device_mesh != self.mesh:
                return tensor
            shape = torch.Size([tensor.shape[0] // parts, *tensor.shape[1:]])
            return _from_local(tensor, self.shard_mesh, (Shard(0),), shape)

        return _map_dtensors(state, narrow)


def _from_local(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Shard, ...], shape: torch.Size) -> DTensor:
    local = tensor.to_local()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())


def _map_dtensors(state: Any, function: Callable[[DTensor], DTensor]) -> Any:
    """The same nested mappings and lists with ``function`` applied to each DTensor in them."""
    if isinstance(state, DTensor):
        return function(state)
    if isinstance(state, Mapping):
        return {key: _map_dtensors(value, function) for key, value in state.items()}
    if isinstance(state, list):
        return [_map_dtensors(value, function) for value in state]
    return state
