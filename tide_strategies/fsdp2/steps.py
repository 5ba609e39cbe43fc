"""Optimizer steps, noted for the parameters that they update.

A fused optimizer (``torch.optim.AdamW(..., fused=True)``) writes parameters without counting up their versions, so the
versions alone do not tell whether a slot still holds a group's current values.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_hook: Any = None


def watch(group: Any) -> None:
    """From now on, a step of any optimizer counts up ``_tide_generation`` of the group's parameters that it updates."""
    global _hook
    _groups.add(group)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_note)


def unwatch(group: Any) -> None:
    """No longer; harmless for a group that was not watched."""
    global _hook
    _groups.discard(group)
    if _hook is not None and not _groups:
        _hook.remove()
        _hook = None


def _note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for watched in list(_groups):
        for param in watched.fsdp_params:
            if id(param.sharded_param) in updated:
                param._tide_generation += 1
