"""Nodes that share no memory: messages between them, on one host and on several."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from harness import launch, launch_raw
from models import BF16, Case, batch, build, full_parameters, train

from tide_strategies import apply_tide
from tide_strategies.runtime import bootstrap

CASES = [
    Case("fp32"),
    Case("bf16, uneven", uneven=True, policy=BF16),
    Case("everything cached", accumulate=2, policy=BF16, config={"all_gather.cache": "microbatch"}),
]
#: With 2x2 also the other groups that a job of two nodes may have.
MIXED = [
    Case("experts over the nodes", experts=True, policy=BF16),
    Case("replicas across ranks of a node", hsdp=True, across=True, uneven=True),
]


def _trained(rank: int, world: int, topology: str) -> list[bool]:
    """Whether training over either rail gives the same losses and parameters, for each case."""
    same = []
    for case in CASES + MIXED * (topology == "2x2"):
        results = []
        for rail in ("local", "p2p"):
            model = build(case, world)
            options = {
                **case.config,
                "plan": "tide",
                "timeout_s": 30,
                "strict": True,
                "topology": topology,
                "rail": rail,
            }
            handle = apply_tide(model, options)
            losses = train(model, case, rank)
            threads = [t.name for t in threading.enumerate() if t.name.startswith("tide-rail")]
            assert bool(threads) == (rail == "p2p"), threads
            results.append((losses, full_parameters(model)))
            handle.close()
        (losses, parameters), (others, other_parameters) = results
        equal = all(torch.equal(parameters[n], other_parameters[n]) for n in parameters)
        same.append(losses == others and equal and losses[0] != losses[-1])
    assert not [t for t in threading.enumerate() if t.name.startswith("tide-rail")], "close ends the threads"
    return same


@pytest.mark.parametrize(("topology", "cases"), [("2x2", len(CASES + MIXED)), ("3x1", len(CASES))])
def test_training_over_messages_has_the_bits_of_shared_memory(topology: str, cases: int) -> None:
    nodes, local = map(int, topology.split("x"))
    for same in launch(nodes * local, _trained, topology):
        assert same == [True] * cases


def _lost(rank: int, world: int, how: str) -> None:
    model = build(Case("lost", policy=BF16), world)
    apply_tide(model, {"timeout_s": 4, "topology": "2x2", "rail": "p2p"})
    for step in range(4):
        if step == 2 and rank == 3:
            pid = os.getpid()
            if how == "stopped":  # like a host whose network is cut, it keeps its connections; ended for the harness
                subprocess.Popen(["sh", "-c", f"sleep 8; kill -KILL {pid}"])
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        model(batch(step, rank)).sum().backward()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank_ends_the_ranks_of_every_node_and_is_named(how: str) -> None:
    results = launch_raw(4, _lost, how, timeout=60)
    assert results[3].exit_code == -signal.SIGKILL
    # A stopped process is only known by its silence. (TideTimeoutError is a TidePeerError.)
    allowed = ["TidePeerError"] if how == "killed" else ["TidePeerError", "TideTimeoutError"]
    for r in results[:3]:
        assert r.error_type in allowed, r.error
    assert any("rank 3" in str(r.error) for r in results[:3])


def _failing(rank: int, world: int, _: None) -> None:
    model = build(Case("words", policy=BF16), world)
    apply_tide(model, {"timeout_s": 3, "topology": "2x2", "rail": "p2p"})
    for step in range(3):
        if step == 2 and rank == 1:
            time.sleep(7)  # late for everybody; those who notice first tell the others why
        model(batch(step, rank)).sum().backward()


def test_why_a_rank_stops_reaches_the_other_nodes() -> None:
    results = launch_raw(4, _failing, timeout=60)
    assert all(r.error is not None for r in results)
    told = [r for r in results if "stopped first: TIDE: no progress within timeout_s=3" in str(r.error)]
    assert told, [r.error for r in results]


def _on_hosts(rank: int, world: int, host_of: list[int]) -> tuple[Any, list[float], dict[str, torch.Tensor], list[str]]:
    """Train with ranks that say they are on these hosts: groups' reports, losses, parameters, threads of rails."""
    case = Case("hosts", policy=BF16)
    name = f"host {host_of[rank]}"
    identity = {**bootstrap.host_identity(), "boot_id": name, "hostname": name}
    model = build(case, world)
    with mock.patch.object(bootstrap, "host_identity", return_value=identity):
        handle = apply_tide(model, {"timeout_s": 30})
        losses = train(model, case, rank)
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("tide-rail"))
    groups, parameters = handle.report().groups, full_parameters(model)
    handle.close()
    return groups, losses, parameters, threads


def _hosts(rank: int, world: int, _: None) -> None:
    groups, losses, parameters, threads = _on_hosts(rank, world, [0, 0, 1, 1])
    assert {g.path for g in groups} == {"tide"}
    assert threads == [f"tide-rail-from-{(rank + 2) % 4}", f"tide-rail-to-{(rank + 2) % 4}"]
    groups, stock_losses, stock, threads = _on_hosts(rank, world, [0, 0, 0, 1])
    assert {g.code for g in groups} == {"TIDE-F027"}
    assert "host host 1 has 1 of the ranks, host host 0 has 3" in groups[0].reason
    assert threads == []
    apart = [abs(a - b) for a, b in zip(losses, stock_losses, strict=True)]
    apart += [float((parameters[n] - stock[n]).abs().max()) for n in stock]
    assert max(apart) < 1e-4  # addends in another order, as in test_virtual_nodes.py


def test_hosts_are_found_and_those_that_form_no_topology_keep_stock() -> None:
    launch(4, _hosts)
