"""What callers of the kernels lay out: the tables of tiles, and the shape of a compiled kernel. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class TileWord(IntEnum):
    """The int64 words of one row of the tile table. Offsets, strides and counts are in elements."""

    POINTER = 0
    """Index of the own gradient's address."""
    OWN_OFFSET = 1
    """From the own gradient's address to the tile."""
    STAGING_OFFSET = 2
    """From ``staging`` to the tile of the first staged source."""
    STAGING_STRIDE = 3
    """From one staged source to the next."""
    OUTPUT_OFFSET = 4
    """From ``output`` to the tile."""
    COUNT = 5
    """Elements of the tile, 0 to ``SumShape.tile``."""


#: int64 words of a row of the tile table.
TILE_WORDS = len(TileWord)
#: int64 words of a row for landing: element offset in the output, elements; and of each of its sources: index of the
#: address, element offset from there.
LAND_HEAD_WORDS, LAND_SOURCE_WORDS = 2, 2
#: Launch arguments before the gradients' addresses: tiles, first_tile, n_tiles, staging, output, factor, divides.
LEADING_ARGUMENTS = 7
#: Numbers of gradient addresses that kernels are compiled for; 256 parameters are the paper's limit of a group.
POINTER_COUNTS = (4, 8, 16, 32, 64, 128, 256)
#: Offsets and strides that are multiples of this many elements suit an aligned kernel, whatever the dtypes.
ALIGNED_ELEMENTS = 8
#: Addresses of an aligned kernel (staging, output, every gradient) are multiples of this many bytes.
ALIGNED_BYTES = 16

_KIB = 1024
#: Bytes of all sources of one tile: enough to hide the latency of memory when a few tiles are on their way.
_TILE_BYTES = 64 * _KIB
#: Shared memory for tiles on their way; more brings nothing, and shared memory is taken from the L1 cache.
_RING_BYTES = 160 * _KIB
#: Triton turns a tile's layout for loads into that for stores through shared memory, at 4 bytes an element of half a
#: tile at most; and a little for the table's words.
_SPARE_BYTES = 20 * _KIB
#: Few threads with many loads each: the speed is in the bytes under way, and the ring holds those.
#: On an H200, 4 warps moved 1.1 to 1.5 times as much as 8 or 16.
_WARPS = 4


@dataclass(frozen=True, slots=True)
class SumShape:
    """How a kernel walks: elements of a tile, warps of a thread block, stages of the load pipeline (1: none).

    A shape changes speed only, never a bit of the sums.
    """

    tile: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name, value in (("tile", self.tile), ("warps", self.warps)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; got {value}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1; got {self.stages}")


def pointer_count(gradients: int) -> int:
    """The smallest of ``POINTER_COUNTS`` that holds ``gradients`` addresses.

    Raises:
        ValueError: if there are more gradients than the largest kernel takes, or fewer than none.
    """
    for count in POINTER_COUNTS:
        if 0 <= gradients <= count:
            return count
    raise ValueError(f"a sum takes 0 to {POINTER_COUNTS[-1]} gradients; got {gradients}")


def default_shape(staged: int, item_bytes: int, aligned: bool, shared_limit: int) -> SumShape:
    """A shape for ``staged + 1`` sources of ``item_bytes`` an element on a device with ``shared_limit`` bytes a block.

    Aligned loads go through a ring in shared memory as deep as fits. Unaligned ones cannot (asynchronous copies move 4
    bytes at least), so they rely on many threads and on registers, of which 512 threads have 128 each.
    """
    if not aligned:
        tile = 8192
        while tile > 512 and (staged + 1) * tile > 4 * 8192:
            tile //= 2
        return SumShape(tile=tile, warps=16, stages=1)
    tile = 8192
    while tile > 1024 and (staged + 1) * tile * item_bytes > _TILE_BYTES:
        tile //= 2
    room = min(_RING_BYTES, shared_limit - _SPARE_BYTES)
    # A pipeline of S stages keeps S - 1 tiles.
    stages = max(1, min(4, 1 + room // ((staged + 1) * tile * item_bytes)))
    return SumShape(tile=tile, warps=_WARPS, stages=stages)
