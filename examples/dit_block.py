"""Train a small diffusion transformer (DiT blocks, adaLN-Zero) on images made up on the spot.

    torchrun --standalone --nproc-per-node 2 examples/dit_block.py                            # 2 CPU processes
    torchrun --standalone --nproc-per-node 8 examples/dit_block.py --device cuda --bf16 \\
        --layers 28 --width 1152 --heads 16 --size 32 --patch 2                               # 8 GPUs, DiT-XL

The model learns the velocity from images to noise (rectified flow) for each of a few classes. An average of the weights
is kept beside them, shard by shard, and used for the loss on new images at the end.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies import apply_tide
from tide_strategies.runtime.teardown import orderly_teardown

CLASSES = 8


def parse_args():
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--plan", choices=["auto", "tide", "stock"], default="auto", help="whose collectives to use")
    parser.add_argument("--bf16", action="store_true", help="gather and compute in bf16, reduce in fp32")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="images per process and step (default: %(default)s)")
    parser.add_argument("--average", type=float, default=0.9, help="decay of the averaged weights (default: 0.9)")
    for name, value in (("layers", 4), ("width", 192), ("heads", 4), ("size", 16), ("patch", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/dit_block.py")
    return args


class DiTBlock(nn.Module):
    """A transformer layer whose norms are scaled, shifted and gated by the condition ``[batch, width]``."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)  # adaLN-Zero: the block begins as the identity
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, condition):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        h = self.norm_attention(x) * (1 + scale_a) + shift_a
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate_a * self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm_mlp(x) * (1 + scale_m) + shift_m
        return x + gate_m * self.mlp(h)


class DiT(nn.Module):
    """Images ``[batch, 1, size, size]``, times in [0, 1] and classes in; velocities of the images' shape out."""

    def __init__(self, args):
        super().__init__()
        self.patch, tokens = args.patch, (args.size // args.patch) ** 2
        self.patches = nn.Linear(args.patch**2, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, args.width))
        self.time = nn.Sequential(nn.Linear(64, args.width), nn.SiLU(), nn.Linear(args.width, args.width))
        self.classes = nn.Embedding(CLASSES, args.width)
        self.blocks = nn.ModuleList(DiTBlock(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.out = nn.LayerNorm(args.width), nn.Linear(args.width, args.patch**2)

    def forward(self, images, time, label):
        frequencies = torch.exp(-math.log(10_000) * torch.arange(32, device=time.device) / 32)
        angles = 1000 * time.float()[:, None] * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(images.dtype)
        condition = self.time(waves) + self.classes(label)
        x = self.patches(F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        out = self.out(self.norm(x)).transpose(1, 2)
        return F.fold(out, images.shape[-2:], self.patch, stride=self.patch)


def examples(args, seed):
    """Blobs at a place that the class decides, with times and noise; different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (args.batch,), generator=generator)
    angle = 2 * math.pi * label / CLASSES
    center = torch.stack([angle.cos(), angle.sin()], -1) / 2 + 0.1 * torch.randn(args.batch, 2, generator=generator)
    grid = torch.linspace(-1, 1, args.size)
    distance = (grid[None, :, None] - center[:, :1, None]) ** 2 + (grid[None, None, :] - center[:, 1:, None]) ** 2
    images = 2 * torch.exp(-10 * distance)[:, None] - 1
    time = torch.rand(args.batch, generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    return [t.to(args.device) for t in (images, noise, time, label)]


def loss_of(model, batch):
    """Mean squared error of the velocity."""
    images, noise, time, label = batch
    mixed = torch.lerp(images, noise, time[:, None, None, None])
    return F.mse_loss(model(mixed, time, label).float(), noise - images)


def mean_over_ranks(value):
    """The mean of a number of each rank."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def parallelize(model, args):
    """A group for each block and one for the rest, then TIDE."""
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return apply_tide(model, {"plan": args.plan})


def main():
    """Train, then measure the averaged weights on new images."""
    args = parse_args()
    if args.device == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # TIDE needs it, before CUDA starts
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DiT(args).to(args.device)
    handle = parallelize(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    averaged = [p.detach().clone() for p in model.parameters()]  # shards, like the parameters
    for step in range(args.steps):
        loss = loss_of(model, examples(args, seed=step * world + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(averaged, model.parameters(), strict=True):
                mean.lerp_(p, 1 - args.average)
        loss = mean_over_ranks(loss)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:4d}  loss {loss:.5f}", flush=True)
    with torch.no_grad():
        for mean, p in zip(averaged, model.parameters(), strict=True):
            p.copy_(mean)
        new = mean_over_ranks(loss_of(model, examples(args, seed=1_000_000 + rank)))
    if rank == 0:
        print(f"averaged weights, new images: loss {new:.5f}", flush=True)
        print(handle.report(), flush=True)
    handle.close()
    orderly_teardown()


if __name__ == "__main__":
    main()
