"""``tide bench``: collectives, training steps and interference, ours beside the stock path, in one run each."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tide_strategies.cli.bench.ranks import Failure, Job, Row, run_jobs, usable_gpus
from tide_strategies.cli.bench.rows import environment, header, heading, line, write_json, write_picture
from tide_strategies.errors import TideError

#: benchmark -> (module with ``add_arguments``, ``jobs``, ``columns``, ``draw`` and ``ABOUT``, one line of help).
BENCHMARKS = {
    "collectives": ("tide_strategies.cli.bench.collectives", "all-gather and reduce-scatter by themselves"),
    "step": ("tide_strategies.cli.bench.step", "training steps of a Llama-style block stack"),
    "interference": ("tide_strategies.cli.bench.interference", "how much collectives slow kernels beside them (GPU)"),
}
_GPU_ONLY = {"interference"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide bench``."""
    which = parser.add_subparsers(dest="what", metavar="BENCHMARK", required=True)
    for name, (module, words) in BENCHMARKS.items():
        benchmark = importlib.import_module(module)
        sub = which.add_parser(
            name,
            help=words,
            description=words,
            epilog=benchmark.ABOUT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--device", choices=["cpu", "cuda"], help="where (default: cuda if there is a GPU)")
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as JSON too")
        sub.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows into FILE.png too")
        sub.add_argument(
            "--limit", type=float, default=300.0, help="seconds from one row to the next, else the job fails (300)"
        )
        benchmark.add_arguments(sub)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write JSON and picture. 1 if a job failed, after all the others have run.

    Raises:
        TideError: the device asked for is not there, or has no part in this benchmark.
    """
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            print(f"tide bench: no folder {path.parent} for {option}", file=sys.stderr)
            return 2
    device = _device(arguments)
    benchmark = importlib.import_module(BENCHMARKS[arguments.what][0])
    counts = arguments.ranks or ([2, 4] if device == "cpu" else [max(2, usable_gpus())])
    facts = {"benchmark": arguments.what, **environment(device, counts), "options": _stated(arguments)}
    print(header(facts), flush=True)
    rows: list[Row] = []
    failures: list[Failure] = []
    table = benchmark.columns(device)
    print(heading(table), flush=True)
    for ranks in counts:
        _measure(benchmark.jobs(arguments, device), ranks, device, arguments.limit, table, rows, failures)
    for note in dict.fromkeys(n for row in rows for n in row.get("notes", ())):
        print(f"Note: {note}")
    if arguments.json is not None:
        write_json(arguments.json, facts, rows, failures)
        print(f"rows written to {arguments.json}")
    if arguments.plot is not None:
        _draw(benchmark, arguments.plot, facts, rows)
    if failures:
        print(f"{len(failures)} of the jobs failed: {'; '.join(f.label for f in failures)}", file=sys.stderr)
    return 1 if failures else 0


def _stated(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options that decide what is measured, as given or by default."""
    elsewhere = {"command", "what", "device", "ranks", "json", "plot", "limit"}
    return {k: v for k, v in vars(arguments).items() if k not in elsewhere and v not in (None, [], False)}


def _device(arguments: argparse.Namespace) -> str:
    gpus = usable_gpus()
    device: str = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise TideError("--device cuda: torch finds no GPU here")
    if device == "cpu" and arguments.what in _GPU_ONLY:
        raise TideError(f"{arguments.what} needs a GPU: on the CPU collectives and kernels never run at once")
    return device


def _measure(
    jobs: Sequence[Job],
    ranks: int,
    device: str,
    limit_s: float,
    table: Any,
    rows: list[Row],
    failures: list[Failure],
) -> None:
    for outcome in run_jobs(jobs, ranks, device, limit_s):
        if isinstance(outcome, Failure):
            failures.append(outcome)
            print(f"{outcome.label}: FAILED, see stderr", flush=True)
            print(
                f"tide bench: {outcome.label} among {ranks} ranks failed:\n{outcome.error}", file=sys.stderr, flush=True
            )
        else:
            rows.append(outcome)
            print(line(table, outcome), flush=True)


def _draw(benchmark: Any, path: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    if not rows:
        print("No picture: there are no rows.")
        return
    where = ", ".join(dict.fromkeys(facts.get("gpus", ()))) or "CPU"
    title = f"tide bench {facts['benchmark']}: {where}, torch {facts['torch']}, {facts['date'][:10]}"
    if write_picture(path, title, benchmark.draw, rows):
        print(f"picture written to {path}")
    else:
        print("No picture: matplotlib is not installed (pip install 'tide-strategies[plots]').")
