"""Counters between ranks, in one process and in two; waits that take too long."""

from __future__ import annotations

import multiprocessing as mp
import os
import time

import numpy as np
from stage import (
    AWAIT,
    COPY,
    MIB,
    NOTIFY,
    OTHERS,
    RAW,
    array,
    calls,
    cell,
    controls,
    fake,
    finish,
    lone_control,
    memory,
    play,
    program,
    raises,
    run,
    scenario,
    until,
)

from tide_strategies._native import cuda


@scenario
def counters_across_ranks():
    """Notify all, notify one, count 0, and two calls that overlap, among three ranks."""
    ranks, (made, own) = 3, controls(3)
    everyone = program(
        [[NOTIFY, 0, 1, OTHERS], *[[AWAIT, 0, w, 1] for w in (1, 2)]],
        n_counters=1,
        advance=[(0, w, 1) for w in range(3)],
    )
    assert everyone.segments(0) == [("signals", 3)]
    streams = [cuda.Stream(0, 0) for _ in range(ranks)]
    first = everyone.begin(made[0], [], [1], 1, 1.0)
    first.enqueue(0, streams[0].handle)
    until(lambda: cell(own[1], 3, 1, 0) == 1 and cell(own[2], 3, 1, 0) == 1)
    assert cell(own[0], 3, 1, 0) == 0, "nobody reads the own cell in the own memory"
    assert made[0].outstanding() == 1
    for r in (1, 2):
        tell = program([[NOTIFY, 0, 1, 0]], n_counters=1, advance=[(0, w, 1) for w in range(3)])
        tell.begin(made[r], [], [1], 1, 1.0).enqueue(0, streams[r].handle)
    until(lambda: made[0].outstanding() == 0)
    assert cell(own[1], 3, 1, 2) == 0, "only rank 0 was told"
    before = program([[AWAIT, 0, 1, 0]], n_counters=1)
    before.begin(made[0], [], [1], 2, 1.0).enqueue(0, streams[0].handle)
    until(lambda: made[0].outstanding() == 0)
    finish()


@scenario
def readers_name_who_every_other_rank_is():
    made, own = controls(4)
    prog = program([[NOTIFY, 0, 2, OTHERS]], n_counters=1, advance=[(0, 1, 2)], readers=[0, 1, 3])
    run(prog, made[1], [], [3])
    assert [cell(m, 4, 3, 1) for m in own] == [2, 0, 0, 2]


