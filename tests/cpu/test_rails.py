"""Nodes that share no memory: messages between them, on one host and on several."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankResult, launch, launch_raw
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


#: What becomes of ranks, and whether nodes share memory or send messages. Stopped ranks, like a host whose network is
#: cut, keep their connections; the threads of those asleep go on. Nobody comes after who is killed.
LOST = {
    "a rank stops": ("local", (3,)),
    "a rank stops, messages": ("p2p", (3,)),
    "a node sleeps, messages": ("p2p", (2, 3)),
    "a rank is killed, messages": ("p2p", (3,)),
}
#: A wait looks for the dead, and for who has given up, ten times a second. The rest is for a machine that is busy: less
#: than the timeout, so that to wait for that twice, or at all for a rank that was killed, takes too long.
TIMEOUT_S, LOOK_S, BUSY_S = 3.0, 0.1, 2.5
#: How a rank says what it waits for.
WAIT = re.compile(
    r"rank (\d) in (?:all-gather|reduce-scatter) of '[^']+'.*? \(operation \d+\) "
    r"awaits counter \w+\[\d\] of rank (\d): expected (\d+), seen (\d+)"
)


def _lose(rank: int, world: int, folder: str) -> dict[str, tuple[str, str, float]]:
    """Train until some do no more, in each of these ways: what this rank is told, and how long after the step began."""
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    out = {}
    for what, (rail, lost) in LOST.items():
        marks = {r: Path(folder, f"{what} {r}") for r in range(world)}  # that a rank was told
        others = [mark for r, mark in marks.items() if r not in lost]
        model = build(Case("lost", policy=BF16), world)
        handle = apply_tide(model, {"plan": "tide", "timeout_s": TIMEOUT_S, "topology": "2x2", "rail": rail})
        error, begun = None, 0.0
        try:
            for step in range(3):
                begun = time.monotonic()
                if step == 2 and rank in lost:
                    _do_no_more(what, others)
                model(batch(step, rank)).sum().backward()
        except Exception as e:
            error = e
        out[what] = type(error).__name__, str(error), time.monotonic() - begun
        marks[rank].touch()
        if "killed" in what:
            break  # there is one rank less
        if "stops" in what and rank == 0:
            _await(others)
            for r in lost:
                os.kill(pids[r], signal.SIGCONT)
        handle.close()
        dist.barrier()
    return out


def _do_no_more(what: str, others: list[Path]) -> None:
    if "sleeps" in what:
        _await(others)
    else:
        os.kill(os.getpid(), signal.SIGKILL if "killed" in what else signal.SIGSTOP)


def _await(marks: list[Path]) -> None:
    deadline = time.monotonic() + 3 * TIMEOUT_S
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, f"they have not ended: {marks}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    return launch_raw(4, _lose, str(tmp_path_factory.mktemp("lost")), timeout=100)


@pytest.mark.parametrize("what", LOST)
def test_every_rank_ends_in_time_and_waits_lead_to_who_is_lost(lost: list[RankResult], what: str) -> None:
    """A rank that waits for one that itself waits may be the first to give up, and all hear what it has to say."""
    _, gone = LOST[what]
    killed, waits = "killed" in what, {}
    assert lost[3].exit_code == -signal.SIGKILL
    for rank in {*range(4)} - {*gone}:
        assert lost[rank].error is None, lost[rank].error
        kind, words, took = lost[rank].value[what]
        assert took < LOOK_S + BUSY_S + (0 if killed else TIMEOUT_S), words
        if killed:
            assert kind == "TidePeerError", words
            assert re.search(r"rank 3 (is dead|cannot be reached any more)", words), words
        else:
            assert kind in ("TidePeerError", "TideTimeoutError"), words
            assert f"TIDE: no progress within timeout_s={TIMEOUT_S:g}: rank " in words, words
            assert took >= TIMEOUT_S or kind == "TidePeerError", "only who is told may end before that"
        own = {int(w[2]) for w in WAIT.finditer(words) if int(w[1]) == rank and int(w[4]) < int(w[3])}
        if own:
            (waits[rank],) = own
        else:  # it had not come to wait when it was told
            assert f"rank {rank} at the beginning of " in words, words
    assert {*waits.values()} & {*gone}, waits
    for rank in waits:
        passed = [rank]
        while passed[-1] in waits:
            passed.append(waits[passed[-1]])
            assert passed.count(passed[-1]) == 1, f"they wait for each other: {waits}"


def test_why_a_rank_stops_reaches_the_other_nodes(lost: list[RankResult]) -> None:
    """Nobody on the node that slept has waited for so long."""
    kind, words, _ = lost[2].value["a node sleeps, messages"]
    assert kind == "TidePeerError"
    assert re.search(rf"rank [01] stopped first: TIDE: no progress within timeout_s={TIMEOUT_S:g}: ", words), words


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
