"""What grows with the number of ranks: at 1,024 of them, in operations and bytes, as one rank sees it.

The hot path is a call's schedule: how often it waits and signals follows from nodes and local ranks, not from ranks.
Meeting and agreeing are done once; what other ranks say is compared by digest and said in full only where it differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Await, Item, Notify, Put, Schedule
from tide_strategies.errors import TideArenaError, TideMismatchError
from tide_strategies.fsdp2 import agreement
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.architectures import preset
from tide_strategies.runtime import bootstrap, hosts
from tide_strategies.runtime.calls import CallBook
from tide_strategies.topology import Topology

RANKS, LOCAL = 1024, 8
#: A layer of a 70B model has nine parameters; eighty layers and what is around them.
GROUPS = [
    {"name": f"layers.{i}", "parameters": {f"weight{p}": [[8192, 8192], "bfloat16", 0] for p in range(9)}}
    for i in range(82)
]

Change = Callable[[int, Any], Any]


class Peers:
    """An exchange with ranks that say what this one says, but for what ``change`` makes of it; counts what comes in."""

    def __init__(self, change: Change = lambda rank, value: value) -> None:
        self.change, self.calls, self.bytes = change, 0, 0

    def __call__(self, payload: bytes) -> list[bytes]:
        self.calls += 1
        changed = (self.change(rank, json.loads(payload)) for rank in range(RANKS))
        told = [json.dumps(value).encode() for value in changed]
        self.bytes += sum(map(len, told))
        return told


@pytest.fixture
def among(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peers], None]:
    def join(peers: Peers) -> None:
        monkeypatch.setattr(agreement, "process_group_exchange", lambda group, timeout_s, what: peers)
        monkeypatch.setattr(agreement.dist, "get_process_group_ranks", lambda group: list(range(RANKS)))

    return join


def test_ranks_that_agree_tell_each_other_digests_alone(among) -> None:
    peers = Peers()
    among(peers)
    agreement.agree_on_options([None], {"timeout_s": 300, "all_gather": {"slots": 2}}, 1.0)
    assert agreement.agree_on_groups([None], GROUPS, ["TIDE-OK"] * len(GROUPS), 1.0) == [None] * len(GROUPS)
    assert (peers.calls, peers.bytes) == (2, 2 * RANKS * 66), "64 digits and two quotes from every rank, twice"


def test_one_rank_that_differs_is_named_with_both_values(among) -> None:
    def other(rank: int, value: Any) -> Any:
        if rank != 777:
            return value
        return "0" * 64 if isinstance(value, str) else {**value, "all_gather": {"slots": 3}}

    among(Peers(other))
    with pytest.raises(TideMismatchError, match=r"'all_gather.slots': rank 0 has 2, rank 777 has 3"):
        agreement.agree_on_options([None], {"timeout_s": 300, "all_gather": {"slots": 2}}, 1.0)


def test_one_rank_that_has_another_geometry_is_named_with_both(among) -> None:
    def other(rank: int, value: Any) -> Any:
        if rank != 1023 or isinstance(value, str):
            return "0" * 64 if rank == 1023 else value
        value["groups"][7]["parameters"]["weight3"][0] = [8192, 1024]
        return value

    among(Peers(other))
    with pytest.raises(TideMismatchError) as caught:
        agreement.agree_on_groups([None], GROUPS[:9], ["TIDE-OK"] * 9, 1.0)
    words = str(caught.value)
    assert "group 7.parameters.weight3" in words
    assert "rank 0 has" in words
    assert "rank 1023 has" in words
    assert "[8192, 1024]" in words


def test_a_rank_that_fails_to_meet_the_others_is_named() -> None:
    def fails(rank: int, value: Any) -> Any:
        return {**value, "error": "no memory"} if rank == 900 else value

    peers = Peers(fails)
    with pytest.raises(TideArenaError, match=r"creating the shared arena failed\. rank 900: no memory"):
        bootstrap.agree(peers, 0, None, "creating the shared arena", bootstrap.host_identity())
    assert peers.calls == 1
    assert peers.bytes < RANKS * 512


def test_topology_is_found_with_about_one_comparison_a_rank(monkeypatch) -> None:
    identities = [{**bootstrap.host_identity(), "boot_id": f"host {r // LOCAL}"} for r in range(RANKS)]
    compared = []
    apart = hosts.apart
    monkeypatch.setattr(hosts, "apart", lambda a, b: compared.append(1) or apart(a, b))
    assert hosts.found_topology(identities) == Topology(RANKS // LOCAL, LOCAL)
    nodes = RANKS // LOCAL
    assert len(compared) <= RANKS + nodes * nodes // 2


def synchronisation(schedule: Schedule) -> int:
    """How often a call waits and signals."""
    return sum(isinstance(op, (Await, Notify, Put)) for ops in schedule.streams.values() for op in ops)


@pytest.mark.parametrize("local", [2, 4, 8])
def test_a_call_waits_and_signals_as_nodes_and_local_ranks_ask_for(local: int) -> None:
    """All-gathers: the logarithm of the nodes. Reductions: the nodes times the local ranks of one. Never all ranks."""
    for nodes in (8, 64, 128):
        topology = Topology(nodes, local)
        layout = GroupLayout((ParamShape(topology.ranks * local, 64, 2),), topology.ranks)
        gather = all_gather_nodes(layout, topology, 0, [Item.RAW2], shared_landing=False, interleave=False)
        rounds = (nodes - 1).bit_length()
        assert synchronisation(gather) <= 8 * rounds + 2 * local + 8, (nodes, local)
        reduction = reduce_scatter(
            layout, topology, 0, grad=Item.BF16, output=Item.F32, chunk_bytes=1 << 20, interleave=False
        )
        waves = -(-nodes // local)
        # A partial: pushes to and waits for local peers; a send, an arrival, a credit. A wave: waits for local peers.
        assert synchronisation(reduction) <= nodes * (3 * local + 8) + waves * (4 * local + 4), (nodes, local)
        assert CallBook(topology, 4).counters <= 2 * nodes + local + 2 * rounds + 20


def test_the_geometry_of_a_real_block_is_a_few_numbers_a_parameter() -> None:
    """A layout is arithmetic: nothing in it is kept per rank."""
    layout = preset("llama-3.1-70b").groups[-2].layout(RANKS)
    kept = [v for v in vars(layout).values() if isinstance(v, (tuple, list, dict))]
    assert kept
    assert all(len(v) <= len(layout.params) + 1 for v in kept)