@scenario
def many_signals_are_split():
    """More than 255 stream memory operations at once are given in pieces; the record brackets them all."""
    made, own = controls(40, 16)
    ops = [[NOTIFY, c, 1, OTHERS] for c in range(16)] + [[AWAIT, c, w, 0] for c in range(16) for w in range(1, 40)]
    prog = program(ops, n_counters=16, advance=[(c, 0, 1) for c in range(16)])
    run(prog, made[0], [], range(16))
    assert calls("cuStreamBatchMemOp") == -(-(16 * 39 * 2 + 2) // 250)
    assert all(cell(own[39], 40, c, 0) == 1 for c in range(16))
    assert made[0].outstanding() == 0


@scenario
def counters_wrap_around():
    big = 2**31 - 1
    (a, b), own = controls()
    steps = [big, big, 3, 5]  # the third passes 2**32
    stream = cuda.Stream(0, 0), cuda.Stream(0, 0)
    total = 0
    for n in steps:
        total += n
        wait = program([[AWAIT, 0, 0, n]], n_counters=1, advance=[(0, 0, n)])
        tell = program([[NOTIFY, 0, n, OTHERS]], n_counters=1, advance=[(0, 0, n)])
        wait.begin(b, [], [2], 1, 1.0).enqueue(0, stream[1].handle)
        time.sleep(0.02)
        assert b.outstanding() == 1
        tell.begin(a, [], [2], 1, 1.0).enqueue(0, stream[0].handle)
        until(lambda: b.outstanding() == 0)
        assert cell(own[1], 2, 2, 0) == total % 2**32
    assert total > 2**32


@scenario
def records_are_reused():
    """Many more waits than the ring has entries, behind one that lags."""
    (a, b), _own = controls()
    lagging = program([[AWAIT, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    slow, fast = cuda.Stream(0, 0), cuda.Stream(0, 0)
    lagging.begin(a, [], [0], 5, 1.0).enqueue(0, slow.handle)
    passes = program([[AWAIT, 0, 1, 0]] * 2, n_counters=1)
    for i in range(9000):
        passes.begin(a, [], [1], 1, 1.0).enqueue(0, fast.handle)
        if i % 1000 == 999:
            until(lambda: a.outstanding() == 1)
    assert [w["tag"] for w in a.overdue(0.0)] == [5]
    program([[NOTIFY, 0, 1, OTHERS]], n_counters=1, advance=[(0, 1, 1)]).begin(b, [], [0], 1, 1.0).enqueue(
        0, fast.handle
    )
    until(lambda: a.outstanding() == 0)


@scenario
def overdue_waits_are_named():
    (a, b), _ = controls()
    stream, other = cuda.Stream(0, 0), cuda.Stream(0, 0)
    tell = program([[NOTIFY, 0, 4, OTHERS]], n_counters=1, advance=[(0, 1, 4)])
    tell.begin(b, [], [3], 1, 1.0).enqueue(0, other.handle)
    finish()
    both = program([[AWAIT, 0, 1, 4], [AWAIT, 1, 1, 2]], n_counters=2, advance=[(0, 1, 4), (1, 1, 2)])
    for tag in (10, 11):
        both.begin(a, [], [3, 2], tag, 1.0).enqueue(0, stream.handle)
    assert a.outstanding() == 2
    until(lambda: a.overdue(0.0) != [])
    (wait,) = a.overdue(0.0)
    assert wait.pop("blocked_s") >= 0
    # The second call has not begun, and of the first one's two waits only one is not fulfilled.
    assert wait == {"k": 0, "seq": 1, "tag": 10, "counter": 2, "writer": 1, "expected": 2, "seen": 0}
    assert a.overdue(30.0) == []
    time.sleep(0.15)
    assert [w["tag"] for w in a.overdue(0.1)] == [10]
    for bad in (-1.0, float("nan")):
        with raises(ValueError, "seconds"):
            a.overdue(bad)
    fake.fake_hold_host_copies(1)
    begun = time.monotonic()
    assert [(w["counter"], w["seen"]) for w in a.overdue(0.1)] == [(3, None), (2, None)]
    assert [w["seen"] for w in a.overdue(0.1)] == [None, None]
    assert time.monotonic() - begun < 3.0, "not longer than the limit for reading"
    fake.fake_hold_host_copies(0)
    until(lambda: [w["seen"] for w in a.overdue(0.1)] == [0])
    assert not a.released
    assert a.release()
    assert a.released
    until(lambda: a.outstanding() == 0)


@scenario
def release_frees_present_and_future_waits():
    (a, b), own = controls()
    stream = cuda.Stream(0, 0)
    wait = program([[AWAIT, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    for _ in range(3):
        wait.begin(a, [], [0], 1, 1.0).enqueue(0, stream.handle)
    time.sleep(0.05)
    assert a.outstanding() == 3
    assert a.release()
    until(lambda: a.outstanding() == 0)
    assert cell(own[0], 2, 0, 1) == 3 + 2**30
    wait.begin(a, [], [0], 1, 1.0).enqueue(0, stream.handle)
    finish()
    assert b.outstanding() == 0
    assert not b.released
    fake.fake_hold_host_copies(1)
    begun = time.monotonic()
    assert not a.release()
    assert time.monotonic() - begun < 6.0
    fake.fake_hold_host_copies(0)
    finish()  # what was held back is written before its memory goes


@scenario
def threads_of_the_host_let_streams_go_on():
    """And streams tell them how far they have come, through words and bytes in host memory; without the driver."""
    control, host, stream = cuda.Control.in_host_memory(0, 2, 0, 4), cuda.HostMemory(0, 96, 2), cuda.Stream(0, 0)
    source, target = memory(), memory()
    array(source, np.uint8, 0, 64)[:] = np.arange(64)
    array(target, np.uint8)[:] = 0xEE
    wait = program([[AWAIT, 0, 1, 2]], n_counters=1, advance=[(0, 1, 2)])
    host.fetch(32, source.address, 64, stream.handle)
    host.mark(1, 2**32 - 1, stream.handle)
    wait.begin(control, [], [3], 7, 1.0).enqueue(0, stream.handle)
    host.store(target.address + 16, 32, 64, stream.handle)
    host.mark(1, 0, stream.handle)  # words go round
    assert host.marked(1, 2**32 - 1, 10.0)
    until(lambda: control.overdue(0.0) != [])
    control.deliver(3, 1, 1)
    (found,) = control.overdue(0.0)
    assert (found["counter"], found["writer"], found["expected"], found["seen"]) == (3, 1, 2, 1)
    begun, before = time.monotonic(), calls("cuCtxPushCurrent")
    assert not host.marked(1, 0, 0.05)
    assert not control.delivered(3, 1, 2, 0.05)
    assert time.monotonic() - begun < 5
    control.deliver(3, 1, 2)
    assert control.delivered(3, 1, 2, 0.0)
    assert host.marked(1, 0, 10.0)
    assert calls("cuCtxPushCurrent") == before, "the driver was asked"
    assert list(array(target, np.uint8, 0, 96)) == [0xEE] * 16 + list(range(64)) + [0xEE] * 16
    wait.begin(control, [], [3], 7, 1.0).enqueue(0, stream.handle)
    assert control.release()
    until(lambda: control.outstanding() == 0)
    control.deliver(3, 1, 0)
    assert control.delivered(3, 1, 4 + 2**30, 0.0), "what is released stays so"
    with raises(ValueError, "the cells of this control are not in host memory"):
        lone_control().deliver(0, 0, 1)
    with raises(ValueError, "counter is 4; allowed: 0 to 3"):
        control.deliver(4, 1, 1)
    with raises(ValueError, "offset is 33; allowed: 0 to 32"):
        host.fetch(33, source.address, 64, stream.handle)
    with raises(ValueError, "bytes is 97; allowed: 0 to 96"):
        host.store(target.address, 0, 97, stream.handle)
    with raises(ValueError, "index is 2; allowed: 0 to 1"):
        host.mark(2, 1, stream.handle)
    with raises(ValueError, "is a default stream"):
        host.mark(1, 1, 0)
    with raises(ValueError, "bytes is 0; allowed: 1 to "):
        cuda.HostMemory(0, 0)
    with raises(ValueError, "marks is -1; allowed: 0 to "):
        cuda.HostMemory(0, 96, -1)


@scenario
def pinned_memory_of_the_host_is_told_to_the_byte():
    """What an object says that it pins is what the driver was asked for, and is given back."""
    own, before = memory(), fake.fake_pinned_memory()
    makers = {
        (96, 0): lambda: cuda.HostMemory(0, 96),
        (96, 2): lambda: cuda.HostMemory(0, 96, 2),
        "on the device": lambda: cuda.Control(0, 2, 0, 4, own, [None, None]),
        "on the host": lambda: cuda.Control.in_host_memory(0, 2, 0, 4),
    }
    found = {}
    for what, make in makers.items():
        made = make()
        found[what] = fake.fake_pinned_memory() - before
        assert made.pinned_bytes == found[what], what
        del made
        assert fake.fake_pinned_memory() == before, what
    assert (found[96, 0], found[96, 2]) == (96, 96 + 2 * 4)
    cells = cuda.Control.control_bytes(2, 4)
    assert found["on the host"] - found["on the device"] == cells
    assert found["on the device"] > 2 * cells


@scenario
def blocked_work_does_not_block_the_end():
    """A process whose waits are never fulfilled still drops its objects and exits in bounded time."""
    (a, b), own = controls()
    stream = cuda.Stream(0, 0)
    wait = program([[AWAIT, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    call = wait.begin(a, [], [0], 1, 1.0)
    call.enqueue(0, stream.handle)
    begun = time.monotonic()
    del a, b, own, call, wait, stream
    assert time.monotonic() - begun < 10.0


def _peer(rank, connection, results):
    """All-gather of one shard a rank over memory that two processes share."""
    from tide_strategies.runtime.bootstrap import share_fd

    def exchange(payload):
        connection.send_bytes(payload)
        theirs = connection.recv_bytes()
        return [payload, theirs] if rank == 0 else [theirs, payload]

    n = 100_000
    own, maps = cuda.Allocation(rank, 2 * MIB), []
    for root in range(2):

        def turned(payload, root=root):
            replies = exchange(payload)
            return [*replies[root:], *replies[:root]]

        fd, _ = share_fd(turned, (rank - root) % 2, 2, 30.0, own.export_fd)
        source = own if root == rank else cuda.Allocation.from_fd(fd, own.bytes, rank)
        os.close(fd)
        maps.append(cuda.Mapping(source, rank))
    control = cuda.Control(rank, 2, rank, 4, maps[rank], [None if r == rank else maps[r] for r in range(2)])
    exchange(b"cleared")
    landing = 1 << 20  # past the counters
    mine = array(maps[rank], np.int32, landing + rank * n * 4, n)
    peer = 1 - rank
    ops = [
        [AWAIT, 0, peer, 0],
        [COPY, rank, landing + rank * n * 4, peer, landing + rank * n * 4, 1, n * 4, 0, 0, RAW, RAW],
        [NOTIFY, 1, 1, OTHERS],
        [AWAIT, 1, peer, 1],
        [NOTIFY, 0, 1, OTHERS],
    ]
    prog = program(
        ops,
        streams=[(0, 3), (3, 1), (4, 1)],
        n_bases=2,
        n_counters=2,
        advance=[(c, w, 1) for c in (0, 1) for w in (0, 1)],
    )
    streams = [cuda.Stream(rank, -1) for _ in range(3)]
    for step in range(5):
        mine[:] = np.arange(n) + 1000 * rank + step
        call = prog.begin(control, [m.address for m in maps], [2, 3], step, 1.0)
        call.enqueue(0, streams[0].handle)
        call.enqueue(1, streams[1].handle)
        until(lambda: control.outstanding() == 0, 30.0)
        got = array(maps[rank], np.int32, landing + peer * n * 4, n)
        assert np.array_equal(got, np.arange(n) + 1000 * peer + step)
        # The own shard must have left before it is overwritten, and the peer's may come only now.
        assert fake.fake_idle(rank, 10_000)
        call.enqueue(2, streams[2].handle)
    exchange(b"done")
    results.put((rank, "ok"))


@scenario
def two_processes_share_memory_and_counters():
    spawn = mp.get_context("spawn")
    ends, results = spawn.Pipe(), spawn.Queue()
    processes = [spawn.Process(target=_peer, args=(r, ends[r], results), daemon=True) for r in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0, 0]
    assert sorted(results.get(timeout=5) for _ in processes) == [(0, "ok"), (1, "ok")]


if __name__ == "__main__":
    play(globals())
