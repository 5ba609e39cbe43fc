"""Launch a small training many times through each door and count the exit codes.

    python tests/tools/launch_many.py                                   every door, 30 times
    python tests/tools/launch_many.py --door accelerate --times 30      one of them

Each launch is what a user types: a script, started in the way of its door, on two CPU processes, with TIDE under
it; it trains a few steps, writes a checkpoint and ends. ``--python`` names the interpreter of the environment that has
the package (the default is the one that runs this). A launch is good if it ends by itself, with exit code 0, having
said that its groups were accelerated, and has left its checkpoint. Nearly all of its time are imports: a launcher and
two ranks import torch and the door's framework. Exit status: 0 if all were good, 1 if not, 2 if what a door needs is
not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fresh_environment import ROOT, outside
from snippet_readers import ACCELERATE, ACCELERATE_FILE, LIGHTNING, PACKAGE, TRANSFORMERS

GOOD = re.compile(r"([1-9]\d*) of \1 groups accelerated")

PLAIN = """\
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from my_project.model import build, train
from tide_strategies import apply_tide
from tide_strategies.runtime.teardown import orderly_teardown

dist.init_process_group("gloo")
model = build()
for block in model.blocks:
    fully_shard(block)
handle = apply_tide(fully_shard(model))
train(model)
dcp.save(get_model_state_dict(model), checkpoint_id="saved")
if dist.get_rank() == 0:
    print(handle.report(), flush=True)
orderly_teardown()
"""

# The last checkpoint is still being written when the program ends.
FABRIC = """\
import torch
from lightning.fabric import Fabric
from my_project.model import build
from tide_strategies.integrations.lightning import TideFabricEMA, TideFSDPFabricStrategy

strategy = TideFSDPFabricStrategy(state_dict_type="sharded", save_in_background=True)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
model = build()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
ema = TideFabricEMA(decay=0.9)
for _ in range(3):
    fabric.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model)
fabric.print(fabric.strategy.tide_report())
fabric.save("saved", {"model": model, "optimizer": optimizer, "ema": ema})
"""

FIT = """\
from lightning.pytorch import Trainer
from my_project.lightning import Data, Module

