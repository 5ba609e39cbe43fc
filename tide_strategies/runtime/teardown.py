"""An orderly end for programs that used gloo process groups: no abort after the work is done.

The hazard, in any program on the CPU (seen with stock FSDP2 and nothing of ours loaded, about one run in eight):
``Work.wait()`` returns when a collective is complete, a moment *before* the gloo worker thread that ran it drops
its own reference to the Work. If that reference is the last one, dropping it frees tensors that Python owns, for
which the worker needs the GIL. Should the main thread already be inside ``Py_FinalizeEx``, CPython answers a
request for the GIL with ``pthread_exit``; unwinding through a C++ destructor then ends the process with
"terminate called without an active exception" (SIGABRT, exit code -6).

``destroy_process_group()`` alone does not help: device meshes, DTensors and FSDP's own state keep the C++ group,
and with it the worker threads, alive until the very end. What helps is to *see* that every worker has let go
before the interpreter starts to finalise. A worker that has nothing in hand is parked on a condition variable with
no timeout; one that waits for the network or for the GIL waits with a timeout or keeps being scheduled. Linux
shows both in ``/proc/self/task``, so no collective is needed, and a dead peer cannot make the teardown hang.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("tide_strategies.teardown")

_WORKER = "pt_gloo_runloop"  # the name torch gives to the worker threads of ProcessGroupGloo
_TASKS = "/proc/self/task"
_SAMPLE_S = 0.01  # above CPython's 5 ms GIL switch interval, at which a thread that waits for the GIL wakes up
_STABLE_SAMPLES = 3
_BLIND_WAIT_S = 0.25  # where threads cannot be observed: this long without the GIL, and no proof
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine())

_lock = threading.Lock()
_installed_in: int | None = None


@dataclass(frozen=True, slots=True)
class _Worker:
    """One sample of a worker thread: ``switches`` grows whenever it was scheduled in between."""

    tid: str
    switches: int
    parked: bool


def orderly_teardown(timeout_s: float = 30.0) -> None:
    """Let every gloo worker thread finish what it holds, then destroy the process groups.

    Call it at the end of a program, on every rank, or let :func:`install_exit_teardown` do so. It is no
    collective: ranks need not arrive together, and a dead peer delays nobody. It may be called again, and before
    or without ``init_process_group`` (a program that destroyed its groups itself still has worker threads).

    Args:
        timeout_s: seconds this may take in all. Workers still busy then (a peer hangs in a collective) are left
            alone, and their groups are kept alive so that nothing later waits for them either.

    Never raises for what it finds; problems are logged under ``tide_strategies.teardown``.
    """
    # Even with no time allowed, look long enough to see that workers are idle, as they nearly always are.
    deadline = time.monotonic() + max((_STABLE_SAMPLES + 1) * _SAMPLE_S, timeout_s)
    with _lock:
        try:
            _teardown(deadline)
        except Exception:
            # At exit there is nobody to catch it, and the work of the program is already done.
            _log.warning("the teardown of the process groups failed", exc_info=True)


def install_exit_teardown() -> None:
    """Run :func:`orderly_teardown` when this process exits. Only the first call in a process registers it.

    Exit handlers run last-registered first and before the interpreter finalises, so handlers that the program
    registers later still find their process groups.
    """
    global _installed_in
    if _installed_in != os.getpid():
        # A forked child inherits the parent's registration: the pid decides whose it is.
        if _installed_in is None:
            atexit.register(_at_exit)
        _installed_in = os.getpid()


def _at_exit() -> None:
    if _installed_in == os.getpid():
        orderly_teardown()


def _teardown(deadline: float) -> None:
    dist: Any = sys.modules.get("torch.distributed")  # not imported: then there is nothing to tear down
    if dist is None or not dist.is_available():
        return
    initialized = dist.is_initialized()
    if not initialized and _observable() and not _workers():
        return
    groups = _process_groups(dist) if initialized else []
    idle = _await_idle_workers(deadline)
    if not idle:
        _log.warning(
            "gloo workers are still busy with a collective that does not end (does a peer hang?); "
            "their process groups are left as they are"
        )
        for group in groups:
            _keep_for_ever(group)  # destroying one would wait for its worker, that is, for the peer
        return
    if initialized:
        _destroy(dist, groups, deadline)
    del groups
    gc.collect()  # Works and groups in reference cycles go now, while the interpreter is whole
    _await_idle_workers(deadline)


def _process_groups(dist: Any) -> list[Any]:
    """All process groups of this process that torch keeps book of."""
    return list(dist.distributed_c10d._world.pg_map)


def _destroy(dist: Any, groups: list[Any], deadline: float) -> None:
    """Destroy all groups: at once where only gloo is used, else in a helper thread that may be given up."""
    if not _sees_timeouts():
        for group in groups:
            _keep_for_ever(group)  # a collective might be in flight after all, and the destructor would wait for it
    if all(dist.get_backend(g) in ("gloo", "fake") for g in groups):
        dist.destroy_process_group()  # the workers are idle: joining them takes no time
        return
    # Other backends may talk to their peers here, without a bound of their own.
    helper = threading.Thread(target=_destroy_quietly, args=(dist,), name="tide-teardown", daemon=True)
    try:
        helper.start()
    except RuntimeError:
        return  # Python >= 3.12 starts no threads at exit; the driver releases what these backends hold
    helper.join(max(0.0, deadline - time.monotonic()))
    if helper.is_alive():
        _log.warning("destroy_process_group() did not end in time; going on without it")


def _destroy_quietly(dist: Any) -> None:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        _log.warning("destroy_process_group() failed", exc_info=True)


def _keep_for_ever(group: Any) -> None:
    """Leak one reference: the destructor of a busy group waits for its workers, for as long as its timeout."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _observable() -> bool:
    return os.path.isdir(_TASKS)


