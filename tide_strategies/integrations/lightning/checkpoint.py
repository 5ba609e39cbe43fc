"""Checkpoints of a sharded model: one file with everything in it, or a folder with a part per rank.

Both have Lightning's own formats; a full checkpoint made here, or by any other strategy, loads everywhere. Files are
written by Lightning itself.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.averaging import sharded_like, sharded_tensors
from tide_strategies.integrations.experts import ExpertGroups

METADATA_FILE = "meta.pt"
#: The entry of a checkpoint with a moving average of the model, beside its ``state_dict``.
AVERAGE_KEY = "tide_ema"

# What torch says in each rank's part of a CheckpointException.
_MISSING_KEY = re.compile(r"Missing key in checkpoint state_dict: (.+?)\.?$")


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder written by a strategy with sharded checkpoints."""
    return path.is_dir() and (path / METADATA_FILE).is_file()


def split_for_ranks(checkpoint: dict[str, Any], experts: ExpertGroups | None = None) -> dict[str, Any]:
    """Take out of a checkpoint what each rank writes its own part of; the rest goes into the metadata file."""
    parts: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
    for i, state in enumerate(checkpoint.pop("optimizer_states", [])):
        parts[f"optimizer_{i}"] = state
    if AVERAGE_KEY in checkpoint:
        average = checkpoint[AVERAGE_KEY].pop("average")
        checkpoint[AVERAGE_KEY]["dtypes"] = {name: tensor.dtype for name, tensor in average.items()}
        parts[AVERAGE_KEY] = average
    if experts is not None:
        whole: dict[str, Any] = experts.whole(parts)
        return whole
    return parts


def load_sharded_average(
    path: Path,
    module: nn.Module,
    key: str,
    dtypes: Mapping[str, torch.dtype],
    experts: ExpertGroups | None = None,
) -> dict[str, Tensor]:
    """Read the average of a sharded checkpoint (its entry ``key``), laid out like the module; a collective call.

    Raises:
        TideConfigError: if the average has tensors that the module has not.
    """
    tensors = sharded_tensors(module)
    if unknown := sorted(dtypes.keys() - tensors.keys()):
        raise TideConfigError(
            f"the average in {str(path)!r} has tensors that this model has not: {', '.join(unknown)}. Resume with the "
            f"model that it was made with."
        )
    average = {}
    for name, dtype in dtypes.items():
        tensor = tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        average[name] = sharded_like(tensor, torch.empty_like(local, dtype=dtype, requires_grad=False))
    _read({key: average}, path, experts)
    return average


def load_file(path: Path, *, weights_only: bool, where: str) -> dict[str, Any]:
    """Read a checkpoint file; with ``weights_only`` nothing in it can run code.

    Tensors, numbers, text and plain containers load, and OmegaConf nodes (hyper-parameters often are).

    Raises:
        TideConfigError: if the file holds other objects; ``where`` says how to allow them.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint at {str(path)!r}: it is neither a file nor a folder with {METADATA_FILE}"
        )
    try:
        with _omegaconf_allowed():
            content: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
            return content
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        raise TideConfigError(
            f"{str(path)!r} holds Python objects besides tensors and plain values, and reading those can run "
            f"code of whoever wrote the file. If you trust it, use {where}. What torch said: {error}"
        ) from error


def load_sharded(
    path: Path,
    module: nn.Module,
    module_key: str,
    optimizers: Mapping[str, Optimizer],
    strict: bool,
    experts: ExpertGroups | None = None,
) -> None:
    """Restore the module and optimizers from a sharded checkpoint; a collective call.

    The folder's index is read by ``torch.distributed.checkpoint``, which trusts it.

    Raises:
        TideConfigError: if the checkpoint lacks something that the module or an optimizer has.
    """
    state = _read({module_key: get_model_state_dict(module)}, path, experts, allow_partial=not strict)
    set_model_state_dict(module, state[module_key], options=StateDictOptions(strict=strict))
    for key, optimizer in optimizers.items():
        state = _read({key: get_optimizer_state_dict(module, optimizer)}, path, experts)
        set_optimizer_state_dict(
            module, optimizer, optim_state_dict=state[key], options=StateDictOptions(strict=strict)
        )


def _read(
    state: dict[str, Any], path: Path, experts: ExpertGroups | None, *, allow_partial: bool = False
) -> dict[str, Any]:
    """Read what ``state`` has from a sharded checkpoint, tensors in place; returns it with the rest."""
    found: dict[str, Any] = experts.whole(state) if experts is not None else state
    try:
        load(found, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=allow_partial))
    except CheckpointException as error:  # the same on all ranks
        missing = [_MISSING_KEY.search(str(why)) for why, _ in error.failures.values()]
        if not all(missing):
            raise
        names = sorted({match[1] for match in missing if match is not None})
        raise TideConfigError(
            f"the sharded checkpoint {str(path)!r} has no {', '.join(map(repr, names))}, perhaps among others; resume "
            f"with the model and the optimizers that the checkpoint was made with"
        ) from error
    return experts.own(found) if experts is not None else found


def load_full_module(module: nn.Module, state: dict[str, Any], strict: bool) -> None:
    """Distribute a full state dict over the ranks; a collective call that reads rank 0's values."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(module, state, options=options)


def load_full_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]], strict: bool
) -> None:
    """Distribute full optimizer states over the ranks; a collective call that reads rank 0's values.

    Raises:
        TideConfigError: if the numbers of optimizers and of states differ.
    """
    _check_number_of_optimizers(len(states), len(optimizers))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    for optimizer, state in zip(optimizers, states, strict=True):
        if not state["state"]:
            # Plain SGD has no state per parameter, which torch's loader does not expect.
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({k: v for k, v in saved.items() if k != "params"})
            continue
        if isinstance(next(iter(state["state"])), int):
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, module)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)


def check_sharded_optimizers(path: Path, optimizers: int) -> None:
    """Whether a sharded checkpoint of the Trainer has the states of so many optimizers.

    Raises:
        TideConfigError: if the numbers differ.
    """
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    states = {key.partition(".")[0] for key in keys if key.startswith("optimizer_")}
    _check_number_of_optimizers(len(states), optimizers)


def _check_number_of_optimizers(states: int, optimizers: int) -> None:
    if states != optimizers:
        raise TideConfigError(
            f"the checkpoint holds the state of {states} optimizer(s), but {optimizers} are configured; "
            f"resume with the optimizers that the checkpoint was made with"
        )


@contextlib.contextmanager
def _omegaconf_allowed() -> Iterator[None]:
    """Let OmegaConf containers through torch's safe reader: plain data nodes whose loading runs no outside code."""
    try:
        from omegaconf import nodes
        from omegaconf.base import ContainerMetadata, Metadata
        from omegaconf.dictconfig import DictConfig
        from omegaconf.listconfig import ListConfig
    except ImportError:  # then nothing here can have been saved with it
        yield
        return
    values = [c for c in vars(nodes).values() if isinstance(c, type) and issubclass(c, nodes.ValueNode)]
    plain = [collections.defaultdict, dict, list, tuple, set, int, float, str, bool, bytes]
    allowed: list[Any] = [DictConfig, ListConfig, ContainerMetadata, Metadata, *values, *plain]
    allowed.append((typing.Any, "typing.Any"))
    with torch.serialization.safe_globals(allowed):
        yield
