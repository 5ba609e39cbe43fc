"""The examples on GPUs, as their own text says, only shorter: every door trains, on TIDE.

Those that print losses while they train learn as well.

Two processes, on one card if there is no other; NCCL must let them (``cards.py``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cards import WITHOUT_NCCL, stock_runs

import tide_strategies

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Whoever starts processes finds the package, and its entry points, where this process found it.
PACKAGE = Path(tide_strategies.__file__).parents[1]
MODULE = [sys.executable, "-m"]
TORCHRUN = [*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LOGGED_BY_TRANSFORMERS = r"'loss': '?([\d.]+)"  # a number, or in newer releases a text
GPT = ["--layers", "2", "--width", "128", "--heads", "4", "--context", "64"]

ONE_CARD = torch.cuda.device_count() < 2


@pytest.fixture(scope="module", autouse=True)
def nccl(environment: None) -> None:
    if not stock_runs():
        pytest.skip(WITHOUT_NCCL)


def script(name: str) -> list[object]:
    """An example, for each of the processes that somebody starts."""
    return [*([Path(__file__).with_name("one_card.py")] if ONE_CARD else []), EXAMPLES / name]


def output(folder: Path, *command: object) -> str:
    """What a command prints that ends well."""
    paths = os.pathsep.join(p for p in (str(PACKAGE), os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([str(c) for c in command], cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def learns(text: str, pattern: str) -> None:
    losses = [float(x) for x in re.findall(pattern, text)]
    assert len(losses) > 1, text
    assert losses[-1] < losses[0], losses


def accelerated(text: str) -> None:
    found = re.search(r"(\d+) of (\d+) groups accelerated", text)
    assert found is not None, text
    assert found[1] == found[2] != "0", found[0]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("plain_pytorch.py", GPT),
        ("moe_experts.py", ["--layers", "2", "--width", "64", "--hidden", "64"]),
        ("dit_block.py", ["--layers", "2", "--width", "64", "--heads", "2"]),
    ],
)
def test_plain_pytorch(tmp_path: Path, example: str, arguments: list[str]) -> None:
    options = ["--device", "cuda", "--bf16", "--plan", "tide", "--steps", "20"]
    text = output(tmp_path, *TORCHRUN, *script(example), *options, *arguments)
    accelerated(text)
    learns(text, r"step +\d+  loss ([\d.]+)")


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    # Lightning wants a GPU for each process of a node: on one card each process is a node of its own to it.
    start = (
        [*TORCHRUN, *script("lightning_gpt.py"), "--devices", "1", "--nodes", "2"]
        if ONE_CARD
        else [sys.executable, *script("lightning_gpt.py")]
    )
    options = ["--accelerator", "gpu", "--precision", "bf16-mixed", "--plan", "tide", "--steps", "20"]
    accelerated(output(tmp_path, *start, *options, *GPT))


@pytest.mark.parametrize(
    ("example", "arguments", "losses"),
    [
        ("accelerate_finetune.py", ["--steps", "20", "--context", "32"], r"step +\d+  loss ([\d.]+)"),
        ("transformers_trainer.py", ["--max_steps", "20", "--logging_steps", "5", "--bf16"], LOGGED_BY_TRANSFORMERS),
    ],
)
def test_accelerate(tmp_path: Path, example: str, arguments: list[str], losses: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    config = (ROOT / "configs/accelerate/tide.yaml").read_text().replace("num_processes: 8", "num_processes: 2")
    (tmp_path / "tide.yaml").write_text(config)
    launch = [*MODULE, "accelerate.commands.launch", "--config_file", tmp_path / "tide.yaml"]
    text = output(tmp_path, *launch, *script(example), *arguments)
    accelerated(text)
    learns(text, losses)


def test_hydra(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    options = ["device=cuda", "steps=4", "batch=2", "tide.plan=tide", "model={layers: 2, width: 64, heads: 2}"]
    text = output(tmp_path, sys.executable, EXAMPLES / "hydra_sweep.py", *options, f"hydra.run.dir={tmp_path / 'run'}")
    accelerated(text)
