"""Where the time of a step goes on the compute stream, from a trace of it: ``tide bench step --trace``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from tide_strategies.cli.bench.kernels import SLEEP, Event, is_kernel, recorded
from tide_strategies.cli.bench.ranks import Place, Row

_STEPS = 5
#: Gaps from this many microseconds on are waits for something; shorter ones lie between any two kernels.
_LONG_US = 20.0
#: The time of the step's parts: before its first kernel, kernels, gaps, those of them that are long, after its last.
PARTS = ("lead_ms", "kernels_ms", "gaps_ms", "long_gaps_ms", "tail_ms")


def traced(place: Place, step: Callable[[], object], between: Callable[[], object]) -> Row | str | None:
    """Milliseconds of each part of a step of rank 0, medians; in words why not. Collective; the host runs ahead.

    Args:
        step: the timed part of a step, on the current stream.
        between: what runs between two of them.
    """

    def work() -> None:
        for _ in range(_STEPS + 1):  # in the first, the ranks meet
            torch.cuda._sleep(1)
            step()
            torch.cuda._sleep(1)
            between()

    events = recorded(place, work)
    return parts_of(events) if isinstance(events, list) else events


def parts_of(events: Sequence[Event]) -> Row | str:
    """The parts of the steps between pairs of marks, but for the first's; ``events`` in time's order."""
    marks = [e for e in events if SLEEP in e["name"]]
    if len(marks) < 4 or len(marks) % 2:
        return f"the trace has {len(marks)} marks"
    stream = marks[0]["args"]["stream"]
    found = []
    for begin, end in zip(marks[2::2], marks[3::2], strict=True):
        inside = [e for e in events if is_kernel(e) and begin["ts"] < e["ts"] < end["ts"]]
        own = [e for e in inside if e["args"]["stream"] == stream]
        if not own:
            return "the trace has a step without kernels"
        ends = [e["ts"] + e["dur"] for e in own]
        gaps = [after["ts"] - before for before, after in zip(ends, own[1:], strict=False)]
        lead, tail = own[0]["ts"] - begin["ts"] - begin["dur"], end["ts"] - ends[-1]
        busy = sum(e["dur"] for e in own)
        found.append((lead, busy, sum(gaps), sum(g for g in gaps if g >= _LONG_US), tail))
    return {part: statistics.median(values) / 1e3 for part, values in zip(PARTS, zip(*found, strict=True), strict=True)}
