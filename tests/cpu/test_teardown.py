"""Programs that used gloo process groups end with exit code 0, and their teardown never hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PREAMBLE = """
import os, time, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from tide_strategies.runtime.teardown import install_exit_teardown, orderly_teardown
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
"""

# What exposes the hazard: the last thing before the end is a collective whose tensors Python owns.
TRAIN = """
install_exit_teardown()
install_exit_teardown()
dist.init_process_group("gloo")
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)])
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
full = [p.full_tensor() for p in model.parameters()]
"""


def start(world: int, body: str, tmp_path: Path) -> list[subprocess.Popen[str]]:
    """Start ``body`` as a real script on every rank."""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    procs = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        procs.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return procs


def finish(procs: list[subprocess.Popen[str]], timeout: float = 90.0) -> list[tuple[int, str]]:
    """Exit code and output of every rank; what still runs after ``timeout`` is killed and shows as -9."""
    deadline = time.monotonic() + timeout
    results = []
    for p in procs:
        try:
            out, _ = p.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            out, _ = p.communicate()
        results.append((p.returncode, out))
    return results


ENDINGS = {
    "left to the exit handler": "",
    "after the user's own destroy": "dist.destroy_process_group()",
    "called by hand, twice": "orderly_teardown(); orderly_teardown()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_code_is_zero(ending: str, tmp_path: Path) -> None:
    for _ in range(2):
        for code, out in finish(start(2, TRAIN + ending, tmp_path)):
            assert code == 0, out


@pytest.mark.parametrize("hidden", ["t._FUTEX = None", "t._TASKS = '/nowhere'"], ids=["system calls", "threads"])
def test_where_the_kernel_tells_less(hidden: str, tmp_path: Path) -> None:
    """What cannot be observed is waited for instead; the group is let go of all the same."""
    ending = (
        f"import tide_strategies.runtime.teardown as t\n{hidden}\norderly_teardown()\nassert not dist.is_initialized()"
    )
    for code, out in finish(start(2, TRAIN + ending, tmp_path)):
        assert code == 0, out


def test_an_error_keeps_its_exit_code(tmp_path: Path) -> None:
    """The handler hides nothing: a failing program still fails, with its own traceback."""
    for code, out in finish(start(2, TRAIN + "raise SystemExit(7) if rank else KeyError('mine')", tmp_path)):
        assert code in (1, 7)
        assert code == 7 or "KeyError: 'mine'" in out


def test_dead_peer_delays_nobody(tmp_path: Path) -> None:
    """Rank 1 is killed while rank 0 has a collective with it in flight: rank 0 still ends at once."""
    body = """
    import signal
    install_exit_teardown()
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.5)
    began = time.monotonic()
    orderly_teardown(timeout_s=20)
    print("teardown", time.monotonic() - began, dist.is_initialized())
    """
    (code, out), (killed, _) = finish(start(2, body, tmp_path))
    assert killed == -signal.SIGKILL
    assert code == 0, out
    seconds, initialized = out.split("teardown ")[1].split()[:2]
    assert float(seconds) < 5
    assert initialized == "False"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's view of threads")
def test_stopped_peer_costs_only_the_time_allowed(tmp_path: Path) -> None:
    """Rank 1 neither answers nor dies: rank 0 gives up after its timeout, leaves the group, and exits."""
    body = """
    import logging, signal
    logging.basicConfig()
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    began = time.monotonic()
    orderly_teardown(timeout_s=1.0)
    print("teardown", time.monotonic() - began)
    """
    procs = start(2, body, tmp_path)
    try:
        ((code, out),) = finish(procs[:1], timeout=60)
    finally:
        procs[1].kill()
        procs[1].communicate()
    assert code == 0, out
    assert "still busy" in out
    assert 0.9 < float(out.split("teardown ")[1].split()[0]) < 5


def test_without_process_groups() -> None:
    """Neither torch.distributed nor torch itself has to be there, and nothing is imported for it."""
    code = """
    import sys, time
    from tide_strategies.runtime.teardown import install_exit_teardown, orderly_teardown
    began = time.monotonic()
    install_exit_teardown()
    orderly_teardown()
    orderly_teardown(0.0)
    assert time.monotonic() - began < 1
    """
    for before, after in (("", "assert 'torch' not in sys.modules"), ("import torch.distributed", "")):
        script = "\n".join([before, textwrap.dedent(code), after])
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
