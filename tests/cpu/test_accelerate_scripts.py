"""Unchanged scripts under ``accelerate launch --config tide.yaml``, started as users start them."""

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tide_strategies

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

ROOT = Path(tide_strategies.__file__).parents[1]

# What is written for Accelerate and never heard of TIDE: accumulation, clipping, a tracker, a checkpoint.
TRAIN = """
import os
import sys

from accelerate import Accelerator  # before torch: then Accelerate's own import is what imports torch
import torch
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed

class Lines(GeneralTracker):
    name, requires_logging_directory, main_process_only = "lines", False, True

    @property
    def tracker(self):
        return self

    @on_main_process
    def log(self, values, step=None, **kwargs):
        with open("log.txt", "a") as f:
            f.write(f"{step} {sorted(values)}\\n")

    @on_main_process
    def store_init_configuration(self, values):
        pass

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return x + self.linear(self.norm(x))

accelerator = Accelerator(gradient_accumulation_steps=2, log_with=Lines(_blank=True))
accelerator.init_trackers("test")
set_seed(accelerator.process_index)
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
steps = 0
for (batch,) in data:
    with accelerator.accumulate(model):
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        if "--fail" in sys.argv and steps == 1 and accelerator.process_index == 1:
            raise LookupError("made to fail")
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps += 1
            accelerator.log({"loss": accelerator.gather(loss).mean()}, step=steps)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("checkpoint")
accelerator.end_training()
words = [steps, accelerator.num_processes, accelerator.distributed_type.value, next(model.parameters()).device.type]
os.write(1, ("RAN " + " ".join(map(str, words)) + "\\n").encode())  # one write: ranks share the pipe
"""

FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: 2
tide_config:
  timeout_s: 20
  all_gather: {slots: 3}
"""


def launch(folder, command, *arguments, **environment):
    (folder / "train.py").write_text(TRAIN)
    (folder / "tide.yaml").write_text(FILE)
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env.update(OMP_NUM_THREADS="1", HF_HOME=str(folder / "hf"), **environment)
    return subprocess.run(
        [sys.executable, "-m", *command, "--config", "tide.yaml", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def check(done, folder):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("RAN 4 2 FSDP cpu\n") == 2, done.stdout
    assert (done.stdout + done.stderr).count("TIDE: 3 of 3 groups accelerated") == 1, done.stderr
    assert (folder / "log.txt").read_text().splitlines() == [f"{step} ['loss']" for step in range(1, 5)]
    assert (folder / "checkpoint" / "pytorch_model_fsdp_0").is_dir()


ACCELERATE = ["accelerate.commands.accelerate_cli", "launch"]


@pytest.fixture
def installed():
    try:
        importlib.metadata.distribution("tide-strategies")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch finds the entry point of an installed package only")


@pytest.mark.usefixtures("installed")
def test_an_unchanged_script(tmp_path):
    check(launch(tmp_path, ACCELERATE, "train.py"), tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_error_on_one_rank_ends_the_job(tmp_path):
    done = launch(tmp_path, ["accelerate.commands.launch"], "train.py", "--fail")  # as documented for debuggers
    assert done.returncode != 0
    assert "made to fail" in done.stderr


@pytest.mark.usefixtures("installed")
def test_programs_without_a_request_do_not_notice(tmp_path):
    code = """
import sys, accelerate
from accelerate.accelerator import Accelerator, AcceleratorState, fsdp2_prepare_model
functions = [Accelerator.__init__, Accelerator.free_memory, AcceleratorState.__init__, fsdp2_prepare_model]
print([f.__module__ for f in functions if hasattr(f, "__wrapped__") or not f.__module__.startswith("accelerate.")])
print(sorted(m for m in sys.modules if m.startswith("tide_strategies.") and "accelerate" in m))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TIDE_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout + done.stderr
