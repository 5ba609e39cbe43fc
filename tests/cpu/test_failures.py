"""Whatever goes wrong ends in words, on every rank, in time, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import launch
from programs import finish, start
from stacks import (
    HIDDEN,
    ODD,
    WIDTH,
    Stack,
    attempt,
    plain,
    shard,
    train,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tide_strategies import apply_tide
from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2 import guards, handle
from tide_strategies.runtime import teardown

# --- options, before anything else ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"all_gather.slot": 3}, "did you mean 'all_gather.slots'"),
        ({"timeout_s": "5"}, "'timeout_s' must be a number"),
        (5, "must be a mapping or a TideConfig"),
    ],
)
def test_wrong_options_are_refused_before_anything_else(options: Any, words: str) -> None:
    """Before the model is looked at, and without a process group."""
    with pytest.raises(TideConfigError, match=words):
        apply_tide(nn.Linear(2, 2), options)


def test_a_model_without_fully_shard_is_refused() -> None:
    with pytest.raises(TideConfigError, match=r"Linear has no FSDPModule\. Call torch\.distributed\.fsdp\.fully_shard"):
        apply_tide(nn.Linear(2, 2))


# --- what ranks must agree on ---------------------------------------------------------------------------------


def _disagree(rank: int, world: int, _: Any) -> dict[str, tuple[str, str, float]]:
    out = {}
    options = {"timeout_s": 10, "all_gather.slots": 2 + rank}
    out["options"] = attempt(lambda: apply_tide(plain(), options))
    with mock.patch.dict(os.environ, {"TIDE_TOPOLOGY": "1x2"} if rank else {}):
        out["environment"] = attempt(lambda: apply_tide(plain(), {"timeout_s": 10}))
    verdict = guards.GuardResult(False, "9.9", guards.UNKNOWN_VERSION, "torch 9.9 is unknown", "Install another.")
    with mock.patch.object(handle, "check_torch", return_value=verdict) if rank else mock.MagicMock():
        out["torch"] = attempt(lambda: apply_tide(plain(), {"timeout_s": 10}))

    def first_forward(model: nn.Module) -> tuple[str, str, float]:
        tide = apply_tide(model, {"timeout_s": 10})
        result = attempt(lambda: train(model, 1))
        assert not tide.installed
        assert "the installation failed (TideMismatchError" in tide.report().status
        tide.close()
        dist.barrier()
        return result

    out["wider"] = first_forward(plain(hidden=HIDDEN + 8 * rank))
    frozen = plain()
    frozen.blocks[ODD].up.weight.requires_grad_(rank == 0)
    out["frozen"] = first_forward(frozen)
    torch.manual_seed(0)
    fewer = Stack()
    if rank == 1:
        del fewer.blocks[-1]
    out["fewer"] = first_forward(shard(fewer))
    return out


def test_ranks_that_disagree_stop_together_naming_both_sides() -> None:
    first, second = launch(2, _disagree)
    words = {
        "options": ["'all_gather.slots'", "rank 0 has 2", "rank 1 has 3"],
        "environment": ["'topology'", "rank 0 has 'auto'", "rank 1 has {'nodes': 1, 'gpus_per_node': 2}"],
        "torch": ["'torch verdict'", "rank 0 has 'TIDE-OK'", "rank 1 has 'TIDE-F101'"],
        "wider": ["blocks.0.up.weight", f"rank 0 has [[{HIDDEN}, {WIDTH}]", f"rank 1 has [[{HIDDEN + 8}, {WIDTH}]"],
        "frozen": [f"blocks.{ODD}.up.weight", "True]", "False]"],
        "fewer": ["'group 3'", "rank 0 has {'name': 'blocks.2'", "rank 1 has None"],
    }
    assert first.keys() == words.keys()
    for name, expected in words.items():
        for kind, text, seconds in (first[name], second[name]):
            assert kind == "TideMismatchError", text
            assert [w for w in expected if w not in text] == [], text
            assert seconds < 10


# --- shared memory is private ---------------------------------------------------------------------------------


def _private(rank: int, world: int, _: Any) -> dict[str, Any]:
    model = plain()
    tide = apply_tide(model, {"timeout_s": 30, "strict": True})
    train(model, 1)
    (installation,) = tide._installations
    (engine,) = installation.engines
    fd = engine.arena.native.fd
    status = os.fstat(fd)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {status.st_ino} " in line]
    out = {
        "mode": stat.S_IMODE(status.st_mode),
        "owner": status.st_uid == os.geteuid(),
        "links": status.st_nlink,
        "name": os.readlink(f"/proc/self/fd/{fd}"),
        "maps": {line.split(maxsplit=5)[5].split(":")[0] for line in maps if "memfd" in line},
        "shared": all(line.split()[1][3] == "s" for line in maps),
        "inherited": os.get_inheritable(fd),
        "sockets": [line for line in Path("/proc/net/unix").read_text().splitlines() if "@tide-" in line],
    }
    del maps
    tide.close()
    return out


def test_the_arena_belongs_to_the_user_alone_and_has_no_name() -> None:
    for result in launch(2, _private):
        assert result["mode"] == 0o600
        assert result["owner"]
        assert result["links"] == 0, "no folder lists it"
        assert result["name"].startswith("/memfd:")
        assert result["name"].endswith("(deleted)")
        assert result["maps"] == {"/memfd"}
        assert result["shared"]
        assert not result["inherited"]


# --- ranks that stray, stall or die ---------------------------------------------------------------------------


def _stray(rank: int, world: int, _: Any) -> dict[str, tuple[str, str, float]]:
    out = {}
    # Rank 1 runs an inner block by itself where the others run the model.
    model = plain()
    tide = apply_tide(model, {"timeout_s": 10, "strict": True})
    train(model, 2)
    odd = model.blocks[ODD]
    inputs = torch.randn(4, WIDTH)
    out["modules"] = attempt(lambda: (odd if rank == 1 else model)(inputs).sum().backward())
    out["afterwards"] = attempt(lambda: train(model, 1))
    out["close"] = attempt(tide.close)
    dist.barrier()
    # Rank 1 runs a backward less: the reduce-scatters of the others meet an all-gather.
    model = plain()
    tide = apply_tide(model, {"timeout_s": 10, "strict": True})
    train(model, 1)
    loss = model(inputs).sum()
    out["no backward"] = attempt(lambda: model(inputs) if rank == 1 else loss.backward())
    tide.close()
    dist.barrier()
    # Rank 1 is late with applying TIDE.
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    torch.manual_seed(0)
    model = shard(Stack(), mesh=mesh)
    if rank == 1:
        time.sleep(4)
    out["late"] = attempt(lambda: apply_tide(model, {"timeout_s": 1.5}))
    out["exit handler"] = ("yes" if teardown._installed_in == os.getpid() else "no", "", 0.0)
    return out


@pytest.fixture(scope="module")
def stray() -> list[dict[str, tuple[str, str, float]]]:
    return launch(2, _stray)


def test_ranks_that_run_different_modules_hear_both_calls(stray: list[dict[str, tuple[str, str, float]]]) -> None:
    for what, calls in (
        ("modules", ["all-gather of '(root)'", f"all-gather of 'blocks.{ODD}'"]),
        ("no backward", ["all-gather of"]),
    ):
        kinds = {result[what][0] for result in stray}
        # One rank finds out; the other may be told by it.
        assert kinds <= {"TideMismatchError", "TidePeerError"}, stray
        assert "TideMismatchError" in kinds
        for result in stray:
            _, words, seconds = result[what]
            assert "ranks run different collectives" in words
            assert [c for c in calls if c not in words] == [], words
            assert "rank -1" not in words
            assert seconds < 5, "long before the timeout"


def test_after_a_failure_every_use_fails_and_closing_does_not(stray: list[dict[str, tuple[str, str, float]]]) -> None:
    for result in stray:
        kind, words, seconds = result["afterwards"]
        assert kind == "TidePeerError"
        assert "ranks run different collectives" in words
        assert seconds < 1
        assert result["close"][0] == "none", result["close"][1]


def test_a_rank_that_applies_tide_late_is_a_timeout_in_bounds(stray: list[dict[str, tuple[str, str, float]]]) -> None:
    first, second = stray
    kind, words, seconds = first["late"]
    assert kind == "TideTimeoutError"
    assert "not every rank reached the agreement on TIDE's options within timeout_s=1.5" in words
    assert 1.5 <= seconds < 1.5 + 2
    assert second["late"][0] in ("TideTimeoutError", "TidePeerError")
    assert second["late"][2] < 1.5 + 2
    # What is left in flight may not hold up the end of the program.
    assert first["exit handler"][0] == "yes"


# --- real programs --------------------------------------------------------------------------------------------

# Every survivor says what it caught and after how long, and lets the exception end the program.
PROGRAM = """
import json, os, signal, sys, time, traceback
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from tide_strategies import apply_tide

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
what, timeout_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)])
for block in model:
    fully_shard(block)
