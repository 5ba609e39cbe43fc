"""The FSDP plugin for an ``Accelerator`` whose models communicate through TIDE."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.hooks import RemovableHandle

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2 import TideHandle, apply_tide
from tide_strategies.integrations.accelerate.environment import requested_config
from tide_strategies.integrations.accelerate.training import extend
from tide_strategies.integrations.options import TIDE_OPTIONS, combined, unknown_option
from tide_strategies.integrations.summary import summary_line
from tide_strategies.integrations.wrapping import plan_units
from tide_strategies.report import TideReport
from tide_strategies.runtime.cuda.queues import request_queues

_log = logging.getLogger("tide_strategies.accelerate")

_Host: Any = FullyShardedDataParallelPlugin  # the type checker may or may not see Accelerate

_HANDLE = "_tide_handle"  # attribute of a prepared model
_FSDP_OPTIONS = tuple(f.name for f in dataclasses.fields(FullyShardedDataParallelPlugin))


class TideFSDPPlugin(_Host):
    """FSDP2 through Accelerate, with TIDE's collectives: ``Accelerator(fsdp_plugin=TideFSDPPlugin())``.

    What differs from Accelerate's own plugin, besides the collectives: the version is 2; without an
    ``auto_wrap_policy`` (here or from the launcher) the repeated blocks of the model become units; and under mixed
    precision gradients are reduced in fp32. A ``mixed_precision_policy`` given as an object is used as it is.

    Args:
        tide: options of TIDE (a ``TideConfig`` or a mapping). Without any, those of the launcher's ``tide_config:``
            section, or else the defaults.
        options: the fields of ``FullyShardedDataParallelPlugin``, and the top-level options of ``TideConfig``
            (``timeout_s=60``).

    Raises:
        TideConfigError: for an unknown option or a wrong value, and for ``fsdp_version=1``.
    """

    # Fields of the host that are changed here.
    fsdp_version: Any
    auto_wrap_policy: Any
    mixed_precision_policy: Any
    transformer_cls_names_to_wrap: Any

    def __init__(self, tide: TideConfig | Mapping[str, Any] | None = None, **options: Any) -> None:
        for name in options:
            if name not in (*_FSDP_OPTIONS, *TIDE_OPTIONS):
                described = "those of FullyShardedDataParallelPlugin"
                raise TideConfigError(unknown_option(name, "TideFSDPPlugin", _FSDP_OPTIONS, described))
        given = {name: options.pop(name) for name in TIDE_OPTIONS if name in options}
        requested = requested_config() if tide is None and not given else None
        self._adopt_config(requested or combined(tide, given))
        request_queues()  # before the Accelerator starts CUDA
        super().__init__(**options)

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = int(os.environ.get("FSDP_VERSION", "2"))
        _check_version(self.fsdp_version)
        if self.auto_wrap_policy is None and "FSDP_AUTO_WRAP_POLICY" not in os.environ:
            self.auto_wrap_policy = "transformer_based_wrap"
        super().__post_init__()

    def _adopt_config(self, config: TideConfig) -> None:
        self.tide_config = config
        self._find_units = False
        self._models: list[weakref.ref[nn.Module]] = []
        self._last_report = TideReport(installed=False, status="no model has been prepared yet")

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """As in Accelerate's plugin, but gradients are reduced in fp32, which costs nothing with TIDE."""
        by_name = override or self.mixed_precision_policy is None
        super().set_mixed_precision(mixed_precision, buffer_autocast, override)
        if by_name:
            self.mixed_precision_policy = dataclasses.replace(self.mixed_precision_policy, reduce_dtype=torch.float32)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """As in Accelerate's plugin; without class names, the repeated blocks of ``model`` are found.

        Raises:
            TideConfigError: if a class to wrap does not occur in the model, with the nearest one that does.
        """
        policy = getattr(self.auto_wrap_policy, "func", self.auto_wrap_policy)
        if policy is transformer_auto_wrap_policy:
            self._find_units = self._find_units or not self.transformer_cls_names_to_wrap
            if not self._find_units:
                _check_class_names(self.transformer_cls_names_to_wrap, model)
            elif not self._are_found(model):
                self.auto_wrap_policy = policy
                self.transformer_cls_names_to_wrap = sorted({type(m).__name__ for m in plan_units(model)})
        super().set_auto_wrap_policy(model)

    def _are_found(self, model: nn.Module) -> bool:
        """Whether the names are for this model: Accelerate asks again once it has wrapped blocks for checkpointing."""
        names = set(self.transformer_cls_names_to_wrap or ())
        return bool(names) and names <= {type(m).__name__ for m in model.modules()}

    # ---- TIDE

    def apply_tide(self, model: nn.Module, *, announce: bool) -> None:
        """Make a model that ``accelerator.prepare`` has sharded use TIDE; nothing happens if it does already.

        Args:
            model: the sharded model.
            announce: say in one line what came of it, after the first forward.
        """
        if hasattr(model, _HANDLE):
            return
        handle = apply_tide(model, self.tide_config)
        # The model owns its handle: when the program drops the model, both go.
        setattr(model, _HANDLE, handle)
        self._models.append(weakref.ref(model))
        if announce:
            _announce_after_first_forward(model, handle)

    def close_tide(self) -> None:
        """Give all models their stock collectives back and release TIDE's memory."""
        self._last_report = self.tide_report()
        for model in self._alive():
            getattr(model, _HANDLE).close()
            delattr(model, _HANDLE)
        self._models.clear()

    def tide_report(self) -> TideReport:
        """What TIDE did on this rank for the model prepared last."""
        models = self._alive()
        return getattr(models[-1], _HANDLE).report() if models else self._last_report

    def _alive(self) -> list[nn.Module]:
        return [model for ref in self._models if (model := ref()) is not None]


