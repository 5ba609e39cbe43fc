"""Processes behind the benchmarks: one per rank, jobs one after another, and what goes wrong in one job stays there.

A job that raises, hangs or kills its process ends the processes of the session; the jobs after it run in new ones.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import faulthandler
import os
import queue
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tide_strategies.runtime.teardown import orderly_teardown

#: Hardware queues that the GPU path asks for; read when CUDA starts in a process.
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_QUEUES = 32
_GRACE_S = 3.0
_LEAVE_S = 40.0
#: To start processes and to bring up process groups, however short the limit of a job is.
_START_S = 120.0

#: Why there is nothing of stock's, where there is nothing.
NO_STOCK = (
    "several ranks share a GPU, where NCCL does not run (2.31.2 or newer does, with NCCL_MULTI_RANK_GPU_ENABLE=1)"
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a rank of a benchmark runs.

    Args:
        rank: this process.
        ranks: how many there are.
        device: what it measures on.
        shares_card: several ranks drive one GPU.
        stock_runs: stock's collectives do. Where ranks share a GPU they need an NCCL that is told to let them
            (``nccl_shares_cards``); else the process group is gloo's.
    """

    rank: int
    ranks: int
    device: torch.device
    shares_card: bool = False
    stock_runs: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Job:
    """One piece of work for all ranks: ``function(place, **arguments)`` yields rows, of which rank 0's count."""

    label: str
    function: Callable[..., Iterable[Row]]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A job that did not end well, and why."""

    label: str
    error: str


def usable_gpus() -> int:
    """How many GPUs torch finds; makes no CUDA context here."""
    return torch.cuda.device_count()


def nccl_shares_cards() -> bool:
    """Whether this process's NCCL lets several ranks drive one GPU; it must be told to."""
    from tide_strategies.runtime.cuda.nccl_domains import missing_nccl

    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and missing_nccl() is None


def meet() -> None:
    """Wait on the host until all ranks are here; nothing is enqueued on a GPU."""
    dist.all_reduce(torch.zeros(1))


def run_jobs(jobs: Sequence[Job], ranks: int, device: str, limit_s: float) -> Iterator[Row | Failure]:
    """Run ``jobs`` in order among ``ranks`` processes; yields their rows, and a failure for each job that failed.

    Args:
        device: "cpu" or "cuda".
        limit_s: seconds that a job may take from one row to the next.
    """
    begun = 0
    while begun < len(jobs):
        session = _Session(jobs[begun:], ranks, device, limit_s)
        try:
            for index, job in enumerate(jobs[begun:]):
                begun += 1
                error = yield from session.rows(index)
                if error:
                    yield Failure(job.label, error)
                    break
        finally:
            session.end()


class _Session:
    """One set of processes and the jobs they go through."""

    def __init__(self, jobs: Sequence[Job], ranks: int, device: str, limit_s: float) -> None:
        context = mp.get_context("spawn")
        self._out: Any = context.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._limit_s, self._ranks, self._jobs = limit_s, ranks, len(jobs)
        self._done: dict[int, int] = {}
        self._errors: list[tuple[int, str]] = []
        self._rows: collections.deque[Row] = collections.deque()
        self._begun = False
        if device == "cuda":
            connections = os.environ.get(MAX_CONNECTIONS, "")
            if not connections.isdecimal() or int(connections) < _QUEUES:
                os.environ[MAX_CONNECTIONS] = str(_QUEUES)
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(target=_rank, args=(r, ranks, device, store, list(jobs), limit_s, self._out), daemon=True)
            for r in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def rows(self, index: int) -> Generator[Row, None, str]:
        """Rows of one job; the generator's value is the error if it failed, else empty."""
        deadline = time.monotonic() + (self._limit_s if self._begun else _START_S)
        while True:
            if self._listen(0.2):
                self._begun, deadline = True, time.monotonic() + self._limit_s
            while self._rows:
                yield self._rows.popleft()
            if any(at <= index for at, _ in self._errors):
                self._listen_for(_GRACE_S)  # the other ranks' own words
                yield from self._rows
                return "\n".join(words for _, words in self._errors)
            if self._done.get(index, 0) == self._ranks:
                return ""
            if time.monotonic() > deadline:
                bound = self._limit_s if self._begun else _START_S
                return f"no progress within {bound:g} s; the processes were stopped"
            self._look_for_the_dead(index)

    def end(self) -> None:
        """Let processes that are through leave, and stop the others."""
        through = not self._errors and sum(self._done.values()) == self._ranks * self._jobs
        deadline = time.monotonic() + (_LEAVE_S if through else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._folder.cleanup()

    def _listen(self, wait_s: float) -> bool:
        """Take in one word from a rank; False if none came in time."""
        try:
            kind, index, what = self._out.get(timeout=wait_s)
        except queue.Empty:
            return False
        if kind == "row":
            self._rows.append(what)
        elif kind == "done":
            self._done[index] = self._done.get(index, 0) + 1
        elif kind == "error":
            self._errors.append((index, what))
        return True

    def _listen_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(self._errors) < self._ranks:
            self._listen(0.2)

    def _look_for_the_dead(self, index: int) -> None:
        for rank, process in enumerate(self._processes):
            if process.exitcode not in (None, 0) and not self._errors:
                self._listen_for(0.5)  # its last words may be on their way
                if not self._errors:
                    self._errors.append((index, f"rank {rank} ended with exit code {process.exitcode}"))


def _rank(rank: int, ranks: int, device: str, store: str, jobs: list[Job], limit_s: float, out: Any) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # names of collectives that newer releases of torch spell otherwise
    index = 0
    try:
        place = _place(rank, ranks, device, store, limit_s)
        for index, job in enumerate(jobs):
            out.put(("begin", index, None))
            faulthandler.dump_traceback_later(0.9 * limit_s, exit=False)
            for row in job.function(place, **job.arguments):
                faulthandler.dump_traceback_later(0.9 * limit_s, exit=False)
                if rank == 0:
                    out.put(("row", index, row))
            out.put(("done", index, None))
        faulthandler.cancel_dump_traceback_later()
        meet()
    except Exception:
        out.put(("error", index, f"rank {rank} of {ranks}:\n{traceback.format_exc()}"))
        out.close()
        out.join_thread()
        os._exit(1)  # peers may hang in a collective: no orderly end is to be had
    with contextlib.suppress(Exception):
        orderly_teardown()


def _place(rank: int, ranks: int, device: str, store: str, limit_s: float) -> Place:
    torch.set_num_threads(1)
    backend, shares_card, stock_runs, where = "gloo", False, True, torch.device("cpu")
    if device == "cuda":
        gpus = torch.cuda.device_count()
        where, shares_card = torch.device("cuda", rank % gpus), ranks > gpus
        torch.cuda.set_device(where)
        torch.zeros(1, device=where)  # a context of its own, before anything asks for one
        stock_runs = not shares_card or nccl_shares_cards()
        backend = f"cpu:gloo,cuda:{'nccl' if stock_runs else 'gloo'}"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=max(limit_s, _START_S)),
    )
    return Place(rank, ranks, where, shares_card, stock_runs)
