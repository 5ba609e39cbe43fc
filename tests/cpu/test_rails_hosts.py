"""Real hosts: ``torchrun --nnodes 2`` across network namespaces, with memory shared only within each."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts

SCRIPT = str(Path(__file__).with_name("hosts_script.py"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as pair:
            yield pair
    except RuntimeError as e:
        pytest.skip(f"this machine does not allow network namespaces: {e}")


def torchrun(
    hosts: tuple[Host, Host], local_ranks: int, port: int, folder: Path, *arguments: str, **environment: str
) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start the script with ``local_ranks`` ranks on each host; returns the launchers and their logs."""
    jobs = []
    for node, host in enumerate(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        command += ["--nproc-per-node", str(local_ranks), "--max-restarts", "0"]
        command += ["--master-addr", hosts[0].address, "--master-port", str(port), SCRIPT, *arguments]
        log = folder / f"{host.name}.log"
        jobs.append((host.start(command, log, OMP_NUM_THREADS="1", **environment), log))
    return jobs


def ended(jobs: list[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> list[int | None]:
    """Exit codes once all have ended; None for those that had to be killed."""
    deadline = time.monotonic() + seconds
    codes: list[int | None] = []
    for process, _ in jobs:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.kill()  # and with it, everything on that host
            process.wait(30)
    return codes


@pytest.mark.parametrize("local_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_hosts_train_like_stock(hosts: tuple[Host, Host], local_ranks: int, tmp_path: Path) -> None:
    jobs = torchrun(hosts, local_ranks, 29650 + local_ranks, tmp_path, "4", "30")
    codes = ended(jobs, 150)
    logs = [log.read_text(errors="replace") for _, log in jobs]
    assert codes == [0, 0], "\n".join(logs)
    arenas = []
    for node, text in enumerate(logs):
        said = re.findall(r"RANK (\d+) ON (\S+): same=(\S+) apart=(\S+) arenas=\[(\d+)\] (.*)", text)
        ranks = {node * local_ranks + i for i in range(local_ranks)}
        assert {int(rank) for rank, *_ in said} == ranks, text
        for rank, name, same, apart, _, rails in said:
            other = (int(rank) + local_ranks) % (2 * local_ranks)
            assert name == f"host{node}"
            assert rails == str([f"tide-rail-from-{other}", f"tide-rail-to-{other}"])
            assert same == "True" if local_ranks == 1 else float(apart) < 1e-4  # two addends have one order
        assert len({arena for *_, arena, _ in said}) == 1, "the ranks of a host share one arena"
        arenas.append(said[0][4])
    assert arenas[0] != arenas[1]


def test_a_host_that_is_cut_off_ends_every_rank_in_time(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    jobs = torchrun(hosts, 2, 29660, tmp_path, "500", "5", PAUSE_S="0.1")
    deadline = time.monotonic() + 90
    while "step 3" not in jobs[0][1].read_text(errors="replace"):
        assert time.monotonic() < deadline, jobs[0][1].read_text(errors="replace")
        time.sleep(0.1)
    hosts[1].unplug()
    start = time.monotonic()
    words = re.compile(r"Tide(?:Peer|Timeout)Error: TIDE: .*rank (\d)")
    seen: list[set[str]] = [set(), set()]
    while not all(seen) and time.monotonic() < start + 45:
        seen = [set(words.findall(log.read_text(errors="replace"))) for _, log in jobs]
        time.sleep(0.2)
    ended(jobs, 20)
    logs = "\n".join(log.read_text(errors="replace") for _, log in jobs)
    assert seen[0] & {"2", "3"}, logs
    assert seen[1] & {"0", "1"}, logs
