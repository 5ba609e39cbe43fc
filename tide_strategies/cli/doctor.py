"""``tide doctor``: what this machine and job can do, why not more, and how to fix it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from tide_strategies.cli.checks import Check, everything
from tide_strategies.cli.tables import table, wrapped

_ABOUT = """\
Looks at torch, the native core, memory, GPUs, NCCL, the job's variables and the switches of the environment, and starts
nothing. Exit code 0: TIDE can run here, on the GPUs if there are any. 1: it cannot, and the report says why. What a
model adds to this is told by tide explain.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide doctor``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check everything and print it."""
    checks = everything()
    abilities = summary(checks)
    code = 0 if abilities["here"] else 1
    if arguments.json:
        print(json.dumps({"ok": code == 0, **abilities, "checks": [asdict(c) for c in checks]}, indent=1))
        return code
    for area in dict.fromkeys(c.area for c in checks):
        rows = [(c.status, c.name, c.found) for c in checks if c.area == area]
        print(f"{area}\n{table(['', 'checked', 'found'], rows)}\n")
    remedies = [c for c in checks if c.remedy and c.status in ("warn", "fail")]
    for check in remedies:
        print(wrapped(f"{check.status} {check.area}, {check.name}: {check.remedy}"))
    words = {True: "yes", False: "no", None: "there are none"}
    print(f"CPU ranks of one host: {words[abilities['cpu']]}. GPU ranks of one host: {words[abilities['gpu']]}.")
    return code


def summary(checks: Sequence[Check]) -> dict[str, bool | None]:
    """Whether TIDE can run on ``cpu`` ranks, on ``gpu`` ranks (None: no GPU), and on what is ``here`` by preference."""
    failed = {c.area for c in checks if c.status == "fail"}
    anywhere = not failed & {"software", "job"}
    has_gpu = any(c.area == "GPU ranks" and c.name.startswith("device ") for c in checks)
    cpu = anywhere and "CPU ranks" not in failed
    gpu = (anywhere and "GPU ranks" not in failed) if has_gpu else None
    return {"cpu": cpu, "gpu": gpu, "here": cpu if gpu is None else gpu}
