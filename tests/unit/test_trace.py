"""Measured timelines: bounded files, read as data, on one clock."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.cli.main import main
from tide_strategies.errors import TideConfigError
from tide_strategies.fsdp2.device_trace import DeviceTrace, span
from tide_strategies.planner.measured import Recording, aligned, offsets, read, within
from tide_strategies.runtime import trace as writing
from tide_strategies.runtime.trace import Trace


def lines(folder: Path) -> list[Any]:
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_is_noted_is_read_back(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new", 3, "group", [1.0, 2.0])
    trace.add("copy", "all-gather of 'a'", 5.0, 5.5, 0.4, 100)
    trace.add("copy", "all-gather of 'b'", 6.0, 6.25)
    trace.close()
    trace.close()
    trace.add("copy", "after the end", 7.0, 8.0)
    (recording,) = read(tmp_path / "new")
    assert (recording.rank, recording.group, recording.meetings, recording.missing) == (3, "group", (1.0, 2.0), 0)
    assert recording.calls == (
        ("copy", "all-gather of 'a'", 5.0, 0.5, 0.4, 100),
        ("copy", "all-gather of 'b'", 6.0, 0.25, 0.0, 0),
    )


def test_a_file_does_not_outgrow_its_bound_and_says_what_is_missing(tmp_path: Path) -> None:
    trace = Trace(tmp_path, 0, "g", [], max_bytes=2000)
    for i in range(1000):
        trace.add("copy", "a call", float(i), i + 0.5)
    trace.close()
    (file,) = tmp_path.iterdir()
    assert 1500 < file.stat().st_size <= 2000
    (recording,) = read(tmp_path)
    assert len(recording.calls) + recording.missing == 1000
    assert recording.missing > 900


def test_nothing_is_written_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_TRACE", raising=False)
    met: list[bytes] = []

    def exchange(payload: bytes) -> list[bytes]:
        met.append(payload)
        return [payload, payload]

    assert writing.begin("", exchange, 0) is None
    assert met == []
    monkeypatch.setenv("TIDE_TRACE", str(tmp_path / "by environment"))
    trace = writing.begin("", exchange, 1)
    assert trace is not None
    trace.close()
    (recording,) = read(tmp_path / "by environment")
    assert list(recording.meetings) == sorted(recording.meetings)
    assert len(recording.meetings) == len(met) - 1
    assert recording.group == met[0].decode()


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    trace = Trace(blocked / "below", 0, "g", [])
    trace.add("copy", "a call", 0.0, 1.0)
    trace.close()


def recording(rank: int, host: str, group: str, meetings: list[float], start: float, waited: float = 0.0) -> Recording:
    return Recording(rank, host, group, tuple(meetings), (("copy", f"call {rank}", start, 1.0, waited, 7),), 0)


def test_clocks_of_hosts_are_aligned_by_meetings_and_those_of_one_host_are_one() -> None:
    """Host b is 100 s ahead, c another 50 s, and meets b in another group only. One meeting of five was late."""
    spans = aligned(
        [
            recording(0, "a", "x", [1, 2, 3, 4, 5], 10.0),
            recording(1, "a", "y", [], 10.5, waited=0.75),
            recording(2, "b", "x", [101, 102, 109, 104, 105], 111.0),
            recording(2, "b", "z", [200, 201, 202], 112.0),
            recording(3, "c", "z", [250, 251, 252], 163.0),
        ]
    )
    assert [(s.rank, s.start, s.end, s.nbytes) for s in spans] == [
        (0, 0.0, 1.0, 7),
        (1, 0.5, 1.5, 7),
        (2, 1.0, 2.0, 7),
        (2, 2.0, 3.0, 7),
        (3, 3.0, 4.0, 7),
    ]
    assert [s.wait for s in spans] == [False, True, False, False, False]
    assert spans[1].what == "call 1 (waited 750.000 ms)"
    assert [(s.rank, s.start, s.end) for s in within(spans, 0.75, 1.25)] == [
        *[(0, 0.0, 0.25), (1, 0.0, 0.5), (2, 0.25, 0.5)],
    ]


def test_hosts_that_never_met_cannot_be_aligned() -> None:
    strangers = [recording(0, "a", "x", [1], 1.0), recording(1, "b", "y", [1], 1.0)]
    with pytest.raises(TideConfigError, match="rank 1 cannot be aligned"):
        offsets(strangers)
    assert offsets([]) == {}


CONTENT: list[Any] = [
    {"format": 1, "rank": 0, "host": "h b", "pid": 1, "group": "g", "meetings": [1.0, 2.0]},
    ["copy", "a call", 5.0, 0.5, 0.25, 100],
    {"missing": 3},
]


def written(folder: Path, content: list[Any]) -> Path:
    for file in folder.iterdir():
        file.unlink()
    (folder / "tide-h-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0, {"format": 2}), "first line"),
        ((0, []), "first line"),
        ((0, {"rank": -1}), "rank '-1'"),
        ((0, {"meetings": ["x"]}), "meetings"),
        ((0, {"group": None}), "its group"),
        ((1, ["copy", "a call", 5.0, 0.5, 0.25]), "line 2: not a call"),
        ((1, ["copy", "a call", float("nan"), 0.5, 0.25, 1]), "line 2: not a call"),
        ((1, ["copy", "a call", 5.0, -1, 0.25, 1]), "line 2: not a call"),
        ((1, [1, "a call", 5.0, 0.5, 0.25, 1]), "line 2: not a call"),
        ((2, {"missing": "all"}), "line 3: not a call"),
    ],
)
def test_what_no_rank_writes_is_refused_with_its_place(tmp_path: Path, change: tuple[int, Any], words: str) -> None:
    content = copy.deepcopy(CONTENT)
    at, value = change
    content[at] = {**content[at], **value} if isinstance(value, dict) and at == 0 else value
    with pytest.raises(TideConfigError, match=words):
        read(written(tmp_path, content))


def test_a_rank_that_was_killed_leaves_half_a_line(tmp_path: Path) -> None:
    written(tmp_path, CONTENT)
    file = tmp_path / "tide-h-1.jsonl"
    file.write_text(file.read_text() + '["copy", "a ca')
    (found,) = read(tmp_path)
    assert (len(found.calls), found.missing) == (1, 3)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TideConfigError, match="no rank wrote a trace"):
        read(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "tide-pipe.jsonl")
    with pytest.raises(TideConfigError, match="no file"):
        read(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2), json_values, st.binary(max_size=20))
def test_any_line_is_a_call_or_a_clear_refusal(at: int, value: Any, tail: bytes) -> None:
    import tempfile

    content = copy.deepcopy(CONTENT)
    content[at] = value
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), content)
        with (Path(folder) / "tide-h-1.jsonl").open("ab") as file:
            file.write(tail)
        try:
            spans = aligned(read(Path(folder)))
        except TideConfigError as e:
            assert "tide-h-1.jsonl" in str(e)  # noqa: PT017
        else:
            assert all(0 <= s.start <= s.end for s in spans)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--measured", "/no/such/folder"], "no rank wrote a trace"),
        (["--measured", "{}", "--from", "x.json"], "two timelines"),
        (["--window", "1:2"], "--window is for --measured"),
        (["--measured", "{}", "--window", "2:1"], "as in 100:250; got '2:1'"),
        (["--measured", "{}", "--window", "a"], "as in 100:250; got 'a'"),
        (["--measured", "{}", "--window", "0:nan"], "as in 100:250"),
        (["--measured", "{}", "--window", "5000:6000"], "nothing happened"),
    ],
)
def test_the_command_refuses_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    written(tmp_path, CONTENT)
    assert main(["timeline", *(w.format(tmp_path) for w in words)]) != 0
    assert reason in capsys.readouterr().err


class Event:
    """An event of a device whose clock is ``now`` seconds, and which is through with everything up to ``done``."""

    now = done = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def synchronize(self) -> None:
        Event.done = max(Event.done, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return (end.at - self.at) * 1e3


def test_device_spans_are_written_once_they_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "done", 0.0)
    with span(None, "nothing is traced", 0, ("copy", None)):
        pass
    trace = Trace(tmp_path, 0, "g", [])
    device = DeviceTrace(trace, Event)
    for number in range(3):
        with span(device, f"call {number}", 10, ("push", 1), ("sum", 2)):
            Event.now += 1.0
    assert len(lines(tmp_path)) == 1, "the header: nothing has happened on the device"
    Event.done = 1.0
    with span(device, "call 3", 0, ("push", 1)):
        Event.now += 0.5
    trace.close()
    calls = lines(tmp_path)[1:]
    assert [c[:2] for c in calls] == [
        *([stream, f"call {n}"] for n in range(3) for stream in ("push", "sum")),
        ["push", "call 3"],
    ]
    start = calls[0][2]
    assert [round(c[2] - start, 6) for c in calls] == [0, 0, 1, 1, 2, 2, 3]
    assert [c[3] for c in calls] == [1, 1, 1, 1, 1, 1, 0.5]
