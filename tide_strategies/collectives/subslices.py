"""Geometry of the two-level reduce-scatter: sub-slices, their parts, and the chunks in which they are staged.

A rank's shard is seen packed, as in the output (stock FSDP2's layout, no gaps). The packed span is split into L
sub-slices of equal capacity, each into as many parts as there are passes (paper, section 4.2). A partial holds one
part of one sub-slice for all L ranks of a destination node: L rows of ``part_items`` fp32 elements.

An element belongs to the same sub-slice whatever the passes and chunks are: these knobs keep every bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout, align
from tide_strategies.topology import Topology

#: Sub-slices start on multiples of this many elements, for vectors of four fp32 elements.
PART_ALIGNMENT = 4
#: Pieces start on multiples of this many bytes in staging.
PIECE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's share of a chunk.

    Args:
        p: the parameter.
        start: first element, counted in a shard of ``p``.
        items: elements of a full row.
        column: element of the partial's row where it belongs.
        at: byte of the staged row where it lies.
        rows: destination ranks whose row is full; strided copies move them together.
        tail: elements of the one row after them that the end of the parameter cuts short (0: none).
    """

    p: int
    start: int
    items: int
    column: int
    at: int
    rows: int
    tail: int

    def lines(self) -> Iterator[tuple[int, int]]:
        """Each row with its elements."""
        yield from ((row, self.items) for row in range(self.rows))
        if self.tail:
            yield self.rows, self.tail


@dataclass(frozen=True)
class SubSlices:
    """Sub-slices of a group's packed shards.

    Args:
        layout: the group's geometry.
        topology: M nodes x L ranks.
        passes: parts of each sub-slice.
    """

    layout: GroupLayout
    topology: Topology
    passes: int

    @property
    def capacity(self) -> int:
        """Elements of a sub-slice."""
        return align(-(-self.layout.output_items // self.topology.local_ranks), PART_ALIGNMENT)

    @property
    def part_items(self) -> int:
        """Elements of a row of a partial."""
        return align(-(-self.capacity // self.passes), PART_ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Bytes of a partial: L rows of fp32 elements."""
        return self.topology.local_ranks * self.part_items * 4

    def bounds(self, s: int, part: int) -> tuple[int, int]:
        """Packed elements [low, high) of a part of sub-slice ``s``; empty ones are (x, x)."""
        low = s * self.capacity + part * self.part_items
        high = min(low + self.part_items, (s + 1) * self.capacity, self.layout.output_items)
        return low, max(low, high)

    def params(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Parameters that meet packed elements [low, high): (p, first, end), counted in a shard of p."""
        p = max(bisect_right(self._offsets, low) - 1, 0)
        while p < len(self.layout.params) and self._offsets[p] < high:
            first, end = max(low - self._offsets[p], 0), min(high, self._offsets[p + 1]) - self._offsets[p]
            if first < end:
                yield p, first, end
            p += 1

    def live_bytes(self, node: int, s: int, part: int) -> int:
        """Bytes from a partial's beginning to the end of its last row that holds anything; 0 if none does."""
        low, high = self.bounds(s, part)
        rows = sum(any(True for _ in self.valid(r, low, high)) for r in self._ranks(node))
        return ((rows - 1) * self.part_items + high - low) * 4 if rows else 0

    def valid(self, rank: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Maximal runs (first, items) of packed elements in [low, high) of rank's shard that are no padding."""
        run: tuple[int, int] | None = None
        for p, first, end in self.params(low, high):
            end = min(end, self.layout.valid_items(p, rank))
            if first >= end:
                continue
            begin = self._offsets[p] + first
            if run is not None and run[0] + run[1] == begin:
                run = (run[0], run[1] + end - first)
                continue
            if run is not None:
                yield run
            run = (begin, end - first)
        if run is not None:
            yield run

    def chunks(self, node: int, s: int, part: int, item: Item, row_bytes: int) -> list[tuple[Piece, ...]]:
        """Cut what each rank contributes to a partial into chunks of at most ``row_bytes`` per destination rank.

        All ranks cut alike, and padding is left out.
        """
        out: list[tuple[Piece, ...]] = []
        current: list[Piece] = []
        at = 0
        low, high = self.bounds(s, part)
        for p, start, limit in self.params(low, high):
            rows = [self.layout.valid_items(p, r) for r in self._ranks(node)]
            end = min(limit, rows[0])
            while start < end:
                items = min((row_bytes - at) // item.size, end - start)
                if items <= 0:
                    out.append(tuple(current))
                    current, at = [], 0
                    continue
                full = sum(v >= start + items for v in rows)
                tail = max(rows[full] - start, 0) if full < len(rows) else 0
                column = self._offsets[p] + start - low
                current.append(Piece(p, start, items, column, at, full, tail))
                at = align(at + items * item.size, PIECE_ALIGNMENT)
                start += items
        if current:
            out.append(tuple(current))
        return out

    def _ranks(self, node: int) -> range:
        return self.topology.node_ranks(self.topology.rank(node, 0))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(self.layout.output_offset(p) for p in range(len(self.layout.params) + 1))
