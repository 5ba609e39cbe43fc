"""The whole range of base plans, each accepted or refused by the planner's rules (paper, appendix D)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tide_strategies.collectives.plan import (
    BASE_LOCAL_RANKS,
    BASE_NODES,
    BASE_ROUNDS,
    BASE_WIDTHS,
    BasePlan,
    refusals,
)
from tide_strategies.collectives.signals import RAILS


@dataclass(frozen=True, slots=True)
class Counts:
    """Plans accepted and rejected up to some number of nodes."""

    nodes: int
    accepted: int
    rejected: int


def base_plans(nodes: Sequence[int] = BASE_NODES, passes: int = 1) -> Iterator[Counts]:
    """Go through all (nodes, wave width, round width, mode) and count, telling the totals after each node count."""
    accepted = rejected = 0
    for m in nodes:
        for width in BASE_WIDTHS:
            for rounds in BASE_ROUNDS:
                for slot_reuse in (False, True):
                    refused = bool(refusals(BasePlan(m, BASE_LOCAL_RANKS, width, rounds, slot_reuse, passes)))
                    accepted, rejected = accepted + (not refused), rejected + refused
        yield Counts(m, accepted, rejected)


def copy_descriptors(nodes: int, local_ranks: int, params: int) -> tuple[int, int]:
    """Copies that a rank would issue per reduce-scatter if every slice were flat, and with destination ranks coalesced.

    One per other owner, parameter and destination node, at most, and flat times the node's ranks (section 4.1).
    """
    coalesced = (local_ranks - 1) * params * nodes
    return coalesced * local_ranks, coalesced


def connections(
    nodes: int, local_ranks: int, contexts: int = 4, rails: int = RAILS
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(queue pairs of a rank, barrier steps) of one communicator of all ranks, and of ``rails`` per rail.

    From section 6.1, whose rails have one communicator each.
    """
    ranks = nodes * local_ranks
    return (2 * contexts * ranks, contexts * ranks**2), (2 * contexts * nodes * rails, contexts * nodes**2 * rails)
