"""The report counts what happened: calls, bytes to the byte, times that can be true, and words to read."""

from __future__ import annotations

import contextlib
import itertools
import json
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import launch
from models import BF16, Case, batch, build, train
from torch.distributed.tensor import DTensor

from tide_strategies import TideReport, apply_tide
from tide_strategies.cli.main import main
from tide_strategies.layout import LANDING_ALIGNMENT, align
from tide_strategies.planner import measured
from tide_strategies.report import CollectiveStats, ExposedStats, GroupReport

PAGE = 4096
CHUNK = 8192
SLOTS = 2
CASE = Case("report", uneven=True, policy=BF16, blocks=4, steps=3)
LATE_S = 0.25
ITEM = 2  # bytes of what is gathered, and of the gradients
ROOT = "(root)"


def _expected(model: torch.nn.Module, world: int) -> dict[str, dict[str, int]]:
    """Per group what one gather and one reduction move on this rank, from the parameters alone."""
    out: dict[str, dict[str, int]] = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        group = ".".join(name.split(".")[:2]) if name.startswith("blocks") else ROOT
        counts = out.setdefault(group, {"parameters": 0, "unsharded": 0, "gather": 0, "reduce": 0})
        own, row = p.to_local().numel(), p.numel() // p.shape[0]
        counts["parameters"] += 1
        counts["unsharded"] += align(world * -(-p.shape[0] // world) * row * ITEM, LANDING_ALIGNMENT)
        counts["gather"] += own * ITEM
        counts["reduce"] += (p.numel() - own) * ITEM
    return out


def _metered(handle: Any) -> list[tuple[str, str]]:
    """Meter the groups as on a GPU: what is timed from here on, as (group, the function that it is in)."""
    spans: list[tuple[str, str]] = []
    for group in handle._installations[0].groups:

        @contextlib.contextmanager
        def around(name: str = group.name) -> Iterator[None]:
            spans.append((name, sys._getframe(2).f_code.co_name))
            yield

        group.binding.meter = SimpleNamespace(around=around, finalized=lambda n=group.name: spans.append((n, "end")))
    return spans


def _report(rank: int, world: int, traces: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for cache in ("off", "turnaround"):
        model = build(CASE, world)
        options: dict[str, Any] = {
            "all_gather.cache": cache,
            "all_gather.slots": SLOTS,
            "reduce_scatter.chunk_bytes": CHUNK,
        }
        if cache == "turnaround":
            options["debug.trace"] = traces
        handle = apply_tide(model, {"timeout_s": 30, "strict": True, **options})
        before = handle.report()
        assert (before.installed, before.groups, before.arena_bytes) == (False, (), {})
        assert str(before) == "TIDE: waits for the first forward"
        start = time.perf_counter()
        train(model, CASE, rank)
        elapsed = time.perf_counter() - start
        report = handle.report()
        assert report.exposed is None
        spans = _metered(handle)
        out[cache] = {"report": report.to_dict(), "text": str(report), "elapsed": elapsed}
        train(model, CASE, rank)
        out[cache]["again"], out[cache]["spans"] = handle.report().to_dict(), spans
        if cache == "off":  # as on GPUs that messages connect
            engine = handle._installations[0].engines[0]
            with mock.patch.object(engine, "pinned_by_part", return_value={"stage": 3 << 20, "pieces": 1 << 19}):
                railed = handle.report()
            out["pinned"] = railed.to_dict()["pinned_bytes"], str(railed)
        assert report.to_dict() == out[cache]["report"], "a report does not change after it was made"
        out["expected"] = _expected(model, world)
        handle.close()
    out["late"] = _late(rank, world)
    return out


def _late(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Rank 1 is late in three ways; what each made this rank wait for more than before."""
    model = build(CASE, world)
    handle = apply_tide(model, {"timeout_s": 30, "strict": True, "all_gather": {"cache": "off", "slots": 1}})
    with torch.no_grad():  # without a backward, which prefetches, the ring stays at its one slot
        model(batch(0, rank))

    def sleep(*_: Any) -> None:
        if rank == 1:
            time.sleep(LATE_S)

    def in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(sleep)

    out = {}
    # In a block that holds the only slot; before anything is gathered; amid a block's backward.
    for cause, hook in {"slots": sleep, "shards": None, "gradients": in_backward}.items():
        handles = [model.blocks[0].down.register_forward_hook(hook)] if hook else []
        torch.distributed.barrier()
        before = handle.report().waits
        assert before is not None
        if cause == "shards":
            sleep()
        with torch.set_grad_enabled(cause != "slots"):
            loss = model(batch(1, rank)).sum()
        if cause == "gradients":
            loss.backward()
        after = handle.report().waits
        assert after is not None
        out[cause] = {name: after[name] - before[name] for name in after}
        for h in handles:
            h.remove()
    handle.close()
    return out


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "new"


@pytest.fixture(scope="module")
def results(traces: Path) -> list[dict[str, Any]]:
    return launch(2, _report, str(traces))


def test_calls_are_counted(results: list[dict[str, Any]]) -> None:
    """Blocks are gathered for the forward and again for the backward; the root stays. One reduction per backward."""
    for result in results:
        for g in result["off"]["report"]["groups"]:
            assert g["all_gather"]["calls"] == CASE.steps * (1 if g["name"] == ROOT else 2)
            assert g["all_gather"]["reused"] == 0
            assert g["reduce_scatter"]["calls"] == CASE.steps
            assert (g["reduce_scatter"]["stock_calls"], g["reduce_scatter"]["stock_reason"]) == (0, "")


def test_gathers_that_the_cache_saves_are_counted_apart(results: list[dict[str, Any]]) -> None:
    """With two slots the last two blocks are still there when the backward begins; nobody else is spared."""
    for result in results:
        for g in result["turnaround"]["report"]["groups"]:
            saved = CASE.steps if g["name"] in ("blocks.2", "blocks.3") else 0
            assert g["all_gather"]["reused"] == saved
            assert g["all_gather"]["calls"] == CASE.steps * (1 if g["name"] == ROOT else 2) - saved


@pytest.mark.parametrize("cache", ["off", "turnaround"])
def test_bytes_are_exact(results: list[dict[str, Any]], cache: str) -> None:
    for result in results:
        groups = result[cache]["report"]["groups"]
        assert [g["name"] for g in groups] == [ROOT, *(f"blocks.{i}" for i in range(CASE.blocks))]
        for g in groups:
            expected = result["expected"][g["name"]]
            assert g["parameters"] == expected["parameters"]
            assert g["unsharded_bytes"] == expected["unsharded"]
            assert g["all_gather"]["bytes"] == g["all_gather"]["calls"] * expected["gather"]
            assert g["reduce_scatter"]["bytes"] == g["reduce_scatter"]["calls"] * expected["reduce"]
    # Rows that do not divide: the ranks' own parts differ, and together they are everything.
    first, second = (r["expected"]["blocks.0"] for r in results)
    assert first["gather"] == second["reduce"]
    assert first["gather"] != second["gather"]


def test_shared_memory_is_told_by_part(results: list[dict[str, Any]]) -> None:
    for result in results:
        arena = result["off"]["report"]["arena_bytes"]
        block = max(e["unsharded"] for n, e in result["expected"].items() if n != ROOT)
        assert arena["ring"] == SLOTS * align(block, PAGE)
        assert arena["pinned"] == align(result["expected"][ROOT]["unsharded"], PAGE)
        assert arena["staging"] == 2 * 2 * CHUNK  # two ranks, two banks, one sender to each
        assert arena["control"] > 0
        assert arena.keys() == {"control", "ring", "pinned", "staging"}
        assert result["off"]["report"]["pinned_bytes"] == {}
        assert "pinned host memory" not in result["off"]["text"]
        pinned, text = result["pinned"]
        assert pinned == {"stage": 3 << 20, "pieces": 1 << 19}
        assert "\n  pinned host memory of this rank: stage 3.0 MiB, pieces 0.5 MiB\n" in text
    assert results[0]["off"]["report"]["arena_bytes"] == results[1]["off"]["report"]["arena_bytes"]


@pytest.mark.parametrize("cache", ["off", "turnaround"])
def test_times_can_be_true(results: list[dict[str, Any]], cache: str) -> None:
    for result in results:
        total = 0.0
        for g in result[cache]["report"]["groups"]:
            for kind in ("all_gather", "reduce_scatter"):
                stats = g[kind]
                assert stats["seconds"] > 0
                assert 0 <= stats["slot_wait_seconds"] <= stats["wait_seconds"] <= stats["seconds"]
                assert kind == "all_gather" or stats["slot_wait_seconds"] == 0.0
                total += stats["seconds"]
        assert total <= result[cache]["elapsed"], "no time is counted twice"


def test_waits_are_told_by_cause(results: list[dict[str, Any]]) -> None:
    for cause, grown in results[0]["late"].items():
        assert max(grown, key=lambda name: grown[name]) == cause, (cause, grown)
        assert grown[cause] > LATE_S / 2, "the other rank was late by that much more"


def test_counts_go_on_from_report_to_report(results: list[dict[str, Any]]) -> None:
    for result in results:
        for g, later in zip(result["off"]["report"]["groups"], result["off"]["again"]["groups"], strict=True):
            for kind in ("all_gather", "reduce_scatter"):
                assert later[kind]["calls"] == 2 * g[kind]["calls"]
                assert later[kind]["bytes"] == 2 * g[kind]["bytes"]
                assert later[kind]["seconds"] > g[kind]["seconds"]


def test_a_report_is_json_and_reads_well(results: list[dict[str, Any]]) -> None:
    for result in results:
        report, text = result["turnaround"]["report"], result["turnaround"]["text"]
        as_lists = {key: list(report[key]) for key in ("groups", "plans")}
        assert json.loads(json.dumps(report)) == {**report, **as_lists}
        assert report["installed"] is True
        assert {g["storage"] for g in report["groups"] if g["name"] != ROOT} == {"ring"}
        assert report["groups"][0]["storage"] == "pinned"
        lines = text.splitlines()
        assert lines[0] == "TIDE: 5 of 5 groups accelerated"
        assert lines[1].startswith("  shared memory of this node: ")
        assert lines[2] == "  nodes x ranks 1x2, rail none, schedule direct (all ranks are on one host)"
        (plan,) = report["plans"]
        assert plan["knobs"]["chunk_bytes"] == CHUNK
        assert lines[3].startswith(f"  plan of 5 groups on 2 ranks: chunk_bytes {CHUNK} (stated), sum_ctas 1, ")
        assert "rates (built in): push 11.4 GB/s" in lines[3]
        assert lines[4].startswith("  waited for peers: ")
        assert lines[4].endswith(" ms for gradients")
        assert len(lines) == 5 + len(report["groups"])
        for line, g in zip(lines[5:], report["groups"], strict=True):
            assert line.startswith(f"  {g['name']}: tide (TIDE-OK: eligible), {g['parameters']} parameters, ")
            assert f"{g['all_gather']['calls']} all-gathers ({g['all_gather']['reused']} saved)" in line
            assert f"{g['reduce_scatter']['calls']} reduce-scatters" in line


def test_every_wait_of_computing_is_timed_where_there_are_events(results: list[dict[str, Any]]) -> None:
    """As on a GPU, with a meter of the test's own: gathers awaited, gradients handed over, the end of the backward."""
    for result in results:
        spans = result["off"]["spans"]
        for g in result["off"]["report"]["groups"]:
            own = Counter(what for name, what in spans if name == g["name"])
            assert own["wait_for_unshard"] == CASE.steps * (1 if g["name"] == ROOT else 2)
            assert own["post_backward"] >= CASE.steps
            assert own["finalize_backward"] == own["end"] >= CASE.steps


def test_the_measured_timeline_has_every_call_of_every_rank(
    results: list[dict[str, Any]], traces: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As many as were counted, taking as long as was counted; drawn as text, picture and trace."""
    recordings = measured.read(traces)
    assert sorted(r.rank for r in recordings) == [0, 1]
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in traces.iterdir())
    assert len({r.host for r in recordings}) == len({r.group for r in recordings}) == 1
    for r in recordings:
        assert r.missing == 0
        groups = results[r.rank]["turnaround"]["again"]["groups"]
        for g in groups:
            label = f"all-gather of {g['name']!r}"
            assert sum(c[0] == "copy" and c[1] == label for c in r.calls) == g["all_gather"]["calls"]
            reductions = [c for c in r.calls if c[0] == "reduce-scatter" and f"of {g['name']!r} " in c[1]]
            assert len(reductions) == g["reduce_scatter"]["calls"]
            assert sum(c[5] for c in reductions) == g["reduce_scatter"]["bytes"]
        seconds = sum(c[3] for c in r.calls)
        counted = sum(g[kind]["seconds"] for g in groups for kind in ("all_gather", "reduce_scatter"))
        assert seconds == pytest.approx(counted, abs=1e-6 * len(r.calls))
        # One thing after another, in one thread.
        ordered = sorted(r.calls, key=lambda c: c[2])
        assert all(a[2] + a[3] <= b[2] + 1e-6 for a, b in itertools.pairwise(ordered))
    # A gather that is complete has been copied by every rank: on one clock its copies begin before it ends.
    spans = measured.aligned(recordings)
    first = {r: next(s for s in spans if s.rank == r and s.stream == "copy") for r in (0, 1)}
    done = next(s for s in spans if s.stream == "completion")
    assert max(s.start for s in first.values()) < done.end
    svg, trace = tmp_path / "t.svg", tmp_path / "t.json"
    assert main(["timeline", "--measured", str(traces), "--svg", str(svg), "--trace", str(trace)]) == 0
    assert f"{len(spans)} calls of 2 ranks" in capsys.readouterr().out
    assert svg.read_text().count("<rect") == len(spans) + 1  # and the background
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(spans)
    assert main(["timeline", "--measured", str(traces), "--window", "0:1000000", "--json"]) == 0
    assert sum(e["ph"] == "X" for e in json.loads(capsys.readouterr().out)["traceEvents"]) == len(spans)


def test_what_fell_back_is_told_with_its_remedy() -> None:
    late = CollectiveStats(calls=3, stock_calls=2, stock_reason="TIDE-F031 gradients of dtype torch.float16 arrived")
    group = GroupReport(
        name="head",
        path="stock",
        code="TIDE-F003",
        reason="'head.weight' is sharded on dimension 1",
        remedy="shard on dimension 0",
        parameters=2,
        unsharded_bytes=3 << 20,
        storage="torch",
        reduce_scatter=late,
    )
    report = TideReport(installed=True, status="0 of 1 groups accelerated", groups=(group,))
    lines = str(report).splitlines()
    assert lines[0] == "TIDE: 0 of 1 groups accelerated"
    assert (
        "head: stock (TIDE-F003: 'head.weight' is sharded on dimension 1), 2 parameters, 3.0 MiB in torch" in lines[1]
    )
    assert lines[2].strip() == "shard on dimension 0"
    assert lines[3].strip() == f"2 reduce-scatter calls ran as stock: {late.stock_reason}"
    assert json.loads(json.dumps(report.to_dict()))["groups"][0]["reduce_scatter"]["stock_calls"] == 2


def test_a_gpus_arena_is_its_own_and_not_the_nodes() -> None:
    exposed = ExposedStats(seconds=0.5, sampled=2, backwards=4)
    report = TideReport(
        installed=True, status="1 of 1 groups accelerated", arena_bytes={"ring": 3 << 20}, exposed=exposed
    )
    assert str(report).splitlines()[1:] == [
        "  device memory of this rank: ring 3.0 MiB",
        "  computing waited 250.000 ms for collectives in a forward and backward (mean of 2 of 4)",
    ]
