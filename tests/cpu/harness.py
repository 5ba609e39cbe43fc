"""Run one function in several processes, bounded in time, and hand back what each returned.

    results = launch(2, train, {"steps": 3})

``train(rank, world, arg)`` runs in a process per rank with a gloo process group ready. Whatever goes wrong in one rank
(an exception, a signal, a hang) fails the test with that rank's own traceback.

The processes are forked from a server that has imported torch and nothing of ours, which saves each rank seconds. They
are otherwise as good as fresh: the environment is that of the caller now, and their memory is laid out differently.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class RankResult:
    """Outcome of one rank: its return value, or the text of its exception, and its exit code."""

    value: Any = None
    error: str | None = None
    error_type: str | None = None
    exit_code: int | None = None


#: What every rank needs and what starts no threads.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
]
#: What the first forward of FSDP2 imports. Not where there are GPUs: it may look at them, and then no fork could.
_PRELOAD_WITHOUT_GPU = ["torch._dynamo"]
#: Keeps ranks' memory apart: forked alike, they would map the same things at the same addresses, and one that used its
#: own address for another's memory would be right by luck.
_APART_BYTES = 64 * 1024 * 1024
_apart: list[mmap.mmap] = []


def forking() -> Any:
    """The multiprocessing context whose processes are forked from the server."""
    import torch

    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(_PRELOAD + ([] if torch.cuda.is_available() else _PRELOAD_WITHOUT_GPU))
    return ctx


def become_rank(environment: dict[str, str], rank: int) -> None:
    """In a process of the server: take over the caller's environment, with memory laid out as no other rank's."""
    gc.freeze()  # what the server imported is there for good: no collection needs to look at it
    _apart.append(mmap.mmap(-1, (rank + 1) * _APART_BYTES, prot=mmap.PROT_READ))
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)  # the variable was read when the server started


def _main(
    work: bytes,
    environment: dict[str, str],
    rank: int,
    world: int,
    store: str,
    out: Any,
    pg_timeout: float,
    backend: str,
) -> None:
    become_rank({**environment, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}, rank)
    import datetime

    import torch
    import torch.distributed as dist

    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=pg_timeout),
        )
        fn, arg = pickle.loads(work)  # imports the test's module, now that the environment is right
        value = fn(rank, world, arg)
        out.put((rank, pickle.dumps(value), None, None))
        code = 0
    except BaseException as e:
        out.put((rank, None, traceback.format_exc(), type(e).__name__))
        code = 1
    # The results are out; leave without interpreter finalisation, which can abort in torch's gloo threads
    # (the product's own exits are tested through its doors, not through this harness).
    out.close()
    out.join_thread()
    os._exit(code)


def launch_raw(
    world: int,
    fn: Callable[..., Any],
    arg: Any = None,
    *,
    timeout: float = 120.0,
    pg_timeout: float = 60.0,
    backend: str = "gloo",
    during: Callable[[list[int]], None] | None = None,
) -> list[RankResult]:
    """Run ``fn`` on ``world`` ranks; never raises for what a rank did. ``during`` gets the process ids once started."""
    ctx = forking()
    out = ctx.Queue()
    results = [RankResult() for _ in range(world)]
    work = pickle.dumps((fn, arg))
    with tempfile.TemporaryDirectory() as tmp:
        store = os.path.join(tmp, "store")
        procs = [
            ctx.Process(
                target=_main, args=(work, dict(os.environ), r, world, store, out, pg_timeout, backend), daemon=True
            )
            for r in range(world)
        ]
        for p in procs:
            p.start()
        if during is not None:
            during([p.pid for p in procs])
        deadline, seen = time.monotonic() + timeout, 0
        while seen < world and time.monotonic() < deadline:
            try:
                rank, value, error, kind = out.get(timeout=0.2)
            except queue.Empty:
                if all(p.exitcode is not None for p in procs) and out.empty():
                    break
                continue
            seen += 1
            results[rank] = RankResult(pickle.loads(value) if value else None, error, kind)
        for r, p in enumerate(procs):
            p.join(max(0.0, deadline - time.monotonic()) if seen == world else 0.5)
            if p.exitcode is None:
                p.kill()
                p.join()
                if results[r].error is None and results[r].value is None:
                    results[r].error, results[r].error_type = f"no result within {timeout} s; killed", "Hang"
            results[r].exit_code = p.exitcode
            if results[r].error is None and p.exitcode != 0:
                results[r].error, results[r].error_type = f"exit code {p.exitcode}", "Exit"
    return results


def launch(world: int, fn: Callable[..., Any], arg: Any = None, **kw: Any) -> list[Any]:
    """Run ``fn`` on ``world`` ranks and return their values; raise with the first failing rank's traceback."""
    results = launch_raw(world, fn, arg, **kw)
    for rank, r in enumerate(results):
        if r.error is not None:
            raise AssertionError(f"rank {rank} of {world} failed:\n{r.error}")
    return [r.value for r in results]
