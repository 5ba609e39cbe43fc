"""An FSDP2 model in the planner's terms: its parameter groups with shapes, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tide_strategies.fsdp2 import access
from tide_strategies.layout import ParamShape
from tide_strategies.planner.groups import Group


def planner_groups(groups: Iterable[Any]) -> tuple[Group, ...]:
    """FSDPParamGroups after lazy initialisation as the planner's groups."""
    return tuple(
        Group(
            access.group_name(group),
            tuple(ParamShape.of(p._orig_size, access.unsharded_dtype(p).itemsize) for p in group.fsdp_params),
            bool(group._reshard_after_forward),
        )
        for group in groups
    )


def group_numbers(groups: Iterable[Any]) -> dict[str, int]:
    """The number of the group that each parameter is in, by the parameter's name."""
    return {str(p._param_fqn): number for number, group in enumerate(groups) for p in group.fsdp_params}


def lazy_init_on_meta(root: Any) -> None:
    """What FSDP2 does at the root's first forward, for a model that has no values: names, dtypes, roots.

    FSDP2 refuses meta parameters there, rightly, as no forward could run. Nothing here is going to.
    """
    for group in access.param_groups(root):
        group._validate_no_meta_params = lambda: None
    access.lazy_init(root)
