"""Numbers for trackers are differences of totals, per step."""

from __future__ import annotations

import pytest

from tide_strategies.metrics import METRICS, StepMetrics
from tide_strategies.report import CollectiveStats, ExposedStats, GroupReport, TideReport


def report(calls: int, path: str = "tide", exposed: ExposedStats | None = None) -> TideReport:
    seconds = calls * 1e-3
    counts = {"calls": calls, "seconds": seconds, "wait_seconds": seconds / 2, "bytes": calls << 20, "reused": calls}
    gathers = CollectiveStats(**counts, slot_wait_seconds=seconds / 8)  # type: ignore[arg-type]
    stats = CollectiveStats(**counts)  # type: ignore[arg-type]
    group = GroupReport(
        name="g",
        path=path,  # type: ignore[arg-type]
        code="TIDE-OK",
        reason="",
        remedy="",
        parameters=1,
        unsharded_bytes=4,
        storage="ring",
        all_gather=gathers,
        reduce_scatter=stats,
    )
    return TideReport(installed=True, status="", arena_bytes={"ring": 3 << 20}, groups=(group,), exposed=exposed)


def test_nothing_before_installation_then_differences() -> None:
    reports = [TideReport(installed=False, status=""), report(4), report(10), report(2, "stock")]
    metrics = StepMetrics(lambda: reports.pop(0))
    assert metrics.collect(1) == {}
    first = metrics.collect(2)
    assert first.keys() == METRICS.keys()
    assert (first["tide/all_gathers"], first["tide/collectives_ms"], first["tide/wait_ms"]) == (2, 4, 2)
    causes = [first[f"tide/wait_{cause}_ms"] for cause in ("slots", "shards", "gradients")]
    assert causes == [0.25, 0.75, 1]
    assert first["tide/exposed_ms"] == first["tide/collectives_ms"], "all of it on the CPU"
    second = metrics.collect(3)
    assert (second["tide/all_gathers"], second["tide/moved_mib"], second["tide/all_gathers_saved"]) == (2, 4, 2)
    assert (second["tide/groups_tide"], second["tide/groups_stock"], second["tide/arena_mib"]) == (1, 0, 3)
    again = metrics.collect(1)
    assert (again["tide/all_gathers"], again["tide/groups_stock"]) == (2, 1), "a new installation begins at nothing"


def test_exposed_time_on_gpus_is_that_of_the_sampled_backwards() -> None:
    """Two of four backwards (two a step) were sampled, 30 ms in all: 15 ms each, 30 ms a step."""
    reports = [
        report(4, exposed=ExposedStats(seconds=0.01, sampled=1, backwards=2)),
        report(8, exposed=ExposedStats(seconds=0.04, sampled=3, backwards=6)),
        report(9, exposed=ExposedStats(seconds=0.04, sampled=3, backwards=7)),
    ]
    metrics = StepMetrics(lambda: reports.pop(0))
    waits = {name for name in METRICS if name.startswith("tide/wait_")}
    assert len(waits) == 4
    assert metrics.collect(1).keys() == METRICS.keys() - waits, "the device waits, and a 0 would say that nobody does"
    assert metrics.collect(2)["tide/exposed_ms"] == pytest.approx(30)
    assert metrics.collect(1)["tide/exposed_ms"] == 0.0, "no sample since"


def test_steps_must_be_there() -> None:
    with pytest.raises(ValueError, match="at least 1; got 0"):
        StepMetrics(lambda: report(1)).collect(0)
