"""Pieces of pinned host memory through which messages between GPU nodes leave: how many, and how large."""

from __future__ import annotations

from tide_strategies.collectives.signals import RAILS

#: Pieces that bytes to one peer go through, of all-gathers and of reductions each.
PIECES = 4
#: Shared out among peers and kinds; and bounds of a piece.
_SENDING_BYTES, _LEAST, _MOST = 64 << 20, 64 << 10, 4 << 20
#: By which a stream tells that a piece is full.
_WORD_BYTES = 4


def piece_bytes(nodes: int) -> int:
    """Bytes of a piece where so many nodes are connected; the same on all ranks."""
    shared = _SENDING_BYTES // (RAILS * (nodes - 1) * PIECES)
    return min(max(shared >> 12 << 12, _LEAST), _MOST)


def sending_bytes(nodes: int) -> int:
    """Bytes of all pieces of a rank, and of their words."""
    return RAILS * (nodes - 1) * PIECES * (piece_bytes(nodes) + _WORD_BYTES)
