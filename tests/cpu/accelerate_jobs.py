"""What the Accelerate tests train, in processes that the harness started (no launcher in between)."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tide_strategies import TideFSDPPlugin

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    """Sizes that two ranks cannot divide evenly, a buffer, and a head of one row."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("scale", torch.tensor([1.0 + seed / 8]))
        self.embed = nn.Linear(7, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        h = self.embed(x) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def environment(rank, world, **more):
    """What ``accelerate launch`` would have set."""
    for name in [n for n in os.environ if n.startswith(("FSDP_", "ACCELERATE_", "TIDE_"))]:
        if name != "TIDE_PLAN":  # the tests' own
            del os.environ[name]
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank), **more)


def accelerator_with_tide(plugin=None, **options):
    fresh_state()
    return Accelerator(fsdp_plugin=plugin or TideFSDPPlugin(timeout_s=60), **options)


def accelerator_with_stock_fsdp2(precision="no", **options):
    """Accelerate's own plugin and code path, only moved to CPU processes by hand, which Accelerate itself cannot do."""
    fresh_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        mixed_precision_policy=BF16 if precision == "bf16" else None,
    )
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    accelerator = Accelerator(mixed_precision=precision, **options)
    for state in (accelerator.state, AcceleratorState()):
        state.fsdp_plugin, state.distributed_type = plugin, DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """A model, its optimizer and scheduler, prepared; ``run`` continues where it stopped."""

    def __init__(self, accelerator, seed=0):
        self.accelerator = accelerator
        model = Model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.step = 0
        self.norms = []

    def run(self, steps):
        for _ in range(steps):
            for micro in range(self.accelerator.gradient_accumulation_steps):
                batch = self.batch(micro)
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).float().pow(2).mean()
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        self.norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            self.step += 1
        return self

    def batch(self, micro):
        seed = 1000 * self.step + 10 * micro + self.accelerator.process_index
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))

    def result(self):
        """Every bit of the local state: parameters, optimizer, norms seen."""
        parameters = {n: bytes_of(local(p)) for n, p in self.model.named_parameters()}
        moments = [bytes_of(local(v)) for s in self.optimizer.optimizer.state.values() for v in s.values()]
        parameters.update((n, bytes_of(b)) for n, b in self.model.named_buffers())
        return parameters, moments, [bytes_of(n) for n in self.norms], self.scheduler.get_last_lr()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def finish(training):
    """Back to stock collectives, memory released."""
    training.accelerator.free_memory()
