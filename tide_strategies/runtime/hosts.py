"""Which ranks are on one host, and what topology and rail follow from that.

Everything is decided from the ranks' identities (``bootstrap.host_identity``), which all ranks know, so that all
decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tide_strategies.collectives.rail_lane import one_wave
from tide_strategies.errors import TideArenaError
from tide_strategies.runtime.bootstrap import apart, check_one_host
from tide_strategies.topology import Topology


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group are, and what follows for its collectives.

    Args:
        topology: its nodes; the ranks of one node share memory.
        rail: what connects the nodes: memory that they share too, messages, NCCL, or nothing, for one node.
        why: the reason for both, in words.
        lanes: whether one rank on each node has schedules of its own (on GPUs, reductions).
        host_ranks: so many consecutive ranks are on one host, or more of them; 0: all are.
        multicast: whether GPUs use multicast, and why not, in words; empty for CPU ranks.
        instead_of_nccl: why messages connect nodes of GPUs where NCCL was to do it; empty if they were asked for.
    """

    topology: Topology
    rail: Literal["none", "local", "p2p", "nccl_rma"]
    why: str
    lanes: bool = True
    host_ranks: int = 0
    multicast: str = ""
    instead_of_nccl: str = ""

    @property
    def schedule(self) -> Literal["direct", "two-level", "lane"]:
        """Which schedules run: "direct" on one node, "lane" with one rank on each of several, else "two-level"."""
        if self.topology.nodes == 1:
            return "direct"
        return "lane" if self.topology.lane and self.lanes else "two-level"


def hosts_of(identities: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Ranks by host, where a host is what its ranks can share memory on; in the order of their first ranks."""
    hosts: list[list[int]] = []
    for rank, identity in enumerate(identities):
        # Neighbours are on one host as a rule: so many comparisons as there are ranks, and a few for each host.
        home = next((h for h in reversed(hosts) if apart(identities[h[0]], identity) is None), None)
        if home is None:
            hosts.append([rank])
        else:
            home.append(rank)
    return hosts


def found_topology(identities: Sequence[dict[str, Any]]) -> Topology:
    """The topology that the hosts of the ranks form.

    Raises:
        TideArenaError: on every rank alike, with code TIDE-F027: hosts with different numbers of ranks, or whose ranks
            are not consecutive.
    """
    hosts = hosts_of(identities)
    words = {h[0]: identities[h[0]].get("hostname") for h in hosts}
    for host in hosts:
        if len(host) != len(hosts[0]):
            raise TideArenaError(
                f"host {words[host[0]]} has {len(host)} of the ranks, host {words[0]} has {len(hosts[0])}", "TIDE-F027"
            )
        if host != list(range(host[0], host[0] + len(host))):
            raise TideArenaError(f"host {words[host[0]]} has ranks {host}, which are not consecutive", "TIDE-F027")
    return Topology(len(hosts), len(hosts[0]))


def place(identities: Sequence[dict[str, Any]], stated: Topology | None, rail: str) -> Placement:
    """Choose topology and rail of CPU ranks.

    Args:
        identities: of all ranks, in order.
        stated: the topology that the user states; its nodes may be smaller than hosts.
        rail: option ``rail``. "local" is memory that all ranks share; "auto" takes it where all ranks can.

    Raises:
        TideArenaError: on every rank alike: the hosts form no topology (TIDE-F027), the ranks of a node cannot share
            memory (TIDE-F020), or the rail is not for CPU ranks (TIDE-F028).
    """
    everyone = list(identities)
    if rail == "local":
        check_one_host(everyone)
    topology = stated or found_topology(identities)
    hosts = len(hosts_of(identities))
    nodes = "topology as stated" if stated else f"{hosts} hosts found" if hosts > 1 else "all ranks are on one host"
    if topology.nodes == 1:
        check_one_host(everyone)
        return Placement(topology, "none", nodes)
    if rail == "nccl_rma":
        raise TideArenaError("rail: nccl_rma is for GPU ranks, and these are CPU ranks", "TIDE-F028")
    if rail == "local" or (rail == "auto" and hosts == 1):
        return Placement(topology, "local", f"{nodes}, all ranks share memory")
    for first in range(0, topology.ranks, topology.local_ranks):
        check_one_host(everyone[first : first + topology.local_ranks], first)
    return Placement(topology, "p2p", nodes if rail == "auto" else f"{nodes}, messages are asked for")


def place_devices(identities: Sequence[dict[str, Any]], stated: Topology | None, rail: str) -> Placement:
    """Topology and rail of ranks that drive GPUs.

    Args:
        identities: as of :func:`place`; ``nccl`` says why that rank's NCCL has no host RMA, or is None.
        stated: as of :func:`place`.
        rail: option ``rail``. "auto" is memory that all ranks of one host map, and between hosts NCCL where every rank
            has it, else messages.

    Raises:
        TideArenaError: on every rank alike: the hosts form no topology (TIDE-F027), the ranks of a node are not on one
            host (TIDE-F020), the rail that is asked for ends with the host (TIDE-F023), or NCCL is asked for and a
            rank's has no rails (TIDE-F029). That the ranks of a single stated node are on one host is found out when
            they share memory.
    """
    everyone = list(identities)
    hosts = len(hosts_of(identities))
    topology = stated or found_topology(identities)
    if topology.nodes == 1:
        return Placement(topology, "none", "GPU ranks of a group are one node")
    nodes, lanes = "topology as stated" if stated else f"{hosts} hosts found", one_wave(topology)
    if hosts == 1 and rail in ("auto", "local"):
        return Placement(topology, "local", f"{nodes}, all ranks map each other's memory", lanes)
    if rail == "local":
        try:
            check_one_host(everyone)
        except TideArenaError as e:
            raise TideArenaError(str(e), "TIDE-F023") from e
    for first in range(0, topology.ranks, topology.local_ranks):
        check_one_host(everyone[first : first + topology.local_ranks], first)
    host_ranks = 0 if hosts == 1 else topology.local_ranks
    if rail == "p2p":
        return Placement(topology, "p2p", f"{nodes}, messages are asked for", lanes, host_ranks)
    missing = _without_nccl(identities)
    if missing and rail == "nccl_rma":
        raise TideArenaError(f"{nodes}, and {missing}", "TIDE-F029")
    asked = ", puts through NCCL are asked for" if rail == "nccl_rma" else ""
    placement = Placement(topology, "nccl_rma", nodes + asked, lanes, host_ranks)
    return by_messages(placement, missing) if missing else placement


def by_messages(placement: Placement, why: str) -> Placement:
    """The same nodes of GPUs, connected by messages since NCCL does not connect them: ``why``."""
    told = f"{placement.why}, messages since NCCL does not connect them (TIDE-F032): {why}"
    return replace(placement, rail="p2p", why=told, instead_of_nccl=why)


def _without_nccl(identities: Sequence[dict[str, Any]]) -> str:
    """Which ranks have no NCCL for rails, and why, in words; empty if all have it."""
    without: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        if identity.get("nccl") is not None:
            without.setdefault(identity["nccl"], []).append(rank)
    return "; ".join(f"rank {r[0]}{f' (and {len(r) - 1} more)' if r[1:] else ''}: {why}" for why, r in without.items())
