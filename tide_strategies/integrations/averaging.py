"""An exponential moving average of a sharded model: each rank averages the shards that it holds.

Averaging is elementwise, so no update communicates, and the shards of all ranks together are, value for value, the
average of the whole model. (``torch.optim.swa_utils.AveragedModel`` copies the module, which FSDP2 forbids.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tide_strategies.errors import TideConfigError


class ShardAverage:
    """The average of the trainable parameters of a module; those that are frozen are their own average.

    The first update copies a parameter, later ones do ``average += (1 - decay) * (parameter - average)``. A parameter
    that becomes trainable later joins at the next update.

    Args:
        module: the module, sharded or not. Between :meth:`apply` and :meth:`restore` nobody else may change it.
        decay: weight of the past, between 0 and 1.
        float32: keep the averages of half-precision parameters in fp32; in bf16 small updates round to nothing.
        buffers: average floating-point buffers as well (every rank its own).
    """

    def __init__(self, module: nn.Module, decay: float, *, float32: bool = True, buffers: bool = False) -> None:
        self.module = module
        self._decay = decay
        self._float32 = float32
        self._buffers = buffers
        self._lerp = get_ema_multi_avg_fn(decay)
        self._averages: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}

    @property
    def applied(self) -> bool:
        """Whether the module holds the averages now."""
        return bool(self._current)

    @torch.no_grad()
    def update(self) -> None:
        """Take the module's present values into the average; no communication."""
        averages, values = [], []
        for name, tensor in self._averaged_tensors():
            value = _local(tensor)
            average = self._averages.get(name)
            if average is None:
                self._averages[name] = value.to(self._dtype(value), copy=True)
            elif average.dtype != value.dtype:
                average.lerp_(value.to(average.dtype), 1.0 - self._decay)
            elif value.numel():
                averages.append(average)
                values.append(value)
        if averages:
            self._lerp(averages, values, 0)

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averages into the module, rounded to its dtypes; :meth:`restore` undoes it."""
        if self._current:
            return
        for name, tensor in sharded_tensors(self.module).items():
            if name in self._averages:
                value = _local(tensor)
                self._current[name] = value.clone()
                value.copy_(self._averages[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values from before :meth:`apply` back, bit for bit."""
        if not self._current:
            return
        for name, tensor in sharded_tensors(self.module).items():
            if name in self._current:
                _local(tensor).copy_(self._current[name])
        self._current = {}

    def state(self) -> dict[str, Tensor]:
        """Name -> average: DTensors where the module has them, sharing the memory of the averages."""
        return self._sharded(self._averages)

    def state_before_apply(self) -> dict[str, Tensor]:
        """Name -> what :meth:`restore` would put back; shared parameters under all their names."""
        first = {id(tensor): name for name, tensor in sharded_tensors(self.module).items()}
        state = self._sharded(self._current)
        every = sharded_tensors(self.module, shared_once=False)
        return {name: state[first[id(t)]] for name, t in every.items() if first[id(t)] in state}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state: DTensors as from :meth:`state`, or full tensors, of which each rank takes its shards.

        Raises:
            TideConfigError: if the state has names that the module has not, or other shapes.
        """
        tensors = sharded_tensors(self.module)
        for name, value in state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                ours = f"of shape {tuple(tensors[name].shape)}" if name in tensors else "that does not exist"
                raise TideConfigError(
                    f"the average in the checkpoint has {name!r} of shape {tuple(value.shape)}, which here is a "
                    f"parameter {ours}. Resume with the model that it was made with, or train without the checkpoint's "
                    f"average: delete its entry 'tide_ema'."
                )
        self._current = {}
        self._averages = {name: self._shard_of(value, tensors[name]) for name, value in state.items()}

    def _shard_of(self, value: Tensor, like: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value.to_local()
        local = _local(like)
        if isinstance(like, DTensor):
            # Each rank cuts its own part out of the full tensor that it has read: nothing to communicate.
            value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()
        return value.to(local.device, self._dtype(local), copy=True)

    def _sharded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = sharded_tensors(self.module)
        return {name: sharded_like(tensors[name], value) for name, value in values.items()}

    def _averaged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sharded_tensors(self.module).items():
            wanted = tensor.requires_grad if isinstance(tensor, nn.Parameter) else self._buffers
            if (wanted or name in self._averages) and tensor.is_floating_point():
                yield name, tensor

    def _dtype(self, value: Tensor) -> torch.dtype:
        return torch.float32 if self._float32 and value.dtype.itemsize < 4 else value.dtype


def sharded_tensors(module: nn.Module, *, shared_once: bool = True) -> dict[str, Tensor]:
    """Name -> parameter or buffer, by the names that checkpoints use; unsharded parameters are given back first."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    named = [
        *module.named_parameters(remove_duplicate=shared_once),
        *module.named_buffers(remove_duplicate=shared_once),
    ]
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named}


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor laid out like ``tensor``; shards may be uneven or empty."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def gather_on_rank0(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in CPU memory on rank 0, nothing elsewhere; a collective call, one tensor at a time."""
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            # With CPU offload the shards are not where their ranks communicate.
            on_mesh = sharded_like(tensor, tensor.to_local().to(tensor.device_mesh.device_type))
            assert isinstance(on_mesh, DTensor)
            tensor = on_mesh.full_tensor()
        if dist.get_rank() == 0:
            whole[name] = tensor.to("cpu", copy=True)
    return whole


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
