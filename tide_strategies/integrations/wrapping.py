"""Choose the modules that become FSDP2 units (one parameter group each).

A unit's parameters are gathered when its ``forward`` begins and freed when it ends, so a unit must be a module
that is always used through ``forward``. The automatic choice therefore takes repeated blocks only and leaves
everything else to the root's group, which is correct for any model: parameters of the root stay whole for the
entire step.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from tide_strategies.errors import TideConfigError

# The list, itself a collection, comes first for LightningCLI: it is what can be written back to a file.
WrapPolicy = list[type[nn.Module] | str] | Collection[type[nn.Module] | str] | Callable[[nn.Module], bool]

_LISTS = (nn.ModuleList, nn.Sequential)


def plan_units(
    root: nn.Module, policy: WrapPolicy | None = None, min_num_params: int = 0, apart: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """The modules below ``root`` to hand to ``fully_shard``, innermost first; the root itself is not among them.

    Args:
        root: the model; nothing in it may be sharded yet.
        policy: ``None`` takes the blocks the model names itself (``_no_split_modules``, as Hugging Face models
            do), else the elements of lists of repeated blocks. A collection of classes (or class names) takes
            their instances; a function ``module -> bool`` decides for each module that has a ``forward``.
        min_num_params: units with fewer parameters of their own join the group around them.
        apart: modules that are no part of the plan, whatever is in them.

    Parameters shared between modules always end up in one group: a candidate that shares a parameter with a
    module outside it is left to the closest module that holds all of the sharers.

    Raises:
        TideConfigError: if ``policy`` has another type, or names a class the model does not contain.
    """
    candidates = _automatic(root) if policy is None else modules_by_policy(root, policy)
    excluded = {id(m) for outer in apart for m in outer.modules()}
    owners = _owners(root)
    depth = {id(m): name.count(".") for name, m in root.named_modules()}
    units: list[nn.Module] = []
    taken = {id(p) for outer in apart for p in outer.parameters()}
    for module in sorted((m for m in candidates if id(m) not in excluded), key=lambda m: -depth[id(m)]):
        inside = {id(m) for m in module.modules()}
        own = [p for p in module.parameters() if id(p) not in taken]
        shares_outside = any(not owners[id(p)] <= inside for p in own)
        if not own or shares_outside or sum(p.numel() for p in own) < min_num_params:
            continue
        units.append(module)
        taken.update(id(p) for p in own)
    return units


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module runs code of its own: containers such as ``ModuleList`` have no ``forward``."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def modules_by_policy(root: nn.Module, policy: WrapPolicy, option: str = "auto_wrap_policy") -> list[nn.Module]:
    """The modules below ``root`` that a policy chooses; ``option`` is its name in errors.

    Raises:
        TideConfigError: if ``policy`` has another type, or names a class the model does not contain.
    """
    modules = [m for m in root.modules() if m is not root]
    if isinstance(policy, Collection) and not isinstance(policy, str):
        wanted = _classes(root, policy, option)
        return [m for m in modules if type(m) in wanted]
    if not callable(policy) or isinstance(policy, type) or hasattr(policy, "_run_policy"):
        raise TideConfigError(
            f"{option} must be None, a collection of module classes or class names, or a function "
            f"module -> bool; got {policy!r}. Write a single class as {{Block}}."
        )
    return [m for m in modules if has_forward(m) and policy(m)]


def _classes(root: nn.Module, policy: Collection[Any], option: str) -> set[type[nn.Module]]:
    """Resolve classes and class names to the classes present in the model."""
    present = {type(m) for m in root.modules() if m is not root}
    chosen: set[type[nn.Module]] = set()
    for entry in policy:
        if isinstance(entry, str):
            found = {c for c in present if c.__name__ == entry}
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            found = {c for c in present if issubclass(c, entry)}
        else:
            raise TideConfigError(f"{option} lists module classes or class names; got {entry!r}")
        if not found:
            name = entry if isinstance(entry, str) else entry.__name__
            names = sorted(c.__name__ for c in present)
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TideConfigError(
                f"{option} names {name!r}, but the model has no such module{hint} It has: {', '.join(names)}."
            )
        bare = sorted(c.__name__ for c in found if c.forward is nn.Module.forward)
        if bare:
            raise TideConfigError(
                f"{option} names {', '.join(bare)}, a container without a forward(): FSDP2 could never "
                f"gather its parameters. Name the class of its elements instead."
            )
        chosen |= found
    return chosen


def _automatic(root: nn.Module) -> list[nn.Module]:
    names = {name for m in root.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    named = [m for m in root.modules() if m is not root and type(m).__name__ in names]
    if named:
        return named
    blocks = list(_repeated(root, layers=False))
    return blocks or list(_repeated(root, layers=True))


def _repeated(module: nn.Module, *, layers: bool, in_block: bool = False) -> Iterator[nn.Module]:
    """Elements of lists, at ``module`` or below, whose class occurs at least twice in the list.

    With ``layers`` these are plain layers and have the list to themselves; else they are blocks, modules of modules.
    Inside a block only ``Sequential`` is looked into, since all of it runs in every step. A ``ModuleList`` there
    may be a mixture of experts, where ranks run different elements: separate groups would wait for each other
    forever.
    """
    if in_block and isinstance(module, nn.ModuleList):
        return
    if isinstance(module, _LISTS):
        elements = [m for m in module.children() if has_forward(m) and next(m.parameters(), None) is not None]
        count = Counter(type(m) for m in elements)
        if layers:
            chosen = elements if len(count) == 1 and len(elements) > 1 else []
        else:
            chosen = [m for m in elements if count[type(m)] > 1 and next(m.children(), None) is not None]
        yield from chosen
        in_block = in_block or bool(chosen)
    for child in module.children():
        yield from _repeated(child, layers=layers, in_block=in_block)


def _owners(root: nn.Module) -> dict[int, set[int]]:
    """Parameter id -> ids of the modules that hold it directly (more than one if it is shared)."""
    owners: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners
