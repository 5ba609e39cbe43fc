"""Numbers for trackers are differences of totals, per step."""

from __future__ import annotations

import pytest

from tide_strategies.metrics import METRICS, StepMetrics
from tide_strategies.report import CollectiveStats, GroupReport, TideReport


def report(calls: int, path: str = "tide") -> TideReport:
    seconds = calls * 1e-3
    stats = CollectiveStats(calls=calls, seconds=seconds, wait_seconds=seconds / 2, bytes=calls << 20, reused=calls)
    group = GroupReport(
        name="g",
        path=path,  # type: ignore[arg-type]
        code="TIDE-OK",
        reason="",
        remedy="",
        parameters=1,
        unsharded_bytes=4,
        storage="ring",
        all_gather=stats,
        reduce_scatter=stats,
    )
    return TideReport(installed=True, status="", arena_bytes={"ring": 3 << 20}, groups=(group,))


def test_nothing_before_installation_then_differences() -> None:
    reports = [TideReport(installed=False, status=""), report(4), report(10), report(2, "stock")]
    metrics = StepMetrics(lambda: reports.pop(0))
    assert metrics.collect(1) == {}
    first = metrics.collect(2)
    assert first.keys() == METRICS.keys()
    assert (first["tide/all_gathers"], first["tide/collectives_ms"], first["tide/wait_ms"]) == (2, 4, 2)
    second = metrics.collect(3)
    assert (second["tide/all_gathers"], second["tide/moved_mib"], second["tide/all_gathers_saved"]) == (2, 4, 2)
    assert (second["tide/groups_tide"], second["tide/groups_stock"], second["tide/arena_mib"]) == (1, 0, 3)
    again = metrics.collect(1)
    assert (again["tide/all_gathers"], again["tide/groups_stock"]) == (2, 1), "a new installation begins at nothing"


def test_steps_must_be_there() -> None:
    with pytest.raises(ValueError, match="at least 1; got 0"):
        StepMetrics(lambda: report(1)).collect(0)
