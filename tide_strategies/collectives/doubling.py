"""Recursive doubling on a rail: who sends what in which round, for any number of nodes (paper, section 3.1).

Node n keeps a row of M slots; slot i holds the shards of node (n + i) mod M. In round d it sends its first
c = min(2^d, M - 2^d) slots to node n - 2^d, where they become slots 2^d to 2^d + c - 1, and receives as many from
n + 2^d (Bruck's algorithm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: The last round is cut into at most this many groups of slots, so that placing them begins early.
LAST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a transfer, and the slots (counted in it) that are complete with it."""

    begin: int
    end: int
    complete: range


@dataclass(frozen=True, slots=True)
class Round:
    """One round as node ``node`` sees it.

    Args:
        step: d.
        slots: c, slots sent and received.
        first: slot where those received begin.
        target: node that this one sends to.
        source: node that this one receives from.
        last: whether no round follows.
    """

    step: int
    slots: int
    first: int
    target: int
    source: int
    last: bool

    def parts(self, slot_bytes: int, head_bytes: int) -> list[Part]:
        """Cut the transfer: a head that lets the next sender begin and a tail, or the last round's groups."""
        if not slot_bytes:
            return [Part(0, 0, range(self.slots))]
        if self.last:
            size = -(-self.slots // LAST_GROUPS)
            groups = [range(i, min(i + size, self.slots)) for i in range(0, self.slots, size)]
            return [Part(g.start * slot_bytes, g.stop * slot_bytes, g) for g in groups]
        total = self.slots * slot_bytes
        if total <= head_bytes:
            return [Part(0, total, range(self.slots))]
        return [Part(0, head_bytes, range(0)), Part(head_bytes, total, range(self.slots))]


def rounds(nodes: int, node: int) -> Iterator[Round]:
    """The ceil(log2 M) rounds of ``node``."""
    step = 0
    while (first := 1 << step) < nodes:
        yield Round(
            step,
            slots=min(first, nodes - first),
            first=first,
            target=(node - first) % nodes,
            source=(node + first) % nodes,
            last=2 * first >= nodes,
        )
        step += 1
