"""The Triton kernel of landing: fp32 sums of node partials out of the inboxes of a node (paper, section 4.2).

Where the NVSwitch does not add them, each rank reads its rows of the partials from its peers' memory. Arguments are
those of ``kernels.sum``, but ``staging`` is not read and ``addresses`` are those of inboxes and spares. The rows of the
tile table are other ones (``kernels.tiles``).
"""

# Triton reads annotations and tuples in its own way.
# ruff: noqa: ANN001, ANN201, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from tide_strategies.kernels.sum import _scale, _select
from tide_strategies.kernels.tiles import LAND_HEAD_WORDS, LAND_SOURCE_WORDS

# Globals that a kernel reads must be constexpr.
_HEAD = tl.constexpr(LAND_HEAD_WORDS)
_EACH = tl.constexpr(LAND_SOURCE_WORDS)


@triton.jit
def land_tiles(
    tiles,
    first_tile,
    n_tiles,
    staging,
    output,
    factor,
    divides,
    addresses,
    SOURCES: tl.constexpr,
    POINTERS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out = [out +] ((s_0 + s_1) + ...) * factor for every tile (or / factor); each operation rounds to fp32, in order.

    Compiled without fusion: the product may feed an addition. ``ALIGNED`` promises that every source and the output of
    every tile begin at a multiple of 16 bytes; counts stay arbitrary.
    """
    lane = tl.arange(0, TILE)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        row = tiles + (first_tile + tile).to(tl.int64) * (_HEAD + SOURCES * _EACH)
        destination = output + tl.load(row)
        count = tl.load(row + 1).to(tl.int32)
        mask = lane < count
        if ALIGNED:
            destination = tl.multiple_of(destination, 16)
        # All loads are issued before the first addition: they come over the link.
        values = ()
        for s in tl.static_range(SOURCES):
            address = _select(addresses, tl.load(row + _HEAD + s * _EACH), POINTERS)
            source = address.to(tl.pointer_type(tl.float32)) + tl.load(row + _HEAD + s * _EACH + 1)
            if ALIGNED:
                source = tl.multiple_of(source, 16)
            if count == TILE:  # an exact mask would split loads into single elements
                value = tl.load(source + lane)
            else:
                value = tl.load(source + lane, mask=mask, other=0.0)
            values = values + (value,)
        total = values[0]
        for s in tl.static_range(SOURCES - 1):
            total = total + values[s + 1]
        total = _scale(total, factor, divides)
        if ACCUMULATE:
            total = tl.load(destination + lane, mask=mask, other=0.0).to(tl.float32) + total
        total = total.to(output.dtype.element_ty)
        if count == TILE:
            tl.store(destination + lane, total)
        else:
            tl.store(destination + lane, total, mask=mask)
