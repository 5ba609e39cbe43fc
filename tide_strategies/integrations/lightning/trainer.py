"""``TideFSDPStrategy``: FSDP2 with TIDE collectives for Lightning's ``Trainer``.

:class:`TrainerStrategy` holds all of the behaviour and none of the namespace: it is mixed into the
``ModelParallelStrategy`` of ``lightning.pytorch`` in ``trainer_unified`` and of ``pytorch_lightning`` in
``trainer_standalone``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.clipping import clip_grad_norm_, clip_grad_value_
from tide_strategies.integrations.experts import ExpertGroups
from tide_strategies.integrations.lightning.base import TideStrategyBase
from tide_strategies.integrations.lightning.checkpoint import (
    AVERAGE_KEY,
    METADATA_FILE,
    check_sharded_optimizers,
    is_sharded_checkpoint,
    load_file,
    load_full_module,
    load_full_optimizers,
    load_sharded,
    load_sharded_average,
    split_for_ranks,
)
from tide_strategies.integrations.lightning.ema import Ema
from tide_strategies.integrations.lightning.options import check_experts, check_flag
from tide_strategies.integrations.lightning.saving import ShardedWriter
from tide_strategies.integrations.sharding import set_gradient_sync
from tide_strategies.integrations.wrapping import WrapPolicy

if TYPE_CHECKING:
    # The type checker sees one of the two hosts; at run time the class that mixes this in brings its own.
    from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy as _Host
else:
    _Host = object

# Callbacks that copy or average whole models, which does not work on shards.
_REFUSED_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")
# Plugins whose meaning sharded checkpoints keep: the default one, and writing in the background.
_IO_OF_SHARDED = ("TorchCheckpointIO", "AsyncCheckpointIO")


class TrainerStrategy(TideStrategyBase, _Host):
    """Fully sharded data parallelism (FSDP2) with TIDE collectives.

    The LightningModule needs no ``configure_model``: repeated blocks become units by themselves. Where
    ``configure_model`` has called ``fully_shard`` on parts of the model, those parts stay as they are.

    Args:
        auto_wrap_policy: what becomes a unit. ``None`` finds the repeated blocks; or module classes, class names, or
            a function ``module -> bool``.
        min_num_params: units with fewer parameters join the group around them.
        reshard_after_forward: free the units' parameters between forward and backward.
        mp_policy: replaces the policy that follows from the Trainer's ``precision``.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory.
        replicate_size: number of replicas of the shards (HSDP); must divide the number of processes.
        expert_policy: modules that hold this rank's experts, named as in ``auto_wrap_policy``. They are sharded among
            the ranks that hold the same experts.
        expert_parallel_size: number E of parts of the experts; rank r holds part r mod E. :attr:`expert_mesh` has the
            groups, for ``configure_model``.
        sync_module_states: start from rank 0's parameters and buffers on all ranks (experts: from the first rank that
            holds them).
        sync_every_microbatch: reduce gradients in each micro-batch of an accumulation (saves memory, costs time).
        state_dict_type: "full" writes checkpoints as one file with everything, "sharded" as a folder with a part per
            rank. Both kinds load, whichever is set.
        weights_only: False also loads checkpoints with arbitrary Python objects, which can run code of their
            author.
        tide: options of TIDE, a :class:`~tide_strategies.TideConfig` or a mapping.
        process_group_backend: as in ``ModelParallelStrategy``.
        timeout: of the process group, as in ``ModelParallelStrategy``.
        **options: top-level options of ``TideConfig``, such as ``plan="stock"``.

    Raises:
        TideConfigError: for an unknown option or a value that is not allowed.
    """

    strategy_name = "tide_fsdp"

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy | None = None,
        min_num_params: int = 0,
        reshard_after_forward: bool | int = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        replicate_size: int = 1,
        expert_policy: WrapPolicy | None = None,
        expert_parallel_size: int = 1,
        sync_module_states: bool = True,
        sync_every_microbatch: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
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
        check_flag("sync_every_microbatch", sync_every_microbatch)
        check_experts(expert_policy, expert_parallel_size, replicate_size, state_dict_type)
        self.expert_policy = expert_policy
        self.expert_parallel_size = expert_parallel_size
        self.sync_every_microbatch = sync_every_microbatch
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=state_dict_type == "sharded",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._sharded_writer = ShardedWriter(timeout or default_pg_timeout)

    # ---- setup and teardown

    @property
    def precision_plugin(self) -> Any:
        """The Trainer's precision plugin, with gradient clipping that knows shards."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            self._policy(plugin.precision)  # raises for precisions that do not work
            plugin.clip_grad_by_norm = functools.partial(self._clip_by_norm, plugin)
            plugin.clip_grad_by_value = functools.partial(_clip_by_value, plugin)
        self._precision_plugin = plugin

    def _clip_by_norm(self, plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
        split = self._experts.split_further if self._experts is not None else None
        clip_grad_norm_(plugin.main_params(optimizer), clip_val, split_further=split)

    def setup_environment(self) -> None:
        """Start the process group (first stage only) and lay out the mesh."""
        assert self.lightning_module is not None
        self._refuse_callbacks(self.lightning_module.trainer)
        self._refuse_plugins()
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        continues = dist.is_initialized() and self._device_mesh is not None
        self._setup_distributed()
        if not continues:  # every mesh makes process groups of its own: one mesh serves all stages
            self._device_mesh = self._make_mesh()
            self._experts = self._make_expert_groups()
        self.lightning_module._device_mesh = self._device_mesh

    def _make_expert_groups(self) -> ExpertGroups | None:
        world, parts, policy = self.num_nodes * self.num_processes, self.expert_parallel_size, self.expert_policy
        check_experts(policy, parts, self.replicate_size, "full" if self.saves_whole_files else "sharded", world)
        return None if policy is None else ExpertGroups.over(self.root_device.type, world, parts, policy)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """All ranks as ``expert_parallel`` (between parts of the experts) by ``expert_shard`` (of the same part).

        Raises:
            TideConfigError: without ``expert_policy``, or before the Trainer has started processes.
        """
        if self._experts is None:
            raise TideConfigError(
                "expert_mesh is there from configure_model on, with expert_policy and expert_parallel_size set"
            )
        return self._experts.mesh

    def setup(self, trainer: Any) -> None:
        """Shard the model, apply TIDE, and create the optimizers (in ``fit``)."""
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if not isinstance(self.model, FSDPModule):
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
        self._shard(self.model, self.precision_plugin.precision)
        self.model_to_device()
        self.barrier()
        self._apply_tide(self.model)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what sharding has left behind; with CPU offload the parameters stay where they are."""
        assert self.model is not None
        if not self.sharding.cpu_offload:
            self.model.to(self.root_device)

    def teardown(self) -> None:
        """End of a stage, or of a failed one: leave a model of sharded parameters and stock collectives behind."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # the root keeps its parameters whole after a forward without backward
        self._close_tide()
        super().teardown()
        if not self._saves_in_background:
            return
        try:
            self._sharded_writer.wait()
            self.checkpoint_io.teardown()
        except Exception as error:
            assert self.lightning_module is not None
            if self.lightning_module.trainer.state.status == "running":
                raise
            # Training has failed already, perhaps with this very error.
            rank_zero_warn(f"the last checkpoint was not written: {error}")

    def _refuse_callbacks(self, trainer: Any) -> None:
        names = {c.__name__ for callback in trainer.callbacks for c in type(callback).__mro__}
        for name in _REFUSED_CALLBACKS:
            if name in names and trainer.state.fn == "fit":
                raise TideConfigError(
                    f"the callback {name} copies and averages whole models, which does not work on sharded ones. "
                    f"For a moving average use TideEMA(decay=...) from tide_strategies.integrations.lightning, which "
                    f"averages the shards; else average saved checkpoints after training."
                )

    def _refuse_plugins(self) -> None:
        plugin = self._checkpoint_io
        if plugin is None or self.saves_whole_files or type(plugin).__name__ in _IO_OF_SHARDED:
            return
        raise TideConfigError(
            f"sharded checkpoints are written by torch.distributed.checkpoint, not by the plugin "
            f"{type(plugin).__name__}. Use state_dict_type='full' with it, or AsyncCheckpointIO, or no plugin."
        )

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's ``training_step`` inside the root's forward, so that its parameters are whole."""
        return self._step("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`training_step`, without gradients."""
        with _no_inference_mode():
            return self._step("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`training_step`, without gradients."""
        with _no_inference_mode():
            return self._step("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`training_step`, without gradients."""
        with _no_inference_mode():
            return self._step("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    def _step(self, name: str, context: AbstractContextManager[None], *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        assert self.lightning_module is not None
        with context:
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """After each backward: report once, and keep the root usable in manual optimisation."""
        if (line := self._take_summary()) is not None:
            rank_zero_info(line)
        self._refresh_root()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Step, then let the rest of a manually optimised ``training_step`` see the new parameters."""
        result = super().optimizer_step(optimizer, closure, model=model, **kwargs)
        self._refresh_root()
        return result

    def _refresh_root(self) -> None:
        """Gather the root's parameters anew in the middle of a ``training_step`` with manual optimisation.

        FSDP2 frees them at the end of backward, and an optimizer step changes them; but all of ``training_step``
        runs inside the root's forward and may go on to use them.
        """
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization and isinstance(self.model, FSDPModule):
            self.model.reshard()
            self.model.unshard()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, unless ``sync_every_microbatch`` is set."""
        if self.sync_every_microbatch:
            yield
            return
        assert self.model is not None
        set_gradient_sync(self.model, False)
        try:
            yield
        finally:
            set_gradient_sync(self.model, True)

    # ---- checkpoints

    @property
    def saves_whole_files(self) -> bool:
        """Whether checkpoints are single files that rank 0 writes."""
        return not self._save_distributed_checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; with ``AsyncCheckpointIO`` while training goes on. A collective call.

        Raises:
            TidePeerError: if another rank could not write this checkpoint or the one before it; that rank raises what
                kept it from doing so.
        """
        with self._failing_together("write a checkpoint"):
            if self.saves_whole_files or storage_options is not None:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            else:
                path = Path(self.broadcast(filepath))
                parts = split_for_ranks(checkpoint, self._experts)
                self._sharded_writer.write(parts, checkpoint, path, background=self._saves_in_background)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status != "running":  # nothing else would wait for it
            self._finish_saving()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint; while another is being written, once that one is whole."""
        self._sharded_writer.afterwards(functools.partial(super().remove_checkpoint, filepath))

    def on_train_end(self) -> None:
        """Training is done when its checkpoints are written."""
        super().on_train_end()
        self._finish_saving()

    def _finish_saving(self) -> None:
        if self._saves_in_background:
            with self._failing_together("finish a checkpoint"):
                self._sharded_writer.wait()
                self.checkpoint_io.teardown()

    @property
    def _saves_in_background(self) -> bool:
        return _is_a(self._checkpoint_io, "AsyncCheckpointIO")

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore the model and, in ``fit``, the optimizers, from either kind of checkpoint; returns the rest.

        ``weights_only`` as passed to ``trainer.fit`` counts where Lightning hands it on; else the strategy's own.
        """
        assert self.model is not None
        assert self.lightning_module is not None
        self._finish_saving()
        path = Path(self.broadcast(checkpoint_path))
        safe = self.weights_only if weights_only is None else weights_only
        how = f"{type(self).__name__}(weights_only=False)"
        strict = self.lightning_module.strict_loading
        fitting = self.lightning_module.trainer.state.fn == "fit"
        optimizers = list(self.optimizers) if fitting else []
        if is_sharded_checkpoint(path):
            rest = load_file(path / METADATA_FILE, weights_only=safe, where=how)
            by_key = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
            if "lr_schedulers" not in rest:
                by_key = {}  # a checkpoint of weights alone: Lightning itself then says that it cannot resume from it
            elif fitting:
                check_sharded_optimizers(path, len(by_key))
            load_sharded(path, self.model, "state_dict", by_key, strict, self._experts)
            trainer: Any = self.lightning_module.trainer
            if AVERAGE_KEY in rest and any(isinstance(c, Ema) for c in trainer.callbacks):
                dtypes = rest[AVERAGE_KEY]["dtypes"]
                average = load_sharded_average(path, self.model, AVERAGE_KEY, dtypes, self._experts)
                rest[AVERAGE_KEY]["average"] = average
            return rest
        if self.expert_parallel_size > 1:
            raise TideConfigError(
                f"{str(path)!r} is not a sharded checkpoint, and no other kind holds experts of several parts"
            )
        checkpoint = load_file(path, weights_only=safe, where=how)
        load_full_module(self.model, checkpoint.pop("state_dict"), strict)
        # A checkpoint of weights alone has no states; Lightning itself then says that it cannot resume from it.
        if fitting and "optimizer_states" in checkpoint:
            load_full_optimizers(self.model, optimizers, checkpoint["optimizer_states"], strict)
        return checkpoint


def _is_a(thing: object, name: str) -> bool:
    """Whether the thing is of the class, in either copy of Lightning."""
    return any(c.__name__ == name for c in type(thing).__mro__)


def _clip_by_value(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_value_(plugin.main_params(optimizer), clip_val)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Run under ``no_grad`` where Lightning has chosen ``inference_mode``.

    FSDP2 creates its buffers at first use and keeps them: made in inference mode (the sanity check before
    training, say), they could not take part in a backward later.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
