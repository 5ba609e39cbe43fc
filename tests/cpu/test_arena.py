"""The shared arena between processes: meeting, growing, counters, and every way in which a peer can fail."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import struct
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import launch, launch_raw

from tide_strategies import _native
from tide_strategies.errors import TideArenaError
from tide_strategies.runtime import bootstrap
from tide_strategies.runtime.arena import SharedArena

NOTIFY, AWAIT = 3, 4


def encode(ops, n_counters, advance):
    words = b"".join(struct.pack("<12q", *op, *[0] * (12 - len(op))) for op in ops)
    return _native.Program(words, b"", [(0, len(ops))], 0, n_counters, advance)


def exchange(payload: bytes) -> list[bytes]:
    out: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(out, payload)
    return out


def create(rank, world, counters=8, timeout_s=10.0):
    return SharedArena.create(exchange, rank, world, counters, timeout_s)


def barrier_program(rank, world):
    """Everybody notifies, then awaits all others: one counter, as many writers as ranks."""
    ops = [[NOTIFY, 0, 1], *[[AWAIT, 0, r, 1] for r in range(world) if r != rank]]
    return encode(ops, 1, [(0, r, 1) for r in range(world)])


def wait_program(writer):
    return encode([[AWAIT, 0, writer, 1]], 1, [(0, writer, 1)])


def shared_words(arena, count=64):
    offset = arena.grow(8 * count, part="words")
    mapping = _native.Mapping(arena.native, offset, 8 * count)
    return torch.from_dlpack(mapping.tensor(0, count, "int64"))


def _grow(rank, world, _):
    with create(rank, world) as arena:
        first = arena.grow(10_000, part="ring")
        words = shared_words(arena)
        words[rank] = rank + 100
        assert barrier_program(rank, world).replay(arena.native, [], [3], 1, 1.0, 20.0).status == "ok"
        seen = words[:world].tolist()
        before = arena.native.allocated_bytes
        with pytest.raises(TideArenaError) as too_much:
            arena.grow(1 << 50, part="huge")
        with pytest.raises(TideArenaError) as differing:
            arena.grow(4096 * (1 + rank), part="odd")
        dist.barrier()  # rank 0 has given back
        after = arena.native.allocated_bytes
        dist.barrier()  # all have looked
        assert after == before
        again = arena.grow(4096, part="ring")
        parts = arena.bytes_by_part()
        dist.barrier()
    with pytest.raises(TideArenaError, match="closed"):
        arena.grow(1)
    return first, again, seen, str(too_much.value), str(differing.value), parts, arena.host_pids


def test_ranks_share_memory_and_grow_together():
    results = launch(3, _grow)
    assert all(r == results[0] for r in results)
    first, again, seen, too_much, differing, parts, pids = results[0]
    page = os.sysconf("SC_PAGESIZE")
    assert seen == [100, 101, 102]
    assert len(set(pids)) == 3
    ring = -(-10_000 // page) * page
    assert again == first + ring + page
    assert parts == {"control": first, "ring": ring + page, "words": page}
    assert f"{1 << 50} bytes are needed for 'huge'" in too_much
    assert "are available" in too_much
    assert "grow the shared arena differently" in differing


def _barriers(rank, world, rounds):
    arena = create(rank, world)
    words = shared_words(arena)
    program, waited = barrier_program(rank, world), 0.0
    for i in range(rounds):
        words[rank] = i
        outcome = program.replay(arena.native, [], [i % 2], i, 1.0, 30.0)
        assert outcome.status == "ok", outcome
        waited += outcome.waited_s
        others = words[:world].tolist()
        assert all(i <= w <= i + 1 for w in others), (i, others)
        # Nobody may write round i + 1 before everybody has read round i.
        assert program.replay(arena.native, [], [2 + i % 2], i, 1.0, 30.0).status == "ok"
    return waited


@pytest.mark.parametrize("world", [2, 4])
def test_barriers_through_counters_hold(world):
    assert all(waited >= 0 for waited in launch(world, _barriers, 500))


def _wrap(rank, world, _):
    arena = create(rank, world)
    big, outcomes = 2**31 - 1, []
    ops = [[NOTIFY, 0, big], [AWAIT, 0, 1 - rank, big]]
    program = encode(ops, 1, [(0, r, big) for r in range(world)])
    for _ in range(9):  # the 32-bit cells wrap four times
        outcomes.append(program.replay(arena.native, [], [0], 0, 1.0, 20.0).status)
        # The lead of one rank must stay below 2**31: the next round waits until this one is over for both.
        outcomes.append(barrier_program(rank, world).replay(arena.native, [], [1], 0, 1.0, 20.0).status)
    return outcomes


def test_counters_wrap_between_processes():
    assert launch(2, _wrap) == [["ok"] * 18] * 2


def _latency(rank, world, rounds):
    """Rank 1 writes the time and notifies while rank 0 has long been asleep; rank 0 reads the clock on waking."""
    arena = create(rank, world)
    words, late = shared_words(arena), []
    barrier, wait = barrier_program(rank, world), wait_program(1)
    notify = encode([[NOTIFY, 0, 1]], 1, [(0, 1, 1)])
    for _ in range(rounds):
        assert barrier.replay(arena.native, [], [0], 0, 1.0, 20.0).status == "ok"
        if rank == 0:
            assert wait.replay(arena.native, [], [1], 0, 1.0, 20.0).status == "ok"
            late.append((time.monotonic_ns() - int(words[0])) * 1e-9)
        else:
            time.sleep(0.002)
            words[0] = time.monotonic_ns()
            assert notify.replay(arena.native, [], [1], 0, 1.0, 20.0).status == "ok"
    return statistics.median(late) if late else None


def test_a_sleeping_waiter_wakes_within_half_a_millisecond():
    best = min(launch(2, _latency, 200)[0] for _ in range(2))
    assert best < 0.5e-3


def _signalled(rank, world, sig):
    arena = create(rank, world)
    assert barrier_program(rank, world).replay(arena.native, [], [0], 0, 1.0, 20.0).status == "ok"
    if rank == 1:
        time.sleep(60)
        return None
    os.kill(arena.host_pids[1], sig)
    start = time.monotonic()
    outcome = wait_program(1).replay(arena.native, [], [1], 5, 1.0, 1.5 if sig == signal.SIGSTOP else 30.0)
    took = time.monotonic() - start
    with contextlib.suppress(ProcessLookupError):
        os.kill(arena.host_pids[1], signal.SIGKILL)
    return outcome.status, outcome.writer, outcome.expected, outcome.seen, outcome.peer_seq, took


def test_killed_peer_is_reported_within_two_seconds():
    results = launch_raw(2, _signalled, signal.SIGKILL)
    status, writer, _, _, _, took = results[0].value
    assert (status, writer) == ("peer_dead", 1)
    assert took < 2.0
    assert results[1].exit_code == -signal.SIGKILL


def test_stopped_peer_is_a_timeout_in_time():
    results = launch_raw(2, _signalled, signal.SIGSTOP)
    status, writer, expected, seen, peer_seq, took = results[0].value
    assert (status, writer, expected, seen, peer_seq) == ("timeout", 1, 1, 0, 1)
    assert 1.5 <= took < 3.5


def _abort(rank, world, _):
    arena = create(rank, world)
    dist.barrier()
    if rank == 2:
        time.sleep(0.3)
        assert arena.abort(17, "grüße " + "x" * 500)
    start = time.monotonic()
    status = wait_program((rank + 1) % world).replay(arena.native, [], [0], 0, 1.0, 30.0).status
    took = time.monotonic() - start
    dist.barrier()
    return status, arena.aborted(), took


def test_abort_reaches_every_rank():
    for status, record, took in launch(3, _abort):
        assert status == "aborted"
        assert record[:2] == (2, 17)
        assert record[2].startswith("grüße xxx")
        assert took < 3.0


def _mismatch(rank, world, _):
    arena = create(rank, world)
    outcome = barrier_program(rank, world).replay(arena.native, [], [0], 40 + rank, 1.0, 20.0)
    return outcome.status, outcome.peer_tag


def test_ranks_that_issue_different_collectives_are_told():
    assert launch(2, _mismatch) == [("mismatch", 41), ("mismatch", 40)]


def _cannot_attach(rank, world, failing):
    if rank == failing:

        class Refusing:
            create = staticmethod(_native.Arena.create)

            @staticmethod
            def attach(*_):
                raise OSError(24, "Too many open files")

        import tide_strategies.runtime.arena as module

        module.Arena = Refusing
    with pytest.raises(TideArenaError) as caught:
        create(rank, world)
    return str(caught.value)


def test_one_rank_that_cannot_attach_fails_all_alike():
    texts = launch(3, _cannot_attach, 2)
    assert len(set(texts)) == 1
    assert "rank 2: OSError" in texts[0]
    assert "Too many open files" in texts[0]


def _no_memory_file(rank, world, _):
    def refuse():
        raise OSError(38, "Function not implemented")

    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TideArenaError) as caught:
        bootstrap.share_fd(exchange, rank, world, 5.0, refuse)
    assert len(os.listdir("/proc/self/fd")) == fds
    return str(caught.value)


def test_rank_zero_that_cannot_create_fails_all_alike():
    texts = launch(2, _no_memory_file)
    assert texts[0] == texts[1]
    assert "creating the shared arena failed. rank 0: OSError: [Errno 38]" in texts[0]


def _late_rank(rank, world, _):
    if rank == 1:
        bootstrap._receive = lambda *a: (_ for _ in ()).throw(TimeoutError("never came"))
    start = time.monotonic()
    with pytest.raises(TideArenaError) as caught:
        create(rank, world, timeout_s=1.0)
    return str(caught.value), time.monotonic() - start


def test_rank_that_never_fetches_the_descriptor_ends_in_time():
    (first, took), (second, _) = launch(2, _late_rank)
    assert first == second
    assert "rank 0: TimeoutError: timed out: rank(s) [1] did not fetch" in first
    assert "rank 1: TimeoutError: never came" in first
    assert took < 10


def _strangers(rank, world, _):
    """Before rank 1 comes, others connect: with a wrong token, saying nothing, hanging up."""
    real = bootstrap._receive

    def after_strangers(name, own_rank, root, tokens, deadline):
        import socket

        keep = []
        for greeting in (b"", b"\0" * 20, tokens[root] + b"\7\0\0\0"):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            s.connect(b"\0tide-" + name.hex().encode())
            s.sendall(greeting)
            if greeting:
                s.settimeout(10)
                assert s.recv(1) == b""  # dropped
            else:
                s.close()
            keep.append(s)
        return real(name, own_rank, root, tokens, deadline)

    if rank == 1:
        bootstrap._receive = after_strangers
    return create(rank, world).native.bytes


def test_strangers_at_the_socket_get_nothing_and_stop_nobody():
    first, second = launch(2, _strangers)
    assert first == second


def _elsewhere(rank, world, key):
    real = bootstrap.host_identity
    bootstrap.host_identity = lambda: {**real(), **({key: "other"} if rank == 1 else {})}
    with pytest.raises(TideArenaError) as caught:
        create(rank, world)
    return str(caught.value)


@pytest.mark.parametrize("key", ["boot_id", "net_namespace"])
def test_ranks_that_cannot_share_memory_are_told_why(key):
    first, second = launch(2, _elsewhere, key)
    assert first == second
    assert "ranks 0 and 1 cannot share memory" in first
    assert key in first


def test_bootstrap_needs_no_torch_and_one_rank_needs_no_peer():
    code = (
        "import sys\n"
        "from tide_strategies.runtime.arena import SharedArena\n"
        "a = SharedArena.create(lambda b: [b], 0, 1, 4, 5.0)\n"
        "assert a.grow(5, part='x') == a.native.control_bytes\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_message_that_is_not_ours_is_an_error_with_words():
    with pytest.raises(TideArenaError, match="rank 1: sent something that is not a bootstrap message"):
        bootstrap.agree(lambda b: [b, b"\x80pickle"], 0, None, "testing")


def test_negative_growth_is_refused():
    arena = SharedArena.create(lambda b: [b], 0, 1, 1, 5.0)
    with pytest.raises(ValueError, match="negative"):
        arena.grow(-1)
