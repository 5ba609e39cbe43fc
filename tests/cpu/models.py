"""Small models and the features that a user may combine with FSDP2, for parity tests."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 24


class Block(nn.Module):
    """Linear layers, a norm and a scale, with sizes that do not divide evenly unless asked to."""

    def __init__(self, width: int = WIDTH, hidden: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, a stack of blocks, a head; the head may share the embedding's weight."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = 23 if case.uneven else WIDTH
        hidden = 5 if case.uneven else 40
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(case.blocks))
        self.head = nn.Linear(width, 31, bias=False)
        self.unused = nn.Linear(width, 3) if case.unused else None
        self.twice = case.twice
        self.checkpoint = case.activation_checkpointing
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2 if self.twice else 1):
            for block in self.blocks:
                if self.checkpoint:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
        return self.head(x).float()


@dataclass
class Case:
    """One combination of features to train with."""

    name: str
    blocks: int = 4
    steps: int = 3
    uneven: bool = False
    tied: bool = False
    unused: bool = False
    twice: bool = False
    activation_checkpointing: bool = False
    frozen: bool = False
    policy: dict[str, Any] = field(default_factory=dict)
    param_dtype: torch.dtype = torch.float32
    accumulate: int = 1
    sync_every: bool = True
    clip: float | None = None
    evaluate: str | None = None
    checkpoint: str | None = None
    hsdp: bool = False
    across: bool = False
    experts: bool = False
    defer_all_reduce: bool = False
    compile: str | None = None
    prefetch: int = 0
    unshard_all: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    reshard: bool | None = None
    last_stays: bool = False
    root_only: bool = False
    poison: bool = False
    hook: bool = False
    edit: bool = False
    fused: bool = True
    setters: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def build(case: Case, world: int, seed: int = 0, device: str = "cpu") -> nn.Module:
    """The case's model, sharded over all ranks, the same for every call with the same seed."""
    torch.manual_seed(seed)
    model = Net(case).to(device, case.param_dtype)
    if case.frozen:
        for p in [*model.blocks[1].parameters(), model.blocks[2].up.weight, model.embed.weight]:
            p.requires_grad_(False)
    mesh, block_mesh = _meshes(case, world, device)
    kwargs: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**case.policy)}
    if case.reshard is not None:
        kwargs["reshard_after_forward"] = case.reshard
    if not case.root_only:
        for block in model.blocks:
            if case.compile:
                block.compile(backend=case.compile)
            last = {"reshard_after_forward": False} if case.last_stays and block is model.blocks[-1] else {}
            fully_shard(block, mesh=block_mesh, **kwargs, **last)
    fully_shard(model, mesh=mesh, **kwargs)
    if case.prefetch:
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + case.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - case.prefetch) : i][::-1])
    for block in [model] if case.root_only else [model, *model.blocks]:
        if case.divide_factor is not None:
            block.set_gradient_divide_factor(case.divide_factor)
        if case.force_sum:
            block.set_force_sum_reduction_for_comms(True)
    for name, value in case.setters.items():
        if hasattr(model, name):  # torch 2.13 and newer
            getattr(model, name)(value)
    return model


def _meshes(case: Case, world: int, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Of the root, and of the blocks: with ``experts``, every other rank shards them, as experts of its own."""
    if case.hsdp:
        ranks = torch.arange(world).view(-1, 2).T if case.across else torch.arange(world).view(2, -1)
        mesh = DeviceMesh(device, ranks, mesh_dim_names=("replicate", "shard"))
        return mesh, mesh
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    if not case.experts:
        return mesh, mesh
    return mesh, DeviceMesh(device, torch.arange(world).view(-1, 2), mesh_dim_names=("shard", "part"))["shard"]


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids of one micro-batch, different per step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 31, (3, 6), generator=generator)


def train(model: nn.Module, case: Case, rank: int, seen: list[Any] | None = None) -> list[float]:
    """Train for the case's steps; returns the losses."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=case.fused)
    if case.hook:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)) if seen is not None else None)
    losses = []
    if case.evaluate:
        context = torch.inference_mode if case.evaluate == "inference" else torch.no_grad
        with context():
            losses.append(model(batch(99, rank).to(device)).sum().item())
    for step in range(case.steps):
        if case.unshard_all:
            handles = [m.unshard(async_op=True) for m in model.blocks]
            for handle in handles:
                handle.wait()
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            if case.accumulate > 1:
                if case.defer_all_reduce:
                    model.set_requires_all_reduce(last)
                else:
                    model.set_requires_gradient_sync(last or case.sync_every)
            if case.edit and micro == 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.99)
            tokens = batch(step * 10 + micro, rank).to(device)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            losses.append(loss.item())
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluate and step == 1:
            with torch.no_grad():
                losses.append(model(batch(98, rank).to(device)).sum().item())
        if case.checkpoint and step == 1:
            _checkpoint(model, optimizer, case.checkpoint)
    return losses


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Save, spoil and load the parameters in the way the case names."""
    if kind == "dcp":
        import tempfile

        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
        _spoil(model)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return
    saved = copy.deepcopy(model.state_dict())
    assert all(isinstance(v, DTensor) for v in saved.values())
    _spoil(model)
    model.load_state_dict(saved, assign=kind == "assign")
    if kind == "assign":  # the optimizer must follow the new parameters
        names = dict(model.named_parameters())
        optimizer.param_groups[0]["params"] = [p for p in names.values() if p.requires_grad]


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, unsharded, on the CPU."""
    return {n: _full(p).detach().clone() for n, p in model.state_dict().items()}


def _full(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.cpu()
    if parameter.device.type == "cpu":
        return parameter.full_tensor()
    # gloo, the only backend for several ranks on one card, gathers no device memory
    mesh = _cpu_mesh(tuple(parameter.device_mesh.shape))
    shard, shape, stride = parameter.to_local().cpu(), parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, shape=shape, stride=stride).full_tensor()


@functools.cache
def _cpu_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)
