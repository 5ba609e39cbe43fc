"""After a stop, what the ranks wrote names the rank that was first, and what it owed."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from harness import launch_raw
from models import Case, batch, build

from tide_strategies import apply_tide
from tide_strategies.cli import autopsy
from tide_strategies.cli.main import main
from tide_strategies.errors import TideConfigError, TideError

CULPRIT = 1


def _job(rank: int, world: int, arg: tuple[str, str]) -> str:
    what, folder = arg
    model = build(Case("autopsy"), world)
    tide = apply_tide(model, {"plan": "tide", "timeout_s": 2.0, "debug": {"autopsy": folder}})
    model(batch(0, rank)).sum().backward()
    try:
        if rank == CULPRIT and what == "stalls":
            time.sleep(4.0)
        if rank == CULPRIT and what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == CULPRIT and what == "strays":
            model.blocks[2].unshard()
        model(batch(1, rank)).sum().backward()
    except TideError as e:
        tide.close()
        return type(e).__name__
    return "none"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("stalls", "was in no collective when rank"),
        ("dies", ") died. Rank"),
        ("strays", "ranks run different collectives"),
    ],
)
def test_the_first_cause_is_named(what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "stopped"
    results = launch_raw(3, _job, (what, str(folder)), timeout=60)
    survivors = [r for i, r in enumerate(results) if i != CULPRIT]
    assert all(r.value in ("TidePeerError", "TideTimeoutError", "TideMismatchError") for r in survivors), results
    files = list(folder.glob("*.json"))
    assert len(files) >= 2
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    assert main(["autopsy", str(folder), "--json"]) == 0
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert words in cause
    if what != "strays":
        assert f"rank {CULPRIT} (pid " in cause
        assert "expected" in cause
    assert main(["autopsy", str(folder)]) == 0
    assert "First cause:" in capsys.readouterr().out


def _record(rank: int, kind: str, at: float, *waits: tuple[int, str]) -> dict[str, Any]:
    return {
        "format": 1,
        "rank": rank,
        "global_rank": str(rank),
        "host": "h",
        "pid": 100 + rank,
        "pids": [100, 101, 102, 103],
        "time": at,
        "kind": kind,
        "message": f"message of {rank}",
        "waits": [
            {"call": c, "counter": "landed", "writer": w, "expected": 3, "seen": 2, "peer_call": ""} for w, c in waits
        ],
    }


def _cause(folder: Path, *records: dict[str, Any]) -> str:
    for i, r in enumerate(records):
        (folder / f"tide-{i}.json").write_text(json.dumps(r))
    found, refused = autopsy.read(folder)
    assert not refused
    return autopsy.first_cause(found)


def test_waits_are_followed_to_their_end(tmp_path: Path) -> None:
    """0 awaits 2, 2 awaits 3, and 3 left no word: 3 is the cause, though 0 was the first to give up."""
    cause = _cause(
        tmp_path,
        _record(0, "timeout", 10.0, (2, "all-gather of 'a'")),
        _record(1, "aborted", 10.1, (0, "all-gather of 'a'")),
        _record(2, "aborted", 10.1, (3, "all-gather of 'a'")),
    )
    assert cause.startswith("rank 3 (pid 103) wrote nothing")
    assert "Rank 2 in all-gather of 'a' awaited landed of rank 3: expected 3, seen 2." in cause


def test_a_circle_is_named_as_such(tmp_path: Path) -> None:
    cause = _cause(tmp_path, _record(0, "timeout", 1.0, (1, "a")), _record(1, "aborted", 1.1, (0, "b")))
    assert "ranks await each other (0 <- 1 <- 0)" in cause


def test_a_rank_outside_its_collectives_is_the_cause(tmp_path: Path) -> None:
    cause = _cause(tmp_path, _record(0, "timeout", 1.0, (1, "a")), _record(1, "aborted", 9.0))
    assert cause.startswith("rank 1 (pid 101) was in no collective")


def test_waits_of_a_ranks_streams_for_each_other_do_not_mislead(tmp_path: Path) -> None:
    """As on GPUs: 0 and 1 await each other in one stream, themselves in another, and 2 in a third."""
    cause = _cause(
        tmp_path,
        _record(0, "timeout", 1.0, (0, "own"), (1, "sum"), (2, "push")),
        _record(1, "aborted", 1.1, (0, "sum"), (1, "own"), (2, "push")),
        _record(2, "aborted", 1.2, (2, "own")),
    )
    assert cause.startswith("rank 2 (pid 102) was in no collective when rank 0 lost patience")
    assert "Rank 0 in push awaited landed of rank 2" in cause


def test_the_dead_rank_is_the_one_that_wrote_nothing(tmp_path: Path) -> None:
    cause = _cause(
        tmp_path,
        _record(0, "peer_dead", 1.0, (0, "own"), (1, "sum"), (2, "push")),
        _record(1, "aborted", 1.1, (2, "sum")),
    )
    assert cause.startswith("rank 2 (pid 102) died. Rank 0 in push awaited landed of rank 2")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"format": 2}',
        json.dumps(_record(0, "timeout", 1.0) | {"waits": [3]}),
        json.dumps(_record(0, "timeout", 1.0) | {"rank": "0"}),
        json.dumps(_record(0, "timeout", 1.0) | {"time": True}),
        json.dumps(_record(0, "timeout", 1.0) | {"waits": [{"call": 1}]}),
        "\xff\x00",
        "x" * (2 << 20),
    ],
)
def test_what_cannot_be_read_is_said_and_never_a_crash(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tide-bad.json").write_text(text)
    assert main(["autopsy", str(tmp_path)]) == 1
    assert "no rank wrote anything" in capsys.readouterr().err
    (tmp_path / "tide-good.json").write_text(json.dumps(_record(0, "timeout", 1.0, (1, "a"))))
    assert main(["autopsy", str(tmp_path)]) == 0
    assert "not read: tide-bad.json" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TideConfigError, match="no folder"):
        autopsy.read(tmp_path / "none")
