"""What a reader of a page brings to its snippets, and which snippets are not run here and why.

A reader has a model, data and scripts; a page does not. ``FILES`` are those of a page's reader. ``USES`` says what
becomes of a snippet that does not stand alone: the names that it takes for granted, the code in the place of a line
``...``, the file that it is part of, the command that tries it. A snippet is named by a text that occurs in no other
of its page. ``WITHOUT_GPU`` are the words that the pages themselves give to those who have none. Whatever is listed
here and fits no snippet any more is an error (``stale``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from snippets import SHELL, Command, Snippet


@dataclass(frozen=True)
class Use:
    """What becomes of one snippet, or of one command.

    Args:
        before, after: code around it (of a Python snippet), or text (of a file).
        own: one line of code in the place of each line ``...``.
        save_as: the file that it is (part of, if another snippet has the same); Python without one is run at once.
        first, then: commands before and after it.
    """

    before: str = ""
    own: tuple[str, ...] = ()
    after: str = ""
    save_as: str = ""
    first: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


MODEL = '''\
"""A stack of blocks, and its training."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 3)

    def init_weights(self):
        torch.manual_seed(0)
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Stack()


def train(model, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def all_fast(report):
    assert report.status == "4 of 4 groups accelerated", report
    assert all(g.reduce_scatter.calls == 3 for g in report.groups), report
'''

LIGHTNING = '''\
"""The same model in Lightning."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from my_project.model import build


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, batch, index):
        return self.model(batch[0]).square().mean()

    def on_train_epoch_end(self):
        self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=2)
'''

ACCELERATE = """\
import torch
from accelerate import Accelerator
from my_project.model import build

accelerator = Accelerator()
model = build()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""

TRANSFORMERS = """\
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps, args.report_to = 3, []
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
ids = torch.arange(8)
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=[{"input_ids": ids, "labels": ids}] * 64).train()
"""

# Hydra runs its jobs one after the other in one process, so each job starts the second rank by itself.
HYDRA = """\
import os

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from torch.distributed.fsdp import fully_shard
from my_project.model import build, train
from tide_strategies import apply_tide
from tide_strategies.runtime.teardown import orderly_teardown


def sharded_model_on_two_ranks():
    torch.set_num_threads(1)
    folder = HydraConfig.get().runtime.output_dir
    child = os.fork()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(child == 0), world_size=2)
    model = build()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), child


"""
HYDRA_END = """
    train(model)
    if child == 0:
        orderly_teardown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.destroy_process_group()


main()
"""

STOPPED = '''\
"""A job that stops because rank 1 sleeps in its own code: leaves the folder "stopped"."""

import os
import sys
import time

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from my_project.model import build, train
from tide_strategies import apply_tide

rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
model = build()
for block in model.blocks:
    fully_shard(block)
apply_tide(fully_shard(model), {"timeout_s": 2, "debug.autopsy": "stopped", "plan": "tide"})
train(model)
if rank == 1:
    model.embed.register_forward_hook(lambda *_: time.sleep(4))
try:
    train(model)
except Exception as e:
    os.write(1, f"rank {rank}: {e}\\n".encode())
    time.sleep(4 * (1 - rank))
    os._exit(0)
sys.exit("nothing stopped")
'''

PACKAGE = {"my_project/__init__.py": "", "my_project/model.py": MODEL}
ACCELERATE_FILE = """\
distributed_type: FSDP
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
tide_config:
  timeout_s: 300
"""

#: Page -> files that its reader has.
FILES: dict[str, dict[str, str]] = {
    "README.md": {
        **PACKAGE,
        "my_project/lightning.py": LIGHTNING,
        "train.py": ACCELERATE,
        "tide.yaml": ACCELERATE_FILE,
    },
    "docs/accelerate.md": {**PACKAGE, "train.py": ACCELERATE},
    "docs/cli.md": {**PACKAGE, "stopped.py": STOPPED},
    "docs/hydra.md": {**PACKAGE, "options.yaml": "timeout_s: 30\nreduce_scatter: {mode: slot_reuse}\n"},
    "docs/lightning.md": {
        **PACKAGE,
        "my_project/lightning.py": LIGHTNING,
        "cli.py": "from lightning.pytorch.cli import LightningCLI\n"
        "from my_project.lightning import Data, Module\n\nLightningCLI(Module, Data)\n",
    },
    "docs/plain_pytorch.md": PACKAGE,
    "docs/planner.md": PACKAGE,
    "docs/transformers.md": {"train.py": TRANSFORMERS, "tide.yaml": ACCELERATE_FILE},
}

_MODEL = (
    "import torch\nfrom torch.distributed.fsdp import fully_shard\nfrom my_project.model import *\nmodel = build()\n"
)
_FIT = "from my_project.lightning import Data, Module\nmodel, datamodule = Module(), Data()\n"
_PARALLELIZE = """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
args, device, Transformer = None, "cpu", lambda args: Stack()
def parallelize(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(checkpoint_wrapper(block))
    fully_shard(model)
"""
_DATA = "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 8)), batch_size=2)\n"

#: (page, text of one of its snippets or commands) -> what becomes of it.
USES: dict[tuple[str, str], Use] = {
    ("README.md", "trainer.fit(model, datamodule)"): Use(before=_FIT, save_as="fit.py", then=("python fit.py",)),
    ("README.md", "apply_tide(model"): Use(
        before=_MODEL, own=("train(model)",), after="all_fast(handle.report())\nhandle.close()"
    ),
    ("docs/accelerate.md", "Accelerator(fsdp_plugin=plugin)"): Use(
        before=f"{_MODEL}optimizer = torch.optim.AdamW(model.parameters())\n{_DATA}",
        own=("train(model, optimizer)",),
        after="all_fast(plugin.tide_report())",
    ),
    ("docs/accelerate.md", "StepMetrics("): Use(
        after="train(model, optimizer)\nassert metrics.collect(3)['tide/groups_tide'] == 4\naccelerator.free_memory()",
    ),
    ("docs/accelerate.md", "parallelism_config:"): Use(
        first=("cp tide.yaml replicas.yaml",),
        save_as="replicas.yaml",
        then=("accelerate launch --config replicas.yaml train.py",),
    ),
    ("docs/cli.md", "tide autopsy stopped"): Use(first=("python stopped.py",)),
    ("docs/hydra.md", "@hydra.main"): Use(
        before=HYDRA, own=("model, child = sharded_model_on_two_ranks()",), after=HYDRA_END, save_as="app.py"
    ),
    ("docs/hydra.md", "# tide/mine.yaml"): Use(then=("python app.py tide=mine",)),
    ("docs/hydra.md", "structured_config()"): Use(
        before="import sys\nsys.argv = ['app.py', 'all_gather.slots=3']\n",
        after="assert (config.timeout_s, config.all_gather.slots) == (30, 3)\n"
        "assert config.reduce_scatter.mode == 'slot_reuse'\n"
        "OmegaConf.save(options, 'used.yaml')\nassert TideConfig.from_any(OmegaConf.load('used.yaml')) == config\n"
        "assert TideConfig.from_any(OmegaConf.load('options.yaml')).timeout_s == 30\n",
    ),
    ("docs/lightning.md", "trainer.fit(model, datamodule)"): Use(before=_FIT, save_as="fit.py"),
    ("docs/lightning.md", "TideFSDPStrategy(replicate_size"): Use(
        after="trainer.fit(Module(), Data())\n", save_as="fit.py", then=("python fit.py",)
    ),
    ("docs/lightning.md", "TideFSDPStrategy(expert_policy"): Use(
        before="from tide_strategies import TideFSDPStrategy\n", save_as="experts.py", then=("python experts.py",)
    ),
    ("docs/lightning.md", "TideEMA(decay"): Use(
        before=f"from lightning.pytorch import Trainer\n{_FIT}",
        after="trainer.fit(model, datamodule)\n",
        save_as="averages.py",
        then=("python averages.py",),
    ),
    ("docs/lightning.md", "TideFabricEMA(decay"): Use(
        before=f"import torch\nfrom my_project.model import build\nmodel = build()\n{_DATA}"
        "optimizer = torch.optim.AdamW(model.parameters())\n",
        after="import pathlib\nassert all(pathlib.Path(p, 'meta.pt').is_file() for p in ('last', 'averages'))\n"
        "assert strategy.tide_report().installed\n",
        save_as="loop.py",
        then=("python loop.py",),
    ),
    ("docs/lightning.md", "class_path:"): Use(
        save_as="config.yaml", then=("python cli.py fit --config config.yaml --trainer.devices 2",)
    ),
    ("docs/plain_pytorch.md", "MixedPrecisionPolicy(param_dtype"): Use(
        before=_MODEL, after="train(model)\nall_fast(handle.report())\nhandle.close()"
    ),
    ("docs/plain_pytorch.md", "parallelize(model)"): Use(
        before=_PARALLELIZE, after="train(model, optimizer)\nall_fast(handle.report())\nhandle.close()"
    ),
    ("docs/planner.md", "plan: {default: tide"): Use(
        save_as="options.yaml", then=("tide explain my_project.model:build --config options.yaml",)
    ),
}

_GPU, _FILL_IN = "needs a GPU", "has places to fill in"
#: (page, beginning of a command) -> why it is not run.
NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", "git clone <this repository>"): f"{_FILL_IN}; a copy of the checkout stands for it",
    ("README.md", "make test"): "runs all tests: that is what CI does",
    ("docs/benchmarks.md", "tide bench interference"): _GPU,
    ("docs/benchmarks.md", "make bench-gpu BENCHMARKS=collectives"): _GPU,
    ("docs/benchmarks.md", "make bench-gpu BENCHMARKS=interference"): _GPU,
    ("docs/benchmarks.md", "tide bench step --device cuda --steps"): _GPU,
    ("docs/benchmarks.md", "tide bench step --device cuda --sweep"): _GPU,
    ("docs/benchmarks.md", "LD_PRELOAD="): _GPU,
    ("docs/benchmarks.md", "make test-gpu"): _GPU,
    ("docs/supported_torch.md", "pip download"): _FILL_IN,
    ("docs/supported_torch.md", "unzip wheels/torch-2.X.Y"): _FILL_IN,
}

