"""The examples for Accelerate, transformers and Hydra, started as their own text says, only shorter."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ["-m", "tide_strategies.launch", "--config", "configs/accelerate/tide_cpu.yaml", "--main_process_port", "0"]


def run(*arguments, **environment):
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


needs_transformers = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("transformers")), reason="needs accelerate and transformers"
)


@needs_transformers
def test_accelerate_finetune(tmp_path):
    small = ["--steps", "10", "--accumulate", "1", "--batch", "1", "--context", "16"]
    # Where entry points are off, this launcher still finds TIDE.
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TIDE_AUTOLOAD": "0"}
    done = run(*LAUNCH, "examples/accelerate_finetune.py", *small, "--save", tmp_path / "saved", **off)
    assert "TIDE: 5 of 5 groups accelerated" in done.stderr
    assert done.stdout.count("step   10  loss") == 1
    assert done.stdout.count("loss on new text:") == 1
    assert (tmp_path / "saved").is_dir()


@needs_transformers
def test_transformers_trainer(tmp_path):
    small = ["--max_steps=4", "--per_device_train_batch_size=1", "--gradient_accumulation_steps=1", "--logging_steps=2"]
    small += ["--layers=2", "--width=32", "--hidden=64", "--heads=2", "--kv_heads=1", "--context=16"]
    done = run(*LAUNCH, "examples/transformers_trainer.py", *small, "--fsdp", "--output_dir", tmp_path)
    assert "TIDE: 3 of 3 groups accelerated" in done.stderr
    assert len(re.findall(r"'loss': '?[\d.]+", done.stdout)) == 2
    assert done.stdout.count("loss on new text:") == 1


@pytest.mark.skipif(find_spec("hydra") is None, reason="needs hydra-core")
def test_hydra_sweep(tmp_path):
    try:
        importlib.metadata.distribution("tide-strategies")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Hydra finds the group of an installed package only")
    small = ["steps=3", "batch=1", "model={layers: 2, width: 32, heads: 2}", f"hydra.sweep.dir={tmp_path}"]
    run("examples/hydra_sweep.py", "-m", "tide=stock,default", *small)
    stock, tide = (json.loads((tmp_path / str(job) / "result.json").read_text()) for job in range(2))
    assert stock["loss"] == tide["loss"]
    assert stock["status"] == "0 of 3 groups accelerated"
    assert tide["status"] == "3 of 3 groups accelerated"
