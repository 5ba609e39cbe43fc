"""Measuring keeps to its budget, by a clock that the test turns: nothing is begun late, what was begun is finished."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import calibration, probing
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import probes
from tide_strategies.planner.knobs import Knobs
from tide_strategies.runtime.group import Tally
from tide_strategies.topology import Topology


class _Clock:
    """Stands still but for what is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Any:
        def call() -> None:
            self.now += seconds

        return call


def _alone(payload: bytes) -> list[bytes]:
    return [payload]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 3.0), st.floats(1e-3, 1.0))
def test_rounds_of_probes_end_with_the_budget(probe_s: float, budget_s: float) -> None:
    """Two rounds at least (the first is not counted), and none begins after the budget; so many at most."""
    with pytest.MonkeyPatch.context() as patch:
        clock = _Clock()
        patch.setattr(probing, "time", clock)
        every = probes.probes(Topology(1, 2), 0, one_thread=True)
        runs = [clock.takes(probe_s)] * len(every)
        found, rounds = probing._timed(_alone, every, runs, budget_s, probing._Progress(1))
        one_round = probe_s * len(every)
        assert set(found) == {(p.name, p.size) for p in every}
        assert clock.now <= max(budget_s, one_round) + one_round * (1 + 1e-9)
        assert 2 <= rounds <= probing._ROUNDS
        assert clock.now == pytest.approx(rounds * one_round)


def _member(rows: int) -> Any:
    group = SimpleNamespace(fsdp_params=[], device=torch.device("cpu"), _reshard_after_forward=True)
    layout = GroupLayout((ParamShape(rows, 8, 2),), 2)
    return SimpleNamespace(
        group=group,
        layout=layout,
        name=str(rows),
        binding=SimpleNamespace(all_gathers=Tally(), reduce_scatters=Tally()),
    )


@pytest.mark.parametrize(
    ("budget_s", "rates_s", "call_s"), [(2.0, 0.9, 1e-3), (2.0, 0.4, 0.05), (2.0, 5.0, 0.3), (1e-3, 1.0, 0.1)]
)
def test_what_measuring_took_is_recorded_told_and_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, budget_s: float, rates_s: float, call_s: float
) -> None:
    clock, wanted = _Clock(), []

    def measure_rates(*arguments: Any) -> None:
        wanted.append(arguments[-1])
        clock.now += rates_s

    for name, value in {
        "time": clock,
        "measure_rates": measure_rates,
        "process_group_exchange": lambda *_: _alone,
        "facts_of": lambda *_: {"device": "cpu"},
        "_backend": lambda *_: "gloo",
        "_calls": lambda *_: [clock.takes(call_s)] * 4,
    }.items():
        monkeypatch.setattr(calibration, name, value)
    config = TideConfig.from_any({"calibration": {"cache": "off", "budget_s": budget_s}})
    ranks: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    with caplog.at_level(logging.INFO, "tide_strategies"):
        made = calibration.Calibration(ranks, torch.device("cpu"), config)
        assert made.rates() == (None, "measured")
        members = [_member(rows) for rows in (2, 400, 30, 4000)]
        results = made.groups(members, Knobs(chunk_bytes=4096))
    assert wanted == [min(budget_s / 2, 1.0)]
    assert made.spent_s == {"rates": pytest.approx(rates_s), "groups": pytest.approx(clock.now - rates_s)}
    # Half of the budget is the groups' in any case. The last kind is warmed up and timed three times, and may have been
    # about to be timed three times more, when its time was up.
    left_s = max(budget_s - rates_s, budget_s / 2)
    assert made.spent_s["groups"] <= left_s + (1 + 2 * calibration._FIRST) * 4 * call_s + 1e-9
    sources = [r.source for r in results if r is not None]
    assert len(sources) == 4
    assert "measured" in sources
    measured = sources.count("measured")
    assert f"TIDE: measuring rates took {rates_s:.2f} s" in caplog.text
    assert f"TIDE: measuring groups took {made.spent_s['groups']:.2f} s ({measured} of 4 kinds)" in caplog.text
