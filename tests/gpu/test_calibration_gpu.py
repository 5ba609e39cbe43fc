"""``plan: auto``, the default: measured on the cards, kept, reused, and no bit of the training changed by it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from cards import WITHOUT_NCCL, backend, stock_runs
from harness import launch
from models import BF16, Case, build, full_parameters, train
from test_fsdp2_gpu import deterministic

from tide_strategies import apply_tide

CASE = Case("calibrated", blocks=3, steps=2, policy=BF16, frozen=True)


def _runs(rank: int, world: int, cache: str) -> list[dict[str, Any]]:
    """Stock, calibrated, and calibrated from the cache; on the program's default stream, as most programs are."""
    deterministic()
    out = []
    for with_tide in (False, True, True):
        model = build(CASE, world, device="cuda")
        options = {"plan": "auto", "timeout_s": 30, "calibration": {"cache": cache}}
        handle = apply_tide(model, options) if with_tide else None
        losses = train(model, CASE, rank)
        found: dict[str, Any] = {"losses": losses, "values": full_parameters(model)}
        if handle is not None:
            report = handle.report()
            found["groups"] = [(g.path, g.code, g.calibration) for g in report.groups]
            found["rates"] = [p.source for p in report.plans]
            torch.cuda.synchronize()
            handle.close()
        out.append(found)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    if not stock_runs():
        pytest.skip(WITHOUT_NCCL)
    with mock.patch.dict(os.environ):
        os.environ.pop("TIDE_PLAN", None)  # it would answer for "auto"
        return launch(2, _runs, str(tmp_path_factory.mktemp("plans")), timeout=200, backend=backend())


def test_results_are_stocks_to_the_bit(runs) -> None:
    for stock, *calibrated in runs:
        for run in calibrated:
            assert run["losses"] == stock["losses"]
            assert all(torch.equal(run["values"][n], value) for n, value in stock["values"].items())


def test_both_paths_of_every_group_are_timed_once(runs) -> None:
    for _, first, second in runs:
        assert len(first["groups"]) == 4
        assert all(words.endswith("(measured)") for _, _, words in first["groups"]), first["groups"]
        assert [g[2] for g in second["groups"]] == [g[2].replace("(measured)", "(cache)") for g in first["groups"]]


def test_the_faster_path_runs_and_the_report_says_so(runs) -> None:
    for _, first, second in runs:
        assert second["groups"] == [(p, c, w.replace("(measured)", "(cache)")) for p, c, w in first["groups"]]
        for path, code, words in first["groups"]:
            tide, stock = (float(part.split(" ms")[0]) for part in words.split(", "))
            assert (path == "tide") == (tide <= stock) == (code == "TIDE-OK"), words


def test_rates_are_measured_once(runs) -> None:
    for _, first, second in runs:
        some = any(path == "tide" for path, _, _ in first["groups"])  # else there is no plan to be solved from rates
        assert set(first["rates"]) == ({"measured"} if some else set())
        assert set(second["rates"]) == ({"cache"} if some else set())
