"""Pretrain a small GPT in plain PyTorch: the loop of torchtitan in one file, and one line of TIDE.

    torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py                     # 2 CPU processes
    torchrun --standalone --nproc-per-node 8 examples/plain_pytorch.py --device cuda --bf16 \\
        --layers 32 --width 4096 --heads 32 --context 4096 --activation-checkpointing      # 8 GPUs

``--plan stock`` is the same with the stock collectives of FSDP2; on two ranks every loss is the same to the last digit.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies import apply_tide
from tide_strategies.cli.demo_model import GPT, GPTConfig, Windows, library_text  # an ordinary model, and text
from tide_strategies.runtime.teardown import orderly_teardown


def parse_args():
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--plan", choices=["auto", "tide", "stock"], default="auto", help="whose collectives to use")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="gather and compute in bf16, reduce in fp32")
    parser.add_argument("--replicate", type=int, default=1, help="replicas of the shards, HSDP (default: %(default)s)")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in the backward")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save there at the end; resume if it exists")
    for name, value in (("layers", 4), ("width", 256), ("heads", 4), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py")
    return args


def start(device):
    """Join the processes that torchrun has started, each on its own device."""
    if device == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # TIDE needs it, before CUDA starts
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def parallelize(model, args):
    """Shard the blocks and the rest as always; TIDE comes last, once parameters are what will be trained."""
    shards = dist.get_world_size() // args.replicate
    shape, names = ((args.replicate, shards), ("replicate", "shard")) if args.replicate > 1 else ((shards,), ("shard",))
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for i, block in enumerate(model.blocks):
        if args.activation_checkpointing:
            block = model.blocks[i] = checkpoint_wrapper(block)
        # The last block is needed again at once, by its own backward.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=i < len(model.blocks) - 1)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return apply_tide(model, {"plan": args.plan})


class Training(Stateful):
    """All that a checkpoint holds."""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler, self.step = model, optimizer, scheduler, 0

    def state_dict(self):
        """Shards of parameters and optimizer state, and where training is."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        """Continue from there."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def batch(windows, args, step, micro):
    """This rank's part of one micro-batch, the same in a resumed run."""
    start = ((step * args.accumulate + micro) * dist.get_world_size() + dist.get_rank()) * args.batch
    return torch.stack([windows[(start + i) % len(windows)] for i in range(args.batch)]).to(args.device)


def train_step(training, windows, args):
    """Accumulate, clip, step; returns the mean loss of all ranks."""
    total = torch.zeros((), device=args.device)
    for micro in range(args.accumulate):
        training.model.set_requires_gradient_sync(micro == args.accumulate - 1)  # reduce once a step
        tokens = batch(windows, args, training.step, micro)
        logits = training.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    training.step += 1
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    """Train, report, save."""
    args = parse_args()
    start(args.device)
    torch.manual_seed(0)  # the same model on all ranks; fully_shard keeps each rank's part
    config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    model = GPT(config).to(args.device)
    handle = parallelize(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    training = Training(model, optimizer, scheduler)
    if args.checkpoint and args.checkpoint.exists():
        dcp.load({"training": training}, checkpoint_id=args.checkpoint)
    windows = Windows(library_text()[0], 1 << 16, args.context)

    began, tokens = time.perf_counter(), args.batch * args.accumulate * args.context * dist.get_world_size()
    while training.step < args.steps:
        loss = train_step(training, windows, args)
        now = time.perf_counter()
        if dist.get_rank() == 0:
            print(f"step {training.step:4d}  loss {loss:.5f}  {tokens / (now - began):,.0f} tokens/s", flush=True)
        began = now
    if args.checkpoint:
        dcp.save({"training": training}, checkpoint_id=args.checkpoint)
    if dist.get_rank() == 0:
        print(handle.report(), flush=True)
    handle.close()
    orderly_teardown()


if __name__ == "__main__":
    main()
