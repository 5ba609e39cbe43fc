"""Waiting on counters: bounded, woken promptly, not burning a core, and telling what went wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_native_program import AWAIT, NOTIFY, arena_pair, encode

from tide_strategies._native import Arena

WAIT_FOR_0 = {"ops": [[AWAIT, 0, 0, 1]], "n_counters": 1, "advance": [(0, 0, 1)]}
NOTIFY_ONE = {"ops": [[NOTIFY, 0, 1]], "n_counters": 1, "advance": [(0, 0, 1)]}


def timed(fn):
    start = time.monotonic()
    return fn(), time.monotonic() - start


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, 0.25])
def test_timeout_comes_in_time_and_names_what_is_missing(timeout_s):
    _, second = arena_pair()
    outcome, took = timed(lambda: encode(**WAIT_FOR_0).replay(second, [], [5], 7, 1.0, timeout_s))
    assert (outcome.status, outcome.op, outcome.writer, outcome.counter) == ("timeout", 0, 0, 5)
    assert (outcome.expected, outcome.seen, outcome.peer_seq, outcome.peer_tag) == (1, 0, -1, -1)
    assert timeout_s <= took < timeout_s + 2.0
    assert outcome.waited_s == pytest.approx(took, abs=0.5)
    assert "timeout" in repr(outcome)


def test_timeout_bounds_all_waits_of_a_replay_together():
    first, second = arena_pair()
    ops = [[AWAIT, 0, 0, 0], [AWAIT, 1, 0, 1], [AWAIT, 2, 0, 1]]
    outcome, took = timed(lambda: encode(ops, n_counters=3).replay(second, [], [0, 1, 2], 0, 1.0, 0.2))
    assert (outcome.status, outcome.op) == ("timeout", 1)
    assert took < 2.0
    del first


def test_waiting_does_not_burn_the_processor():
    _, second = arena_pair()
    program = encode(**WAIT_FOR_0)
    cpu = time.process_time()
    _, took = timed(lambda: program.replay(second, [], [0], 0, 1.0, 1.0))
    assert time.process_time() - cpu < 0.25 * took


def test_counters_wrap_around():
    first, second = arena_pair()
    big = 2**31 - 1
    notify = encode([[NOTIFY, 0, big]], n_counters=1, advance=[(0, 0, big)])
    wait = encode([[AWAIT, 0, 0, big]], n_counters=1, advance=[(0, 0, big)])
    for i in range(1, 8):
        early = wait.begin(second, [], [3], 0, 1.0)
        assert early.run(0, 0.01).status == "timeout"
        assert notify.replay(first, [], [3], 0, 1.0, 1.0).status == "ok"
        assert early.run(0, 1.0).status == "ok"
        value = encode([[AWAIT, 0, 0, 1]], n_counters=1).begin(second, [], [3], 0, 1.0).run(0, 0.0)
        assert (value.status, value.seen, value.expected) == ("timeout", i * big % 2**32, (i * big + 1) % 2**32)


def test_notification_wakes_a_sleeping_waiter():
    first, second = arena_pair()
    outcomes = []
    waiter = threading.Thread(target=lambda: outcomes.append(encode(**WAIT_FOR_0).replay(second, [], [0], 1, 1.0, 30)))
    waiter.start()
    time.sleep(0.2)
    assert encode(**NOTIFY_ONE).replay(first, [], [0], 1, 1.0, 1.0).status == "ok"
    waiter.join(10)
    assert outcomes[0].status == "ok"
    assert 0.05 < outcomes[0].waited_s < 10


def test_abort_ends_waits_and_the_first_one_is_kept():
    first, second = arena_pair()
    assert first.aborted() is None
    outcomes = []
    program = encode(**WAIT_FOR_0)
    waiter = threading.Thread(target=lambda: outcomes.append(program.replay(second, [], [0], 1, 1.0, 30)))
    waiter.start()
    time.sleep(0.1)
    start = time.monotonic()
    assert first.abort(-3, b"x" * 500)
    waiter.join(10)
    assert time.monotonic() - start < 1.0
    assert outcomes[0].status == "aborted"
    assert not second.abort(4, b"later")
    assert first.aborted() == second.aborted() == (0, -3, b"x" * 400)
    assert program.replay(second, [], [0], 1, 1.0, 30).status == "aborted"
    with pytest.raises(ValueError, match="32 bits"):
        first.abort(2**31, b"")


def test_other_tag_is_seen_after_a_satisfied_wait():
    first, second = arena_pair()
    assert encode(**NOTIFY_ONE).replay(first, [], [0], 11, 1.0, 1.0).status == "ok"
    outcome = encode(**WAIT_FOR_0).replay(second, [], [0], 22, 1.0, 1.0)
    assert (outcome.status, outcome.peer_seq, outcome.peer_tag) == ("mismatch", 1, 11)


def test_other_tag_is_seen_while_waiting_for_what_never_comes():
    first, second = arena_pair()
    encode(**NOTIFY_ONE).replay(first, [], [0], 11, 1.0, 1.0)
    outcome, took = timed(lambda: encode(**WAIT_FOR_0).replay(second, [], [6], 22, 1.0, 30.0))
    assert (outcome.status, outcome.peer_tag) == ("mismatch", 11)
    assert took < 5.0


def test_tags_of_distant_calls_are_not_compared():
    first, second = arena_pair()
    notify, wait = encode(**NOTIFY_ONE), encode(**WAIT_FOR_0)
    for i in range(200):  # the writer runs far ahead, more than a ring of 64
        notify.replay(first, [], [0], i, 1.0, 1.0)
    for i in range(200):
        assert wait.replay(second, [], [0], i, 1.0, 1.0).status == "ok"
    late = wait.replay(second, [], [0], 200, 1.0, 0.0)
    assert (late.status, late.peer_seq, late.peer_tag) == ("timeout", 200, 199)


def sleeping_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_dead_peer_is_noticed_even_as_a_zombie():
    _, second = arena_pair()
    child = sleeping_child()
    try:
        second.watch(0, child.pid)
        program = encode(**WAIT_FOR_0)
        assert program.replay(second, [], [0], 0, 1.0, 0.3).status == "timeout"
        child.send_signal(signal.SIGKILL)
        outcome, took = timed(lambda: program.replay(second, [], [0], 0, 1.0, 30.0))
        assert (outcome.status, outcome.writer) == ("peer_dead", 0)
        assert took < 2.0
    finally:
        child.kill()
        child.wait()


WITHOUT_PIDFD = """
import ctypes, struct, subprocess, sys, time
from tide_strategies._native import Arena, Program
# A system call filter: pidfd_open (434) fails with ENOSYS, everything else is allowed.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *r) for r in rules))
head = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0):
    sys.exit(77)
