"""Measured timelines: the files that ranks wrote (``runtime/trace.py``) as spans on one clock."""

from __future__ import annotations

import json
import math
import os
import stat
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_strategies.errors import TideConfigError
from tide_strategies.planner.replay import Span

FORMAT = 1
#: A larger file is none of ours; ranks of a job at most.
_MAX_BYTES, _MAX_FILES = 80 << 20, 4096


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank wrote, in seconds of its host's clock.

    Args:
        rank: among all ranks of the job.
        host: name and boot of the host; ranks that share it share a clock.
        group: names the ranks that met.
        meetings: when these ranks met, one by one.
        calls: (stream, call, start, length, waited, bytes).
        missing: calls that had no room.
    """

    rank: int
    host: str
    group: str
    meetings: tuple[float, ...]
    calls: tuple[tuple[str, str, float, float, float, int], ...]
    missing: int


def read(folder: Path) -> list[Recording]:
    """All recordings of one job.

    Raises:
        TideConfigError: there is none, or a file is not what ranks write; says which file and line.
    """
    files = sorted(folder.glob("tide-*.jsonl")) if folder.is_dir() else []
    if not files:
        raise TideConfigError(f"no rank wrote a trace into {folder}: set TIDE_TRACE to it before the job starts")
    if len(files) > _MAX_FILES:
        raise TideConfigError(f"{folder} has {len(files)} traces; a job has at most {_MAX_FILES}")
    return [_recording(file) for file in files]


def _recording(file: Path) -> Recording:
    lines = _lines(file)
    header = _value(file, 1, next(lines, ""))
    wanted = {"format", "rank", "host", "pid", "group", "meetings"}
    if not isinstance(header, dict) or header.keys() != wanted or header["format"] != FORMAT:
        raise TideConfigError(f"{file}: the first line is not that of a trace of this version")
    rank, host, group, meetings = (header[key] for key in ("rank", "host", "group", "meetings"))
    texts = all(type(text) is str and len(text) < 1000 for text in (host, group))
    if type(rank) is not int or not 0 <= rank < 1 << 31 or not texts:
        raise TideConfigError(f"{file}: rank {str(rank)[:40]!r}, its host or its group cannot be")
    if not isinstance(meetings, list) or len(meetings) > 100 or not all(_seconds(t) for t in meetings):
        raise TideConfigError(f"{file}: the meetings of the ranks are not times")
    calls, missing = [], 0
    number = 1
    for number, line in enumerate(lines, 2):
        if not line.endswith("\n"):
            break  # the rank was stopped while it wrote: nothing comes after
        value = _value(file, number, line)
        if isinstance(value, dict) and value.keys() == {"missing"} and type(value["missing"]) is int:
            missing = value["missing"]
            continue
        calls.append(_call(file, number, value))
    return Recording(rank, host, group, tuple(map(float, meetings)), tuple(calls), missing)


def _lines(file: Path) -> Iterator[str]:
    try:
        # A pipe in the place of a file must not hold anybody up.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, errors="replace") as opened:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
                raise TideConfigError(f"{file} is no file, or one of more than {_MAX_BYTES} bytes: no rank writes that")
            yield from opened
    except OSError as e:
        raise TideConfigError(f"{file}: {e.strerror}") from None


def _value(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise TideConfigError(f"{file}, line {number}: not JSON: {line[:60]!r}") from None


def _call(file: Path, number: int, value: Any) -> tuple[str, str, float, float, float, int]:
    good = (
        isinstance(value, list)
        and len(value) == 6
        and all(type(text) is str and len(text) < 1000 for text in value[:2])
        and all(_seconds(t) for t in value[2:5])
        and type(value[5]) is int
        and 0 <= value[5] < 1 << 60
    )
    if not good:
        raise TideConfigError(f"{file}, line {number}: not a call: {str(value)[:80]}")
    stream, call, start, length, waited, nbytes = value
    return stream, call, float(start), float(length), float(waited), nbytes


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12 and math.isfinite(value)


def offsets(recordings: Sequence[Recording]) -> dict[str, float]:
    """Seconds by which the clock of each host is ahead of the first recording's.

    Ranks of one host share a clock. Between hosts, the offset is the median difference of the times at which ranks met:
    as good as their meetings were, which is well below a millisecond on a quiet network.

    Raises:
        TideConfigError: the ranks of some host never met any of the others.
    """
    out = {r.host: 0.0 for r in recordings[:1]}
    waiting = [r for r in recordings if r.host not in out]
    while waiting:
        known = {r.group: r for r in recordings if r.host in out and r.meetings}
        found = next((r for r in waiting if r.meetings and r.group in known), None)
        if found is None:
            raise TideConfigError(
                f"the clock of rank {waiting[0].rank} cannot be aligned: it met no rank of other hosts"
            )
        other = known[found.group]
        pairs = zip(found.meetings, other.meetings, strict=False)
        out[found.host] = out[other.host] + statistics.median(own - theirs for own, theirs in pairs)
        waiting = [r for r in waiting if r.host not in out]
    return out


def aligned(recordings: Sequence[Recording]) -> list[Span]:
    """Spans of all ranks on one clock, which begins with the first of them (raises as :func:`offsets`)."""
    ahead = offsets(recordings)
    begin = min((c[2] - ahead[r.host] for r in recordings for c in r.calls), default=0.0)
    spans = []
    for r in recordings:
        for stream, call, start, length, waited, nbytes in r.calls:
            at = start - ahead[r.host] - begin
            what = f"{call} (waited {waited * 1e3:.3f} ms)" if waited else call
            spans.append(Span(r.rank, stream, what, at, at + length, nbytes, waited > length / 2))
    return sorted(spans, key=lambda s: (s.start, s.rank))


def within(spans: Sequence[Span], first_s: float, last_s: float) -> list[Span]:
    """What happens between two times, which the first of them begins."""
    cut = [s for s in spans if s.end > first_s and s.start < last_s]
    return [
        Span(s.rank, s.stream, s.what, max(s.start, first_s) - first_s, min(s.end, last_s) - first_s, s.nbytes, s.wait)
        for s in cut
    ]
