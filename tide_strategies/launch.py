"""``python -m tide_strategies.launch --config tide.yaml train.py``: ``accelerate launch``, with TIDE in any case.

For environments in which torch loads no entry points (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) or TIDE's is switched off
(``TIDE_AUTOLOAD=0``): ``accelerate launch`` would not know the ``tide_config:`` section there. It takes the same
arguments. Workers start through this module as well, so that the script itself stays unchanged.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from tide_strategies._autoload import install_hooks

#: First argument of a worker, which is started as ``python -m tide_strategies.launch <one of these> SCRIPT ...``.
_AS_SCRIPT, _AS_MODULE = "--run-script", "--run-module"


def main(argv: Sequence[str] | None = None) -> None:
    """Launch the processes of a job; the arguments are those of ``accelerate launch``."""
    install_hooks()
    try:
        from accelerate.commands import launch
    except ImportError as e:
        raise SystemExit(f"tide_strategies.launch needs accelerate ({e}). Try: pip install accelerate") from None

    args = launch.launch_command_parser().parse_args(argv)
    if not args.no_python:
        how = _AS_MODULE if args.module else _AS_SCRIPT
        args.training_script_args = [how, args.training_script, *args.training_script_args]
        args.training_script, args.module = __spec__.name, True
    launch.launch_command(args)


def _run_worker(how: str, target: str, arguments: list[str]) -> None:
    """Run the user's script as Python would have run it."""
    install_hooks()
    sys.argv = [target, *arguments]
    if how == _AS_MODULE:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] in ([_AS_SCRIPT], [_AS_MODULE]):
        _run_worker(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        main()
