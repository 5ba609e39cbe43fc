"""Nodes of GPUs that are connected by messages: engines on the fake driver, gloo between processes."""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import signal
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import FakeKernels
from hosts_scenarios import FOUND_S, INTERVAL_S, LONG, SWAPPED, Training
from nodes_scenarios import SIZES, TIMEOUT_S, Rank, bf16, check_collectives, lost
from path_scenarios import check_steps
from ranks import launch, values
from stage import fake, memory, play, scenario, until

from tide_strategies._native import cuda
from tide_strategies.cli.plan import arena_of_gpu_ranks, pinned_of_gpu_ranks
from tide_strategies.collectives.schedule import Item
from tide_strategies.config import TideConfig
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.fsdp2 import connect
from tide_strategies.fsdp2.board import open_board
from tide_strategies.planner import architectures
from tide_strategies.planner.knobs import unmeasured
from tide_strategies.planner.memory import Ring
from tide_strategies.runtime.cuda import p2p_threads, pieces, sum_kernels
from tide_strategies.runtime.hosts import Placement
from tide_strategies.topology import Topology

#: So small that most puts go in several pieces.
AS_EVER = pieces._LEAST, pieces._MOST
pieces._LEAST = pieces._MOST = 192


def join(exchange, rank, size):
    """The process group that a program has."""
    if not dist.is_initialized():
        bound, ours = datetime.timedelta(seconds=60), None
        if rank == 0:
            ours = dist.TCPStore("127.0.0.1", 0, size, True, bound, wait_for_workers=False)
        port = int(exchange(str(ours.port if ours else 0).encode())[0])
        store = ours or dist.TCPStore("127.0.0.1", port, size, False, bound)
        dist.init_process_group("gloo", store=store, timeout=bound, world_size=size, rank=rank)


def messages(exchange, rank, topology, device, timeout_s, book):
    """The rail as a program gets it, which has a process group of its ranks."""
    join(exchange, rank, topology.ranks)
    connect.CallBook = lambda *_: book
    config = TideConfig.from_any({"timeout_s": timeout_s})
    return connect._device_rail(exchange, dist.group.WORLD, Placement(topology, "p2p", ""), device, config, 0)


def _with_the_lock(rank, exchange):
    """Whether the program's stream gets through an all-gather while a call holds the interpreter's lock."""
    here = Rank(rank, exchange, Topology(2, 1), rank, chunk_bytes=256, connect=messages)
    group, marks, hold = here.groups[0], cuda.HostMemory(rank, 1, 1), ctypes.PyDLL(None).usleep
    time.sleep(0.3 * rank)
    here.gather(group, [np.zeros(group.layout.shard_items(p), np.uint16) for p in range(len(SIZES))])
    group.arrive()
    marks.mark(0, 1, here.stream("completion"))
    hold(400_000)
    through = marks.marked(0, 1, 0.0)
    here.vacate(group)
    here.finish()
    exchange(b"all are through")
    here.engine.close()
    return through


@scenario
def collectives_and_steps_run_over_messages():
    """All-gathers land every shard; reductions give the bytes of the CPU's executor; training gets through.

    With one hardware queue, and a host that waits for the device before every launch, as well: threads that bring what
    the device awaits need nothing of the driver, and streams are given everything in order.
    """
    for shape, *how in [
        ((2, 1), Item.F32, False, 4096),
        ((2, 2), Item.BF16, True, 64),
        ((4, 1), Item.F32, True, 64),
    ]:
        found = values(launch(shape[0] * shape[1], check_collectives, shape, *how, messages))
        assert all(launches > 0 for launches in found)
    assert values(launch(2, _with_the_lock)) == [True, True]
    os.environ["FAKE_CUDA_CONNECTIONS"] = "1"
    os.environ["FAKE_CUDA_BLOCKING"] = "1"
    check_steps([((2, 2), False, None, messages)])


class _ConnectedError(Exception):
    """All memory has been asked for."""


