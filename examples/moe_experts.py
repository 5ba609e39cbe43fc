"""Train a mixture of experts: dense layers sharded over all ranks, experts over a subgroup of them.

    torchrun --standalone --nproc-per-node 2 examples/moe_experts.py                          # experts over both ranks
    torchrun --standalone --nproc-per-node 4 examples/moe_experts.py --expert-parallel 2      # subgroups of 2
    torchrun --standalone --nproc-per-node 8 examples/moe_experts.py --device cuda --bf16 --expert-parallel 2 \\
        --experts 64 --width 2048 --hidden 1408 --layers 24                                   # 8 GPUs

With ``--expert-parallel E`` each rank holds the experts of one part in E, and tokens travel to them and back
(all-to-all). The ranks with the same part, world size / E of them, shard it among each other with ``fully_shard`` on
their own mesh: to TIDE an ordinary group, only of fewer ranks. With E equal to the world size nobody shares a part, so
there is nothing to gather, and the report says so (TIDE-F010).

The experts are plain tensors here, of another value on each part. Experts that are DTensors already (torchtitan's
expert parallelism) keep stock collectives today (TIDE-F012), beside dense layers that run on TIDE.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies import apply_tide
from tide_strategies.cli.demo_model import Windows, library_text  # only the text
from tide_strategies.runtime.teardown import orderly_teardown


def parse_args():
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--plan", choices=["auto", "tide", "stock"], default="auto", help="whose collectives to use")
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="E", help="parts of the experts (default: 1)")
    parser.add_argument("--experts", type=int, default=8, help="experts in a layer (default: %(default)s)")
    parser.add_argument("--capacity", type=float, default=1.5, help="places for tokens, by the average (default: 1.5)")
    parser.add_argument("--bf16", action="store_true", help="gather and compute in bf16, reduce in fp32")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows per process and step (default: %(default)s)")
    for name, value in (("layers", 3), ("width", 128), ("hidden", 256), ("heads", 4), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/moe_experts.py")
    world = int(os.environ["WORLD_SIZE"])
    if world % args.expert_parallel or args.experts % args.expert_parallel:
        parser.error(f"--expert-parallel must divide the {world} processes and the {args.experts} experts")
    return args


class AllToAll(torch.autograd.Function):
    """Block ``i`` of dimension 0 goes to rank ``i`` of the group; the gradients go back the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()  # what is like x must lie in memory as it is sent
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    """This rank's experts: ``[experts, tokens, width]`` both ways, one matrix product for all of them."""

    def __init__(self, first, count, width, hidden):
        super().__init__()
        # Each expert from a seed of its own: the same model whatever the number of parts.
        ins, outs = zip(*(self.one(first + i, width, hidden) for i in range(count)), strict=True)
        self.w_in, self.w_out = nn.Parameter(torch.stack(ins)), nn.Parameter(torch.stack(outs))

    @staticmethod
    def one(number, width, hidden):
        """Weights of one expert."""
        generator = torch.Generator().manual_seed(number)
        return 0.02 * torch.randn(width, hidden, generator=generator), 0.02 * torch.randn(
            hidden, width, generator=generator
        )

    def forward(self, x):
        return torch.bmm(F.gelu(torch.bmm(x, self.w_in)), self.w_out)


class MoE(nn.Module):
    """Each token to the expert that the router likes best; those beyond an expert's capacity pass by."""

    def __init__(self, args, parts):
        super().__init__()
        self.experts_count, self.capacity, self.parts = args.experts, args.capacity, parts
        local = args.experts // parts.size()
        self.router = nn.Linear(args.width, args.experts, bias=False)
        self.experts = Experts(parts.get_local_rank() * local, local, args.width, args.hidden)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        probability, expert = self.router(tokens).float().softmax(-1).max(-1)
        slots = int(self.capacity * len(tokens) / self.experts_count) + 1
        chosen = F.one_hot(expert, self.experts_count)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = place < slots
        where = (expert * slots + place)[kept]
        sent = tokens.new_zeros(self.experts_count * slots, tokens.shape[1]).index_copy(0, where, tokens[kept])
        returned = self.through_experts(sent.view(self.experts_count, slots, -1)).flatten(0, 1)
        out = torch.zeros_like(tokens)
        out[kept] = returned[where] * probability[kept, None].to(tokens.dtype)
        return out.view_as(x)

    def through_experts(self, sent):
        """``[all experts, slots, width]`` to the ranks that hold the experts, through them, and back."""
        parts = self.parts.size()
        if parts == 1:
            return self.experts(sent)
        count, slots, width = sent.shape
        local, group = count // parts, self.parts.get_group()
        arrived = AllToAll.apply(sent.view(parts, local, slots, width), group)  # [from rank, local, slots, width]
        done = self.experts(arrived.transpose(0, 1).flatten(1, 2))
        back = done.view(local, parts, slots, width).transpose(0, 1).contiguous()
        return AllToAll.apply(back, group).view(count, slots, width)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, args, parts):
        super().__init__()
        self.heads = args.heads
        self.norm_attention, self.norm_moe = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.project = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.moe = MoE(args, parts)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.project(mixed)
        return x + self.moe(self.norm_moe(x))


class Model(nn.Module):
    """Predict each byte from those before it."""

    def __init__(self, args, parts):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args, parts) for _ in range(args.layers))
        self.head = nn.Linear(args.width, 256)

    def forward(self, x):
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def parallelize(model, args, mesh):
    """Experts over the ranks that hold the same ones, all else over all ranks."""
    world = dist.get_world_size()
    everyone = init_device_mesh(args.device, (world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh["shard"], mp_policy=policy)
        # An expert sees the tokens of all ranks, so its gradient is the mean over all of them, not over its group.
        block.moe.experts.set_gradient_divide_factor(world)
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    return apply_tide(model, {"plan": args.plan})


def main():
    """Train, report."""
    args = parse_args()
    if args.device == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # TIDE needs it, before CUDA starts
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (world // args.expert_parallel, args.expert_parallel)
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("shard", "expert"))
    torch.manual_seed(0)
    model = Model(args, mesh["expert"]).to(args.device)
    handle = parallelize(model, args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # parameters on two meshes
    windows = Windows(library_text()[0], args.steps * args.batch * world, args.context)
    for step in range(args.steps):
        first = (step * world + rank) * args.batch
        tokens = torch.stack([windows[first + i] for i in range(args.batch)]).to(args.device)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:4d}  loss {mean.item() / world:.5f}", flush=True)
    if rank == 0:
        print(handle.report(), flush=True)
    handle.close()
    orderly_teardown()


if __name__ == "__main__":
    main()
