"""What modules are told and when they communicate: see peers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from models import full_parameters
from peers import WIDTH, Block, Side, Tied, adam, peer, stack
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tide_strategies.fsdp2 import access

# --- setters --------------------------------------------------------------------------------------------------


@peer("parameters that the backward does not need stay sharded in it")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = Tied(9)
    model.head = nn.Linear(WIDTH, 9)
    fully_shard(model.embed)
    fully_shard(model.block)
    fully_shard(model)
    model.embed.set_unshard_in_backward(False)
    side.ready(model)
    uses = []
    with events(side, model) as order:
        model(side.data(0)).sum().backward()  # the events begin after the first forward, which installs
        order.clear()
        model(side.data(1)).sum().backward()
        uses.append(list(order))
    assert "post_backward embed PRE_BACKWARD SHARDED" in uses[0]
    assert "post_backward block PRE_BACKWARD UNSHARDED" in uses[0]
    return uses, side.steps(model)


@peer("resharding after forward is changed between steps")
def _(side: Side) -> Any:
    model = side.ready(stack())
    results = []
    for step, reshard in enumerate((True, False, True, False)):
        model.set_reshard_after_forward(reshard)
        out = model(side.data(step))
        results.append([isinstance(p, DTensor) for p in model.parameters()])
        out.square().mean().backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return results, [p.grad.full_tensor() for p in model.parameters()]


@peer("unshard and reshard by hand")
def _(side: Side) -> Any:
    model = side.ready(stack())
    model(side.data(0)).sum().backward()
    results = []
    for step in range(2):
        want = full_parameters(model)
        model.blocks[1].unshard()
        for name, p in model.blocks[1].named_parameters():
            assert not isinstance(p, DTensor)
            assert torch.equal(p, want[f"blocks.1.{name}"])
        model.blocks[1].reshard()
        handle = model.blocks[2].unshard(async_op=True)
        handle.wait()
        results.append(side.steps(model, count=1, first=step))
    return results


@peer("unshard before the first forward")
def _(side: Side) -> Any:
    """As pipeline schedules do: TIDE is installed while torch's own all-gathers are under way, or done."""
    results = []
    for async_op in (True, False):
        model = side.ready(stack(reshard_after_forward=False))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=async_op)
        results.append(side.steps(model))
    return results


@peer("frozen and unfrozen between steps")
def _(side: Side) -> Any:
    results = []
    for reshard in (True, False):
        model = stack(reshard_after_forward=reshard)
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        side.ready(model)
        for step, (train, rest) in enumerate([(biases, others), (others, biases), (biases + others, [])]):
            for p in rest:
                p.requires_grad_(False)
            for p in train:
                p.requires_grad_(True)
            model(side.data(step)).square().mean().backward()
            assert all(p.grad is None for p in rest)
            results.append([p.grad.full_tensor() for p in train])
            model.zero_grad()
    return results


# --- order of events ------------------------------------------------------------------------------------------


@contextmanager
def events(side: Side, model: Any) -> Iterator[list[str]]:
    """Calls of the groups' unshard, reshard and post_backward, in order, from the second forward on.

    Installed by the first forward of the model inside: before it, the groups' classes are not final.
    """
    order: list[str] = []
    with ExitStack() as patches:

        def begin(*unused: Any) -> None:
            hook.remove()
            for cls in {type(g) for g in access.param_groups(model)}:
                for name in ("unshard", "reshard", "post_backward"):
                    patches.enter_context(mock.patch.object(cls, name, recorded(getattr(cls, name), name, order)))

        hook = model.register_forward_hook(begin)
        yield order


