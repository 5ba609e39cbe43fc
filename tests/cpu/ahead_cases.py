"""Steps of a little model on several nodes, and in which order their all-gathers and reductions are given out.

Every step is trained twice: with the next all-gather ahead of network phases, and in FSDP2's own order.
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


class Shift(nn.Module):
    """A block whose backward needs no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


class Model(nn.Module):
    """Blocks, of which the argument ``run`` says how they are used, and a head, which is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Shift(), Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, run: Run) -> torch.Tensor:
        return self.head(run(self.blocks, x))


Run = Callable[[Any, torch.Tensor], torch.Tensor]


def in_a_row(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=bool(i % 2))
    return x


def checkpointed_in_pairs(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """The second forward of a pair runs in the backward of its latter block, and unshards the former."""
    for i in (0, 2):
        x = checkpoint(lambda y, i=i: blocks[i + 1](blocks[i](y)), x, use_reentrant=False)
    return blocks[4](x)


def three_used_twice(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return in_a_row([*blocks[2:], *blocks[2:]], x)


def two_in_turn(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """What is two back is the group itself."""
    return in_a_row([*blocks[:2], *blocks[:2]], x)


def two_beside(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """No gradients come to blocks 2 and 3, which run between the others."""
    x = in_a_row(blocks[:2], x)
    in_a_row(blocks[2:4], x)
    return blocks[4](x)


def three_frozen(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = in_a_row(blocks[:3], x)
    return in_a_row(blocks[3:], x)


class Training:
    """One of the two trainings on one rank."""

    def __init__(self, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.step, self.model = rank, 0, Model()
        for block in self.model.blocks:
            fully_shard(block)
        self.root: Any = fully_shard(self.model)
        self.handle = apply_tide(self.root, {"timeout_s": 20, "plan": "tide", **options})
        self.optimizer = adam(self.model)

    def loss(self, run: Run = in_a_row) -> torch.Tensor:
        self.step += 1
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        # Its gradient is asked for: else the first block is reduced when the backward is over.
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
        return self.model(x, run).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def once(run: Run) -> Callable[[Training], Iterator[None]]:
    def train(t: Training) -> Iterator[None]:
        loss = t.loss(run)
        yield
        loss.backward()
        yield

    return train


def accumulated(t: Training) -> Iterator[None]:
    t.root.set_requires_gradient_sync(False)
    t.loss().backward()
    t.root.set_requires_gradient_sync(True)
    yield from once(in_a_row)(t)


def two_forwards_first(t: Training) -> Iterator[None]:
    """The notes of both are there when the backward of the latter runs."""
    former, latter = t.loss(), t.loss()
    t.root.set_is_last_backward(False)
    yield
    latter.backward()
    t.root.set_is_last_backward(True)
    former.backward()
    yield


def two_backwards_of_one_graph(t: Training) -> Iterator[None]:
    """Nothing is known of the order in the second one."""
    loss = t.loss()
    yield
    loss.backward(retain_graph=True)
    loss.backward()
    yield


def evaluated_before(t: Training) -> Iterator[None]:
    with torch.no_grad():
        t.loss()
    yield from once(in_a_row)(t)


def prefetched_by_hand(t: Training) -> Iterator[None]:
    """Block 3 says itself what is prefetched: nothing is ahead of its own reduction, nor of the one before it."""
    block = t.model.blocks[3]
    block.set_modules_to_backward_prefetch([t.model.blocks[2]])
    yield from once(in_a_row)(t)
    block.set_modules_to_backward_prefetch([])


def not_unsharded_in_the_backward(t: Training) -> Iterator[None]:
    """Block 2 is not gathered; nor is what comes after it, before it is its turn."""
    block = t.model.blocks[2]
    block.set_unshard_in_backward(False)
    yield from once(in_a_row)(t)
    block.set_unshard_in_backward(True)


@dataclass(frozen=True)
class Step:
    """Forwards and backwards; what is given out between their two yields is noted.

    All-gathers are a block's number, reductions have a minus: in their order with all-gathers ahead, and in FSDP2's.
    """

    train: Callable[[Training], Iterator[None]]
    ahead: str
    plain: str


IN_A_ROW = "4 3 2 -4 1 -3 0 -2 -1 -0 -root", "4 3 -4 2 -3 1 -2 0 -1 -0 -root"
STEPS: dict[str, Step] = {
    "in a row": Step(once(in_a_row), *IN_A_ROW),
    "checkpointed": Step(once(checkpointed), *IN_A_ROW),
    "checkpointed in pairs": Step(once(checkpointed_in_pairs), *IN_A_ROW),
    "three used twice": Step(once(three_used_twice), "4 3 2 4 3 2 -4 -3 -2 -root", "4 3 2 4 3 -4 2 -3 -2 -root"),
    "two in turn": Step(once(two_in_turn), *["1 0 1 0 -1 -0 -root"] * 2),
    "accumulated": Step(accumulated, *IN_A_ROW),
    "two forwards first": Step(two_forwards_first, *[f"{o} root {o}" for o in IN_A_ROW]),
    "two backwards of one graph": Step(
        two_backwards_of_one_graph,
        *[f"{o} root 4 -4 3 -3 2 -2 1 -1 0 -0 -root" for o in IN_A_ROW],
    ),
    "evaluated before": Step(evaluated_before, *IN_A_ROW),
    "three frozen": Step(once(three_frozen), "4 3 2 -4 -root -3", "4 3 -4 2 -root -3"),
    "not unsharded in the backward": Step(
        not_unsharded_in_the_backward, "4 3 -4 -3 1 0 -2 -1 -0 -root", "4 3 -4 -3 1 -2 0 -1 -0 -root"
    ),
    # Block 2 is given back for block 1, and at last the ring grows, as it does without block 2.
    "two beside": Step(once(two_beside), "4 3 2 -4 1 0 -1 -0 -root", "4 3 -4 1 0 -1 -0 -root"),
    "prefetched by hand": Step(prefetched_by_hand, "4 3 -4 2 -3 1 0 -2 -1 -0 -root", "4 3 -4 2 -3 1 -2 0 -1 -0 -root"),
}
#: Options, and the steps that are run with them.
PLACES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "2x2": ({"topology": "2x2"}, list(STEPS)),
    "4x1": ({"topology": "4x1"}, ["in a row", "two beside"]),
    "1x4": ({"topology": "1x4"}, ["in a row"]),
}


@dataclass
class Side:
    """What came of a training."""

    events: list[str]
    values: dict[str, torch.Tensor]
    ring_bytes: int
    ahead: int


def trained(rank: int, place: str, ahead: bool) -> Side:
    """Train all steps of a place on this rank."""
    options, steps = PLACES[place]
    events: list[str] = []
    out: list[str] = []
    with _noted(events), contextlib.nullcontext() if ahead else _in_fsdp2s_order():
        t = Training(rank, **options)
        for name in steps:
            parts = STEPS[name].train(t)
            next(parts)
            events.clear()
            next(parts)
            out.append(" ".join(events))
            assert next(parts, "over") == "over"
            t.update()
        report = t.handle.report()
        assert all(g.path == "tide" and not g.reduce_scatter.stock_calls for g in report.groups), str(report)
        values = full_parameters(t.model)
        t.handle.close()
    return Side(out, values, report.arena_bytes["ring"], sum(g.all_gather.ahead for g in report.groups))


def compared(rank: int) -> dict[str, tuple[Side, Side, bool]]:
    """Of every place: both trainings, without their parameters, and whether these are equal in every bit."""
    out = {}
    for place in PLACES:
        ahead, plain = trained(rank, place, True), trained(rank, place, False)
        same = all(torch.equal(v, plain.values[n]) for n, v in ahead.values.items())
        ahead.values, plain.values = {}, {}
        out[place] = ahead, plain, same
    return out


def _in_fsdp2s_order() -> Any:
    return mock.patch.object(GatherAhead, "before_reduction", return_value=None)


@contextlib.contextmanager
def _noted(events: list[str]) -> Iterator[None]:
    """Note what is given out, also all-gathers that cost nothing as the slot still holds the values."""

    def noting(sign: str, call: Any) -> Any:
        def noted(group: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
            events.append(sign + group.name.rpartition(".")[2].strip("()"))
            return call(group, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for name, sign in (("issue", ""), ("reuse", ""), ("reduce_scatter", "-")):
            patched = noting(sign, getattr(GroupCollectives, name))
            stack.enter_context(mock.patch.object(GroupCollectives, name, patched))
        yield