fully_shard(model)
if not (what == "apply nothing" and rank == world - 1):
    handle = apply_tide(model, {"timeout_s": timeout_s, "strict": True})
optimizer = torch.optim.AdamW(model.parameters())
start = time.monotonic()
try:
    for step in range(200):
        start = time.monotonic()
        loss = model(torch.randn(4, 32)).square().mean()
        if step == 3 and rank == world - 1:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "raise":
                raise KeyError("mine")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
except BaseException as e:
    print("CAUGHT " + json.dumps([type(e).__name__, str(e), time.monotonic() - start]), flush=True)
    raise
"""


def programs(world: int, what: str, timeout_s: float, folder: Path, last_stops: bool = False) -> list[dict[str, Any]]:
    """Run PROGRAM on every rank; the last rank may have to be ended by hand. Checks that nothing is left behind."""
    script, temporary = folder / "program.py", folder / "tmp"
    script.write_text(PROGRAM)
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # torch makes this one itself
    started = start(world, script, what, timeout_s, TMPDIR=str(temporary), **inductor)
    pids = [p.pid for p in started]
    try:
        ended = finish(started[:-1] if last_stops else started, timeout=60)
    finally:
        for p in started:
            p.kill()
    if last_stops:
        ended += finish(started[-1:])
    new = set(os.listdir("/dev/shm")) - before
    assert {n for n in new if "tide" in n or any(str(pid) in n for pid in pids)} == set()
    assert list(temporary.iterdir()) == []
    return [{"code": code, "output": out, "caught": _caught(out)} for code, out in ended]


def _caught(output: str) -> tuple[str, str, float]:
    found = [line for line in output.splitlines() if line.startswith("CAUGHT ")]
    return tuple(json.loads(found[0][7:])) if found else ("none", "", 0.0)


def test_a_killed_rank_stops_the_others_within_seconds(tmp_path: Path) -> None:
    *survivors, killed = programs(3, "kill", 60.0, tmp_path)
    assert killed["code"] == -signal.SIGKILL
    for survivor in survivors:
        kind, words, seconds = survivor["caught"]
        assert kind == "TidePeerError", survivor["output"]
        assert "rank 2 is dead" in words
        assert seconds < 5, "the dead are seen every 0.1 s, whatever timeout_s is"
        assert survivor["code"] == 1, survivor["output"]
        assert "tide_strategies.errors.TidePeerError" in survivor["output"]


def test_a_stopped_rank_is_a_timeout_that_says_where(tmp_path: Path) -> None:
    timeout_s = 3.0
    *survivors, stopped = programs(3, "stop", timeout_s, tmp_path, last_stops=True)
    assert stopped["code"] == -signal.SIGKILL
    kinds = {s["caught"][0] for s in survivors}
    # The first to give up tells the others.
    assert kinds <= {"TideTimeoutError", "TidePeerError"}
    assert "TideTimeoutError" in kinds
    for survivor in survivors:
        _, words, seconds = survivor["caught"]
        assert "no progress within timeout_s=3: rank" in words
        assert re.search(r"in (all-gather|reduce-scatter) of '", words), words
        assert re.search(r"\(operation \d+\) awaits counter \S+ of rank 2: expected \d+, seen \d+", words), words
        assert "that rank was last in call " in words
        assert seconds < timeout_s + 2
        assert survivor["code"] == 1, survivor["output"]


def test_an_exception_of_the_users_on_one_rank_ends_the_others(tmp_path: Path) -> None:
    timeout_s = 20.0
    first, second = programs(2, "raise", timeout_s, tmp_path)
    assert second["caught"][:2] == ("KeyError", "'mine'")
    assert second["code"] == 1
    kind, words, seconds = first["caught"]
    assert kind == "TidePeerError", first["output"]
    assert "rank 1 is dead" in words
    assert seconds < timeout_s
    assert first["code"] == 1


def test_a_rank_without_tide_ends_the_job(tmp_path: Path) -> None:
    """Its own collectives meet the agreement of the others: gloo itself stops on the sizes, or the time ends."""
    start = time.monotonic()
    for result in programs(2, "apply nothing", 5.0, tmp_path):
        assert result["code"] in (1, -signal.SIGABRT), result["output"]
        assert re.search(
            r"TideMismatchError|TideTimeoutError|TidePeerError|RuntimeError|gloo::EnforceNotMet", result["output"]
        )
    assert time.monotonic() - start < 45
