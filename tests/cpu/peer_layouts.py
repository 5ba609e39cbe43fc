"""What is grouped and how it is laid out, and accumulation of gradients: see peers.py."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from models import BF16, full_parameters
from peers import PEERS, WIDTH, Side, Stack, Tied, adam, peer, stack
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# --- layouts --------------------------------------------------------------------------------------------------


@peer("linears of uneven rows in one group")
def _(side: Side) -> Any:
    results = []
    for first, second in (((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8)), ((1, 1), (1, 5))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))
        results.append(side.steps(side.ready(fully_shard(model)), width=first[0]))
    return results


@peer("tied weights with padded rows")
def _(side: Side) -> Any:
    results = []
    for rows in (33, 34):
        torch.manual_seed(0)
        model = Tied(rows)
        fully_shard(model.block)
        results.append(side.steps(side.ready(fully_shard(model))))
        assert model.head.weight is model.embed.weight
        assert model.block[2].weight is model.block[0].weight
    return results


@peer("a module registered in two places")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = Stack()
    model.blocks.append(model.blocks[0])
    return side.steps(side.ready(stack(model)))


@peer("modules grouped into one")
def _(side: Side) -> Any:
    results = []
    for reshard in (True, False):
        torch.manual_seed(0)
        model = Stack(blocks=4)
        fully_shard([model.blocks[0], model.blocks[1]], reshard_after_forward=reshard)
        fully_shard([model.blocks[3], model.head], reshard_after_forward=reshard)
        fully_shard(model.blocks[2], reshard_after_forward=reshard)
        results.append(side.steps(side.ready(fully_shard(model))))
    return results


@peer("nested wrapping")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = Stack()
    for i, block in enumerate(model.blocks):
        fully_shard(block.up, reshard_after_forward=i != 1)
        if i == 2:
            fully_shard(block.down)
        fully_shard(block)
    fully_shard(model.head)
    return side.steps(side.ready(fully_shard(model)))


@peer("wrapped leaves alone")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    return side.steps(side.ready(model))  # three roots, each an installation of its own


class Ignoring(Stack):
    """A stack with a parameter that is to stay whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.whole)


@peer("ignored parameters")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = Ignoring()
    for block in model.blocks:
        fully_shard(block, ignored_params={block.up.bias})
    ignored = {model.whole, *(b.up.bias for b in model.blocks)}
    side.ready(fully_shard(model, ignored_params=ignored))
    model(side.data(0)).sum().backward()
    names = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert names == {"whole", "blocks.0.up.bias", "blocks.1.up.bias", "blocks.2.up.bias"}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if n in names}  # of this rank alone
    model.zero_grad()
    return gradients, side.steps(model)


@peer("a number for reshard_after_forward that two ranks have")
def _(side: Side) -> Any:
    # of two ranks, one is "do not reshard" and two "reshard": neither needs another mesh
    return [side.steps(side.ready(stack(reshard_after_forward=number))) for number in (1, 2)]


@peer("built on the meta device")
def _(side: Side) -> Any:
    with torch.device("meta"):
        model = Stack()
    stack(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.01 * (i + 1))
    return side.steps(side.ready(model))


# --- accumulation ---------------------------------------------------------------------------------------------

#: Which modules hold back, whether they reshard after forward and after backward. Half of the combinations in bf16, so
#: that every pair of choices occurs.
ACCUMULATION = list(itertools.product(("all modules", "root", "one block"), (True, False), (True, False)))


def accumulate(side: Side, which: str, reshard_forward: bool, reshard_backward: bool, dtype: str) -> Any:
    """Two steps of three micro-batches; the named modules reduce in the last only."""
    policy = MixedPrecisionPolicy(**BF16) if dtype == "bf16" else MixedPrecisionPolicy()
    model = side.ready(stack(reshard_after_forward=reshard_forward, mp_policy=policy))
    chosen = {"all modules": model, "root": model, "one block": model.blocks[1]}[which]
    recurse = which == "all modules"
    optimizer = adam(model)
    losses, sharded = [], []
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            chosen.set_requires_gradient_sync(last, recurse=recurse)
            if not reshard_backward:
                chosen.set_reshard_after_backward(last, recurse=recurse)
                chosen.set_is_last_backward(last)
            loss = model(side.data(10 * step + micro)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            sharded.append([isinstance(p, DTensor) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return losses, sharded, full_parameters(model)


for _i, (_which, _forward, _backward) in enumerate(ACCUMULATION):
    _dtype = "bf16" if (_i // 4 + _forward + _backward) % 2 else "fp32"
    _words = f"accumulation: {_which}, reshard {_forward} and {_backward}, {_dtype}"
    PEERS[_words] = partial(
        accumulate, which=_which, reshard_forward=_forward, reshard_backward=_backward, dtype=_dtype
    )


@peer("one forward, one backward: two micro-batches in flight")
def _(side: Side) -> Any:
    results = []
    for reshard in (True, False):
        model = side.ready(stack(reshard_after_forward=reshard))
        optimizer = adam(model)
        for step in range(2):
            losses = [model(side.data(10 * step)).square().mean()]
            for micro in range(1, 4):
                losses.append(model(side.data(10 * step + micro)).square().mean())
                finish(model, losses[micro - 1], last=False, keep=not reshard)
            finish(model, losses[3], last=True, keep=False)
            optimizer.step()
            optimizer.zero_grad()
            results.append([loss.item() for loss in losses])
        results.append(full_parameters(model))
    return results


def finish(model: Any, loss: torch.Tensor, last: bool, keep: bool) -> None:
    """Backward of one micro-batch of several in flight."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(not keep)
    loss.backward()


@peer("gradients are zeroed and set to None in turns")
def _(side: Side) -> Any:
    model = side.ready(stack())
    seen = []
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(side.data(step)).square().mean().backward()
        model(side.data(step + 10)).square().mean().backward()  # adds to the first, which has been reduced
        seen.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(isinstance(p.grad, DTensor) and p.grad.dtype == p.dtype for p in model.parameters())
    return seen


@peer("an optimizer that steps in the backward")
def _(side: Side) -> Any:
    model = side.ready(stack())
    order = []
    names = {p: n for n, p in model.named_parameters()}

    def step(p: torch.Tensor) -> None:
        order.append(names[p])
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.05)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        model(side.data(i)).square().mean().backward()
    return order, full_parameters(model)


@peer("two backwards of one graph")
def _(side: Side) -> Any:
    model = side.ready(stack())
    loss = model(side.data(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.full_tensor() for p in model.parameters()]