def _pinned(rank, exchange, form):
    """What connecting groups allocates by part, as it says itself; its forecast and the driver's count agree."""
    pieces._LEAST, pieces._MOST = AS_EVER
    topology, found = Topology(*form), []
    join(exchange, rank, topology.ranks)
    torch.cuda.current_device, sum_kernels.sum_kernels = lambda: rank % 2, FakeKernels
    groups = [architectures.block(f"block {i}", [(3001, 70), (77,)], 2) for i in range(3)]
    groups.append(architectures.block("head", [(5000, 90)], 2, resharded=False))
    knobs = unmeasured("cuda", topology, [g.layout(topology.ranks) for g in groups], chunk_bytes=1 << 16)
    on_gpu = torch.device("cuda", rank % 2)
    members = [
        SimpleNamespace(
            name=g.name,
            layout=g.layout(topology.ranks),
            group=SimpleNamespace(_reshard_after_forward=g.resharded, device=on_gpu),
        )
        for g in groups
    ]

    def connected(engine, members, config, *_):
        connect._homes(engine, members, config)
        rails = [t for t in threading.enumerate() if t.name.startswith("tide-rail")]
        assert len(rails) == 5 * (topology.nodes - 1), rails
        found.append((engine.bytes_by_part(), engine.pinned_by_part()))
        of_the_rail = fake.fake_pinned_memory() - before - engine.control.pinned_bytes
        assert sum(engine.pinned_by_part().values()) == of_the_rail
        raise _ConnectedError

    connect._device_groups = connected
    config = TideConfig.from_any({"timeout_s": 20, "reduce_scatter.chunk_bytes": 1 << 16})
    before = fake.fake_pinned_memory()
    with pytest.raises(_ConnectedError):
        connect._connect_devices(exchange, dist.group.WORLD, members, config, knobs, Placement(topology, "p2p", ""))
    ((arena, pinned),) = found
    forecast = arena_of_gpu_ranks(groups, topology, knobs=knobs, ring=Ring(), mode="in_place", multicast=False)
    assert arena == forecast
    assert pinned == pinned_of_gpu_ranks(groups, topology, forecast, Ring())
    assert (pinned["stage"], pinned["inbox"]) == (arena["stage"], arena["inbox"])
    return pinned["pieces"]


@scenario
def pinned_memory_is_what_is_forecast_to_the_byte():
    """Of nodes that send messages: twins of what peers put into, pieces (and a word each) for all peers, cells."""
    for form, sending in [((2, 1), 32 << 20), ((2, 2), 32 << 20), ((3, 1), 64 << 20)]:
        words = 4 * 2 * pieces.PIECES * (form[0] - 1)
        assert set(values(launch(form[0] * form[1], _pinned, form))) == {sending + words}


def _lost_rank():
    """Killed, rank 3 is dead to its own host; rank 1, on another, has lost a connection; rank 0 is told."""
    with tempfile.TemporaryDirectory() as folder:
        results = launch(4, lost, "killed", folder, messages, 2)
        found = values(launch(4, lost, "stalled", folder, messages, 2))
        wrote = len(os.listdir(folder))
    assert wrote == 3 + 4, "what each watchdog saw"
    assert results[3].exit_code == -signal.SIGKILL
    killed = values(results[:3])
    assert {kind for kind, _, _ in killed} == {"TidePeerError"}, killed
    assert any("rank 3 cannot be reached any more" in words or "rank 3 is dead" in words for _, words, _ in killed[:2])
    assert all(took < TIMEOUT_S["killed"] for _, _, took in killed), killed
    assert found[3][0] == "stalled"  # it was told
    timeouts = [words for kind, words, _ in found[:3] if kind == "TideTimeoutError"]
    assert timeouts, found
    assert {kind for kind, _, _ in found[:3]} <= {"TideTimeoutError", "TidePeerError"}, found
    assert all("of rank " in words and ": expected" in words for words in timeouts), timeouts
    assert all(took < 15 for _, _, took in found[:3]), found


