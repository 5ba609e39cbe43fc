"""A model as the planner sees it: parameter groups with their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tide_strategies.layout import GroupLayout, ParamShape


@dataclass(frozen=True, slots=True)
class Group:
    """One FSDP2 parameter group.

    Args:
        name: fully qualified module name, "(root)" for the root.
        params: (D, K) of each parameter, with bytes per gathered item.
        resharded: whether it gives its parameters up after the forward (``reshard_after_forward``).
    """

    name: str
    params: tuple[ParamShape, ...]
    resharded: bool = True

    def layout(self, ranks: int) -> GroupLayout:
        """Its geometry among ``ranks`` ranks."""
        return GroupLayout(self.params, ranks)


@dataclass(frozen=True)
class Model:
    """A model's parameter groups.

    Args:
        name: for people.
        groups: in module order, as FSDP2 has them: the root's own group comes first.
        master_itemsize: bytes of a stored (sharded) parameter item: 4 for fp32 masters.
        active_share: share of the parameters that one token uses (below 1 for mixtures of experts; equation 1).
    """

    name: str
    groups: tuple[Group, ...]
    master_itemsize: int = 4
    active_share: float = 1.0

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(s.rows * s.row_items for g in self.groups for s in g.params)

    def largest(self, ranks: int) -> Group:
        """The group with the largest landing."""
        return max(self.groups, key=lambda g: g.layout(ranks).landing_bytes)


def block(name: str, sizes: Sequence[Sequence[int]], itemsize: int, resharded: bool = True) -> Group:
    """A group from tensor sizes."""
    return Group(name, tuple(ParamShape.of(s, itemsize) for s in sizes), resharded)
