"""Programs that used gloo process groups end with exit code 0, and their teardown never hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import finish, start

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


def run(world: int, body: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of ``body`` as a script on every rank."""
    return finish(start(world, script(body, folder)))


def script(body: str, folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(PREAMBLE + textwrap.dedent(body))
    return path


ENDINGS = {
    "left to the exit handler": "",
    "after the user's own destroy": "dist.destroy_process_group()",
    "called by hand, twice": "orderly_teardown(); orderly_teardown()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_code_is_zero(ending: str, tmp_path: Path) -> None:
    for _ in range(2):
        for code, out in run(2, TRAIN + ending, tmp_path):
            assert code == 0, out


def test_exit_code_is_zero_in_processes_that_import_everything_themselves(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
    body = TRAIN.replace('"gloo"', '"gloo", f"file://{os.environ[\'STORE\']}", rank=rank, world_size=2')
    command = [sys.executable, str(script(body, tmp_path))]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **own, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, _ = process.communicate(timeout=90)
            assert process.returncode == 0, out
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("hidden", ["t._FUTEX = None", "t._TASKS = '/nowhere'"], ids=["system calls", "threads"])
def test_where_the_kernel_tells_less(hidden: str, tmp_path: Path) -> None:
    """What cannot be observed is waited for instead; the group is let go of all the same."""
    ending = (
        f"import tide_strategies.runtime.teardown as t\n{hidden}\norderly_teardown()\nassert not dist.is_initialized()"
    )
    for code, out in run(2, TRAIN + ending, tmp_path):
        assert code == 0, out


def test_an_error_keeps_its_exit_code(tmp_path: Path) -> None:
    """The handler hides nothing: a failing program still fails, with its own traceback."""
    for code, out in run(2, TRAIN + "raise SystemExit(7) if rank else KeyError('mine')", tmp_path):
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
    (code, out), (killed, _) = run(2, body, tmp_path)
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
    ranks = start(2, script(body, tmp_path))
    try:
        ((code, out),) = finish(ranks[:1], timeout=60)
    finally:
        ranks[1].kill()
        finish(ranks[1:])
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
