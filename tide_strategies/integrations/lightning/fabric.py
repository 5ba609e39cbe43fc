"""``TideFSDPFabricStrategy``: FSDP2 with TIDE collectives for Lightning Fabric.

:class:`FabricStrategy` holds the behaviour; ``fabric_unified`` and ``fabric_standalone`` mix it into the
``ModelParallelStrategy`` of their namespace.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.averaging import gather_on_rank0
from tide_strategies.integrations.clipping import clip_grad_norm_, clip_grad_value_
from tide_strategies.integrations.lightning.base import TideStrategyBase
from tide_strategies.integrations.lightning.checkpoint import (
    METADATA_FILE,
    is_sharded_checkpoint,
    load_file,
    load_full_module,
    load_full_optimizers,
    load_sharded,
    load_sharded_average,
)
from tide_strategies.integrations.lightning.fabric_ema import TideFabricEMA
from tide_strategies.integrations.lightning.options import check_flag
from tide_strategies.integrations.lightning.saving import ShardedWriter
from tide_strategies.integrations.sharding import set_gradient_sync
from tide_strategies.integrations.wrapping import WrapPolicy

if TYPE_CHECKING:
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as _Host
else:
    _Host = object


class FabricStrategy(TideStrategyBase, _Host):
    """Fully sharded data parallelism (FSDP2) with TIDE collectives, for Fabric.

    Args:
        auto_wrap_policy: what becomes a unit. ``None`` finds the repeated blocks; or module classes, class names, or
            a function ``module -> bool``.
        min_num_params: units with fewer parameters join the group around them.
        reshard_after_forward: free the units' parameters between forward and backward.
        mp_policy: replaces the policy that follows from Fabric's ``precision``.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory.
        replicate_size: number of replicas of the shards (HSDP); must divide the number of processes.
        sync_module_states: start from rank 0's parameters and buffers on all ranks.
        state_dict_type: "full" saves one file with everything, "sharded" a folder with a part per rank. Both kinds
            load, whichever is set.
        save_in_background: ``fabric.save`` copies the state and returns, and a thread writes it; only for sharded
            checkpoints. :meth:`finish_saving` waits for it, as the next save, a load and the program's end do.
        weights_only: False also loads checkpoints with arbitrary Python objects, which can run code of their
            author.
        tide: options of TIDE, a :class:`~tide_strategies.TideConfig` or a mapping.
        process_group_backend: as in ``ModelParallelStrategy``.
        timeout: of the process group, as in ``ModelParallelStrategy``.
        **options: top-level options of ``TideConfig``, such as ``plan="stock"``.

    Raises:
        TideConfigError: for an unknown option or a value that is not allowed.
    """

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy | None = None,
        min_num_params: int = 0,
        reshard_after_forward: bool | int = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        replicate_size: int = 1,
        sync_module_states: bool = True,
        state_dict_type: Literal["full", "sharded"] = "full",
        save_in_background: bool = False,
        weights_only: bool = True,
        tide: TideConfig | Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        self._take_options(
            auto_wrap_policy=auto_wrap_policy,
            min_num_params=min_num_params,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            cpu_offload=cpu_offload,
            sync_module_states=sync_module_states,
            replicate_size=replicate_size,
            state_dict_type=state_dict_type,
            weights_only=weights_only,
            tide=tide,
            options=options,
        )
        check_flag("save_in_background", save_in_background)
        if save_in_background and state_dict_type == "full":
            raise TideConfigError(
                "save_in_background=True needs state_dict_type='sharded', where each rank writes its own part. "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one file of such a checkpoint."
            )
        self.save_in_background = save_in_background
        super().__init__(
            parallelize_fn=_not_used,
            tensor_parallel_size=1,
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._backward_sync_control: Any = _BackwardSyncControl()
        self._sharded_writer = ShardedWriter(timeout or default_pg_timeout)
        self._waits_at_exit = False

    @property
    def checkpoint_io(self) -> Any:
        """There is none, as in ``ModelParallelStrategy``."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise TideConfigError(
            f"{type(self).__name__} writes checkpoints itself, not with the plugin {type(plugin).__name__}: leave it "
            f"out. The options state_dict_type='sharded', save_in_background=True save while training goes on."
        )

    # ---- setup

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            self._policy(plugin.precision)  # raises for precisions that do not work
        self._precision = plugin

    def setup_environment(self) -> None:
        """Start the process group and lay out the mesh."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        self._device_mesh = self._make_mesh()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module and apply TIDE to it."""
        self._shard(module, self.precision.precision)
        self._apply_tide(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Accept an optimizer created after ``setup_module``, over sharded parameters."""
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Shard the module and point optimizers created before that at the sharded parameters.

        Raises:
            TideConfigError: if an optimizer has state already, or holds parameters of another module.
        """
        before = dict(module.named_parameters(remove_duplicate=False))
        module = self.setup_module(module)
        sharded = dict(module.named_parameters(remove_duplicate=False))
        moved = {id(old): sharded[name] for name, old in before.items()}
        for optimizer in optimizers:
            if optimizer.state:
                raise TideConfigError(
                    f"{type(optimizer).__name__} has state already, which cannot be sharded after the fact. Pass a "
                    f"fresh optimizer to fabric.setup(), then restore its state with fabric.load()."
                )
            for group in optimizer.param_groups:
                if any(id(p) not in moved for p in group["params"]):
                    raise TideConfigError(
                        f"{type(optimizer).__name__} holds parameters that are not in the module set up with it"
                    )
                group["params"] = [moved[id(p)] for p in group["params"]]
        return module, optimizers, *scheduler  # Lightning 2.6 passes one and expects it back; 2.5 does neither

    # ---- training

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; after the first one, say what TIDE did."""
        result = super().optimizer_step(optimizer, **kwargs)
        if (line := self._take_summary()) is not None:
            rank_zero_info(line)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of all shards together, on every rank alike; returns that norm."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp gradients to ``[-clip_val, clip_val]``."""
        self.precision.unscale_gradients(optimizer)
        clip_grad_value_(self.precision.main_params(optimizer), float(clip_val))

    # ---- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write the objects in ``state``; a collective call.

        Raises:
            TideConfigError: unless there is exactly one sharded module in ``state``.
            TidePeerError: if another rank could not write this checkpoint or the one before it; that rank raises what
                kept it from doing so.
        """
        _, module = _one_module(state, "save")
        with self._failing_together("write a checkpoint"):
            if not self._save_distributed_checkpoint or storage_options is not None or filter is not None:
                whole = {k: v.to_save(gather_on_rank0) if isinstance(v, TideFabricEMA) else v for k, v in state.items()}
                super().save_checkpoint(path, whole, storage_options, filter)
                return
            parts, rest = _split_for_ranks(state, module)
            if self.save_in_background and not self._waits_at_exit:
                # Registered after the teardown of the process groups, and so run before it.
                atexit.register(self._sharded_writer.wait)
                self._waits_at_exit = True
            self._sharded_writer.write(parts, rest, Path(self.broadcast(path)), background=self.save_in_background)

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written any more; a collective call.

        Raises:
            TideTimeoutError: if it does not end within the strategy's ``timeout``.
            TidePeerError: if another rank could not write its part; that rank raises what kept it from doing so.
        """
        with self._failing_together("finish a checkpoint"):
            self._sharded_writer.wait()

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore the objects in ``state`` from either kind of checkpoint; returns what is left of it.

        Raises:
            TideConfigError: unless ``state`` is a module, or a mapping with exactly one sharded module in it.
        """
        if self.save_in_background:
            self.finish_saving()
        path = Path(self.broadcast(path))
        safe = self.weights_only if weights_only is None else weights_only
        how = f"{type(self).__name__}(weights_only=False)"
        if isinstance(state, nn.Module):
            load_full_module(state, load_file(path, weights_only=safe, where=how), strict)
            return {}
        key, module = _one_module(state, "load")
        assert isinstance(state, dict)
        optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        if sharded := is_sharded_checkpoint(path):
            load_sharded(path, module, key, optimizers, strict)
            rest = load_file(path / METADATA_FILE, weights_only=safe, where=how)
        else:
            rest = load_file(path, weights_only=safe, where=how)
            load_full_module(module, _take(rest, key, path), strict)
            states = [_take(rest, name, path) for name in optimizers]
            load_full_optimizers(module, list(optimizers.values()), states, strict)
        for name in [n for n in state if n != key and n not in optimizers]:
            if name not in rest and not strict:
                continue
            value, target = _take(rest, name, path), state[name]
            if isinstance(target, TideFabricEMA):
                if sharded and value["last_update"] is not None:
                    value["average"] = load_sharded_average(path, module, name, value.pop("dtypes"))
                target.load(module, value)
            elif hasattr(target, "load_state_dict"):
                target.load_state_dict(value)
            else:
                state[name] = value
        return rest


class _BackwardSyncControl:
    """``fabric.no_backward_sync``: leaves synchronisation on afterwards, whatever ``enabled`` was."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        set_gradient_sync(module, False)
        try:
            yield
        finally:
            set_gradient_sync(module, True)


def _one_module(state: Any, verb: str) -> tuple[str, Any]:
    """The one sharded module in ``state``, and its key."""
    modules = [(k, v) for k, v in state.items() if isinstance(v, FSDPModule)] if isinstance(state, dict) else []
    if len(modules) != 1:
        raise TideConfigError(
            f"fabric.{verb}() needs state={{'model': model, ...}} with exactly one model that fabric.setup() has "
            f"sharded; found {len(modules)} in it."
        )
    return modules[0]


def _split_for_ranks(state: dict[str, Any], module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each rank writes its own part of, and what rank 0 writes."""
    options = StateDictOptions(cpu_offload=True)
    parts: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            parts[key] = get_model_state_dict(value, options=options)
        elif isinstance(value, Optimizer):
            parts[key] = get_optimizer_state_dict(module, value, options=options)
        elif isinstance(value, TideFabricEMA):
            rest[key] = value.to_save(dict)
            parts[key] = rest[key].pop("average")
            rest[key]["dtypes"] = {name: tensor.dtype for name, tensor in parts[key].items()}
        else:
            rest[key] = value.state_dict() if isinstance(value, Stateful) else value
    return parts, rest


def _take(checkpoint: dict[str, Any], key: str, path: Path) -> Any:
    if key not in checkpoint:
        raise KeyError(f"{str(path)!r} has no entry {key!r}; it has: {', '.join(map(str, checkpoint))}")
    return checkpoint.pop(key)


def _not_used(module: nn.Module, mesh: Any) -> nn.Module:
    raise AssertionError("setup_module() shards the model itself")
