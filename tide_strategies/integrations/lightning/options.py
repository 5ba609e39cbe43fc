"""The keyword arguments of the strategies, checked and sorted into sharding, checkpoint and TIDE options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.options import TIDE_OPTIONS, combined, unknown_option

# Options of Lightning's ModelParallelStrategy that mean nothing here, and what to use instead.
_REFUSED = {
    "data_parallel_size": "tide_fsdp shards over all ranks; use replicate_size=R for R replicas of the shards (HSDP)",
    "tensor_parallel_size": "tide_fsdp does data parallelism only; use ModelParallelStrategy for tensor parallelism",
    "save_distributed_checkpoint": "use state_dict_type='sharded' or 'full'",
    "parallelize_fn": "tide_fsdp shards the model itself; choose the units with auto_wrap_policy",
}


def tide_config(tide: TideConfig | Mapping[str, Any] | None, options: Mapping[str, Any], owner: type) -> TideConfig:
    """Combine ``tide=`` with TIDE options given as keyword arguments of their own.

    Raises:
        TideConfigError: for a keyword that neither ``owner`` nor TIDE has, or an option given both ways.
    """
    for name in options:
        if name in _REFUSED:
            raise TideConfigError(f"{owner.__name__} does not take {name}: {_REFUSED[name]}.")
        if name not in TIDE_OPTIONS:
            raise TideConfigError(_unknown(name, owner))
    return combined(tide, options)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the texts in ``allowed``."""
    if value not in allowed:
        raise TideConfigError(f"{name} must be {' or '.join(repr(a) for a in allowed)}; got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is a real true or false."""
    if type(value) is not bool:
        raise TideConfigError(f"{name} must be true or false; got {value!r}")


def check_replicate_size(replicate_size: Any, world_size: int | None = None) -> None:
    """Raise unless it is a whole number of at least 1 that divides the world, where the world is known."""
    if type(replicate_size) is not int or replicate_size < 1:
        raise TideConfigError(f"replicate_size must be a whole number, 1 or more; got {replicate_size!r}")
    if world_size is not None and world_size % replicate_size:
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        raise TideConfigError(
            f"replicate_size={replicate_size} does not divide the {world_size} processes of this job; "
            f"possible values: {', '.join(map(str, divisors))}"
        )


def check_experts(policy: Any, parts: Any, replicate_size: int, state_dict_type: str, world: int | None = None) -> None:
    """Raise unless the options for experts fit each other, and the world where it is known."""
    if type(parts) is not int or parts < 1:
        raise TideConfigError(f"expert_parallel_size must be a whole number, 1 or more; got {parts!r}")
    if policy is None and parts > 1:
        raise TideConfigError(
            f"expert_parallel_size={parts} needs expert_policy: the classes, class names or function that say which "
            f"modules hold experts, such as expert_policy={{'Experts'}}"
        )
    if policy is not None and replicate_size > 1:
        raise TideConfigError(
            f"expert_policy does not go with replicate_size={replicate_size}: leave one of the two at its default"
        )
    if parts > 1 and state_dict_type == "full":
        raise TideConfigError(
            "with expert_parallel_size > 1 no rank can write all experts as its own: use state_dict_type='sharded'. "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes one file of such a checkpoint."
        )
    if world is not None and world % parts:
        raise TideConfigError(
            f"expert_parallel_size={parts} does not divide the {world} processes of this job; "
            f"possible values: {', '.join(str(d) for d in range(1, world + 1) if world % d == 0)}"
        )


def _unknown(name: str, owner: type) -> str:
    own = [
        p.name
        for p in inspect.signature(owner).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return unknown_option(name, owner.__name__, own, ", ".join(own))