#: (words, words in their place on a machine without a GPU, the page that says so)
WITHOUT_GPU = [
    ("accelerate launch --config ", "accelerate launch --cpu --config ", "docs/accelerate.md"),
    ("tide_strategies.launch --config ", "tide_strategies.launch --cpu --config ", "docs/accelerate.md"),
    ("--bf16", "--bf16 --use_cpu", "docs/transformers.md"),
]


def use_of(page: str, text: str) -> Use:
    """What becomes of a snippet or command."""
    return next((use for (where, mark), use in USES.items() if where == page and mark in text), Use())


def not_run(command: Command) -> str:
    """Why a command is not run; empty if it is."""
    listed = (why for (page, text), why in NOT_RUN.items() if page == command.page and command.text.startswith(text))
    return next(listed, "")


def stale(found: Iterable[Snippet]) -> list[str]:
    """What is listed here and fits nothing, or fits more than one snippet, in words; and what is missing here."""
    found = list(found)
    commands = [c for s in found if s.language in SHELL for c in s.commands()]
    texts = [(s.page, s.code) for s in found if s.language in ("python", "yaml")]
    texts += [(c.page, c.text) for c in commands]
    problems = []
    for page, mark in USES:
        count = sum(where == page and mark in text for where, text in texts)
        if count != 1:
            problems.append(f"USES: {mark!r} is in {count} snippets of {page}; it must name one")
    for page, text in NOT_RUN:
        if not any(c.page == page and c.text.startswith(text) for c in commands):
            problems.append(f"NOT_RUN: {page} has no command {text!r} any more")
    for old, _, page in WITHOUT_GPU:
        if not any(old in c.text for c in commands):
            problems.append(f"WITHOUT_GPU ({page}): no command has {old!r} any more")
    for page, files in FILES.items():
        own = [s for s in found if s.page == page]
        used = "\n".join([*(s.code for s in own), *(repr(use) for (where, _), use in USES.items() if where == page)])
        for name in files.keys() - PACKAGE.keys():
            if name not in used and name.removesuffix(".py").replace("/", ".") not in used:
                problems.append(f"FILES: no snippet of {page} uses {name}")
    for s in found:
        use = use_of(s.page, s.code)
        places = sum(line.strip() == "..." for line in s.code.splitlines())
        if s.language == "python" and places != len(use.own):
            problems.append(f"{s.where}: {places} lines '...', but USES has {len(use.own)} lines for them")
        if s.language == "yaml" and not (s.file or use.save_as):
            problems.append(f"{s.where}: YAML that says no file (first line '# NAME.yaml') needs an entry in USES")
    return problems
