"""A dry run finds what a step holds: cases small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2.footprint import Footprint, dry_run
from tide_strategies.planner import memory

#: Bytes of one fp32 activation of the chain below, and of one of its weights.
ROWS, WIDTH = 64, 16
ACTIVATION, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


class Chain(nn.Module):
    """Products with square weights: autograd keeps the input of each, and nothing else."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def chain(layers: int, ranks: int = 2, dtype: torch.dtype | None = None, rows: int = ROWS) -> Footprint:
    def build() -> tuple[nn.Module, object]:
        return Chain(layers), lambda model: model(torch.zeros(rows, WIDTH)).sum()

    groups = {f"weights.{i}": i for i in range(layers)}
    return dry_run(build, groups, ranks, dtype=dtype)  # type: ignore[arg-type]


def test_a_chain_keeps_the_input_of_every_product() -> None:
    for layers in (1, 3):
        # The sum of the last product needs its shape alone; the loss is four bytes.
        assert chain(layers).forward == layers * ACTIVATION + 4


def test_gradients_are_in_flight_and_then_in_shards() -> None:
    """One row in the batch: a weight's gradient is more than all activations."""
    one, three = chain(1, rows=1), chain(3, rows=1)
    assert one.optimizer == 2 * WEIGHT // 2, "the shards' gradients, and one parameter's worth for the optimizer"
    assert chain(1, ranks=4, rows=1).optimizer == 2 * WEIGHT // 4
    little = 8 * 4 * WIDTH
    assert WEIGHT + WEIGHT // 2 <= one.tide <= WEIGHT + WEIGHT // 2 + little
    assert one.stock - one.tide == WEIGHT, "packed in fp32 beside the gradient itself"
    # The last group's: its gradient, that of the group before (which peers may still read), and three shards.
    assert 2 * WEIGHT + 2 * WEIGHT // 2 <= three.tide <= 2 * WEIGHT + 3 * WEIGHT // 2 + little
    # Stock lets the packed ones of the group before go first.
    assert 2 * WEIGHT + 3 * WEIGHT // 2 <= three.stock <= 2 * WEIGHT + 3 * WEIGHT // 2 + little


def test_mixed_precision_halves_what_is_computed_and_not_what_is_kept() -> None:
    full, half = chain(2), chain(2, dtype=torch.bfloat16)
    assert half.forward - 2 == (full.forward - 4) // 2
    assert half.optimizer == full.optimizer


def test_what_cannot_be_run_dry_is_said() -> None:
    def build(loss: object) -> object:
        return lambda: (Chain(1), loss)

    def fails(model: nn.Module) -> torch.Tensor:
        raise KeyError("batch")

    for step, words in (
        (lambda model: None, "it gave NoneType"),
        (lambda model: model(torch.zeros(2, WIDTH)), "must return its loss"),
        (fails, "KeyError: 'batch'"),
    ):
        with pytest.raises(TideConfigError, match=words):
            dry_run(build(step), {"weights.0": 0}, 2)  # type: ignore[arg-type]
    with pytest.raises(TideConfigError, match=r"parameters of no group: weights\.0"):
        dry_run(build(lambda model: model(torch.zeros(2, WIDTH)).sum()), {}, 2)  # type: ignore[arg-type]


def test_a_peak_adds_up() -> None:
    step = memory.StepForecast(
        states=100, gradients=20, arena={"ring": 30}, tide=35, stock=50, gathered=40, symmetric=50, symmetric_private=10
    )
    assert memory.peak_of_dry_run(step, 15, tide=7, stock=9) == memory.PeakForecast(80 + 15 + 7, 80 + 40 + 9, "dry run")
    assert memory.peak_of_activations(step, 30, 1000) == memory.PeakForecast(1100 + 30 + 5, 1150, "bound")
