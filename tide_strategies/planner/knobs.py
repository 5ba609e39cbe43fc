"""From rates to the knobs that a runtime takes: one home for what it would otherwise assume.

Knobs change no bit of a result, so ranks of different process groups may have different ones; the ranks of one group
must have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import PIECE_ALIGNMENT
from tide_strategies.config import LEAST_CHUNK
from tide_strategies.layout import GroupLayout, align
from tide_strategies.planner.rates import Rates, built_in
from tide_strategies.planner.sizing import MAX_ROUND_WIDTH, chunk_bytes, paced_ctas, passes_of, solve
from tide_strategies.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """How the reduce-scatters of one process group are cut up and staffed.

    Args:
        chunk_bytes: of one contribution, staged at a time.
        sum_ctas: thread blocks of the sum; a CPU rank sums in its one thread.
        landing_ctas: thread blocks of the landing; 0 where nothing lands.
        round_width: k, transfers of a rank at once across nodes.
        passes: n_part, sub-slice passes across nodes.
    """

    chunk_bytes: int
    sum_ctas: int = 1
    landing_ctas: int = 0
    round_width: int = MAX_ROUND_WIDTH
    passes: int = 1

    def base_plan(self, topology: Topology) -> BasePlan | None:
        """Waves, rounds, passes and inbox generations of reductions across nodes; None on one node, and with one rank a
        node, where the lane has a plan of its own.

        Waves are as wide as a node: another width would group the additions differently.
        """
        if topology.nodes == 1 or topology.lane:
            return None
        local = topology.local_ranks
        return BasePlan(topology.nodes, local, local, self.round_width, passes=self.passes)

    def to_dict(self) -> dict[str, int]:
        """As plain values."""
        return asdict(self)


def choose(
    rates: Rates,
    topology: Topology,
    layouts: Iterable[GroupLayout],
    device: str,
    stated: Mapping[str, int] | None = None,
) -> Knobs:
    """Solve for the knobs of groups with these layouts, which share one engine: the largest group decides.

    Args:
        rates: of one rank.
        topology: M x L.
        layouts: geometry of the groups.
        device: "cpu" or "cuda".
        stated: knobs that somebody has stated; they stay.

    Raises:
        TideConfigError: the topology has no ranks.
    """
    groups = list(layouts)
    largest = max((sum(x.shard_bytes(p) for p in range(len(x.params))) for x in groups), default=0)
    output = max(4 * max((x.output_items for x in groups), default=0), 1)
    # What is staged of one contribution at most: gradients of 4 bytes, across nodes for all ranks of the node at once.
    whole = output * (topology.local_ranks if topology.nodes > 1 else 1)
    one_thread = device == "cpu"
    sizing = solve(rates, topology, output)
    passes = 1 if one_thread else passes_of(rates, topology, output, sizing)
    if passes > 1:
        sizing = solve(rates, topology, output, passes=passes)
    chunk = min(chunk_bytes(rates, largest, one_thread=one_thread), align(whole, LEAST_CHUNK))
    ctas = sizing.sum_ctas if topology.nodes > 1 else paced_ctas(rates, topology, chunk, sizing.sum_ctas)
    solved = Knobs(
        chunk_bytes=chunk,
        sum_ctas=1 if one_thread else ctas,
        landing_ctas=min(sizing.landing_ctas, 1) if one_thread else sizing.landing_ctas,
        round_width=max(sizing.round_width, 1),
        passes=passes,
    )
    chosen: dict[str, Any] = dict(stated or {})
    knobs = replace(solved, **chosen)
    # Twice the alignment of pieces, so that they begin on multiples of 8 elements of either size (kernels/sum.py).
    # Across nodes a chunk has a piece for each rank of a node.
    pieces = topology.local_ranks if topology.nodes > 1 else 1
    return replace(knobs, chunk_bytes=align(knobs.chunk_bytes, 2 * PIECE_ALIGNMENT * pieces))


def unmeasured(device: str, topology: Topology, layouts: Iterable[GroupLayout], **stated: int) -> Knobs:
    """The knobs where nothing has been measured: from built-in rates of that kind of device."""
    return choose(built_in(device), topology, layouts, device, stated)
