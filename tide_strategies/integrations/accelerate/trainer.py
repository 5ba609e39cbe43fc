"""transformers' ``Trainer`` on TIDE: what it passes over in silence, or refuses without a remedy, gets words.

The ``Trainer`` trains through an ``Accelerator``, so there is nothing to add for training. Its classes are extended in
workers whose launcher asked for TIDE, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.accelerate.checkpoint_kind import extend_loading
from tide_strategies.integrations.accelerate.config_file import refuse_misplaced_options
from tide_strategies.integrations.accelerate.environment import requested_config

_MARK = "_tide_extends"


def extend(trainer: ModuleType) -> None:
    """Hook of ``transformers.trainer``; more than one call has no further effect.

    Raises:
        AttributeError: if this transformers has no such functions; the hook's caller leaves it as it is then.
    """
    cls = trainer.Trainer
    if hasattr(cls.train, _MARK):
        return
    train, save_model = _before(cls.train, _check_is_there), _before(cls.save_model, _warn_of_no_model)
    extend_loading(trainer)
    cls.train, cls.save_model = train, save_model


def extend_arguments(training_args: ModuleType) -> None:
    """Hook of ``transformers.training_args``; more than one call has no further effect.

    Raises:
        AttributeError: if this transformers has no such functions; the hook's caller leaves it as it is then.
    """
    cls = training_args.TrainingArguments
    if not hasattr(cls.__post_init__, _MARK):
        cls.__post_init__ = _before(cls.__post_init__, _check_arguments)


def _before(method: Callable[..., Any], check: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """``method`` with a look at its arguments by their names, ``self`` among them."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return method(*args, **kwargs)  # the host's own words for a wrong call
        check(given)
        return method(*args, **kwargs)

    setattr(checked, _MARK, True)
    return checked


def _tide_plugin(trainer: Any) -> Any:
    from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, TideFSDPPlugin) else None


def _check_is_there(given: dict[str, Any]) -> None:
    """The folder to resume from: without it the Trainer ends in the path of one of its files."""
    trainer, folder = given["self"], given.get("resume_from_checkpoint")
    if not isinstance(folder, str | os.PathLike) or os.path.isdir(folder) or _tide_plugin(trainer) is None:
        return
    output = Path(trainer.args.output_dir)
    there = sorted(str(p) for p in output.glob("checkpoint-*"))
    raise TideConfigError(
        f"there is no checkpoint at resume_from_checkpoint={os.fspath(folder)!r}. In output_dir ({output}) there "
        + (f"are {', '.join(there)}; resume_from_checkpoint=True takes the last." if there else "are none.")
        + " It must be a folder that all ranks see."
    )


def _warn_of_no_model(given: dict[str, Any]) -> None:
    """``save_model`` of sharded checkpoints: the Trainer writes nothing and says nothing."""
    plugin = _tide_plugin(given["self"])
    inside_checkpoint = given.get("_internal_call", False)  # which has the shards as well
    if plugin is None or inside_checkpoint or plugin.state_dict_type.name != "SHARDED_STATE_DICT":
        return
    if given["self"].accelerator.is_main_process:
        warnings.warn(
            "TIDE: trainer.save_model() writes no model under SHARDED_STATE_DICT. For a model that from_pretrained "
            "reads call trainer.accelerator.state.fsdp_plugin.set_state_dict_type('FULL_STATE_DICT') before it on all "
            "ranks, or choose that type where you chose the other: fsdp_state_dict_type in the Accelerate file, or "
            "state_dict_type in fsdp_config of TrainingArguments.",
            stacklevel=3,
        )


def _check_arguments(given: dict[str, Any]) -> None:
    """``TrainingArguments`` before it looks at them itself."""
    if requested_config() is None:
        return
    arguments = given["self"]
    refuse_misplaced_options(_read(arguments.fsdp_config), "fsdp_config of TrainingArguments", "the Trainer")
    words = arguments.fsdp.split() if isinstance(arguments.fsdp, str) else arguments.fsdp
    hybrid = [str(getattr(word, "value", word)) for word in words] if isinstance(words, list) else []
    hybrid = [word for word in hybrid if word.lower().startswith("hybrid_shard")]
    if hybrid:
        raise TideConfigError(
            f"fsdp={hybrid[0]!r} is a kind of sharding of FSDP1, and TIDE accelerates FSDP2. There replicas of the "
            f"shards are numbers: fsdp=True, and in the Accelerate file parallelism_config with "
            f"parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size."
        )


def _read(config: Any) -> Mapping[str, Any]:
    """``fsdp_config`` as it may be given: a section, one as JSON, or a file with one; empty where it is wrong."""
    if isinstance(config, str):
        with contextlib.suppress(OSError, ValueError):  # the host's own words follow
            config = json.loads(config if config.lstrip().startswith("{") else Path(config).read_text())
    return config if isinstance(config, Mapping) else {}
