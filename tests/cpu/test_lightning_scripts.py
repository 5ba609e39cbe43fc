"""Scripts as users write them, started as users start them: Lightning's launcher makes the other process."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tide_strategies

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

ROOT = Path(tide_strategies.__file__).parents[1]

TRAINER = """
import os
import torch
import {pl} as pl
{imports}

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

    def forward(self, x):
        return x + self.linear(x)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        if {fail} and self.trainer.global_step == 2 and self.global_rank == 1:
            raise LookupError("made to fail")
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices={devices}, strategy={strategy}, max_epochs=2, accumulate_grad_batches=2,
        gradient_clip_val=1.0, logger=False, enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.save_checkpoint("last.ckpt")
    os.write(1, b"STEPS %d\\n" % trainer.global_step)  # one write: ranks share the pipe
"""

FABRIC = """
import os
import time
import torch
from {fabric} import Fabric
from tide_strategies.integrations.lightning import saving

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="tide_fsdp")
    fabric.launch()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        fabric.backward(model(torch.randn(4, 8)).pow(2).mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save("last.ckpt", {{"model": model}})
    os.write(1, b"STEPS %d\\n" % (step + 1))
    fabric.strategy._save_distributed_checkpoint = fabric.strategy.save_in_background = True
    write = saving.save
    saving.save = lambda *args, **kw: (time.sleep(1), write(*args, **kw))
    fabric.save("end.ckpt", {{"model": model}})
"""


# What a LightningCLI program looks like: no Trainer in it.
CLI = """
class Program(Module):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), batch_size=2)

    def on_train_end(self):
        strategy = self.trainer.strategy
        options = (strategy.saves_whole_files, strategy.tide_config.timeout_s, strategy.sharding.min_num_params)
        assert options == (True, 60, 10), options
        group = torch.distributed.distributed_c10d._get_default_group()
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert (str(torch.distributed.get_backend_config()), timeout.total_seconds()) == ("cpu:gloo", 95), timeout
        assert [type(c).__name__ for c in self.trainer.callbacks if "Tide" in type(c).__name__] == ["TideEMA"]

if __name__ == "__main__":
    import contextlib, sys
    from pytorch_lightning.cli import LightningCLI
    if "LOCAL_RANK" not in os.environ:  # all options into a file, then train with that
        with open("printed.yaml", "w") as file, contextlib.redirect_stdout(file), contextlib.suppress(SystemExit):
            LightningCLI(Program, args=[*sys.argv[1:], "--print_config"])
        named = ["--trainer.strategy=tide_fsdp", "--trainer.accelerator=cpu", "--trainer.devices=2"]
        named = LightningCLI(Program, run=False, save_config_callback=None, args=named).trainer.strategy
        print("BY NAME", type(named).__module__, type(named).__name__, flush=True)
        sys.argv[1:] = ["fit", "--config", "printed.yaml"]
    cli = LightningCLI(Program, save_config_callback=None)
    cli.trainer.save_checkpoint("last.ckpt")
    os.write(1, b"STEPS %d\\n" % cli.trainer.global_step)
"""
CLI_FILE = """
trainer:
  accelerator: cpu
  devices: 2
  accumulate_grad_batches: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
  - class_path: tide_strategies.integrations.lightning.TideEMA
    init_args: {decay: 0.9}
  strategy:
    class_path: tide_strategies.TideFSDPStrategy
    init_args:
      auto_wrap_policy: [Block]
      min_num_params: 10
      tide: {timeout_s: 60}
      process_group_backend: cpu:gloo
      timeout: "0:01:35"
"""


def run(folder, script, *arguments):
    (folder / "train.py").write_text(script)
    # A checkout that is not installed has no entry point; then the search path stands in for the installation.
    path = [str(ROOT), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env.update(PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


def check(done, folder, groups, ranks=2, steps=4):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"STEPS {steps}") == ranks, done.stdout
    said = done.stdout + done.stderr
    assert said.count("TIDE: ") == 1, said
    assert f"of {groups} groups accelerated" in said, said
    assert (folder / "last.ckpt").is_file()


# Where the package is installed the script needs no import of ours (tests/unit/test_autoload.py proves that part).
IMPORT = "import tide_strategies"


def test_by_name(tmp_path):
    script = TRAINER.format(pl="lightning.pytorch", imports=IMPORT, strategy="'tide_fsdp'", devices=2, fail=False)
    check(run(tmp_path, script), tmp_path, groups=3)


def test_lightning_cli_by_class_path_in_the_standalone_namespace(tmp_path):
    """Options in a file, printed in full by ``--print_config``, and the printed file trains; or a name alone."""
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("jsonargparse")
    script = TRAINER.format(pl="pytorch_lightning", imports=IMPORT, strategy="None", devices=2, fail=False)
    (tmp_path / "given.yaml").write_text(CLI_FILE)
    script = script.partition("if __name__")[0] + CLI
    done = run(tmp_path, script, "fit", "--config", "given.yaml", "--trainer.max_epochs=2")
    check(done, tmp_path, groups=3)
    assert "BY NAME tide_strategies.integrations.lightning.trainer_standalone TideFSDPStrategy\n" in done.stdout
    printed = (tmp_path / "printed.yaml").read_text()
    for line in ("timeout_s: 60", "max_epochs: 2", "- Block", "reshard_after_forward: true"):
        assert line in printed, printed


def test_fabric_by_name(tmp_path):
    script = FABRIC.format(fabric="lightning.fabric").replace("import torch\n", f"import torch\n{IMPORT}\n", 1)
    check(run(tmp_path, script), tmp_path, groups=3)
    assert (tmp_path / "end.ckpt/meta.pt").is_file(), "the program's end waits for what is written in the background"


def test_an_error_on_one_rank_ends_the_job(tmp_path):
    script = TRAINER.format(pl="lightning.pytorch", imports=IMPORT, strategy="'tide_fsdp'", devices=2, fail=True)
    done = run(tmp_path, script.replace("'tide_fsdp'", "__import__('tide_strategies').TideFSDPStrategy(timeout_s=10)"))
    assert done.returncode != 0
    assert "made to fail" in done.stderr
