"""How large a job is planned for: what is beyond is a mistake in a file, and would take for ever to be thought through.

Schedules are built to learn what memory they need, and replayed to learn what time they take; both grow with the copies
in them. Models and jobs that exist stay far below the bounds.
"""

from __future__ import annotations

from tide_strategies.errors import TideConfigError
from tide_strategies.layout import GroupLayout
from tide_strategies.planner.groups import Group, Model
from tide_strategies.topology import Topology

#: Nodes, and ranks of one node: the largest NVLink domain sold has 72.
MOST_NODES, MOST_LOCAL = 512, 72
#: Ranks of a job at most.
MOST_RANKS = MOST_NODES * MOST_LOCAL
#: Copies that one rank's schedules of a group have.
MOST_COPIES = 1 << 17
#: Ranks whose schedules across nodes are built to count an arena; beyond, it is the closed form.
MOST_COUNTED = 4096
#: Copies of all ranks that are replayed, on a node, and across nodes, where a chunk's go out as one batch. Of
#: more, a part is or nothing (``planner/predict.py``).
MOST_REPLAYED_COPIES, MOST_REPLAYED_ACROSS = 1 << 14, 1 << 17


def check_topology(topology: Topology) -> None:
    """Refuse jobs that are too large to plan for.

    Raises:
        TideConfigError: more than :data:`MOST_NODES` nodes, or :data:`MOST_LOCAL` ranks on each.
    """
    if topology.nodes > MOST_NODES or topology.local_ranks > MOST_LOCAL:
        raise TideConfigError(
            f"jobs of at most {MOST_NODES} nodes with {MOST_LOCAL} ranks each are planned; got {topology}"
        )


def check_model(model: Model, topology: Topology, chunk_bytes: int) -> None:
    """Refuse groups whose schedules would have more than :data:`MOST_COPIES` copies a rank.

    Raises:
        TideConfigError: there is one; says how large it is and what makes it so.
    """
    for group in dict.fromkeys(model.groups):
        _check_group(model.name, group, topology, chunk_bytes)


def _check_group(model: str, group: Group, topology: Topology, chunk_bytes: int) -> None:
    layout = group.layout(topology.ranks)
    found = copies(layout, topology, chunk_bytes, itemsize=4)
    if found > MOST_COPIES:
        raise TideConfigError(
            f"{model}: group {group.name!r} has {len(group.params)} parameters of {layout.landing_bytes:.3g} bytes in "
            f"all, which {topology} ranks would exchange in {found:.3g} copies a rank, by chunks of {chunk_bytes} "
            f"bytes; at most {MOST_COPIES} are planned. Check the model's sizes and the rates' chunk_cap, wrap smaller "
            "modules, or plan for more ranks"
        )


def copies(layout: GroupLayout, topology: Topology, chunk_bytes: int, *, itemsize: int = 2) -> int:
    """About how many copies one rank's all-gather and reduce-scatter have together.

    Args:
        layout: of the group.
        topology: M x L.
        chunk_bytes: of the reduce-scatter.
        itemsize: of its gradients.
    """
    # Across nodes a chunk has a piece for each rank of the node that it is for.
    contribution = layout.output_items * itemsize * (topology.local_ranks if topology.nodes > 1 else 1)
    chunks = -(-contribution // chunk_bytes)
    return topology.nodes * max(topology.local_ranks - 1, 1) * (chunks + len(layout.params))
