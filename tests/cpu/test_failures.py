"""Whatever goes wrong ends in words, on every rank, in time, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import launch
from models import Block
from programs import finish, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from tide_strategies import TideReport, apply_tide
from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2 import guards, handle
from tide_strategies.runtime import teardown

WIDTH, HIDDEN = 16, 24
BLOCKS = 3
ODD = 1  # the block that is made different


class Stack(nn.Module):
    """Blocks in a row; some may compute in a dtype of their own."""

    def __init__(self, dtypes: dict[int, torch.dtype] | None = None, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, hidden) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.dtypes = dtypes or {}
        for i, dtype in self.dtypes.items():
            self.blocks[i].to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x.to(self.dtypes.get(i, x.dtype))).to(x.dtype)
        return self.head(x)


def shard(model: nn.Module, odd: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """fully_shard on every block and the model; the odd block with options of its own."""
    kwargs.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for i, block in enumerate(model.blocks):
        fully_shard(block, **{**kwargs, **((odd or {}) if i == ODD else {})})
    return fully_shard(model, **kwargs)


def plain(seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return shard(Stack(**kwargs))


def local(parameter: torch.Tensor) -> torch.Tensor:
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return getattr(shard, "_data", shard).detach()


def train(model: nn.Module, steps: int = 3, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, **kwargs: Any) -> tuple[list[float], list[torch.Tensor]]:
    return train(model, **kwargs), [local(p).clone() for p in model.parameters()]


def equal(a: tuple[list[float], list[torch.Tensor]], b: tuple[list[float], list[torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def attempt(function: Callable[[], Any]) -> tuple[str, str, float]:
    """Type and words of the exception, and the seconds it took; the type is "none" if there was none."""
    start = time.monotonic()
    try:
        function()
    except Exception as e:
        return type(e).__name__, str(e), time.monotonic() - start
    return "none", "", time.monotonic() - start


@contextmanager
def warnings_of_tide() -> Iterator[list[str]]:
    """What TIDE logs as warnings."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tide_strategies")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)


def codes(report: TideReport) -> dict[str, str]:
    return {g.name: g.code for g in report.groups}


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


# --- what one handle does to one model ------------------------------------------------------------------------


def _handles(rank: int, world: int, _: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    options = {"timeout_s": 30, "strict": True}
    want = trained(plain())
    want_more = trained(plain(), steps=5)

    # Twice on one model, or on a part of it, whether installed yet or not; a copy of the options changes nothing.
    model = plain()
    tide = apply_tide(model, options)
    twice = [attempt(lambda: apply_tide(model, options)), attempt(lambda: apply_tide(model.blocks[0], options))]
    model(torch.randn(2, WIDTH))
    twice.append(attempt(lambda: apply_tide(nn.Sequential(model), options)))
    out["twice"] = twice
    assert tide.report().installed
    tide.close()
    tide.close()
    assert not tide.report().installed
    out["closed"] = tide.report().status
    apply_tide(model, options).close()  # free again

    # Closing puts stock back: in the middle of training, before any, and twice.
    model = plain()
    tide = apply_tide(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for step in range(5):
        if step == 3:
            tide.close()
            tide.close()
            kinds = {type(g) for m in model.modules() if isinstance(m, FSDPModule) for g in groups_of(m)}
            assert kinds == {FSDPParamGroup}
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    out["close, then train"] = equal((losses, [local(p).clone() for p in model.parameters()]), want_more)
    model = plain()
    apply_tide(model, options).close()
    out["close at once"] = equal(trained(model), want) and not any(
        type(g) is not FSDPParamGroup for m in model.modules() if isinstance(m, FSDPModule) for g in groups_of(m)
    )

    # Two models with a handle each, in turns; one closes, the other goes on.
    one, other = plain(), plain()
    first, second = apply_tide(one, options), apply_tide(other, {**options, "all_gather.slots": 1})
    results = [trained(one), trained(other)]
    first.close()
    out["two models"] = all(equal(r, want) for r in results) and second.report().installed
    again = trained(plain(), steps=3)
    assert equal(again, want)
    train(other, steps=2, first=3)
    assert second.report().groups[0].all_gather.calls >= 5
    second.close()

    # A handle that nobody keeps still works, and off means off.
    model = plain()
    apply_tide(model, options)
    gc.collect()
    out["forgotten handle"] = equal(trained(model), want)
    model = plain()
    off = apply_tide(model, {"enabled": False, "strict": True})
    out["off"] = equal(trained(model), want) and off.report().status == "off (enabled: false); stock FSDP2"
    apply_tide(model, options).close()  # a handle that does nothing holds nothing

    # Parameters on the meta device, at the first forward.
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack()
    shard(model)
    tide = apply_tide(model, options)
    out["meta"] = attempt(lambda: train(model, 1))
    model.to_empty(device="cpu")
    for p, q in zip(model.parameters(), plain().parameters(), strict=True):
        local(p).copy_(local(q))
    tide = apply_tide(model, options)
    out["meta, then right"] = equal(trained(model), want) and tide.report().installed
    tide.close()
    return out


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]


@pytest.fixture(scope="module")
def handles() -> list[dict[str, Any]]:
    return launch(2, _handles)


@pytest.mark.parametrize(
    "what",
    ["close, then train", "close at once", "two models", "forgotten handle", "off", "meta, then right"],
)
def test_a_handle_leaves_training_equal_to_stock(handles: list[dict[str, Any]], what: str) -> None:
    assert [h[what] for h in handles] == [True, True]


def test_a_model_takes_one_handle_at_a_time(handles: list[dict[str, Any]]) -> None:
    for result in handles:
        assert [kind for kind, _, _ in result["twice"]] == ["TideConfigError"] * 3
        assert all("already applied" in words and "close()" in words for _, words, _ in result["twice"])
        assert result["closed"] == "closed; stock FSDP2"


def test_parameters_on_the_meta_device_are_named_with_the_remedy(handles: list[dict[str, Any]]) -> None:
    for result in handles:
        kind, words, _ = result["meta"]
        assert kind == "TideError"
        assert "blocks.0.norm.weight" in words
        assert "to_empty" in words


def _without_group(rank: int, world: int, _: Any) -> list[tuple[str, str, float]]:
    model = plain()
    out = []
    tide = apply_tide(model, {"timeout_s": 5})
    train(model, 1)
    out.append(codes(tide.report()))
    tide.close()
    out.append(attempt(lambda: apply_tide(model, {"timeout_s": 5, "strict": True}) and train(model, 1)))
    tide = apply_tide(plain())
    dist.destroy_process_group()
    out.append(attempt(lambda: apply_tide(model, {"timeout_s": 5})))
    return out


def test_one_rank_has_nothing_to_communicate_and_none_at_all_is_an_error() -> None:
    ((one, strict, none),) = launch(1, _without_group)
    assert set(one.values()) == {"TIDE-F010"}
    assert strict[0] == "TideFallbackError"
    assert none[0] == "TideConfigError"
    assert "process group" in none[1]


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
