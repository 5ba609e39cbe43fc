"""plan: auto times both paths, keeps what it learned, believes only what it can, and all ranks choose alike."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import launch
from models import BF16, Case, build, full_parameters, train
from test_failures import warnings_of_tide

from tide_strategies import apply_tide
from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import calibration
from tide_strategies.planner.calibrate import Measured, Timing

CASE = Case("calibrated", blocks=3, steps=2, policy=BF16, frozen=True)


def _auto(folder: str, **options: Any) -> dict[str, Any]:
    return {"plan": "auto", "timeout_s": 30, "calibration": {"cache": folder, "budget_s": 0.5}, **options}


def _trained(rank: int, world: int, options: dict[str, Any] | None, hsdp: bool = False) -> dict[str, Any]:
    case = Case(**{**vars(CASE), "hsdp": hsdp})
    model = build(case, world)
    tide = apply_tide(model, options) if options is not None else None
    losses = train(model, case, rank)
    out: dict[str, Any] = {"losses": losses, "parameters": full_parameters(model)}
    if tide is not None:
        report = tide.report()
        out["groups"] = {g.name: (g.path, g.code, g.calibration) for g in report.groups}
        out["calls"] = {g.name: (g.all_gather.calls, g.reduce_scatter.calls) for g in report.groups}
        out["arena"] = report.arena_bytes
        tide.close()
    return out


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(a["parameters"].values(), b["parameters"].values(), strict=True))
    return a["losses"] == b["losses"] and same


def _job(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Stock; calibrated; from the cache; with stock made to look faster for some groups, then for all; HSDP."""
    out: dict[str, Any] = {}
    stock = _trained(rank, world, None)
    plain = _trained(rank, world, {"plan": "tide", "timeout_s": 30})
    with mock.patch.dict("os.environ", {"TIDE_PLAN": ""}):
        out["measured"] = _trained(rank, world, _auto(folder))
        files = list(Path(folder).glob("*"))
        out["files"] = [(f.name, stat.S_IMODE(f.stat().st_mode)) for f in files]
        out["cached"] = _trained(rank, world, _auto(folder))
        out["off"] = _trained(rank, world, _auto("off"))
        slow = Measured(Timing(1.0, 1.0), Timing(0.5, 0.5), 1, 1)
        fast = Measured(Timing(0.5, 0.5), Timing(1.0, 1.0), 1, 1)
        with mock.patch.object(calibration, "_measure", lambda e, r, member, b: slow if "1" in member.name else fast):
            out["some"] = _trained(rank, world, _auto("off"))
        with mock.patch.object(calibration, "_measure", return_value=slow):
            out["none"] = _trained(rank, world, _auto("off", strict=True))
        with mock.patch.object(calibration, "_measure", return_value=None):
            out["unknown"] = _trained(rank, world, _auto("off"))
        if world == 4:
            replica = rank // 2
            with mock.patch.object(calibration, "_measure", return_value=slow if replica else fast):
                out["replicas"] = _trained(rank, world, _auto("off"), hsdp=True)
            want = _trained(rank, world, None, hsdp=True)
            out["replicas"]["equal"] = _equal(out["replicas"], want)
            nodes = {"topology": "2x2"}
            out["nodes"] = _trained(rank, world, _auto("off", **nodes))
            out["nodes"]["equal"] = _equal(
                out["nodes"], _trained(rank, world, {"plan": "tide", "timeout_s": 30, **nodes})
            )
    for name in ("measured", "cached", "off", "some", "none", "unknown"):
        out[name]["equal"] = _equal(out[name], stock)
        out[name]["as plain"] = out[name]["calls"] == plain["calls"]
    for name in out:
        if name != "files":
            del out[name]["parameters"]
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(2, _job, str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(4, _job, str(tmp_path_factory.mktemp("cache")), timeout=200)


def test_every_case_trains_as_stock_does(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    for result in (*two, *four):
        for name in ("measured", "cached", "off", "some", "none", "unknown"):
            assert result[name]["equal"], name


def test_ranks_choose_alike_and_the_report_says_by_how_much(two: list[dict[str, Any]]) -> None:
    for name in ("measured", "cached", "off", "some"):
        assert two[0][name]["groups"] == two[1][name]["groups"]
        for path, code, words in two[0][name]["groups"].values():
            assert path == ("tide" if code == "TIDE-OK" else "stock")
            assert "ms a step with TIDE" in words


def test_calibration_leaves_no_trace_in_the_counts(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["measured"]["as plain"]
        assert result["cached"]["as plain"]


def test_what_was_measured_is_kept_for_the_user_alone_and_used_again(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert len(result["files"]) == 1
        assert all(mode == 0o600 for _, mode in result["files"])
        assert all(
            "(measured)" in words or "(estimated)" in words for *_, words in result["measured"]["groups"].values()
        )
        assert any("(cache)" in words for *_, words in result["cached"]["groups"].values())
        measured, cached = ({n: g[:2] for n, g in result[k]["groups"].items()} for k in ("measured", "cached"))
        assert measured == cached


def test_where_stock_is_faster_stock_runs_beside_tide(two: list[dict[str, Any]]) -> None:
    for result in two:
        groups = result["some"]["groups"]
        codes = {name: code for name, (_, code, _) in groups.items()}
        assert codes["blocks.1"] == "TIDE-F026"
        assert set(codes.values()) == {"TIDE-F026", "TIDE-OK"}
        assert result["some"]["arena"]["ring"] > 0


def test_where_stock_is_faster_for_all_there_is_no_arena_and_strict_is_content(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert {code for _, code, _ in result["none"]["groups"].values()} == {"TIDE-F026"}
        assert result["none"]["arena"] == {}


def test_where_stock_cannot_be_timed_tide_runs(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert {code for _, code, _ in result["unknown"]["groups"].values()} == {"TIDE-OK"}


def test_replicas_choose_alike(four: list[dict[str, Any]]) -> None:
    """The second replica finds TIDE slower, the first does not: neither uses it."""
    for result in four:
        assert {code for _, code, _ in result["replicas"]["groups"].values()} == {"TIDE-F026"}
        assert result["replicas"]["equal"]


def test_processes_that_stand_for_nodes_are_calibrated_too(four: list[dict[str, Any]]) -> None:
    for result in four:
        assert result["nodes"]["equal"]
        assert all(words for *_, words in result["nodes"]["groups"].values())


def _spoiled(rank: int, world: int, folder: str) -> dict[str, Any]:
    out = {}
    with mock.patch.dict("os.environ", {"TIDE_PLAN": ""}):
        _trained(rank, world, _auto(folder))
        (file,) = Path(folder).glob("*.json")
        content = file.read_text()
        data = json.loads(content)
        spoils = {
            "no json": "{",
            "other facts": json.dumps({**data, "facts": {**data["facts"], "torch": "0.1"}}),
            "hostile": json.dumps({**data, "groups": {k: {"tide": "rm -rf"} for k in data["groups"]}}),
            "open to others": content,
        }
        for name, text in spoils.items():
            torch.distributed.barrier()
            if rank == 0:
                file.write_text(text)
                file.chmod(0o666 if name == "open to others" else 0o600)
            torch.distributed.barrier()
            out[name] = _trained(rank, world, _auto(folder))["groups"]
    return out


def test_a_spoilt_cache_is_measured_anew(tmp_path: Path) -> None:
    for result in launch(2, _spoiled, str(tmp_path)):
        for groups in result.values():
            assert any("(measured)" in words for *_, words in groups.values())


def _never(rank: int, world: int, _: None) -> bool:
    """Gloo ends a process that gives it tensors on a GPU: there calibration must not even begin."""
    member = mock.Mock(group=mock.Mock(device=torch.device("cuda")))
    with warnings_of_tide() as warned:
        found = calibration.calibrate(dist.group.WORLD, [member, member], TideConfig())
    return found == [None, None] and (len(warned) == 1 and "over gloo" in warned[0] if rank == 0 else warned == [])


def test_stock_on_a_gpu_is_timed_over_nccl_alone() -> None:
    assert launch(2, _never) == [True, True]
