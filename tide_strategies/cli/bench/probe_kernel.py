"""The probe's kernel. Imports Triton: import it late."""

# Triton reads annotations in its own way.
# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sm():
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def note_sm(out, spin_ns):
    """Write this thread block's SM and the time of its beginning to ``out[program]``, then spin ``spin_ns``."""
    begun = _nanoseconds()
    row = out + tl.program_id(0) * 2
    tl.store(row, _sm().to(tl.int64))
    tl.store(row + 1, begun)
    now = begun
    while now - begun < spin_ns:
        now = _nanoseconds()
