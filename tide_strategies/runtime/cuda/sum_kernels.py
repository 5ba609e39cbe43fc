"""Where the summing kernels come from: Triton, compiled on first use."""

from __future__ import annotations

from tide_strategies.collectives.schedule import Item
from tide_strategies.kernels.compile import compile_sum
from tide_strategies.runtime.cuda.group import Kernels, SumKernel

_NAMES = {Item.F32: "float32", Item.BF16: "bfloat16"}


def sum_kernels(device: int) -> Kernels:
    """The kernels for one CUDA device."""

    def kernels(staged: int, pointers: int, grad: Item, output: Item, aligned: bool) -> SumKernel:
        return compile_sum(staged, pointers, _NAMES[grad], _NAMES[output], aligned, device)

    return kernels
