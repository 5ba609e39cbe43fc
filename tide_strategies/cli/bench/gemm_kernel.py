"""The many-wave GEMM's kernel: a thread block for each tile. Imports Triton: import it late."""

# Triton reads annotations in its own way.
# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K = 128, 256, 64
WARPS, STAGES = 8, 3


@triton.jit
def multiply(
    a,
    b,
    out,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """out = a @ b.T for row-major a (m, k), b (n, k) and out (m, n); tiles divide m, n and k."""
    tiles_n = n // TILE_N
    row, column = tl.program_id(0) // tiles_n * TILE_M, tl.program_id(0) % tiles_n * TILE_N
    rows, columns, depth = row + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    left = a + rows[:, None] * k + depth[None, :]
    right = b + columns[None, :] * k + depth[:, None]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in range(0, k, TILE_K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += TILE_K
        right += TILE_K
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(out.dtype.element_ty))
