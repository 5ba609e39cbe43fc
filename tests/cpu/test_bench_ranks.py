"""Jobs of the benchmarks run among processes, and one that fails does not take the others along."""

from __future__ import annotations

import os
import time

from tide_strategies.cli.bench.ranks import Failure, Job, meet, run_jobs


def count(place, to):
    for i in range(to):
        meet()
        yield {"i": i, "rank": place.rank, "device": place.device.type}


def raise_on_rank_1(place):
    if place.rank == 1:
        raise RuntimeError("the second rank cannot")
    meet()  # the other rank never comes
    yield {}


def die(place):
    yield {"before": True}
    if place.rank == 1:
        os._exit(7)
    meet()


def hang(place):
    time.sleep(60)
    yield {}


def test_rows_come_in_order_and_failed_jobs_leave_the_others_alone():
    jobs = [
        Job("first", count, {"to": 2}),
        Job("raises", raise_on_rank_1),
        Job("dies", die),
        Job("last", count, {"to": 1}),
    ]
    out = list(run_jobs(jobs, 2, "cpu", 60.0))
    row = {"rank": 0, "device": "cpu"}
    assert out[:2] == [{"i": 0, **row}, {"i": 1, **row}]
    raised, before, died, last = out[2:]
    assert isinstance(raised, Failure)
    assert raised.label == "raises"
    assert "rank 1 of 2" in raised.error
    assert "the second rank cannot" in raised.error
    assert before == {"before": True}
    assert isinstance(died, Failure)
    assert died.label == "dies"
    assert "exit code 7" in died.error or "rank 0 of 2" in died.error
    assert last == {"i": 0, **row}


def test_a_job_that_hangs_is_stopped():
    start = time.monotonic()
    (failure,) = run_jobs([Job("hangs", hang)], 2, "cpu", 2.0)
    assert isinstance(failure, Failure)
    assert "no progress within 2 s" in failure.error
    assert time.monotonic() - start < 45, "it did not sleep to its end"
