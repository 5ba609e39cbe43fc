"""Backwards on several nodes, and in which order their all-gathers and reductions are given out.

A case trains a little stack and returns nothing; it runs twice, with the next all-gather ahead of network phases and in
FSDP2's own order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from models import full_parameters
from peers import WIDTH, Block, adam
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tide_strategies import apply_tide
from tide_strategies.fsdp2.ahead import GatherAhead
from tide_strategies.runtime.group import GroupCollectives

BLOCKS = 5


class Stack(nn.Module):
    """Blocks, of which ``run`` says how they are used; the head makes it that the root has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.run: Callable[[Any, torch.Tensor], torch.Tensor] = in_a_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.blocks, x))


def in_a_row(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


class Training:
    """One side of a case on one rank."""

    def __init__(self, rank: int, events: list[str]) -> None:
        torch.manual_seed(0)
        self.rank, self.events = rank, events
        self.model: Any = Stack()
        self.handle: Any = None

    def start(self, prepare: Callable[[Any], None] = lambda model: None, **options: Any) -> Any:
        """Shard the model and apply TIDE."""
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        prepare(self.model)
        self.handle = apply_tide(self.model, {"timeout_s": 20, "plan": "tide", "topology": "2x2", **options})
        self.optimizer = adam(self.model)
        return self.model

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        # Inputs that need gradients: else the first block is reduced when the backward is over.
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
        return self.model(x).square().mean()

    def step(self, step: int) -> None:
        """A forward and a backward, of which the latter is noted, and an optimizer step."""
        loss = self.loss(step)
        self.events.clear()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


AHEAD: dict[str, Callable[[Training], None]] = {}


def case(function: Callable[[Training], None]) -> Callable[[Training], None]:
    AHEAD[function.__name__.replace("_", " ")] = function
    return function


@case
def blocks_in_a_row(t: Training) -> None:
    t.start()
    for step in range(3):
        t.step(step)


@case
def one_rank_a_node(t: Training) -> None:
    t.start(topology="4x1")
    for step in range(2):
        t.step(step)


@case
def one_node(t: Training) -> None:
    t.start(topology="1x4")
    for step in range(2):
        t.step(step)


@case
def messages_between_nodes(t: Training) -> None:
    t.start(rail="p2p")
    for step in range(2):
        t.step(step)


@case
def checkpointed(t: Training) -> None:
    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=bool(i % 2))
        return x

    t.start().run = run
    for step in range(2):
        t.step(step)


@case
def checkpointed_in_pairs(t: Training) -> None:
    """The second forward of a pair runs in the backward of its latter block, and unshards the former."""

    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, BLOCKS - 1, 2):
            x = checkpoint(lambda y, i=i: blocks[i + 1](blocks[i](y)), x, use_reentrant=False)
        return blocks[-1](x)

    t.start().run = run
    for step in range(2):
        t.step(step)


@case
def used_twice(t: Training) -> None:
    """Gradients are reduced when the backward comes to the first invocation."""
    t.start().run = lambda blocks, x: in_a_row(blocks[:3], in_a_row(blocks[:3], x))
    for step in range(2):
        t.step(step)


@case
def two_in_turn(t: Training) -> None:
    """What is two back is the group itself."""
    t.start().run = lambda blocks, x: in_a_row(blocks[:2], in_a_row(blocks[:2], x))
    for step in range(2):
        t.step(step)


@case
def accumulated(t: Training) -> None:
    model = t.start()
    for step in range(2):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = t.loss(10 * step + micro)
            t.events.clear()
            loss.backward()
            if micro == 0:
                assert not any(e.startswith("reduce") for e in t.events)
        t.optimizer.step()
        t.optimizer.zero_grad()


@case
def two_forwards_before_their_backwards(t: Training) -> None:
    t.start()
    for step in range(2):
        losses = [t.loss(10 * step + i) for i in range(2)]
        t.events.clear()
        t.model.set_is_last_backward(False)
        losses[1].backward()
        t.model.set_is_last_backward(True)
        losses[0].backward()
        t.optimizer.step()
        t.optimizer.zero_grad()