def with_tide(plugin: FullyShardedDataParallelPlugin, config: TideConfig) -> TideFSDPPlugin:
    """Turn a plugin that a program made itself (transformers' ``--fsdp``, say) into one with TIDE, in place.

    Raises:
        TideConfigError: if it is for FSDP1.
    """
    _check_version(plugin.fsdp_version)
    own = type(plugin)
    plain = own is FullyShardedDataParallelPlugin
    # Methods of TIDE come first; what a subclass adds stays.
    plugin.__class__ = TideFSDPPlugin if plain else type(own.__name__, (TideFSDPPlugin, own), {})
    assert isinstance(plugin, TideFSDPPlugin)
    plugin._adopt_config(config)
    return plugin


def _check_version(version: int) -> None:
    if version != 2:
        raise TideConfigError(
            f"TIDE accelerates FSDP2, but the FSDP plugin says fsdp_version={version}. Set 'fsdp_version: 2' in the "
            f"Accelerate file, fsdp_version=2 in the plugin, or fsdp_config={{'version': 2}} in TrainingArguments."
        )


def _check_class_names(names: list[str], model: nn.Module) -> None:
    present = sorted({type(m).__name__ for m in model.modules()})
    for name in names:
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise TideConfigError(
                f"the layer class to wrap {name!r} (fsdp_transformer_layer_cls_to_wrap) does not occur in the "
                f"model{hint} It has: {', '.join(present)}. Without the option the repeated blocks are found."
            )


def _announce_after_first_forward(model: nn.Module, handle: TideHandle) -> None:
    hook: RemovableHandle

    @torch.compiler.disable
    def announce(module: nn.Module, args: Any, output: Any) -> None:
        hook.remove()
        _say(summary_line(handle.report()))

    hook = model.register_forward_hook(announce)


def _say(line: str) -> None:
    """Through logging where the program has set it up; else on standard error, as Python's own fallback does."""
    if _log.hasHandlers():
        _log.info(line)
    else:
        print(line, file=sys.stderr, flush=True)


extend(accelerate.accelerator)