def _spoiled(rank, exchange, how):
    """Reduce again and again while rank 1 does something wrong; what each is told, and how long it took to end."""
    if how == "deaf" and rank == 1:
        p2p_threads.Incoming._work = lambda self: self._link.ending.wait(60)
    slow = how == "deaf"
    here = Rank(
        *(rank, exchange, Topology(2, 1), rank),
        **{"chunk_bytes": 256, "timeout_s": 1.0 if slow else 20.0, "connect": messages, "host_ranks": 1},
    )
    here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
    group, begun = here.groups[0], time.monotonic()
    output, gradients = memory(group.layout.output_items * 4, rank), [bf16(np.ones(s)) for s in SIZES]
    try:
        for turn in range(1000):
            if turn == 2 and rank == 1:
                here.rail._out[0][1]._messages += {"doubled": -1, "missing": 1}.get(how, 0)
            if not (slow and rank == 1):
                here.reduce(group, gradients, output, Item.F32, 1.0)
            here.engine.watchdog.check()
            time.sleep(0.02)
    except (TidePeerError, TideTimeoutError) as error:
        took, words = time.monotonic() - begun, str(error)
        until(lambda: here.engine.control.outstanding() == here.rail.outstanding() == 0, 10)
        closing = time.monotonic()
        here.engine.close()
        alive = [t.name for t in here.rail._threads() if t.is_alive()]
        return type(error).__name__, words, took, time.monotonic() - closing, alive
    return "nothing", "", 0.0, 0.0, []


def _left(rank, exchange):
    """Rank 1 takes leave where rank 0 gathers, and waits on its host for what never comes."""
    here = Rank(rank, exchange, Topology(2, 1), rank, chunk_bytes=256, timeout_s=20.0, connect=messages, host_ranks=1)
    here.engine.watchdog._main = 0
    if rank == 1:
        here.engine.close()
        return ""
    here.gather(here.groups[0], [np.zeros(here.groups[0].layout.shard_items(p), np.uint16) for p in range(len(SIZES))])
    begun = time.monotonic()
    with pytest.raises(TidePeerError) as caught:
        here.groups[0].arrive()
    assert time.monotonic() - begun < 10
    assert here.engine.watchdog.stopped
    until(lambda: here.engine.control.outstanding() == here.rail.outstanding() == 0, 10)
    here.engine.close()
    return str(caught.value)


def _wrong_on_the_way():
    """Messages that are missing or come twice; a rank that does not receive. And then the rail ends in time."""
    for how, words in [
        ("doubled", "rank 1 has sent message "),
        ("missing", "rank 1 has sent message "),
        (
            "deaf",
            "no progress within timeout_s=1: rank 0 has sent to rank 1 for reduce-scatters what that does not receive",
        ),
    ]:
        found = values(launch(2, _spoiled, how))
        (kind, said, _, _, _), (other, told, _, _, _) = found
        assert kind == ("TideTimeoutError" if how == "deaf" else "TidePeerError"), found
        assert words in said, said
        assert other == "TidePeerError", found
        assert "rank 0 stopped first: " in told, told
        assert words in told, told
        if how in ("doubled", "missing"):
            was, due = (int(n) for n in re.findall(r"message (\d+)", said))
            assert was == due + (1 if how == "missing" else -1), said
        for _, _, took, closing, alive in found:
            assert took < 10, found
            assert closing < 8, found
            assert alive == [], found


@scenario
def what_goes_wrong_ends_all_ranks_in_time():
    _lost_rank()
    _wrong_on_the_way()
    words, _ = values(launch(2, _left))
    assert "rank 1 has left (TIDE was closed there, or the program ended): rank 0 " in words, words


def _swapped(rank, exchange):
    """Two hosts of one rank, as a program connects them; host 1 swaps two calls."""
    join(exchange, rank, 2)
    placement = Placement(Topology(2, 1), "p2p", "", host_ranks=1)
    board = open_board(exchange, dist.group.WORLD, placement)
    interval_s, board.interval_s = board.interval_s, INTERVAL_S
    found = Training(rank, exchange, (2, 1), board, messages).run(SWAPPED, LONG)
    exchange(b"ended")  # rank 0 has the store
    return interval_s, found


@scenario
def hosts_compare_calls_in_the_process_groups_store():
    """Who finds the difference first tells the other, as a rail of messages can."""
    ranks = values(launch(2, _swapped))
    assert [interval_s for interval_s, _ in ranks] == [1.0, 1.0]
    found = [outcome for _, outcome in ranks]
    assert "TideMismatchError" in {kind for kind, _, _ in found} <= {"TideMismatchError", "TidePeerError"}, found
    for _, words, took in found:
        assert f"began call {2 * SWAPPED + 1}, reduce-scatter of '" in words, words
        assert ", while rank " in words, words
        assert took < FOUND_S, found


if __name__ == "__main__":
    play(globals())
