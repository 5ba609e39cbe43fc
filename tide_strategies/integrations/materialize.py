"""Give real memory and initial values to modules built on the meta device.

Only meta tensors are touched: a real buffer (a rotary table, say) beside a meta parameter keeps its values, and
shared parameters stay shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tide_strategies.errors import TideConfigError


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of the module lives on the meta device."""
    return any(t.is_meta for m in module.modules() for _, _, t in _own_tensors(m))


def check_can_materialize(root: nn.Module) -> None:
    """Raise if a module holds meta tensors but has no ``reset_parameters()`` to fill them with.

    Raises:
        TideConfigError: naming every such tensor.
    """
    orphans = [
        f"{name}.{key}" if name else key
        for name, module in root.named_modules()
        if _initializer(module) is None
        for _, key, tensor in _own_tensors(module)
        if tensor.is_meta
    ]
    if orphans:
        raise TideConfigError(
            f"these tensors are on the meta device and their modules have no reset_parameters() to initialise "
            f"them: {', '.join(orphans)}. Add that method to the modules, or build them on a real device."
        )


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, replaced: dict[Tensor, Tensor]) -> None:
    """Replace the meta tensors of a module by initialised tensors on ``device``, sharing kept.

    Args:
        module: the module; modules below it are included.
        device: where the new tensors go.
        replaced: meta tensor -> its replacement. Pass the same dictionary for all parts of one model, so that
            tensors shared between parts stay shared.

    Raises:
        TideConfigError: if ``reset_parameters()`` of a module leaves one of its tensors without values.
    """
    for name, part in module.named_modules():
        fresh: dict[str, Tensor] = {}
        valued: list[Tensor] = []
        for registry, key, tensor in list(_own_tensors(part)):
            if not tensor.is_meta:
                valued.append(tensor)
            elif tensor in replaced:
                registry[key] = replaced[tensor]
                valued.append(replaced[tensor])
            else:
                registry[key] = replaced[tensor] = fresh[key] = _blank_like(tensor, device)
        if fresh:
            _initialize(part, name, fresh, valued)


def _initialize(module: nn.Module, name: str, fresh: dict[str, Tensor], valued: list[Tensor]) -> None:
    """Run the module's initialiser for its fresh tensors; those that have values already keep them."""
    saved = [tensor.detach().clone() for tensor in valued]
    initializer = _initializer(module)
    assert initializer is not None, "check_can_materialize() comes first"
    initializer()
    for tensor, value in zip(valued, saved, strict=True):
        tensor.copy_(value)
    left = [key for key, tensor in fresh.items() if _has_nan(getattr(module, key))]
    if left:
        raise TideConfigError(
            f"{type(module).__name__}.reset_parameters() (module {name!r}) does not initialise "
            f"{', '.join(left)}, which was built on the meta device and has no values without it."
        )


def _blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Real memory that shows whether it has been written: NaN where the dtype has one, else zero."""
    blank = torch.empty_like(tensor, device=device)
    blank.detach().fill_(float("nan") if tensor.is_floating_point() else 0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(blank, requires_grad=tensor.requires_grad)
    return blank


def _has_nan(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.is_floating_point() and bool(local.isnan().any())


def _initializer(module: nn.Module) -> Callable[[], object] | None:
    found: Callable[[], object] | None = None
    for method in ("_reset_parameters", "reset_parameters"):
        found = getattr(module, method, None) or found
    return found


def _own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
    """Parameters and buffers held directly, with the dictionary that holds them."""
    for registry in (module._parameters, module._buffers):
        for key, tensor in registry.items():
            if tensor is not None:
                yield registry, key, tensor  # type: ignore[misc]