@case
def two_backwards_of_one_graph(t: Training) -> None:
    t.start()
    for step in range(2):
        loss = t.loss(step)
        t.events.clear()
        loss.backward(retain_graph=True)
        t.events.append("again")
        loss.backward()
        t.optimizer.step()
        t.optimizer.zero_grad()


@case
def unused_in_the_backward(t: Training) -> None:
    """Blocks 2 and 3 run forward, side by side with what the loss is made of."""

    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        x = blocks[1](blocks[0](x))
        blocks[3](blocks[2](x))
        return blocks[4](x)

    t.start().run = run
    for step in range(3):
        t.step(step)


@case
def frozen_below(t: Training) -> None:
    def freeze(model: Any) -> None:
        for block in model.blocks[:3]:
            block.requires_grad_(False)

    t.start(freeze)
    for step in range(2):
        x = torch.full((4, WIDTH), 1.0 + t.rank)
        loss = t.model(x).square().mean()
        t.events.clear()
        loss.backward()
        t.optimizer.step()
        t.optimizer.zero_grad()


@case
def evaluated_before(t: Training) -> None:
    t.start()
    for step in range(2):
        with torch.no_grad():
            t.loss(50 + step)
        t.step(step)


@case
def prefetched_by_hand(t: Training) -> None:
    """Block 3 says itself what is prefetched; so do neither its own reduction nor the one before it."""

    def prefetch(model: Any) -> None:
        model.blocks[3].set_modules_to_backward_prefetch([model.blocks[2], model.blocks[1]])

    t.start(prefetch)
    for step in range(2):
        t.step(step)


class Shift(nn.Module):
    """Its backward needs no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


@case
def not_unsharded_in_the_backward(t: Training) -> None:
    t.model.blocks[2] = Shift()
    t.start(lambda model: model.blocks[2].set_unshard_in_backward(False))
    for step in range(2):
        t.step(step)


@dataclass
class Outcome:
    """What a case came to on one rank: the last backward's events, and whether FSDP2's order changes anything else."""

    events: list[str]
    plain_events: list[str]
    same_values: bool
    ring: tuple[int, int]
    counted: int


def outcomes(rank: int) -> dict[str, Outcome]:
    """All cases on this rank."""
    return {name: _outcome(run, rank) for name, run in AHEAD.items()}


def _outcome(run: Callable[[Training], None], rank: int) -> Outcome:
    sides = []
    for ahead in (True, False):
        events: list[str] = []
        with _noted(events), contextlib.nullcontext() if ahead else _in_fsdp2s_order():
            t = Training(rank, events)
            run(t)
            noted = list(events)
            values, report = full_parameters(t.model), t.handle.report()
            assert all(g.path == "tide" and not g.reduce_scatter.stock_calls for g in report.groups), str(report)
            t.handle.close()
        sides.append((noted, values, report))
    (events, values, report), (plain_events, plain_values, plain_report) = sides
    assert not any(g.all_gather.ahead for g in plain_report.groups)
    return Outcome(
        events,
        plain_events,
        all(torch.equal(values[n], plain_values[n]) for n in values),
        (report.arena_bytes["ring"], plain_report.arena_bytes["ring"]),
        sum(g.all_gather.ahead for g in report.groups),
    )


def _in_fsdp2s_order() -> Any:
    return mock.patch.object(GatherAhead, "before_reduction", lambda self, group: None)


@contextlib.contextmanager
def _noted(events: list[str]) -> Iterator[None]:
    """Note what is given out: of a gather that costs nothing, too."""

    def noting(what: str, call: Any) -> Any:
        def noted(group: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
            events.append(f"{what} {group.name.rpartition('.')[2]}")
            return call(group, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for name, what in (("issue", "gather"), ("reuse", "reuse"), ("reduce_scatter", "reduce")):
            patched = noting(what, getattr(GroupCollectives, name))
            stack.enter_context(mock.patch.object(GroupCollectives, name, patched))
        yield