first = Arena.create(2, 0, 1)
second = Arena.attach(first.fd, 2, 1, 1)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
second.watch(0, child.pid)
wait = Program(struct.pack("<12q", 4, 0, 0, 1, *[0] * 8), b"", [(0, 1)], 0, 1, [])
statuses = [wait.replay(second, [], [0], 0, 1.0, 0.3).status]
child.kill()
statuses.append(wait.replay(second, [], [0], 0, 1.0, 30.0).status)
child.wait()
statuses.append(wait.replay(second, [], [0], 0, 1.0, 30.0).status)
try:
    second.watch(0, child.pid)
except ProcessLookupError:
    statuses.append("refused")
print(*statuses)
"""


def test_dead_peer_is_noticed_without_pidfds():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PIDFD], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip("no system call filters here")
    assert done.stdout.split() == ["timeout", "peer_dead", "peer_dead", "refused"], done.stderr


def test_what_a_dead_peer_finished_still_counts():
    first, second = arena_pair()
    child = sleeping_child()
    second.watch(0, child.pid)
    child.kill()
    child.wait()
    encode(**NOTIFY_ONE).replay(first, [], [0], 0, 1.0, 1.0)
    assert encode(**WAIT_FOR_0).replay(second, [], [0], 0, 1.0, 1.0).status == "ok"
    with pytest.raises(ProcessLookupError):
        second.watch(0, child.pid)


def test_interrupt_ends_a_wait():
    _, second = arena_pair()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        encode(**WAIT_FOR_0).replay(second, [], [0], 0, 1.0, 30.0)
    assert time.monotonic() - start < 5.0
    timer.join()
    signal.signal(signal.SIGINT, before)


def test_waiting_lets_other_python_threads_run():
    _, second = arena_pair()
    ticks = []

    def tick():
        for _ in range(20):
            ticks.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=tick)
    thread.start()
    encode(**WAIT_FOR_0).replay(second, [], [0], 0, 1.0, 0.5)
    assert len(ticks) == 20
    thread.join()


def test_arena_without_counters_and_with_one_rank():
    arena = Arena.create(1, 0, 0)
    assert encode([]).replay(arena, [], [], 0, 1.0, 0.0).status == "ok"
