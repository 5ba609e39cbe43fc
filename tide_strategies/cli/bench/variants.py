"""The ways of training that ``tide bench step`` compares: one model, one optimizer, different communication."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tide_strategies.cli.bench.model import Block, Stack, loss_of
from tide_strategies.cli.bench.ranks import NO_STOCK, Place
from tide_strategies.fsdp2 import apply_tide

_LR = 1e-4
#: A fallback is no measurement; and a wait that lasts is told before the job's limit ends it.
_OPTIONS = {"plan": "tide", "strict": True, "timeout_s": 100.0}
COMPUTE, STOCK, STOCK_AGAIN, SYMM_MEM = "compute only", "stock FSDP2", "stock FSDP2 again", "FSDP2+SymmMem"
IN_PLACE, SLOT_REUSE, AUTO = "TIDE in-place", "TIDE slot-reuse", "TIDE auto"
#: What is measured unless asked otherwise, in the order of the table.
USUAL = (COMPUTE, STOCK, SYMM_MEM, IN_PLACE, SLOT_REUSE)
#: For many sizes: stock twice says how far apart equals are, and ``plan: auto`` chooses between stock and TIDE.
SWEPT = (COMPUTE, STOCK, STOCK_AGAIN, IN_PLACE, AUTO)
VARIANTS = tuple(dict.fromkeys((COMPUTE, STOCK, STOCK_AGAIN, *USUAL, *SWEPT)))
#: TIDE's own options of its variants.
_MODES: dict[str, dict[str, Any]] = {
    IN_PLACE: {},
    SLOT_REUSE: {"reduce_scatter.mode": "slot_reuse"},
    AUTO: {"plan": "auto", "strict": False},  # to choose stock is no failure
}


class NotHereError(Exception):
    """A variant cannot run here; the words say why."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the block stack."""

    width: int
    hidden: int
    depth: int

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        with torch.device("meta"):
            return sum(p.numel() for p in Block(self.width, self.hidden).parameters())


@dataclass
class Variant:
    """One way of training.

    Args:
        name: of ``VARIANTS``.
        model: what ``forward_backward`` runs.
        optimizer: its AdamW.
        handle: TIDE's, or None.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    handle: Any = None

    def forward_backward(self, x: Tensor) -> Tensor:
        """The part of a step that communicates."""
        loss = loss_of(self.model, x)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The optimizer's step; gradients are let go."""
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)  # the masters of "compute only" are not the model's: they keep theirs

    def arena_bytes(self) -> int | None:
        """Memory of TIDE's arenas on this rank, which torch's allocator does not count."""
        return None if self.handle is None else sum(self.handle.report().arena_bytes.values())

    def groups(self) -> str | None:
        """How many of the parameter groups TIDE runs, such as "3/4"; None where it has no part."""
        if self.handle is None:
            return None
        groups = self.handle.report().groups
        return f"{sum(g.path == 'tide' for g in groups)}/{len(groups)}"

    def path(self) -> str:
        """How many groups TIDE runs, in words; empty where it has no part."""
        return "" if self.handle is None else self.handle.report().status


def build(name: str, place: Place, size: ModelSize, options: dict[str, Any]) -> Variant:
    """Make a variant; the same seed gives all of them the same weights. Collective.

    Args:
        options: TIDE's options, for its variants.

    Raises:
        NotHereError: it cannot run here.
    """
    if name == COMPUTE:
        return _compute_only(place, size)
    if name in (STOCK, STOCK_AGAIN):
        if not place.stock_runs:
            raise NotHereError(NO_STOCK)
        return _sharded(name, place, size, _world_mesh(place))
    if name == SYMM_MEM:
        return _symmetric_memory(place, size)
    variant = _sharded(name, place, size, _world_mesh(place))
    variant.handle = apply_tide(variant.model, {**_OPTIONS, **options, **_MODES[name]})
    return variant


def dispose(variants: list[Variant], place: Place) -> None:
    """Let go of variants and their memory: the list is empty afterwards. Collective."""
    if place.on_gpu:
        torch.cuda.synchronize()
    while variants:  # no name may go on holding the last one
        _close(variants.pop())
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


def _close(variant: Variant) -> None:
    if variant.handle is not None:
        variant.handle.close()


def _world_mesh(place: Place) -> DeviceMesh:
    return init_device_mesh(place.device.type, (place.ranks,))


def _blocks(place: Place, size: ModelSize, finish: Callable[[nn.Module], nn.Module]) -> Stack:
    """The stack, with ``finish`` applied to each block as soon as it is made: only one is there unsharded."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(size.depth):
        with place.device:
            block = Block(size.width, size.hidden)
        blocks.append(finish(block))
    with place.device:
        return Stack(blocks, size.width)


def _compute_only(place: Place, size: ModelSize) -> Variant:
    """bf16 parameters for the passes; fp32 masters as large as a rank's shards for the optimizer."""
    model = _blocks(place, size, lambda block: block.bfloat16()).bfloat16()
    shards = []
    for parameter in model.parameters():
        shard = nn.Parameter(torch.zeros(-(-parameter.numel() // place.ranks), device=place.device))
        shard.grad = torch.zeros_like(shard)
        shards.append(shard)
    return Variant(COMPUTE, model, torch.optim.AdamW(shards, lr=_LR, fused=True))


def _sharded(name: str, place: Place, size: ModelSize, mesh: DeviceMesh) -> Variant:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=mesh, mp_policy=policy)  # in place
        return module

    model = shard(_blocks(place, size, shard))
    return Variant(name, model, torch.optim.AdamW(model.parameters(), lr=_LR, fused=True))


def _symmetric_memory(place: Place, size: ModelSize) -> Variant:
    """FSDP2 with NCCL's symmetric memory: all-gather by copy engines, reduce-scatter by NCCL's symmetric kernels."""
    if not place.on_gpu or place.shares_card:
        raise NotHereError("needs NCCL with one GPU per rank")
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise NotHereError(f"torch {torch.__version__} has no FSDPModule.set_symm_mem_for_comm (2.13 and newer have)")
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if not hasattr(nccl, "NCCL_CTA_POLICY_ZERO"):
        raise NotHereError("this torch's NCCL has no NCCL_CTA_POLICY_ZERO, so its all-gather would run on SMs")
    settings = nccl.Options()
    settings.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=settings)
    variant = _sharded(SYMM_MEM, place, size, DeviceMesh.from_group(group, "cuda"))
    for module in variant.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # before the next line: else the reduce-scatter stays stock
            module.set_symm_mem_for_comm("NCCL")
    return variant
