"""``apply_tide``: the door for plain PyTorch, through which the integrations go as well."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tide_strategies.config import TideConfig
from tide_strategies.detect import Verdict
from tide_strategies.errors import TideConfigError, TideFallbackError
from tide_strategies.fsdp2 import access
from tide_strategies.fsdp2.agreement import agree_on_options
from tide_strategies.fsdp2.guards import check_torch
from tide_strategies.report import ExposedStats, TideReport
from tide_strategies.runtime import autopsy
from tide_strategies.runtime.cuda.queues import request_queues

_log = logging.getLogger("tide_strategies")

#: FSDP2 modules that a handle has, from apply_tide until its close (or until the installation fails).
_held: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def apply_tide(model: nn.Module, config: TideConfig | Mapping[str, Any] | None = None) -> TideHandle:
    """Make the FSDP2 modules of ``model`` communicate through TIDE.

    Call it on every rank after ``fully_shard`` (and after anything that replaces parameters, such as materialising a
    meta-device model), before the first forward. Parameters, optimizers, checkpoints and numerics stay as FSDP2 has
    them. Installation happens at the first forward of the root; groups that are not eligible keep stock collectives,
    and :meth:`TideHandle.report` says why.

    Args:
        model: a module that ``fully_shard`` was applied to, or one that contains such modules.
        config: options (``TideConfig``), or a mapping of them.

    Returns:
        A handle with ``report()`` and ``close()``.

    Raises:
        TideConfigError: an option is wrong, the model has no FSDP2 module, another handle has it already, or there is
            no process group.
        TideMismatchError: ranks were given different options.
        TideFallbackError: ``strict`` and TIDE cannot be used at all here.
    """
    options = TideConfig.from_any(config)
    request_queues()
    if not isinstance(model, nn.Module):
        raise TideConfigError(
            f"apply_tide needs a module, one a call; got {type(model).__name__}. Give the model itself."
        )
    roots = access.outermost_fsdp_modules(model)
    if not roots:
        raise TideConfigError(_without_fully_shard(model))
    if any(module in _held for root in roots for module in access.fsdp_modules(root)):
        raise TideConfigError(
            f"TIDE is already applied to this {type(model).__name__}, or to a part of it. Call close() on the handle "
            f"that apply_tide returned first."
        )
    if not dist.is_initialized():
        raise TideConfigError("apply_tide needs the process group that fully_shard was given; it has been destroyed.")
    guard = check_torch()
    stated = {**options.to_dict(), "torch": torch.__version__, "torch verdict": guard.code}
    agree_on_options(access.mesh_groups(access.meshes(model)), stated, options.timeout_s)
    if guard.warning and dist.get_rank() == 0:
        _log.warning("TIDE: %s", guard.warning)
    autopsy.write_to(options.debug.autopsy)
    handle = TideHandle(options)
    if not options.enabled:
        handle._status = "off (enabled: false); stock FSDP2"
    elif not guard.supported:
        verdict = Verdict(guard.code, guard.reason, guard.remedy)
        if options.strict:
            raise TideFallbackError(f"TIDE (strict): {verdict}")
        handle._status = f"stock FSDP2: {verdict}"
        if dist.get_rank() == 0:
            _log.warning("TIDE: %s", verdict)
    else:
        for root in roots:
            handle._install_at_first_forward(root)
    return handle


def _without_fully_shard(model: nn.Module) -> str:
    """What to do about a model that has no FSDP2 module."""
    words = f"apply_tide needs a model that fully_shard was applied to; {type(model).__name__} has no FSDPModule. "
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            return f"{words}Use torch.distributed.fsdp.fully_shard instead of {type(module).__name__}."
    return f"{words}Call torch.distributed.fsdp.fully_shard on its blocks and on the model first."


class TideHandle:
    """TIDE on one model: what it did, and how to undo it."""

    def __init__(self, config: TideConfig) -> None:
        self.config = config
        self._status = "waits for the first forward"
        self._hooks: dict[FSDPModule, RemovableHandle] = {}
        self._installations: list[Any] = []
        self._held: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def installed(self) -> bool:
        """Whether a first forward has installed TIDE."""
        return bool(self._installations)

    def report(self) -> TideReport:
        """What runs on which path and why, with calls, times and bytes so far (this rank's view)."""
        groups = [g.report() for i in self._installations for g in i.groups]
        if not groups:
            return TideReport(installed=False, status=self._status)
        engines = [e for i in self._installations for e in i.engines]
        fast = sum(g.path == "tide" for g in groups)
        status = f"{fast} of {len(groups)} groups accelerated"
        plans = tuple(p for i in self._installations for p in i.plans)
        return TideReport(
            installed=True,
            status=status,
            arena_bytes=_total(e.bytes_by_part() for e in engines),
            pinned_bytes=_total(e.pinned_by_part() for e in engines),
            groups=tuple(groups),
            plans=plans,
            exposed=self._exposed(),
        )

    def _exposed(self) -> ExposedStats | None:
        meters = [i.meter.stats() for i in self._installations if i.meter is not None]
        if not meters:
            return None
        return ExposedStats(
            seconds=sum(m.seconds for m in meters),
            sampled=min(m.sampled for m in meters),
            backwards=min(m.backwards for m in meters),
        )

    def close(self) -> None:
        """Put stock FSDP2 back and release shared memory. Not between a forward and its backward. Idempotent.

        Raises:
            TideMismatchError: the last collectives were not the same on all ranks. It is closed all the same.
        """
        if self._held:
            self._status = "closed; stock FSDP2"
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        with contextlib.ExitStack() as closing:  # all of it, whatever a part of it raises
            closing.callback(self._let_go, list(self._held))
            for installation in reversed(self._installations):
                closing.callback(installation.close)
            self._installations.clear()

    def _let_go(self, modules: list[nn.Module]) -> None:
        _held.difference_update(modules)
        self._held.difference_update(modules)

    def _install_at_first_forward(self, root: FSDPModule) -> None:
        @torch.compiler.disable
        def install(module: nn.Module, args: Any) -> None:
            hook = self._hooks.pop(root, None)
            if hook is None:
                return
            hook.remove()
            from tide_strategies.fsdp2.install import Installation  # private torch names: only behind the guards

            try:
                self._installations.append(Installation(root, self.config))
            except BaseException as e:
                self._status = f"stock FSDP2: the installation failed ({type(e).__name__}: {e})"
                self._let_go(access.fsdp_modules(root))  # so that TIDE can be applied again once the cause is gone
                raise

        self._held.update(access.fsdp_modules(root))
        _held.update(self._held)
        # prepend: before FSDP2's own hook, which gathers the root's parameters
        self._hooks[root] = root.register_forward_pre_hook(install, prepend=True)  # type: ignore[attr-defined]


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by part, of all together."""
    out: dict[str, int] = {}
    for part, nbytes in (item for by_part in parts for item in by_part.items()):
        out[part] = out.get(part, 0) + nbytes
    return out
