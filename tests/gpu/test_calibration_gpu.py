"""``plan: auto``, the default: measured on the cards, kept, reused, and no bit of the training changed by it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cards import WITHOUT_NCCL, backend, stock_runs
from harness import launch
from models import BF16, Case, build, full_parameters, train
from test_fsdp2_gpu import deterministic

from tide_strategies import apply_tide
from tide_strategies.config import TideConfig
from tide_strategies.fsdp2.probing import measure_rates
from tide_strategies.planner.rates import H200_PAIR, Rates
from tide_strategies.runtime.cuda.nccl_domains import missing_nccl
from tide_strategies.runtime.exchange import process_group_exchange

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


# --- rates of ranks that stand for nodes --------------------------------------------------------------------------

RAILS = ("local", "p2p", "nccl_rma")


def _rates(rank: int, world: int, topology: str) -> dict[str, Any]:
    """Rates over each rail, how long they took, and how much of the card they left in use, in MiB."""
    exchange = process_group_exchange(dist.group.WORLD, 60.0, "the test of rates")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tide_strategies")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    out: dict[str, Any] = {}
    for rail in RAILS:
        if rail == "nccl_rma" and missing_nccl() is not None:
            continue
        options = {"topology": topology, "rail": rail, "timeout_s": 60, "all_gather.multicast": False}
        config = TideConfig.from_any(options)
        for turn in range(2):  # the second time kernels are compiled, libraries loaded, contexts grown
            lines.clear()
            dist.barrier()
            before, start = torch.cuda.mem_get_info()[0], time.monotonic()
            found = measure_rates(exchange, dist.group.WORLD, torch.device("cuda"), config, 0.25)
            took_s = time.monotonic() - start
            dist.barrier()
            held = before - torch.cuda.mem_get_info()[0]
            rates = None if found is None else found.to_dict()
            out[f"{rail} {turn}"] = {"rates": rates, "took_s": took_s, "held": held >> 20, "lines": lines.copy()}
    return out


@pytest.mark.parametrize("topology", ["1x2", "2x1", "2x2"])
def test_rates_of_nodes_are_measured_over_either_rail(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also several ranks a card, where absolute rates say nothing: what is measured is positive and alike."""
    nodes, local = map(int, topology.split("x"))
    results = launch(nodes * local, _rates, topology, timeout=200, backend="cpu:gloo,cuda:gloo")
    with capsys.disabled():
        for name, first in results[0].items():
            words = "; ".join(first["lines"])
            print(f"\n{topology}, {name}: {first['took_s']:.2f} s, {first['held']} MiB held after. {words}")
    for name, first in results[0].items():
        assert all(r[name]["rates"] == first["rates"] for r in results), "alike on all ranks"
        if first["rates"] is None:  # several ranks of a card that this NCCL does not connect
            assert name.startswith("nccl_rma")
            assert any("are not measured" in line for line in first["lines"])
            continue
        rates = Rates.from_dict(first["rates"])
        assert rates.name == f"measured on {topology} cuda ranks"
        assert rates.push > 1e9
        assert rates.sum_per_cta > 1e9
        measured = ("rail", "land_per_cta", "land_cap", "round_wait_s", "rail_signal_s")
        for field in measured:
            assert (getattr(rates, field) != getattr(H200_PAIR, field)) == (nodes > 1), field
        if nodes > 1:
            assert rates.land_cap >= rates.land_per_cta > 1e8
            assert rates.rail > 1e8
        if name == "local 1":
            assert first["held"] < 64, "the memory of probes is given back"
    assert results[0]["local 1"]["rates"] is not None
