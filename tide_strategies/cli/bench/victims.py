"""Kernels that a collective may slow down: what ``tide bench interference`` runs beside collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: The tile of cuBLAS's bf16 kernels on Hopper; how many thread blocks really ran stands in the table.
_TILE_M, _TILE_N = 128, 256
_ONE_WAVE_K = 8192
_LARGE = (8192, 8192, 8192)
_ELEMENTWISE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Victim:
    """A kernel: ``call`` launches it once on the current stream; ``words`` describe it."""

    call: Callable[[], None]
    words: str


def victim(name: str, device: torch.device, one_wave: tuple[int, int, int] | None) -> Victim:
    """The victim of this name, its operands made.

    Args:
        one_wave: M, N, K of the GEMM of one wave; None to fit the device.

    Raises:
        ValueError: there is no such victim.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if name == "one-wave GEMM":
        return _gemm(device, one_wave or one_wave_shape(sms))
    if name == "many-wave GEMM":
        return _gemm_in_waves(device, _LARGE)
    if name == "persistent GEMM":
        return _gemm(device, _LARGE)
    if name == "elementwise":
        x = torch.randn(_ELEMENTWISE_BYTES // 2, device=device).bfloat16()
        out = torch.empty_like(x)
        return Victim(lambda: _add_one(x, out), f"{_ELEMENTWISE_BYTES >> 20} MiB bf16")
    raise ValueError(f"no victim {name!r}")


def one_wave_shape(sms: int) -> tuple[int, int, int]:
    """M, N, K of a GEMM with one tile for (nearly) every SM: the most tiles of all a x b, nearest to a square."""
    a = max(range(1, int(sms**0.5) + 1), key=lambda a: (a * (sms // a), a))
    return _TILE_M * a, _TILE_N * (sms // a), _ONE_WAVE_K


def _operands(device: torch.device, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, k), (n, k) as a linear layer has its weight, and (m, n) for the result."""
    m, n, k = shape
    a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
    return a, b, torch.empty(m, n, dtype=torch.bfloat16, device=device)


def _gemm(device: torch.device, shape: tuple[int, int, int]) -> Victim:
    a, b, out = _operands(device, shape)

    def call() -> None:
        torch.mm(a, b.t(), out=out)

    return Victim(call, " x ".join(map(str, shape)))


def _gemm_in_waves(device: torch.device, shape: tuple[int, int, int]) -> Victim:
    """One tile a thread block, ours: cuBLAS gives a GEMM of this size to one thread block an SM."""
    from tide_strategies.cli.bench import gemm_kernel as kernel

    m, n, k = shape
    a, b, out = _operands(device, shape)
    tiles = kernel.TILE_M, kernel.TILE_N, kernel.TILE_K
    grid = (m // tiles[0] * (n // tiles[1]),)

    def call() -> None:
        kernel.multiply[grid](a, b, out, n, k, *tiles, num_warps=kernel.WARPS, num_stages=kernel.STAGES)

    return Victim(call, " x ".join(map(str, shape)))


def _add_one(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(x, 1, out=out)
