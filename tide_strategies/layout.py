"""Geometry of one parameter group: padded rows, shard bytes, landing and output offsets.

FSDP2 shards parameter p, seen as (D, K), along dimension 0: every rank holds R = ceil(D / N) rows, the last ones
padded. Unsharded, p must be one contiguous (D, K) array, so rank r's shard lands at ``base(p) + r * R * K`` items
(paper, section 2.1 and equation 2). Uneven rows, D < N, empty shards and sizes that are no multiple of anything are
ordinary cases here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

#: Parameters start on multiples of this many bytes, which vectorised compute kernels want.
LANDING_ALIGNMENT = 256


def align(value: int, to: int) -> int:
    """The smallest multiple of ``to`` that is not below ``value``."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class ParamShape:
    """One parameter as (rows, row_items), a scalar as (1, 1).

    Args:
        rows: D, the extent of dimension 0, at least 0.
        row_items: K, the product of the other extents, at least 0.
        itemsize: bytes of one unsharded (all-gathered) item.
    """

    rows: int
    row_items: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_items < 0 or self.itemsize < 1:
            raise ValueError(f"not a parameter shape: {self}")

    @classmethod
    def of(cls, size: Sequence[int], itemsize: int) -> ParamShape:
        """The shape of a tensor with the given size (any number of dimensions)."""
        rows = size[0] if size else 1
        items = 1
        for extent in size[1:]:
            items *= extent
        return cls(rows, items, itemsize)


@dataclass(frozen=True)
class GroupLayout:
    """Addresses of a parameter group among ``ranks`` ranks.

    Args:
        params: the parameters in group order.
        ranks: N, at least 1.
    """

    params: tuple[ParamShape, ...]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a layout needs at least 1 rank; got {self.ranks}")

    def padded_rows(self, p: int) -> int:
        """R, rows of every rank's shard of ``p`` including padding."""
        return -(-self.params[p].rows // self.ranks)

    def shard_items(self, p: int) -> int:
        """R * K, items of a padded shard of ``p``."""
        return self.padded_rows(p) * self.params[p].row_items

    def valid_items(self, p: int, rank: int) -> int:
        """Items of rank's shard of ``p`` that exist in the parameter (the rest is padding)."""
        padded = self.padded_rows(p)
        rows = min(max(self.params[p].rows - rank * padded, 0), padded)
        return rows * self.params[p].row_items

    def shard_bytes(self, p: int) -> int:
        """s, bytes of a padded shard of ``p`` once gathered."""
        return self.shard_items(p) * self.params[p].itemsize

    def landing_base(self, p: int) -> int:
        """Byte offset of ``p`` in the group's landing, a multiple of :data:`LANDING_ALIGNMENT`."""
        return self._landing_bases[p]

    def landing_offset(self, p: int, rank: int) -> int:
        """Byte offset where rank's shard of ``p`` lands (equation 2, with aligned bases)."""
        return self.landing_base(p) + rank * self.shard_bytes(p)

    @property
    def landing_bytes(self) -> int:
        """Bytes of the whole landing: every parameter unsharded and padded."""
        return self._landing_bases[-1]

    def output_offset(self, p: int) -> int:
        """Item offset of ``p`` in the packed reduce-scatter output (stock FSDP2's layout: no alignment)."""
        return self._output_offsets[p]

    @property
    def output_items(self) -> int:
        """Items of the packed per-rank reduce-scatter output."""
        return self._output_offsets[-1]

    @cached_property
    def _landing_bases(self) -> tuple[int, ...]:
        sizes = (align(self.ranks * self.shard_bytes(p), LANDING_ALIGNMENT) for p in range(len(self.params)))
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def _output_offsets(self) -> tuple[int, ...]:
        return tuple(accumulate((self.shard_items(p) for p in range(len(self.params))), initial=0))
