"""Spans of a replay (or of a profile) as a Chrome trace for Perfetto, as an SVG picture, and as lines of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from tide_strategies.errors import TideConfigError
from tide_strategies.planner.replay import Span

#: Colour by what a span does; waits are grey.
_COLOURS = {
    "copy": "#4878cf",
    "push": "#4878cf",
    "sum": "#d65f5f",
    "put": "#6acc65",
    "land": "#b47cc7",
    "zero": "#c4ad66",
}
_OTHER, _WAIT = "#77bedb", "#d0d0d0"
_ROW, _LEFT, _WIDTH = 16, 130, 900


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans in Chrome's trace format (microseconds), one process per rank and one thread per stream."""
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[int, str], int] = {}
    for span in spans:
        key = (span.rank, span.stream)
        if key not in numbers:
            numbers[key] = len(numbers)
            events.append(_name("process_name", span.rank, 0, f"rank {span.rank}"))
            events.append(_name("thread_name", span.rank, numbers[key], span.stream))
        events.append(
            {
                "ph": "X",
                "name": f"wait: {span.what}" if span.wait else span.what,
                "cat": "wait" if span.wait else "work",
                "pid": span.rank,
                "tid": numbers[key],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"bytes": span.nbytes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_of_profile(data: Any) -> list[Span]:
    """The TIDE ranges of a torch profiler trace (or of our own), from the first of them on.

    Raises:
        TideConfigError: not a Chrome trace, or one without such ranges.
    """
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise TideConfigError("not a Chrome trace: no list 'traceEvents'")
    own = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _is_ours(e)]
    found: list[Span] = []
    ranks: dict[str, int] = {}
    for event in own:
        start, length = _number(event.get("ts")), _number(event.get("dur", 0))
        if start is None or length is None:
            continue
        rank = ranks.setdefault(str(event.get("pid")), len(ranks))
        name, args = str(event["name"]), event.get("args")
        nbytes = args.get("bytes", 0) if isinstance(args, dict) else 0
        waits = name.startswith("wait: ") or "_wait" in name.split(" ")[0]
        stream = f"thread {event.get('tid')}"
        found.append(
            Span(rank, stream, name, start / 1e6, (start + length) / 1e6, nbytes if type(nbytes) is int else 0, waits)
        )
    if not found:
        raise TideConfigError("the trace has no range of TIDE (their names begin with 'TIDE::')")
    first = min(s.start for s in found)
    return [Span(s.rank, s.stream, s.what, s.start - first, s.end - first, s.nbytes, s.wait) for s in found]


def svg(spans: Sequence[Span], title: str) -> str:
    """A picture: one row per rank and stream, time to the right."""
    rows = _rows(spans)
    end = max((s.end for s in spans), default=0.0) or 1.0
    height = _ROW * (len(rows) + 4)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#fff"/>',  # readable on dark pages too
        f'<text x="4" y="14" font-size="12">{escape(title)}</text>',
    ]
    for i, key in enumerate(rows):
        out.append(f'<text x="4" y="{_ROW * (i + 2) + 11}">rank {key[0]}, {escape(key[1])}</text>')
    for span in spans:
        x, width = _LEFT + _WIDTH * span.start / end, max(_WIDTH * (span.end - span.start) / end, 0.3)
        y = _ROW * (rows.index((span.rank, span.stream)) + 2)
        tip = escape(f"{span.what}: {span.start * 1e3:.3f} to {span.end * 1e3:.3f} ms, {span.nbytes} bytes")
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}" fill="{_colour(span)}">'
            f"<title>{tip}</title></rect>"
        )
    y = _ROW * (len(rows) + 2) + 12
    for tick in range(6):
        x = _LEFT + _WIDTH * tick / 5
        out.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{end * tick / 5 * 1e3:.3f} ms</text>')
    return "\n".join([*out, "</svg>", ""])


def text(spans: Sequence[Span], width: int = 72, most: int = 24) -> str:
    """Lines of text: per rank and stream, ``#`` where it works, ``.`` where it waits."""
    rows = _rows(spans)
    end = max((s.end for s in spans), default=0.0) or 1.0
    lines = []
    for key in rows[:most]:
        cells = [" "] * width
        for mark, waits in ((".", True), ("#", False)):
            for s in spans:
                if (s.rank, s.stream) == key and s.wait == waits:
                    first, last = int(s.start / end * width), int(s.end / end * width)
                    for i in range(min(first, width - 1), min(max(last, first + 1), width)):
                        cells[i] = mark
        lines.append(f"{f'{key[0]} {key[1]}':<14.14} |{''.join(cells)}|")
    if len(rows) > most:
        lines.append(f"({len(rows) - most} rows more; --svg or --trace show all)")
    return "\n".join([*lines, f"{'':<14}  0{f'{end * 1e3:.3f} ms':>{width - 1}}"])


def to_json(trace: dict[str, Any]) -> str:
    """A trace as the text of a file."""
    return json.dumps(trace) + "\n"


def _rows(spans: Sequence[Span]) -> list[tuple[int, str]]:
    return sorted({(s.rank, s.stream) for s in spans})


def _colour(span: Span) -> str:
    if span.wait:
        return _WAIT
    return next((c for word, c in _COLOURS.items() if span.what.startswith(word)), _OTHER)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _number(value: Any) -> float | None:
    """A time in a trace, or None for what is none."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e18 else None


def _is_ours(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith("TIDE::") or event.get("cat") in ("work", "wait")
