"""The worker's side: an ``Accelerator`` that uses TIDE where it was asked for, and is itself everywhere else.

Accelerate has no place to hook in after sharding, so some of its functions are wrapped, in this process only and only
if TIDE is wanted in it. Each wrapper calls the original and leaves any Accelerator without a TIDE plugin alone.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tide_strategies.errors import TideConfigError, TideError
from tide_strategies.integrations.accelerate.buffers import buffers_outside_the_state_dict
from tide_strategies.integrations.accelerate.checkpoint_kind import extend_loading
from tide_strategies.integrations.accelerate.environment import requested_config

_MARK = "_tide_extends"


def extend(accelerator: ModuleType) -> None:
    """Make ``Accelerator`` understand a ``TideFSDPPlugin``; more than one call has no further effect.

    Raises:
        TideError: if this Accelerate is too different from those that TIDE knows.
    """
    if hasattr(accelerator.fsdp2_prepare_model, _MARK):
        return
    _check_known(accelerator)
    _extend_init(accelerator.Accelerator)
    _extend_prepare(accelerator.Accelerator)
    _extend_free_memory(accelerator.Accelerator)
    _extend_state(accelerator)
    _extend_sharding(accelerator)
    extend_loading(accelerator)


def _check_known(accelerator: ModuleType) -> None:
    """The parts that the wrappers below rely on."""
    expected = [
        (accelerator, "fsdp2_prepare_model", {"accelerator", "model"}),
        (accelerator, "load_fsdp_model", {"fsdp_plugin", "input_dir"}),
        (accelerator.Accelerator, "__init__", {"fsdp_plugin", "cpu"}),
        (accelerator.Accelerator, "prepare", set()),
        (accelerator.Accelerator, "free_memory", set()),
        (accelerator.AcceleratorState, "__init__", {"fsdp_plugin", "cpu"}),
    ]
    for owner, name, parameters in expected:
        function = getattr(owner, name, None)
        if function is None or not parameters <= set(inspect.signature(function).parameters):
            import accelerate

            raise TideError(
                f"accelerate {accelerate.__version__} has another {owner.__name__}.{name} than TIDE knows; "
                f"install a version that the documentation names (docs/accelerate.md)"
            )


def _extend_init(cls: Any) -> None:
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # the host's own words for a wrong call
        plugin = _chosen_plugin(bound.arguments.get("fsdp_plugin"))
        if not isinstance(plugin, TideFSDPPlugin):
            return original(self, *args, **kwargs)
        bound.arguments["fsdp_plugin"] = plugin
        if not torch.accelerator.is_available():
            bound.arguments["cpu"] = True  # without it every process would train alone
        original(*bound.args, **bound.kwargs)
        _check_trains_together(self)
        from tide_strategies.runtime.teardown import install_exit_teardown

        install_exit_teardown()

    cls.__init__ = __init__


def _chosen_plugin(given: Any) -> Any:
    """The plugin for a new Accelerator: the launcher's request applies to whatever FSDP plugin there is."""
    config = requested_config()
    if config is None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return given
    from tide_strategies.integrations.accelerate.plugin import FullyShardedDataParallelPlugin, TideFSDPPlugin, with_tide

    if given is None:
        return TideFSDPPlugin()
    if isinstance(given, FullyShardedDataParallelPlugin) and not isinstance(given, TideFSDPPlugin):
        return with_tide(given, config)
    return given


def _check_trains_together(accelerator: Any) -> None:
    if accelerator.is_fsdp2:
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise TideConfigError(
            f"this job has {world} processes, but Accelerate runs each of them as {accelerator.distributed_type}: "
            f"FSDP2 would not be used. On the CPU set 'use_cpu: true' in the Accelerate file, or "
            f"ACCELERATE_USE_CPU=true in the environment before anything else of Accelerate is used."
        )
    warnings.warn(
        "TIDE: this program runs as one process, so there is nothing to shard and no communication to accelerate. "
        "Start it with several: accelerate launch --config tide.yaml --num_processes 2 SCRIPT",
        stacklevel=3,
    )


def _extend_state(accelerator: ModuleType) -> None:
    """FSDP2 on CPU processes: Accelerate's list of what can use an FSDP plugin leaves them out, without a word."""
    cls = accelerator.AcceleratorState
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        plugin = kwargs.get("fsdp_plugin")
        kinds = accelerator.DistributedType
        if not isinstance(plugin, TideFSDPPlugin) or self.distributed_type != kinds.MULTI_CPU:
            return
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = plugin
        self.distributed_type = kinds.FSDP
        # Every later AcceleratorState() copies it from there.
        accelerator.PartialState._shared_state["distributed_type"] = kinds.FSDP

    cls.__init__ = __init__


def _extend_sharding(accelerator: ModuleType) -> None:
    original = accelerator.fsdp2_prepare_model

    @functools.wraps(original)
    def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        plugin = accelerator.state.fsdp_plugin
        if not isinstance(plugin, TideFSDPPlugin):
            return original(accelerator, model)
        from_rank_0 = plugin.cpu_ram_efficient_loading and not isinstance(model, FSDPModule)
        with buffers_outside_the_state_dict(model) if from_rank_0 else nullcontext():
            model = original(accelerator, model)
        plugin.apply_tide(model, announce=accelerator.is_main_process)
        return model

    setattr(fsdp2_prepare_model, _MARK, True)
    accelerator.fsdp2_prepare_model = fsdp2_prepare_model  # type: ignore[attr-defined]


def _extend_prepare(cls: Any) -> None:
    """Accelerate refuses a model without its optimizer; here the words also say what to do about it."""
    original = cls.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        alone = any(isinstance(a, nn.Module) for a in args) and not any(isinstance(a, Optimizer) for a in args)
        if alone and isinstance(getattr(self.state, "fsdp_plugin", None), TideFSDPPlugin):
            raise TideConfigError(
                "FSDP2 needs a model and its optimizer in one call: accelerator.prepare(model, optimizer, ...). In "
                "transformers' Trainer, evaluate() and predict() need a train() before them; "
                "TrainingArguments(eval_on_start=True) evaluates the untrained model."
            )
        return original(self, *args, **kwargs)

    cls.prepare = prepare


def _extend_free_memory(cls: Any) -> None:
    original = cls.free_memory

    @functools.wraps(original)
    def free_memory(self: Any, *objects: Any) -> Any:
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        plugin = getattr(self.state, "fsdp_plugin", None)
        if isinstance(plugin, TideFSDPPlugin):
            plugin.close_tide()
        return original(self, *objects)

    cls.free_memory = free_memory
