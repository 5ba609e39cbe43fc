"""Where the kernels come from: Triton, or NVRTC for those of multicast; compiled on first use."""

from __future__ import annotations

from dataclasses import dataclass

from tide_strategies.collectives.schedule import Item
from tide_strategies.kernels.compile import compile_land, compile_sum
from tide_strategies.runtime.cuda.group import Kernels, SumKernel
from tide_strategies.runtime.cuda.multicast import landing_kernel

_NAMES = {Item.F32: "float32", Item.BF16: "bfloat16"}


def sum_kernels(device: int) -> Kernels:
    """The kernels for one CUDA device."""
    return _Compiled(device)


@dataclass(frozen=True)
class _Compiled:
    device: int

    def sum(self, staged: int, pointers: int, grad: Item, output: Item, aligned: bool) -> SumKernel:
        return compile_sum(staged, pointers, _NAMES[grad], _NAMES[output], aligned, self.device)

    def land(self, sources: int, pointers: int, output: Item, accumulate: bool, aligned: bool) -> SumKernel:
        return compile_land(sources, pointers, _NAMES[output], accumulate, aligned, self.device)

    def land_multicast(self, output: Item, accumulate: bool) -> SumKernel:
        return landing_kernel(self.device, Item.F32, output, accumulate)
