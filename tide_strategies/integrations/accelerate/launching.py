"""``accelerate launch`` for files with a ``tide_config:`` section: check the request and hand it to the workers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from importlib import import_module
from types import ModuleType
from typing import Any

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.accelerate import environment
from tide_strategies.integrations.accelerate.config_file import SECTION, add_tide_section
from tide_strategies.runtime.cuda.queues import request_queues

_MARK = "_tide_extends"


def extend_launcher(launch: ModuleType) -> None:
    """Hook of ``accelerate.commands.launch``: the section in the file, ``--config``, the request to the workers.

    Raises:
        AttributeError: if this Accelerate has no such functions; the hook's caller leaves it as it is then.
    """
    parser, validate = launch.launch_command_parser, launch._validate_launch_command
    if hasattr(validate, _MARK):
        return
    # Not by a hook of its own: every program that uses Accelerate imports that module.
    add_tide_section(import_module("accelerate.commands.config.config_args"))

    @functools.wraps(parser)
    def launch_command_parser(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parser(*args, **kwargs)
        # SUPPRESS: where it is absent, --config_file keeps its value. A newer Accelerate may have the option itself.
        with contextlib.suppress(argparse.ArgumentError):
            made.add_argument(
                "--config", dest="config_file", default=argparse.SUPPRESS, help="The same as --config_file."
            )
        return made

    @functools.wraps(validate)
    def _validate_launch_command(args: argparse.Namespace) -> Any:
        result = validate(args)
        final, defaults = result[0], result[1]
        if getattr(defaults, SECTION, None) is not None:
            _prepare_workers(final, defaults)
        return result

    setattr(_validate_launch_command, _MARK, True)
    launch.launch_command_parser = launch_command_parser  # type: ignore[attr-defined]
    launch._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]


def _prepare_workers(args: argparse.Namespace, file: Any) -> None:
    """Check what was asked for as a whole, now that file and command line are combined, and set the environment."""
    if not args.use_fsdp:
        kind = getattr(file.distributed_type, "value", file.distributed_type)
        raise TideConfigError(
            f"{SECTION} needs 'distributed_type: FSDP' in the Accelerate file, because TIDE accelerates FSDP2; "
            f"the file says {kind}."
        )
    if str(args.fsdp_version) != "2":
        raise TideConfigError(
            f"{SECTION} needs FSDP2, but fsdp_version is {args.fsdp_version}. Set 'fsdp_version: 2' in fsdp_config; "
            f"'accelerate to-fsdp2 --config_file OLD --output_file NEW' rewrites a whole file for FSDP2."
        )
    reshard = str(args.fsdp_reshard_after_forward)
    if reshard.lower() not in ("true", "false"):
        raise TideConfigError(
            f"fsdp_reshard_after_forward must be true or false with FSDP2; got {reshard!r}, which is a value of FSDP1. "
            f"FULL_SHARD means true, SHARD_GRAD_OP false."
        )
    _choose_devices(args)
    environment.request(getattr(file, SECTION).config)


def _choose_devices(args: argparse.Namespace) -> None:
    """Make ``use_cpu`` (or ``--cpu``) train on all processes; Accelerate alone would train in each by itself."""
    if args.cpu:
        args.use_cpu, args.cpu = True, False
    if args.use_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fully_shard's default mesh takes a GPU wherever it sees one
        return
    import torch

    if not torch.accelerator.is_available():
        raise TideConfigError(
            "no GPU was found, so every process would train alone. Set 'use_cpu: true' in the Accelerate file (or give "
            "--cpu) to train on the CPU."
        )
    request_queues()  # inherited by the workers
