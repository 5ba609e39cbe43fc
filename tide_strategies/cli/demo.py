"""``tide demo``: train a small GPT twice, with stock FSDP2 collectives and with TIDE's, and compare.

Each run is an ordinary launch of ``examples/lightning_gpt.py`` in fresh processes, first with ``--plan stock`` (stock
collectives, only measured), then with TIDE: same seed, same data, same order. Text comes from the installed
Python's own library, so nothing is downloaded. Results, logs and a picture go to a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import tide_strategies
from tide_strategies.cli.demo_summary import compare, draw, table

_POLL_S = 0.2
_LEAVE_S = 20.0  # the launching rank has ended well: time for the other ranks to do so too
_BAR = 30
# What a launcher around us may have set for its own job; the demo starts a job of its own.
_FOREIGN_JOB = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class DemoError(RuntimeError):
    """The demo cannot run here, or one of its training runs failed; says what to do or where to look."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument("--steps", type=int, default=80, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="CPU processes (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows of 128 bytes per process and step")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for results")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is stopped as failed")


def run(args: argparse.Namespace) -> int:
    """Run the demo as asked; prints its progress and results, and returns an exit code."""
    try:
        demo(args.output, steps=args.steps, devices=args.devices, batch=args.batch, limit_s=args.limit)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m tide_strategies.cli.demo``."""
    parser = argparse.ArgumentParser(prog="tide demo", description="Train a small GPT with stock FSDP2 and with TIDE.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def demo(output: Path, *, steps: int, devices: int, batch: int, limit_s: float) -> None:
    """Run both trainings, print the table, and write ``comparison.json``, ``table.txt`` and ``demo.png``.

    Raises:
        DemoError: if the demo's parts are not installed, or a run fails or takes longer than ``limit_s`` seconds.
    """
    script = example_script()
    output.mkdir(parents=True, exist_ok=True)
    threads = max(1, len(os.sched_getaffinity(0)) // devices)
    print(f"A byte-level GPT of 10.9 M parameters, {devices} processes with {threads} thread(s) each, {steps} steps.")
    print("Text: the source of this Python's standard library.\n", flush=True)
    records = []
    for plan, title in (("stock", "stock FSDP2"), ("tide", "TIDE")):
        out = output / f"{plan}.json"
        command = [sys.executable, str(script), "--plan", plan, "--out", str(out)]
        command += ["--steps", str(steps), "--devices", str(devices), "--batch", str(batch)]
        _train(command, title, out, steps, threads, limit_s)
        records.append(json.loads(out.read_text()))
    stock, tide = records
    comparison = compare(stock, tide)
    text = table(comparison)
    print("\n" + text + "\n")
    (output / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    (output / "table.txt").write_text(text + "\n")
    picture = output / "demo.png"
    if draw(stock, tide, picture):
        print(f"Picture: {picture}")
    else:
        print("No picture: matplotlib is not installed (pip install 'tide-strategies[plots]').")
    print(f"Numbers: {output / 'comparison.json'}; each run: {output / 'stock.json'}, {output / 'tide.json'}")


def example_script() -> Path:
    """The script that both runs launch: in the repository, or installed with the package.

    Raises:
        DemoError: if it is in neither place, or Lightning is missing.
    """
    from importlib.util import find_spec

    if find_spec("lightning") is None:
        raise DemoError("the demo trains with Lightning; install it with: pip install 'tide-strategies[lightning]'")
    package = Path(tide_strategies.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / "lightning_gpt.py").is_file():
            return folder / "lightning_gpt.py"
    raise DemoError("examples/lightning_gpt.py is not part of this installation; run the demo from the repository")


def _train(command: list[str], title: str, out: Path, steps: int, threads: int, limit_s: float) -> None:
    """Launch one run, show how far it is, and see to it that none of its processes outlives it."""
    from tide_strategies.cli.demo_record import progress_file

    log, progress = out.with_suffix(".log"), progress_file(out)
    for stale in (out, progress):
        stale.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, env=_environment(threads), stdout=log_file, stderr=log_file, start_new_session=True
        )
        bar = _ProgressBar(title, steps, sys.stdout)
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(_POLL_S)
                bar.show(progress, time.monotonic() - began)
        finally:
            late = process.poll() is None
            _end(process)
            bar.close(progress, time.monotonic() - began)
    if late or process.returncode != 0 or not out.is_file():
        what = f"took longer than {limit_s:g} s" if late else f"ended with exit code {process.returncode}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise DemoError(f"the run with {title} {what}. The end of {log}:\n{tail}")
    progress.unlink(missing_ok=True)


def _environment(threads: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _FOREIGN_JOB}
    env["OMP_NUM_THREADS"] = str(threads)
    root = Path(tide_strategies.__file__).parents[1]
    if (root / "pyproject.toml").is_file():  # the repository itself, which need not be installed
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for what is left of the run's process group (its ranks are in it), or kill it if the run went wrong."""
    patience = time.monotonic() + (_LEAVE_S if process.poll() == 0 else 0.0)
    with contextlib.suppress(ProcessLookupError):  # raised once the group is empty
        while time.monotonic() < patience:
            os.killpg(process.pid, 0)
            time.sleep(_POLL_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _ProgressBar:
    """A bar that redraws itself on a terminal, and prints a line at every tenth elsewhere."""

    def __init__(self, title: str, steps: int, stream: TextIO) -> None:
        self.title, self.steps, self.stream = title.ljust(11), steps, stream
        self.shown = -1

    def show(self, progress: Path, elapsed: float, *, last: bool = False) -> None:
        """Read how far the run is and show it, if there is news."""
        lines = progress.read_text().splitlines() if progress.is_file() else []
        step, loss = (int(lines[-1].split()[0]), lines[-1].split()[1]) if lines else (0, "-")
        filled = _BAR * step // self.steps
        text = f"{self.title} [{'#' * filled}{'.' * (_BAR - filled)}] {step}/{self.steps}  loss {loss}  {elapsed:.0f} s"
        if self.stream.isatty():
            self.stream.write("\r" + text + "  " + ("\n" if last else ""))
        elif step * 10 // self.steps > self.shown * 10 // self.steps or (last and step > self.shown):
            self.stream.write(text + "\n")
            self.shown = step
        self.stream.flush()

    def close(self, progress: Path, elapsed: float) -> None:
        """Show the last state and end the line."""
        self.show(progress, elapsed, last=True)


if __name__ == "__main__":
    sys.exit(main())