trainer = Trainer(accelerator="cpu", devices=2, strategy="tide_fsdp", logger=False, enable_progress_bar=False)
trainer.fit(Module(), Data())
"""


@dataclass(frozen=True)
class Door:
    """The files of a script, the package it needs, the command that starts it, and the files that it leaves."""

    package: str
    command: str
    files: dict[str, str] = field(default_factory=dict)
    leaves: str = ""


_LAUNCH = "accelerate.commands.accelerate_cli launch --cpu --main_process_port 0 --config tide.yaml train.py"
_ACCELERATE = {**PACKAGE, "tide.yaml": ACCELERATE_FILE}
_ACCELERATE_SAVING = ACCELERATE.replace("accelerator.end", "accelerator.save_state('saved')\naccelerator.end")
_SMALL = "steps=2 batch=1 'model={layers: 2, width: 32, heads: 2}'"
DOORS = {
    "lightning": Door(
        "lightning",
        "fit.py",
        {**PACKAGE, "my_project/lightning.py": LIGHTNING, "fit.py": FIT},
        "checkpoints/*.ckpt",
    ),
    "fabric": Door("lightning", "train.py", {**PACKAGE, "train.py": FABRIC}, "saved/meta.pt"),
    "accelerate": Door(
        "accelerate", f"-m {_LAUNCH}", {**_ACCELERATE, "train.py": _ACCELERATE_SAVING}, "saved/**/.metadata"
    ),
    "transformers": Door(
        "transformers",
        f"-m {_LAUNCH} --use_cpu --output_dir out --save_steps 2",
        {**_ACCELERATE, "train.py": TRANSFORMERS},
        "out/checkpoint-2/trainer_state.json",
    ),
    "torchrun": Door(
        "torch",
        "-m torch.distributed.run --standalone --nproc-per-node 2 train.py",
        {**PACKAGE, "train.py": PLAIN},
        "saved/.metadata",
    ),
    "hydra": Door("hydra", f"{ROOT / 'examples/hydra_sweep.py'} {_SMALL}", leaves="outputs/**/result.json"),
}


@dataclass
class Launches:
    """What came of the launches of one door. ``codes`` counts them by exit code, ``bad`` has the output of some."""

    codes: Counter[str] = field(default_factory=Counter)
    silent: int = 0
    nothing_left: int = 0
    seconds: float = 0.0
    bad: list[str] = field(default_factory=list)

    def add(self, code: str, output: str, left: bool) -> None:
        """Count one launch, and whether it left its files."""
        self.codes[code] += 1
        found = GOOD.search(output) is not None
        self.silent += code == "0" and not found
        self.nothing_left += code == "0" and not left
        if code != "0" or not found or not left:
            self.bad.append(output)

    def row(self, door: str) -> str:
        """A line of the table."""
        total = sum(self.codes.values())
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        seconds = self.seconds / max(1, total)
        return f"{door:14}{total:9}  {codes:22}{self.silent:18}{self.nothing_left:16}{seconds:12.1f}"


HEADER = f"{'door':14}{'launches':>9}  {'exit codes':22}{'not accelerated':>18}{'no checkpoint':>16}{'s a launch':>12}"


def launch(door: Door, python: str, folder: Path, timeout_s: float) -> tuple[str, str]:
    """Start the door's script once; returns its exit code (or "timeout") and what it printed."""
    process = subprocess.Popen(
        [python, *shlex.split(door.command)],
        cwd=folder,
        # What plan: auto chooses depends on the machine; here TIDE is to run.
        env=outside(HOME=str(folder), OMP_NUM_THREADS="1", TIDE_PLAN="tide"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "timeout", process.communicate()[0]
    return str(process.returncode), output


def launch_many(door: Door, times: int, python: str, result: Launches, timeout_s: float = 300) -> None:
    """Start the door's script that many times, in one folder."""
    with tempfile.TemporaryDirectory() as tmp:
        for name, text in door.files.items():
            path = Path(tmp, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for _ in range(times):
            began = time.monotonic()
            code, output = launch(door, python, Path(tmp), timeout_s)
            result.seconds += time.monotonic() - began
            left = list(Path(tmp).glob(door.leaves)) if door.leaves else []
            result.add(code, output, bool(left) or not door.leaves)
            for path in left:  # the next one has to leave its own
                path.unlink()


def main() -> int:
    """Launch, print the table and what went wrong; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--door", choices=[*DOORS, "all"], default="all", help="(default: all)")
    add("--times", type=int, default=30, help="launches of each door (default: 30)")
    add("--python", default=sys.executable, help="interpreter of the environment that has the package")
    add("--timeout", type=float, default=300, help="seconds that a launch may take (default: 300)")
    args = parser.parse_args()
    if args.times < 1:
        parser.error(f"--times must be at least 1; got {args.times}")
    doors = {n: d for n, d in DOORS.items() if args.door in (n, "all")}
    for door in doors.values():
        code = f"import tide_strategies, {door.package}"
        if subprocess.run([args.python, "-c", code], env=outside(), cwd="/").returncode:
            print(f"{args.python} has not both tide_strategies and {door.package}; install them", file=sys.stderr)
            return 2
    print(HEADER, flush=True)
    results = {name: Launches() for name in doors}
    for name, door in doors.items():
        launch_many(door, args.times, args.python, results[name], args.timeout)
        print(results[name].row(name), flush=True)
    for name, result in results.items():
        if result.bad:
            print(f"\n{name}, the first of {len(result.bad)} that went wrong:\n{result.bad[0].strip()[-4000:]}")
    return int(any(r.bad for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
