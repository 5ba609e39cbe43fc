"""Small models for the Lightning and Fabric tests, and what plain single-process PyTorch makes of them."""

import copy
import functools
import importlib
import logging
import shutil
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)  # odd: shards are uneven
        self.down = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """Repeated blocks, a head with one output (an empty shard on the second rank), and a parameter of its own."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Normed(Network):
    """The network behind a batch norm, whose running statistics are each rank's own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


def data(rows=32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin() * 3)


def loader(batch_size=4, rows=32):
    return torch.utils.data.DataLoader(data(rows), batch_size=batch_size)


def part_loader(batch_size=4, rows=32):
    """This rank's part in a fixed order (Lightning's own sampler would shuffle): batches of all ranks together are
    those of ``loader(2 * batch_size)``."""
    dataset = data(rows)
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).pow(2).mean()


def reference(model, optimizer_of, *, epochs=1, accumulate=1, batch_size=8, clip_norm=None, clip_value=None):
    """Train a copy in one process on the batches of all ranks together; returns its state dict."""
    model = copy.deepcopy(model)
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    for _ in range(epochs):
        for i, batch in enumerate(loader(batch_size)):
            (loss_of(model, batch) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                if clip_value is not None:
                    nn.utils.clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def full_state(module):
    """The whole state dict on every rank; a collective call."""
    from torch.distributed.tensor import DTensor

    return {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in module.state_dict().items()
    }


def assert_close(actual, expected, tolerance=2e-6, prefix=""):
    actual = {k.removeprefix(prefix): v for k, v in actual.items()}
    assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
    for name, value in expected.items():
        worst = (actual[name].float() - value.float()).abs().max().item() if value.numel() else 0.0
        assert worst <= tolerance, f"{name} differs by {worst}"


def run_checks(checks, *args):
    """Run functions one after the other on all ranks; returns name -> None, or the traceback of one that failed.

    Stops once a check has failed on some ranks only: the others may no longer be in step with them.
    """
    results = {}
    for check in checks:
        try:
            check(*args)
            results[check.__name__] = None
        except Exception:
            results[check.__name__] = traceback.format_exc()
        failed = torch.tensor([results[check.__name__] is not None], dtype=torch.int)
        dist.all_reduce(failed)
        if failed.item() not in (0, dist.get_world_size()):
            break
    return results


def in_new_folder(check, root):
    """The check with one more argument: a folder for it alone, the same on all ranks, removed afterwards."""

    @functools.wraps(check)
    def run(*args):
        folder = Path(root, check.__name__)
        folder.mkdir(exist_ok=True)
        dist.barrier()
        check(*args, folder)
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)

    return run


def assert_passed(outcomes, name):
    """Fail with the traceback of the first rank on which the check did not pass."""
    for rank, outcome in enumerate(outcomes):
        if name not in outcome:
            failed = [n for n, error in outcome.items() if error]
            raise AssertionError(f"rank {rank} stopped before this check, at {', '.join(failed)}")
        if outcome[name] is not None:
            raise AssertionError(f"rank {rank}:\n{outcome[name]}")


def quiet_import(namespace):
    """Import a namespace of Lightning without its notices; ours is imported first, as its entry point would be."""
    warnings.filterwarnings("ignore")
    importlib.import_module("tide_strategies")
    pl = importlib.import_module(namespace)
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return pl


def module_class(pl):
    """A LightningModule of the given namespace around ``Network``."""

    class Module(pl.LightningModule):
        def __init__(self, network=None, optimizer_of=sgd):
            super().__init__()
            self.network = Network() if network is None else network
            self.optimizer_of = optimizer_of

        def forward(self, x):
            return self.network(x)

        def training_step(self, batch, index):
            loss = loss_of(self.network, batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", loss_of(self.network, batch), sync_dist=True)

        def test_step(self, batch, index):
            self.log("test_loss", loss_of(self.network, batch), sync_dist=True)

        def predict_step(self, batch, index):
            return self.network(batch[0])

        def configure_optimizers(self):
            return self.optimizer_of([p for p in self.parameters() if p.requires_grad])

    return Module


def trainer_of(pl, strategy="tide_fsdp", **kw):
    """A quiet Trainer, by default for one epoch on two processes."""
    options = {"devices": 2, "max_epochs": 1, "num_sanity_val_steps": 0, "logger": False, **kw}
    for feature in ("checkpointing", "progress_bar", "model_summary"):
        options.setdefault(f"enable_{feature}", False)
    return pl.Trainer(accelerator="cpu", strategy=strategy, **options)


def strategy_of(pl, **kw):
    """The strategy of the given namespace."""
    kind = "unified" if pl.__name__ == "lightning.pytorch" else "standalone"
    module = importlib.import_module(f"tide_strategies.integrations.lightning.trainer_{kind}")
    return module.TideFSDPStrategy(**kw)


def on(pl, **hooks):
    """A callback with the given hooks, each a function of the trainer and the module."""
    methods = {name: lambda self, trainer, module, *rest, f=f: f(trainer, module) for name, f in hooks.items()}
    return type("Hooks", (pl.Callback,), methods)()
