"""A checkpoint of the other state-dict type: Accelerate looks for the files of its own, and fails without a remedy."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate.utils.constants import FSDP_MODEL_NAME

from tide_strategies.errors import TideConfigError

_FULL, _SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def extend_loading(host: ModuleType) -> None:
    """Make the ``load_fsdp_model`` that ``host`` calls look at the checkpoint first, where a TIDE plugin loads it."""
    original = host.load_fsdp_model
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_fsdp_model(*args: Any, **kwargs: Any) -> Any:
        from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

        given = signature.bind(*args, **kwargs).arguments
        plugin = given["fsdp_plugin"]
        if isinstance(plugin, TideFSDPPlugin):
            _check_kind(plugin.state_dict_type.name, Path(given["input_dir"]), given.get("model_index", 0))
        return original(*args, **kwargs)

    host.load_fsdp_model = load_fsdp_model  # type: ignore[attr-defined]


def _check_kind(wanted: str, folder: Path, index: int) -> None:
    """Refuse a checkpoint that has this model in the other form only.

    Raises:
        TideConfigError: on every rank that sees the checkpoint.
    """
    full = folder / (f"{FSDP_MODEL_NAME}_{index}.bin" if index else f"{FSDP_MODEL_NAME}.bin")
    shards = folder if folder.name == f"{FSDP_MODEL_NAME}_{index}" else folder / f"{FSDP_MODEL_NAME}_{index}"
    there = [kind for kind, is_there in ((_FULL, full.is_file()), (_SHARDED, shards.is_dir())) if is_there]
    if wanted in (_FULL, _SHARDED) and there and wanted not in there:
        raise TideConfigError(
            f"the checkpoint {os.fspath(folder)} was written with {there[0]}, and this run has {wanted}. Load it with "
            f"the type that it was written with: 'fsdp_state_dict_type: {there[0]}' in fsdp_config of the Accelerate "
            f"file, state_dict_type={there[0]!r} in TideFSDPPlugin or in fsdp_config of TrainingArguments."
        )
