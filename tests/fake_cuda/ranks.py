"""Ranks of a scenario: processes that share device memory, started by fork before the driver is, or threads of one.

Both are bounded in time.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass
class Result:
    """What a rank returned, or the words of its exception, and how its process ended."""

    value: Any = None
    error: str = ""
    exit_code: int | None = None


def launch(ranks, function, *arguments, timeout_s=60.0):
    """Run ``function(rank, exchange, *arguments)`` in ``ranks`` processes; their results."""
    fork = mp.get_context("fork")
    pipes = [fork.Pipe() for _ in range(ranks)]
    common = (pipes, arguments, timeout_s)
    processes = [fork.Process(target=_main, args=(function, r, *common), daemon=True) for r in range(ranks)]
    for p in processes:
        p.start()
    for _, theirs in pipes:
        theirs.close()
    results = [Result() for _ in range(ranks)]
    _serve([ours for ours, _ in pipes], results, time.monotonic() + timeout_s)
    for p, result in zip(processes, results, strict=True):
        p.join(5)
        if p.exitcode is None:
            os.kill(p.pid, signal.SIGKILL)
            p.join()
            result.error = result.error or f"no result within {timeout_s} s"
        result.exit_code = p.exitcode
    return results


def threads(size, work, timeout_s=20.0):
    """Run ``work(exchange, rank)`` as ranks on threads; what each returned or raised."""
    payloads, barrier, results = [b""] * size, threading.Barrier(size, timeout=timeout_s), [None] * size

    def run(rank):
        def exchange(payload):
            payloads[rank] = payload
            barrier.wait()
            got = list(payloads)
            barrier.wait()
            return got

        try:
            results[rank] = work(exchange, rank)
        except Exception as e:
            results[rank] = e

    started = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return results


def values(results):
    """What all ranks returned, all of them well."""
    for rank, result in enumerate(results):
        assert not result.error, f"rank {rank}: {result.error}"
        assert result.exit_code == 0, f"rank {rank} ended with {result.exit_code}"
    return [r.value for r in results]


def _main(function, rank, pipes, arguments, timeout_s):
    faulthandler.dump_traceback_later(0.8 * timeout_s)  # where it was, should there be no result
    for r, (ours, theirs) in enumerate(pipes):
        ours.close()
        if r != rank:
            theirs.close()
    connection = pipes[rank][1]

    def exchange(payload):
        connection.send(("exchange", payload))
        return connection.recv()

    try:
        connection.send(("value", function(rank, exchange, *arguments)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # streams of the fake driver are threads, which may still wait


def _serve(connections: list[Connection], results: list[Result], deadline: float) -> None:
    """Hand payloads around until every rank has ended."""
    open_ends, waiting = dict(enumerate(connections)), {}
    while open_ends and time.monotonic() < deadline:
        ready = wait([c for r, c in open_ends.items() if r not in waiting], timeout=0.2)
        for rank in [r for r, c in open_ends.items() if c in ready]:
            try:
                kind, content = open_ends[rank].recv()
            except EOFError:
                del open_ends[rank]
                continue
            if kind == "exchange":
                waiting[rank] = content
            else:
                setattr(results[rank], kind, content)
        if len(waiting) == len(connections):
            replies = [waiting[r] for r in range(len(connections))]
            waiting.clear()
            for c in connections:
                c.send(replies)
