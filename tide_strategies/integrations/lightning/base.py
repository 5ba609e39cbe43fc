"""What the strategies for ``Trainer`` and for ``Fabric`` have in common: options, device mesh, and TIDE itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError, TidePeerError
from tide_strategies.integrations.experts import ExpertGroups
from tide_strategies.integrations.lightning import options as opt
from tide_strategies.integrations.sharding import ShardingOptions, policy_for_precision, shard_module
from tide_strategies.integrations.summary import summary_line
from tide_strategies.report import TideReport
from tide_strategies.runtime.cuda.queues import request_queues

if TYPE_CHECKING:
    from tide_strategies.fsdp2 import TideHandle

# The type checker cannot see both kinds of host at once; the classes that mix this in name theirs.
_Host: Any = object

# With parameters in CPU memory, norms and checkpoints need collectives on CPU tensors beside those on the GPU.
_OFFLOAD_BACKEND = "cpu:gloo,cuda:nccl"


class TideStrategyBase(_Host):
    """Mixed in before a ``ModelParallelStrategy`` of any of the four namespaces."""

    def _take_options(
        self,
        *,
        replicate_size: int,
        state_dict_type: str,
        weights_only: bool,
        tide: TideConfig | Mapping[str, Any] | None,
        options: Mapping[str, Any],
        **sharding: Any,
    ) -> None:
        """Check all options and keep them; nothing here needs processes or devices."""
        request_queues()  # before anybody has touched a GPU; processes that the launcher starts inherit it
        self.tide_config = opt.tide_config(tide, options, type(self))
        opt.check_replicate_size(replicate_size)
        opt.check_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        opt.check_flag("weights_only", weights_only)
        self.sharding = ShardingOptions(**sharding)
        self.replicate_size = replicate_size
        self.weights_only = weights_only
        self._tide_handles: list[TideHandle] = []
        self._last_report: TideReport | None = None
        self._summary_due = False
        self._experts: ExpertGroups | None = None

    # ---- processes and mesh

    def _setup_distributed(self) -> None:
        opt.check_replicate_size(self.replicate_size, self.num_nodes * self.num_processes)
        ours = not dist.is_initialized()
        super()._setup_distributed()
        if ours:
            from tide_strategies.runtime.teardown import install_exit_teardown

            # Not in teardown(): the process group serves all stages (fit, validate, ...) up to the program's end.
            install_exit_teardown()
        if self._offloads_from_gpu and "cpu" not in dist.get_backend_config():
            raise TideConfigError(
                f"cpu_offload=True needs collectives on CPU tensors too, but the process group serves only "
                f"{dist.get_backend_config()!r}. Create it with the backend {_OFFLOAD_BACKEND!r}."
            )

    @property
    def _offloads_from_gpu(self) -> bool:
        return bool(self.sharding.cpu_offload and self.root_device.type == "cuda")

    def _get_process_group_backend(self) -> str:
        if self._offloads_from_gpu and self._process_group_backend is None:
            return _OFFLOAD_BACKEND
        backend: str = super()._get_process_group_backend()
        return backend

    def _make_mesh(self) -> DeviceMesh:
        """The job's mesh: Lightning's own dimension names, or those of HSDP."""
        world, replicas = self.num_nodes * self.num_processes, self.replicate_size
        if replicas == 1:
            shape, names = (world, 1), ("data_parallel", "tensor_parallel")
        else:
            shape, names = (replicas, world // replicas), ("data_parallel_replicate", "data_parallel_shard")
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    @property
    def _data_parallel_mesh(self) -> DeviceMesh:
        mesh: DeviceMesh = self.device_mesh
        return mesh["data_parallel"] if self.replicate_size == 1 else mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads its own part of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # ---- model

    def _policy(self, precision: str) -> MixedPrecisionPolicy:
        policy = policy_for_precision(precision)
        return self.sharding.mp_policy or policy

    def _shard(self, module: nn.Module, precision: str) -> None:
        mesh, policy = self._data_parallel_mesh, self._policy(precision)
        shard_module(module, mesh, self.root_device, self.sharding, policy, self._experts)

    # ---- checkpoints

    @contextmanager
    def _failing_together(self, what: str) -> Iterator[None]:
        """An error of one rank becomes one of all ranks, which would wait for it otherwise."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if not self.reduce_boolean_decision(error is not None, all=False):
            return
        if error is not None:
            raise error
        raise TidePeerError(f"another rank could not {what}; the reason is in its output")

    # ---- TIDE

    def _apply_tide(self, module: nn.Module) -> None:
        from tide_strategies.fsdp2 import apply_tide

        self._tide_handles.append(apply_tide(module, self.tide_config))
        self._summary_due = True

    def _close_tide(self) -> None:
        """Back to stock collectives: the model outlives the strategy, shared memory must not."""
        if self._tide_handles:
            self._last_report = self._tide_handles[-1].report()
        while self._tide_handles:
            self._tide_handles.pop().close()

    def tide_report(self) -> TideReport:
        """What TIDE did on this rank so far; after a stage has ended, what it did in that stage."""
        if self._tide_handles:
            return self._tide_handles[-1].report()
        return self._last_report or TideReport(installed=False, status="no model has been set up yet")

    def _take_summary(self) -> str | None:
        """The line for the log, once for each time that TIDE was applied."""
        if not self._summary_due:
            return None
        self._summary_due = False
        return summary_line(self.tide_report())

    def __getstate__(self) -> dict[str, Any]:
        # Handles and meshes belong to this process.
        host = getattr(super(), "__getstate__", None)  # absent from Fabric's strategies on Python 3.10
        return {**(host() if host else vars(self)), "_tide_handles": [], "_device_mesh": None, "_experts": None}
