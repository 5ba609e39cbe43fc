"""A user's model without values and without a job: on the meta device, sharded over ranks that do not exist."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2 import access
from tide_strategies.fsdp2.describe import group_numbers, lazy_init_on_meta, planner_groups
from tide_strategies.fsdp2.footprint import Footprint, Step, dry_run
from tide_strategies.integrations.sharding import policy_for_precision
from tide_strategies.integrations.wrapping import plan_units
from tide_strategies.planner.groups import Model


@contextmanager
def imagined_job(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` in which this process is rank 0 and no collective does anything.

    Raises:
        TideConfigError: a process group exists already.
    """
    if dist.is_initialized():
        raise TideConfigError("this process has a process group already; run the command outside a job")
    try:
        dist.init_process_group("fake", rank=0, world_size=ranks)
    except (ValueError, RuntimeError):  # before torch 2.12 or so, it wants a store of its own
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_of(path: str) -> nn.Module:
    """The model of :func:`built` on the meta device."""
    with torch.device("meta"):
        return built(path)[0]


def built(path: str) -> tuple[nn.Module, Step | None]:
    """Call ``package.module:function``; modules are looked for in the current folder too.

    Returns:
        The model, and the function that computes the loss of a step, if the function returns both.

    Raises:
        TideConfigError: it cannot be imported or called without arguments, or returns no module.
    """
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
        model = target() if callable(target) else target
    except Exception as e:  # the user's own code: whatever it raises is told in its words
        raise TideConfigError(f"cannot build a model from {path!r}: {type(e).__name__}: {e}") from e
    step = None
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        model, step = model
    if not isinstance(model, nn.Module):
        raise TideConfigError(f"{path!r} gave {type(model).__name__}, not a torch.nn.Module (nor one with a function)")
    return model, step


def sharded(model: nn.Module, ranks: int, precision: str) -> list[Any]:
    """FSDP2 roots of ``model`` after lazy initialisation; shards it as the front ends do if nobody has.

    Call it within :func:`imagined_job`. The mesh is of CPU ranks, whatever they stand for, so that no GPU is
    needed.
    """
    roots: list[Any] = list(access.outermost_fsdp_modules(model))
    if not roots:
        mesh = init_device_mesh("cpu", (ranks,))
        policy = policy_for_precision(precision)
        for unit in plan_units(model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        roots = [fully_shard(model, mesh=mesh, mp_policy=policy)]
    for root in roots:
        lazy_init_on_meta(root)
    return roots


def planned(path: str, ranks: int, precision: str, device: str) -> tuple[Model, Footprint | None]:
    """The planner's view of the model that ``path`` builds, and of a step, if it builds that as well."""
    with torch.device("meta"):
        module, step = built(path)
    with imagined_job(ranks):
        roots = sharded(module, ranks, precision)
        groups = [g for root in roots for g in access.param_groups(root)]
        itemsize = max(p.orig_dtype.itemsize for g in groups for p in g.fsdp_params)
        model, numbers = Model(path, planner_groups(groups), itemsize), group_numbers(groups)
    if step is None:
        return model, None
    policy = policy_for_precision(precision)

    def both() -> tuple[nn.Module, Step]:
        made, own = built(path)
        return made, own or step

    if device == "cuda" and not torch.backends.cuda.is_built():
        print("this torch has no CUDA: the step is run dry with the operators of CPUs", file=sys.stderr, flush=True)
        device = "cpu"
    reduced = (policy.reduce_dtype or policy.param_dtype or torch.float32).itemsize
    return model, dry_run(both, numbers, ranks, dtype=policy.param_dtype, reduce_itemsize=reduced, device=device)
