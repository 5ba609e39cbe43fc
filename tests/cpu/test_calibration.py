"""plan: auto times both paths, keeps what it learned, believes only what it can, and all ranks choose alike."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import launch
from models import BF16, Case, build, full_parameters, train
from stacks import warnings_of_tide

from tide_strategies import apply_tide
from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import calibration
from tide_strategies.planner.calibrate import Measured, Timing
from tide_strategies.planner.rates import CPU_PAIR, Rates

_MEASURE = calibration._measure
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
        out["arena"], out["plans"] = report.arena_bytes, report.plans
        tide.close()
    return out


def _measured_and_won(*args: Any) -> Measured | None:
    """Measures as always; then TIDE wins, whatever this machine is doing beside: what is asserted depends on it."""
    found: Measured | None = _MEASURE(*args)
    if found is None:
        return None
    return replace(found, stock=Timing(2 * found.tide.all_gather_s, 2 * found.tide.reduce_scatter_s))


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(torch.equal(x, y) for x, y in zip(a["parameters"].values(), b["parameters"].values(), strict=True))
    return a["losses"] == b["losses"] and same


def _job(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Stock; calibrated; from the cache; whichever is faster here; stock made faster for some, then for all; HSDP."""
    out: dict[str, Any] = {}
    stock = _trained(rank, world, None)
    plain = _trained(rank, world, {"plan": "tide", "timeout_s": 30})
    with mock.patch.dict("os.environ", {"TIDE_PLAN": ""}):
        tide_wins = mock.patch.object(calibration, "_measure", _measured_and_won)
        with tide_wins:
            out["measured"] = _trained(rank, world, _auto(folder))
        files = list(Path(folder).glob("*"))
        out["files"] = [(f.name, stat.S_IMODE(f.stat().st_mode)) for f in files]
        out["cached"] = _trained(rank, world, _auto(folder))
        out["off"] = _trained(rank, world, _auto("off"))
        with mock.patch.object(calibration, "measure_rates", return_value=None):  # nor rates, to save time
            slow = Measured(Timing(1.0, 1.0), Timing(0.5, 0.5), 1, 1)
            fast = Measured(Timing(0.5, 0.5), Timing(1.0, 1.0), 1, 1)
            some = mock.patch.object(calibration, "_measure", lambda e, r, m, b: slow if "1" in m.name else fast)
            with some:
                out["some"] = _trained(rank, world, _auto("off"))
            with mock.patch.object(calibration, "_measure", return_value=slow):
                out["none"] = _trained(rank, world, _auto("off", strict=True))
            with mock.patch.object(calibration, "_measure", return_value=None):
                out["unknown"] = _trained(rank, world, _auto("off"))
            unlike = mock.patch.object(calibration, "facts_of", return_value={"device": "cpu", "gpu": str(rank)})
            with unlike, mock.patch.object(calibration, "_measure", return_value=fast):
                out["unlike"] = _trained(rank, world, _auto(f"{folder}/unlike"))
            if world == 4:
                replica = rank // 2
                with mock.patch.object(calibration, "_measure", return_value=slow if replica else fast):
                    out["replicas"] = _trained(rank, world, _auto("off"), hsdp=True)
        if world == 4:
            want = _trained(rank, world, None, hsdp=True)
            out["replicas"]["equal"] = _equal(out["replicas"], want)
            nodes = {"topology": "2x2"}
            with tide_wins:
                out["nodes"] = _trained(rank, world, _auto("off", **nodes))
            out["nodes"]["equal"] = _equal(
                out["nodes"], _trained(rank, world, {"plan": "tide", "timeout_s": 30, **nodes})
            )
    out["unlike"]["kept"] = Path(f"{folder}/unlike").exists()
    for name in ("measured", "cached", "off", "some", "none", "unknown", "unlike"):
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


def test_knobs_are_solved_from_measured_rates_alike_on_all_ranks(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    """The same, whether the rates were just measured or come from the cache; the report tells which, and the rates."""
    for result in (*two, *four):
        (measured,), (cached,) = result["measured"]["plans"], result["cached"]["plans"]
        assert (measured.source, cached.source) == ("measured", "cache")
        assert measured.rates == cached.rates
        assert measured.knobs == cached.knobs
        assert measured.knobs["chunk_bytes"] >= 4096
        assert measured.stated == []
        assert measured.rates["name"] == f"measured on 1x{measured.ranks} cpu ranks"
        rates = Rates.from_dict(measured.rates)
        assert 1e7 < rates.push < 1e12, "a copy is not faster than a memory, nor slower than a network"
        assert f"push {rates.push / 1e9:.3g} GB/s" in str(measured)
    for results in (two, four):
        assert all(r["measured"]["plans"] == results[0]["measured"]["plans"] for r in results)
    for result in four:
        (plan,) = result["nodes"]["plans"]
        assert plan.source == "measured"
        rates = Rates.from_dict(plan.rates)
        assert rates.name == "measured on 2x2 cpu ranks"
        assert rates.rail != CPU_PAIR.rail
        assert rates.land_cap != CPU_PAIR.land_cap
        assert 0 < rates.round_wait_s != CPU_PAIR.round_wait_s
        assert plan.knobs["round_width"] == 1, "one other node"


def test_nothing_is_kept_where_ranks_differ_in_what_times_depend_on(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert all("(measured)" in words for *_, words in result["unlike"]["groups"].values())
        assert result["unlike"]["equal"]
        assert not result["unlike"]["kept"]
        assert len(result["files"]) == 1, "as it is where they do not"


def test_what_stock_keeps_has_no_plan(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["none"]["plans"] == ()
        (plan,) = result["some"]["plans"]
        assert plan.source == "built in", "no rates could be told there"
        assert plan.groups == sum(path == "tide" for path, *_ in result["some"]["groups"].values())


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
            "hostile rates": json.dumps({**data, "rates": {**data["rates"], "push": -1}}),
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
    with warnings_of_tide() as warned:
        found = calibration.Calibration(dist.group.WORLD, torch.device("cuda"), TideConfig())
        nothing = found.rates() == (None, "") and found.groups([mock.Mock()] * 2, mock.Mock()) == [None, None]
    return nothing and (len(warned) == 1 and "over gloo" in warned[0] if rank == 0 else warned == [])


def test_stock_on_a_gpu_is_timed_over_nccl_alone() -> None:
    assert launch(2, _never) == [True, True]
