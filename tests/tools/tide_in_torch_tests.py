"""Adds TIDE to every model that a test of PyTorch shards with ``fully_shard`` (see run_torch_fsdp2_tests.py).

A file of tests that the runner writes imports this module first, in the process that collects the tests and in each
process that a test starts: the names that it replaces must be in place before the tests import them.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from typing import Any

TALLY = "TIDE_PEER_TALLY"
OFF = "TIDE_PEER_OFF"
TIMEOUT_S = 60

_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Replace ``fully_shard`` by one that adds TIDE, and let tests of several processes run on the CPU."""
    if OFF not in os.environ:
        _replace_fully_shard()
    import torch
    from torch.testing._internal import common_fsdp

    mixin = getattr(common_fsdp, "FSDPTestMixin", None)
    if not torch.accelerator.is_available() and mixin is not None:
        # torch's own method asks for as many accelerators as ranks; the one it has beside it excepts CPUs.
        common_fsdp.FSDPTest._run = classmethod(mixin._run.__func__)


def _replace_fully_shard() -> None:
    import torch.distributed._composable.fsdp as composable
    import torch.distributed.fsdp as fsdp
    from torch.distributed.fsdp import _fully_shard

    from tide_strategies.fsdp2.guards import check_torch

    verdict = check_torch()  # of torch as it is, before anything is replaced
    if not verdict.supported:
        raise RuntimeError(f"TIDE does not run on this torch: {verdict.code} {verdict.reason}")
    stock = fsdp.fully_shard

    @functools.wraps(stock)  # keeps fully_shard.state
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(module, *args, **kwargs)
        for one in module if isinstance(module, (list, tuple)) else [module]:
            _add_at_first_forward(one)
        return out

    for place in (fsdp, _fully_shard, composable):
        place.fully_shard = fully_shard


def _add_at_first_forward(module: Any) -> None:
    """TIDE for the outermost module only, which is the first to be called."""

    def first(module: Any, args: Any) -> None:
        hook.remove()
        if module in _seen or not _own_process():
            return
        if any(inner in _seen for inner in module.modules()):
            return  # a part has been used by itself before: FSDP2 refuses that, in its own words
        _seen.update(module.modules())
        _add(module, args)

    hook = module.register_forward_pre_hook(first, prepend=True)


def _own_process() -> bool:
    """Whether the rank is a process: torch's threaded tests have ranks that are threads of one."""
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_backend() in ("gloo", "nccl", "cpu:gloo,cuda:nccl")


def _add(module: Any, args: Any) -> None:
    from tide_strategies import apply_tide

    before = set(module._forward_pre_hooks)
    handle = apply_tide(module, {"timeout_s": TIMEOUT_S, "plan": "tide"})
    # This call of the module has its list of hooks already: the new one, which installs TIDE, is run here.
    for key in set(module._forward_pre_hooks) - before:
        module._forward_pre_hooks[key](module, args)
    _note(handle.report())


def _note(report: Any) -> None:
    """One line a model and rank: which test, how many groups run on TIDE, and the codes of the others."""
    line = {
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").split("::", 1)[-1].split(" ")[0],
        "tide": sum(g.path == "tide" for g in report.groups),
        "codes": sorted({g.code for g in report.groups if g.path != "tide"}),
    }
    with open(os.environ[TALLY], "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
