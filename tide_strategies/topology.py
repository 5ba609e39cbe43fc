"""Ranks, nodes and rails: N = M x L ranks in node-major order, r = n*L + l (paper, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """M nodes with L local ranks each.

    Args:
        nodes: M, at least 1.
        local_ranks: L, ranks (GPUs or processes) of one node, at least 1.

    Raises:
        ValueError: if either is below 1.
    """

    nodes: int
    local_ranks: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.local_ranks < 1:
            raise ValueError(f"a topology needs at least 1 node and 1 local rank; got {self.nodes}x{self.local_ranks}")

    @classmethod
    def of_group(cls, members: Sequence[int], local_ranks: int) -> Topology:
        """The topology of a process group within a job of ``local_ranks`` ranks per node.

        Shard groups of HSDP span whole nodes or parts of one; expert groups may have a single rank on each node.

        Args:
            members: global ranks of the group, in group order.
            local_ranks: ranks per node of the whole job, which numbers its ranks node by node.

        Raises:
            ValueError: if the group is not node-major with as many members on every node.
        """
        nodes = [r // local_ranks for r in members] if local_ranks > 0 else []
        per_node = [nodes.count(n) for n in sorted(set(nodes))]
        if not members or nodes != sorted(nodes) or len(set(per_node)) != 1:
            raise ValueError(
                f"a group needs as many ranks on each of its nodes, node by node; got ranks {list(members)} of nodes "
                f"with {local_ranks} ranks"
            )
        return cls(len(per_node), per_node[0])

    @property
    def ranks(self) -> int:
        """N, the number of ranks."""
        return self.nodes * self.local_ranks

    @property
    def lane(self) -> bool:
        """Whether each of several nodes has one rank: nothing is local to a node (appendix F)."""
        return self.nodes > 1 and self.local_ranks == 1

    def node_of(self, rank: int) -> int:
        """The node n of a rank."""
        return self._check(rank) // self.local_ranks

    def local_of(self, rank: int) -> int:
        """The local rank l of a rank, which is also its rail."""
        return self._check(rank) % self.local_ranks

    def rank(self, node: int, local: int) -> int:
        """The rank of local rank ``local`` on node ``node``."""
        if not (0 <= node < self.nodes and 0 <= local < self.local_ranks):
            raise ValueError(f"no local rank {local} on node {node} in a topology of {self}")
        return node * self.local_ranks + local

    def node_ranks(self, rank: int) -> range:
        """All ranks on the node of ``rank``, in local-rank order."""
        first = self.node_of(rank) * self.local_ranks
        return range(first, first + self.local_ranks)

    def rail_ranks(self, rank: int) -> range:
        """All ranks on the rail of ``rank``, in node order."""
        return range(self.local_of(rank), self.ranks, self.local_ranks)

    def _check(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"no rank {rank} in a topology of {self}")
        return rank

    def __str__(self) -> str:
        return f"{self.nodes}x{self.local_ranks}"
