"""The ``tide`` command: ``tide COMMAND --help`` tells each one's options."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tide_strategies import __version__
from tide_strategies.errors import TideError

#: command -> (module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``, one line of help).
#: Modules are imported only when their command is used, so the command line starts fast.
COMMANDS = {
    "autopsy": ("tide_strategies.cli.autopsy", "name the first cause of a stop, from what each rank wrote"),
    "bench": ("tide_strategies.cli.bench.command", "measure collectives beside the stock path"),
    "demo": ("tide_strategies.cli.demo", "train a small language model, stock first, then TIDE, and compare"),
    "doctor": ("tide_strategies.cli.doctor", "what this machine and job can do, why not more, and how to fix it"),
    "explain": ("tide_strategies.cli.explain", "the verdict of each parameter group of a model"),
    "plan": ("tide_strategies.cli.plan", "plan, memory and predicted times of a model on some nodes and GPUs"),
    "timeline": ("tide_strategies.cli.timeline", "draw a predicted or measured schedule"),
    "verify": ("tide_strategies.cli.verify", "prove schedules right without running them"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 success, 1 failure, 2 wrong usage)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="tide", description="Zero-copy collectives for PyTorch FSDP2.")
    parser.add_argument("--version", action="version", version=f"tide-strategies {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, (module, words) in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=words)
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args(argv)
    try:
        return int(importlib.import_module(COMMANDS[arguments.command][0]).run(arguments))
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TideError as e:
        print(f"tide {arguments.command}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