def recorded(function: Any, name: str, order: list[str]) -> Any:
    """The method, noting its call under the name of the group's module."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        states = f"{group._training_state.name} {group._sharded_state.name}"
        order.append(f"{name} {access.group_name(group)} {states}")
        return function(group, *args, **kwargs)

    return call


def ordered(side: Side, model: Any, steps: int = 3) -> Any:
    """Train and return the order of events with the result, and that of some steps more."""
    with events(side, model) as order:
        result = side.steps(model, count=steps)
    assert len(order) > 10
    memory = arena(side)
    more = side.steps(model, count=3, first=steps)
    assert arena(side) == memory, "what is gathered and never used is given back"
    return order, result, more


@peer("order of events")
def _(side: Side) -> Any:
    return [ordered(side, side.ready(stack(reshard_after_forward=reshard))) for reshard in (True, False)]


@peer("order of events with explicit prefetching")
def _(side: Side) -> Any:
    model = side.ready(stack())
    a, b, c = model.blocks
    model.set_modules_to_forward_prefetch([a, b])
    a.set_modules_to_forward_prefetch([b, c])
    c.set_modules_to_backward_prefetch([b, a])
    return ordered(side, model)


@peer("order of events with wrong prefetches")
def _(side: Side) -> Any:
    model = side.ready(stack())
    a, b, c = model.blocks
    b.set_modules_to_forward_prefetch([a])  # has been left
    c.set_modules_to_forward_prefetch([a])
    a.set_modules_to_backward_prefetch([c])  # has been left, and nobody will want it again in this backward
    c.set_modules_to_backward_prefetch([a])  # skips one
    return ordered(side, model)


class Branches(nn.Module):
    """Three blocks in the order that the input's step says; some are left out of the forward or of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.plan: list[tuple[tuple[int, ...], int | None]] = [((0, 1, 2), None)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order, unused = self.plan[0]
        self.plan = self.plan[1:] or self.plan
        total = x
        for i in order:
            y = self.blocks[i](total)
            total = total if i == unused else y
        return total


@peer("blocks in another order in every step")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = side.ready(stack(Branches()))
    model.plan = [((0, 1, 2), None), ((2, 0, 1), None), ((1, 2, 0), None), ((0, 2, 1), None)]
    return ordered(side, model, steps=4)


@peer("blocks that a step leaves out")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = side.ready(stack(Branches()))
    model.plan = [((0, 1, 2), None), ((0, 2), None), ((1,), None), ((0, 1, 2), None)]
    return ordered(side, model, steps=4)


@peer("blocks whose output the loss does not use")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = side.ready(stack(Branches()))
    model.plan = [((0, 1, 2), None), ((0, 1, 2), 2), ((0, 1, 2), 1), ((0, 1, 2), 0), ((0, 1, 2), None)]
    return ordered(side, model, steps=5)


@peer("as many uses as stock, and no collective of torch's")
def _(side: Side) -> Any:
    model = side.ready(stack(), **{"all_gather.cache": "off"})
    optimizer = adam(model)
    counts = []
    for step in range(2):
        before = totals(side)
        with CommDebugMode() as comms:
            model(side.data(step)).square().mean().backward()
        named = {str(op).split(".")[-1]: n for op, n in comms.get_comm_counts().items()}
        gathers, reductions = named.get("_allgather_base_", 0), named.get("_reduce_scatter_base_", 0)
        if side.tide:
            assert named == {} or step == 0, named  # the first step agrees on the installation
            gathers, reductions = (a - b for a, b in zip(totals(side), before, strict=True))
        counts.append((gathers, reductions))
        optimizer.step()
        optimizer.zero_grad()
    assert counts[1] == (4 + 3, 4)  # the root's group stays whole in between
    return counts


def arena(side: Side) -> list[dict[str, int]]:
    """Bytes of TIDE's memory by part."""
    return [handle.report().arena_bytes for handle in side.handles]


def totals(side: Side) -> tuple[int, int]:
    """All-gathers and reduce-scatters that TIDE has run so far."""
    groups = [g for h in side.handles for g in h.report().groups]
    return sum(g.all_gather.calls for g in groups), sum(g.reduce_scatter.calls for g in groups)