def _sees_timeouts() -> bool:
    """Whether the kernel tells what threads wait for, so that a worker waiting for its peer does not look idle."""
    try:
        return _FUTEX is not None and bool(_read(str(threading.get_native_id()), "syscall"))
    except OSError:
        return False


def _await_idle_workers(deadline: float) -> bool:
    """Wait, without the GIL, until every gloo worker is parked with nothing in hand; False if not by then."""
    if not _observable():
        time.sleep(min(_BLIND_WAIT_S, max(0.0, deadline - time.monotonic())))
        return True
    before = _workers()
    stable = 0
    while before:
        time.sleep(_SAMPLE_S)  # a worker that needs the GIL to let go of a tensor gets it here
        now = _workers()
        quiet = now == before and all(w.parked for w in now)
        stable = stable + 1 if quiet else 0
        if stable >= _STABLE_SAMPLES:
            return True
        if time.monotonic() >= deadline:
            return False
        before = now
    return True


def _workers() -> list[_Worker]:
    """A sample of this process's gloo worker threads, in the order of their ids."""
    found = []
    for tid in sorted(os.listdir(_TASKS)):
        try:
            if _read(tid, "comm").strip() != _WORKER:
                continue
            status = dict(line.split(":", 1) for line in _read(tid, "status").splitlines() if ":" in line)
        except OSError:
            continue  # the thread ended between the two looks
        switches = sum(int(status.get(k, "0")) for k in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
        sleeping = status.get("State", "").strip().startswith("S")
        found.append(_Worker(tid, switches, sleeping and not _waits_with_timeout(tid)))
    return found


def _waits_with_timeout(tid: str) -> bool:
    """Whether the thread sleeps on a futex with a timeout: it waits for a peer (or the GIL), it is not parked."""
    try:
        fields = _read(tid, "syscall").split()
    except OSError:
        return False  # the kernel does not tell: the count of switches has to do
    if _FUTEX is None or len(fields) < 5 or fields[0] != str(_FUTEX):
        return False
    return int(fields[4], 16) != 0  # futex(address, operation, value, timeout, ...)


def _read(tid: str, name: str) -> str:
    with open(f"{_TASKS}/{tid}/{name}", encoding="ascii", errors="replace") as f:
        return f.read()
