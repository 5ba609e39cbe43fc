"""Whether the ranks of a host enqueue the same collectives in the same order.

Counters alone would not tell: groups that share a slot share its counters, so one rank's all-gather of one block and
another's of the next could both come to an end, with wrong parameters in both. Each rank therefore notes every call
that it begins in host memory that the others see, and compares what others have noted in the same place.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tide_strategies._native import Mapping
from tide_strategies.errors import TideMismatchError
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.failure import mismatch

#: Calls that a rank may be ahead of another and still be compared with it; a host that far ahead has left many steps
#: behind without waiting for one result.
_KEPT = 4096
_BITS = 32
_LOW = (1 << _BITS) - 1


@dataclass
class _Peer:
    rank: int
    noted: ctypes.Array[ctypes.c_uint64]
    compared: int = 0  # calls, all of which were the same


class CallOrder:
    """The calls that the ranks of a host have begun. Made by all of them together.

    Args:
        host: their shared memory.
        book: names for calls.
    """

    def __init__(self, host: SharedArena, book: CallBook) -> None:
        self._book, self._rank, self._begun = book, host.rank, 0
        notes = ctypes.c_uint64 * _KEPT
        ranks, size = len(host.host), ctypes.sizeof(notes)
        offset = host.grow(ranks * size, "calls")
        self._mapping = Mapping(host.native, offset, ranks * size)  # keeps the notes where they are
        first = self._mapping.address
        noted = {r: notes.from_address(first + i * size) for i, r in enumerate(host.host)}
        self._own = noted[host.rank]
        self._peers = [_Peer(r, n) for r, n in noted.items() if r != host.rank]

    def note(self, tag: int) -> TideMismatchError | None:
        """Note that the next call begins, and that it is ``tag``; the error, if a peer has begun another in its place.

        Of two ranks that differ, whoever comes later is told here. Both at once may miss each other: see :meth:`look`.
        """
        self._begun = number = self._begun + 1
        self._own[number % _KEPT] = entry = (number & _LOW) << _BITS | tag
        for peer in self._peers:
            other = peer.noted[number % _KEPT]
            if other != entry and other >> _BITS == entry >> _BITS:
                return self._differ(peer, number)
        return None

    def look(self) -> TideMismatchError | None:
        """Compare what has been noted since the last look; from one thread."""
        begun = self._begun
        for peer in self._peers:
            for number in range(max(peer.compared, begun - _KEPT) + 1, begun + 1):
                own, other = self._own[number % _KEPT], peer.noted[number % _KEPT]
                if other == own:
                    peer.compared = number
                elif other >> _BITS == own >> _BITS:
                    return self._differ(peer, number)
                else:
                    break  # it has not come so far, or has left it far behind
        return None

    def _differ(self, peer: _Peer, number: int) -> TideMismatchError:
        own, other = (self._book.label(n[number % _KEPT] & _LOW) for n in (self._own, peer.noted))
        return mismatch(f"rank {self._rank} is in call {number}, {own}, while rank {peer.rank} is in {other}")
