"""Bounds for waits that happen on the device.

A stream that waits for a peer cannot time out by itself. This thread looks at the waits that have begun; if one lasts
longer than allowed, or its peer is dead, or another rank has stopped, it leaves word for all ranks, lets every wait of
this rank pass so that the host is not stuck in a synchronisation, and makes the error rise in the main thread: what the
streams compute from then on is worthless, and no further call is accepted.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from tide_strategies._native import cuda
from tide_strategies.errors import TideMismatchError, TidePeerError, TideTimeoutError
from tide_strategies.runtime import autopsy
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.rail import DeviceRail
from tide_strategies.runtime.failure import PATIENCE, STOP

_POLL_S = 0.1
#: A wait shorter than this is not worth asking whether its peer lives.
_SUSPICIOUS_S = 1.0
#: Beyond the timeout, after which waits are let pass without this thread if it cannot run.
_STARVED_S = 5.0
_ABORT_FAILURE = 1

Failure = TidePeerError | TideMismatchError


class Order(Protocol):
    """Where what this rank has begun is compared with what others have."""

    def look(self) -> TideMismatchError | None:
        """The difference, if one is known. Waits for nothing."""


class Watchdog:
    """Watches one engine's waits from a thread of its own.

    Args:
        control: the counters and the record of waits.
        host: shared host memory, for the abort record and the peers' process ids.
        book: names for counters and calls.
        rank: this rank.
        timeout_s: how long a wait on the device may last.
        rail: what may be blocked beside the waits of ``control``, and is told when this rank stops.
        orders: where ranks compare what they have begun.
    """

    def __init__(
        self,
        control: cuda.Control,
        host: SharedArena,
        book: CallBook,
        rank: int,
        timeout_s: float,
        rail: DeviceRail | None = None,
        orders: Sequence[Order] = (),
    ) -> None:
        self._control, self._host, self._book, self._rail, self._orders = control, host, book, rail, orders
        self._rank, self._timeout_s = rank, timeout_s
        self._failure: Failure | None = None
        self._stopping = threading.Lock()
        self._closing = threading.Event()
        self._main = threading.main_thread().ident
        self._peers = {r: _process_fd(host.host_pids[r]) for r in host.host if r != rank}
        # Some calls into the driver hold the interpreter's lock while they wait for room in a queue.
        control.release_after(timeout_s + _STARVED_S)
        self._thread = threading.Thread(target=self._run, name="tide-watchdog", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the watchdog found, if anything."""
        if self._failure is not None:
            raise self._failure

    @property
    def stopped(self) -> bool:
        """Whether it has found something."""
        return self._failure is not None

    def stop(self, failure: Failure) -> Failure:
        """Stop all ranks for what the caller has found and will raise; what has stopped this one, if it had already."""
        self._stop(failure, interrupt=False)
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._thread.join(timeout=5.0)
        for fd in self._peers.values():
            if fd >= 0:
                os.close(fd)
        self._peers.clear()

    def _run(self) -> None:
        while self._failure is None and not self._closing.wait(_POLL_S):
            try:
                failure = self._look()
            except Exception as e:  # without this thread waits have no bound: better to stop
                failure = TidePeerError(f"TIDE: rank {self._rank} cannot watch its waits: {e}. {STOP}")
            if failure is not None:
                self._stop(failure)
                break
        # A peer that goes on may overwrite a counter that was let through: repeat until nothing waits.
        while self._failure is not None and not self._closing.wait(_POLL_S) and self._control.outstanding():
            self._control.release()

    def _look(self) -> Failure | None:
        aborted = self._host.aborted()
        if aborted is not None:
            return TidePeerError(f"TIDE: rank {aborted[0]} stopped first: {aborted[2]} {STOP}")
        if self._control.released:
            return TideTimeoutError(
                f"TIDE: no progress within timeout_s={self._timeout_s:g}: rank {self._rank} waited on its device for "
                f"peers, and in a call that let nothing else run, so that more is not known. {STOP}"
            )
        for order in self._orders:
            different = order.look()
            if different is not None:
                return different
        for wait in self._control.overdue(min(_SUSPICIOUS_S, self._timeout_s)):
            if self._dead(wait["writer"]):
                return TidePeerError(f"TIDE: rank {wait['writer']} is dead: {self._words(wait)}. {STOP}")
        # Streams of this rank wait for each other too, and so for what one of them awaits from a peer: blame that.
        for wait in sorted(self._control.overdue(self._timeout_s), key=lambda w: bool(w["writer"] == self._rank)):
            return TideTimeoutError(
                f"TIDE: no progress within timeout_s={self._timeout_s:g}: {self._words(wait)}. {PATIENCE} {STOP}"
            )
        try:  # what is taken for later calls, no call waits for yet
            if self._rail is not None:
                self._rail.check()
        except (TidePeerError, TideTimeoutError) as e:
            return e
        return None

    def _words(self, wait: dict[str, Any]) -> str:
        return (
            f"rank {self._rank} in call {wait['seq']}, {self._book.label(wait['tag'])}, awaits counter "
            f"{self._book.counter_name(wait['counter'])} of rank {wait['writer']}: expected {wait['expected']}, "
            f"seen {wait['seen']}"
        )

    def _dead(self, rank: int) -> bool:
        fd = self._peers.get(rank, -1)
        return fd >= 0 and bool(select.select([fd], [], [], 0)[0])

    def _stop(self, failure: Failure, interrupt: bool = True) -> None:
        with self._stopping:
            if self._failure is not None:
                return
            self._failure = failure
        self._record(failure)
        self._host.abort(_ABORT_FAILURE, str(failure))
        self._control.release()
        try:
            if self._rail is not None:
                self._rail.stop(str(failure))
        except Exception as e:  # what follows matters more
            print(f"tide_strategies: the rail could not be stopped: {e}", file=sys.stderr, flush=True)
        print(f"tide_strategies: {failure}", file=sys.stderr, flush=True)
        if not interrupt:
            return
        # The main thread may be in a loop that makes no further call of ours: raise there too. It gets the class
        # only; the words are on stderr and in every later call.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(type(failure)))

    def _record(self, failure: Failure) -> None:
        try:
            waits = [
                {
                    "call": self._book.label(wait["tag"]),
                    "counter": self._book.counter_name(wait["counter"]),
                    "writer": wait["writer"],
                    "expected": wait["expected"],
                    "seen": wait["seen"] or 0,
                    "peer_call": "",
                }
                for wait in self._control.overdue(0.0)
            ]
        except Exception:  # the device may be what failed
            waits = []
        pids, kind = self._host.host_pids, "aborted" if self._host.aborted() is not None else _kind(failure)
        autopsy.record(rank=self._rank, pids=pids, kind=kind, message=str(failure), waits=waits)


def _kind(failure: Failure) -> str:
    if isinstance(failure, TideTimeoutError):
        return "timeout"
    return "mismatch" if isinstance(failure, TideMismatchError) else "peer_dead"


def _process_fd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
