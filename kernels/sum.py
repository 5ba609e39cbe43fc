"""The Triton kernel of the reduce-scatter's level 1: fp32 sums of staged and own gradients (paper, section 4.1).

One launch serves many tiles of many parameters. The kernel is compiled ahead of time (``kernels.compile``) and launched
by native code, so its arguments are an ABI, in this order:

====================  =======  =====================================================================================
argument              type     meaning
====================  =======  =====================================================================================
``tiles``             pointer  int64 table, ``TILE_WORDS`` words a tile (``TileWord``)
``first_tile``        int32    first row of the table that this launch handles
``n_tiles``           int32    number of rows that this launch handles
``staging``           pointer  base of the staged sources, gradient dtype
``output``            pointer  base of the packed output, output dtype
``factor``            float32  what every sum is multiplied with, or divided by
``divides``           int32    1: divided, with IEEE rounding; 0: multiplied (by an exact reciprocal, which is faster)
``addresses``         int64    one scalar for each of POINTERS gradients: its address
hidden                pointer  NULL scratch pointers that Triton appends: ``SumKernel.extra_null_pointers`` of them
====================  =======  =====================================================================================

Program i of G handles tiles ``first_tile + i``, ``+ G``, ``+ 2 G``, ...: any grid gives the same bytes.
``kernels.tiles`` names the words of the table; this module imports Triton and is imported late.
"""

# Triton reads annotations and tuples in its own way.
# ruff: noqa: ANN001, ANN201, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from tide_strategies.kernels.tiles import TILE_WORDS

# Globals that a kernel reads must be constexpr.
_WORDS = tl.constexpr(TILE_WORDS)
#: Addresses are selected in blocks of this many.
_SELECT_BLOCK = tl.constexpr(16)


@triton.jit
def _select(addresses, index, POINTERS: tl.constexpr):
    """``addresses[index]`` by static selects: kernel parameters cannot be indexed. Costs a block of selects at most."""
    address = addresses[0]
    for block in tl.static_range(0, POINTERS, _SELECT_BLOCK):
        if (index >= block) & (index < block + _SELECT_BLOCK):
            for i in tl.static_range(_SELECT_BLOCK):
                if block + i < POINTERS:
                    address = tl.where(index == block + i, addresses[block + i], address)
    return address


@triton.jit
def _scale(total, factor, divides):
    # One branch for a whole launch: the usual factor, a power of two, costs no division.
    if divides != 0:
        total = tl.div_rn(total, factor)
    else:
        total = total * factor
    return total


@triton.jit
def sum_tiles(
    tiles,
    first_tile,
    n_tiles,
    staging,
    output,
    factor,
    divides,
    addresses,
    STAGED: tl.constexpr,
    POINTERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out = ((s_0 + s_1) + ... + own) * factor for every tile (or / factor); each operation rounds to fp32, in order.

    No product feeds an addition, so there is nothing for the compiler to contract into a fused multiply-add.
    With STAGES > 1 the loads go through a ring of STAGES tiles in shared memory (cp.async on NVIDIA). ``ALIGNED``
    promises that every source and output of a tile begins at a multiple of 16 bytes; counts stay arbitrary.
    """
    gradient = staging.dtype.element_ty
    lane = tl.arange(0, TILE)
    index = tl.zeros([], tl.int64) - 1
    address = tl.zeros([], tl.int64)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        row = tiles + (first_tile + tile).to(tl.int64) * _WORDS
        pointer = tl.load(row)
        own_offset = tl.load(row + 1)
        staged_offset = tl.load(row + 2)
        stride = tl.load(row + 3)
        output_offset = tl.load(row + 4)
        count = tl.load(row + 5).to(tl.int32)
        # Successive tiles mostly belong to one parameter: look its address up only when it changes.
        if pointer != index:
            address = _select(addresses, pointer, POINTERS)
            index = pointer
        own = address.to(tl.pointer_type(gradient)) + own_offset
        mask = lane < count
        if ALIGNED:
            # Hints reach the compiler only in the kernel's own body, on the value that an operation has just made.
            own = tl.multiple_of(own, 16)
            # Whole 16-byte pieces: one that holds an element of the tile holds no byte of another page.
            vector: tl.constexpr = 128 // gradient.primitive_bitwidth
            mask = lane < tl.multiple_of((count + vector - 1) // vector * vector, vector)
        # All loads are issued before the first addition: with few thread blocks, bytes in flight are the speed.
        values = ()
        for s in tl.static_range(STAGED):
            source = staging + (staged_offset + s * stride)
            if ALIGNED:
                source = tl.multiple_of(source, 16)
            values = values + (tl.load(source + lane, mask=mask, other=0.0, eviction_policy="evict_first"),)
        values = values + (tl.load(own + lane, mask=mask, other=0.0, eviction_policy="evict_first"),)
        total = values[0].to(tl.float32)
        for s in tl.static_range(STAGED):
            total = total + values[s + 1].to(tl.float32)
        total = _scale(total, factor, divides).to(output.dtype.element_ty)
        destination = output + output_offset
        if ALIGNED:
            destination = tl.multiple_of(destination, 16)
        # The exact mask would split the stores of an aligned tile into single elements: full tiles need no mask.
        if count == TILE:
            tl.store(destination + lane, total)
        else:
            tl.store(destination + lane, total, mask=lane < count)
