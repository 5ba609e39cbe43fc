"""What the demo shows of its two runs: a table, and a picture of losses and step times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MiB = 2**20
_BUSY = 0.1  # above this share of waiting for a processor, step times say more about other programs than about ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One run in a few numbers. Times are per step and the mean over ranks unless said otherwise.

    Args:
        step_seconds: median step (forward, backward, optimizer) of the slowest rank of each step.
        collective_seconds: time inside all-gathers and reduce-scatters.
        exposed_seconds: the part of it during which the rank computed nothing. On the CPU collectives are
            synchronous, so that is all of it.
        wait_seconds: the part of it spent waiting for the peer; ``None`` where it cannot be told apart (stock).
        outside_seconds: the rest of a step: computing, the optimizer, and stock FSDP2's copies around collectives.
        processor_wait_share: part of the steps' time for which ranks waited for a processor that others used.
        collective_calls: collectives per step and rank.
        peak_memory_bytes: proportional set size, summed over ranks: memory that ranks share counts once.
        final_loss: training loss of the last step, mean over ranks.
        val_loss: loss on the validation text after the last step.
        tide_groups: parameter groups whose collectives were TIDE's, of ``groups``.
    """

    step_seconds: float
    collective_seconds: float
    exposed_seconds: float
    wait_seconds: float | None
    outside_seconds: float
    processor_wait_share: float
    collective_calls: float
    peak_memory_bytes: int
    final_loss: float
    val_loss: float
    tide_groups: int
    groups: int


def summarize(record: dict[str, Any]) -> Summary:
    """Boil down the record of one run (see ``demo_record``)."""
    ranks, timed = record["ranks"], record["timed_steps"]
    groups = record["report"]["groups"] if record["report"] else []
    tide_groups = sum(g["path"] == "tide" for g in groups)

    def per_step(key: str) -> float:
        return float(statistics.fmean(r["collectives"][key] for r in ranks) / timed)

    first, last = record["warmup"], record["warmup"] + timed
    mean_step = statistics.fmean(s for r in ranks for s in r["step_seconds"][first:last])
    processor_wait = statistics.fmean(r["processor_wait_seconds"] for r in ranks) / timed

    return Summary(
        step_seconds=statistics.median(timed_step_seconds(record)),
        collective_seconds=per_step("seconds"),
        exposed_seconds=per_step("seconds"),
        wait_seconds=per_step("wait_seconds") if tide_groups else None,
        outside_seconds=mean_step - per_step("seconds"),
        processor_wait_share=processor_wait / mean_step,
        collective_calls=per_step("calls"),
        peak_memory_bytes=sum(r["peak_pss_bytes"] for r in ranks),
        final_loss=mean_losses(record)[-1],
        val_loss=record["val_loss"],
        tide_groups=tide_groups,
        groups=len(groups),
    )


def mean_losses(record: dict[str, Any]) -> list[float]:
    """Training loss of each step, mean over ranks."""
    return [statistics.fmean(step) for step in zip(*(r["losses"] for r in record["ranks"]), strict=True)]


def timed_step_seconds(record: dict[str, Any]) -> list[float]:
    """Seconds of each timed step, of the rank that took longest."""
    steps = [max(step) for step in zip(*(r["step_seconds"] for r in record["ranks"]), strict=True)]
    return steps[record["warmup"] : record["warmup"] + record["timed_steps"]]


def compare(stock: dict[str, Any], tide: dict[str, Any]) -> dict[str, Any]:
    """Both summaries, and whether the runs agree to the last bit, as plain JSON-ready data."""
    return {
        "stock": asdict(summarize(stock)),
        "tide": asdict(summarize(tide)),
        "losses_equal": [r["losses"] for r in stock["ranks"]] == [r["losses"] for r in tide["ranks"]],
        "parameters_bit_equal": stock["parameter_sha256"] == tide["parameter_sha256"],
    }


def table(comparison: dict[str, Any]) -> str:
    """The comparison as aligned text, with the words that say how to read it."""
    stock, tide = comparison["stock"], comparison["tide"]
    rows = [("", "stock FSDP2", "TIDE", "stock / TIDE")]
    for label, key, show, with_ratio in _ROWS:
        a, b = stock[key], tide[key]
        ratio = f"{a / b:.2f} x" if with_ratio and a and b else ""
        rows.append(
            (label, show(a) if a is not None else "not known", show(b) if b is not None else "not known", ratio)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for row in rows:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded]).rstrip())
    lines.insert(1, "-" * (sum(widths) + 6))
    return "\n".join([*lines, "", *_notes(comparison)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


_ROWS: list[tuple[str, str, Callable[[Any], str], bool]] = [
    ("step time (median)", "step_seconds", _milliseconds, True),
    ("in collectives, per step", "collective_seconds", _milliseconds, True),
    ("  of that exposed", "exposed_seconds", _milliseconds, True),
    ("  of that waiting for the peer", "wait_seconds", _milliseconds, False),
    ("outside collectives, per step", "outside_seconds", _milliseconds, True),
    ("collectives per step", "collective_calls", lambda n: f"{n:.0f}", False),
    ("peak memory, all processes", "peak_memory_bytes", lambda n: f"{n / MiB:.0f} MiB", True),
    ("loss, last step", "final_loss", lambda x: f"{x:.6f}", False),
    ("loss, validation text", "val_loss", lambda x: f"{x:.6f}", False),
]


def _notes(comparison: dict[str, Any]) -> list[str]:
    tide = comparison["tide"]
    equal = comparison["parameters_bit_equal"]
    notes = [
        "Parameters after the last step: " + ("bit-equal in both runs." if equal else "NOT bit-equal."),
        f"TIDE ran {tide['tide_groups']} of {tide['groups']} parameter groups.",
        "On the CPU collectives are synchronous, so all of their time is exposed; it includes waiting for the",
        "other process to arrive. Memory is the proportional set size (PSS): what processes share counts once.",
    ]
    if tide["tide_groups"] < tide["groups"] or not tide["groups"]:
        notes.insert(2, "The other groups used stock collectives; the report in the JSON file says why.")
    for name, run in (("stock FSDP2", comparison["stock"]), ("TIDE", tide)):
        if run["processor_wait_share"] > _BUSY:
            share = f"{100 * run['processor_wait_share']:.0f} %"
            notes.append(f"Mind: in the run with {name}, other threads had the processor for {share} of the time.")
    return notes


def draw(stock: dict[str, Any], tide: dict[str, Any], path: Path) -> bool:
    """Draw loss curves and step times into ``path`` (PNG). False, and no file, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(mean_losses(stock), color="tab:gray", linewidth=4, alpha=0.5, label="stock FSDP2")
    left.plot(mean_losses(tide), color="tab:blue", linewidth=1.2, label="TIDE")
    left.set(title="Training loss", xlabel="step", ylabel="cross entropy per byte (nats)")
    for record, name, color in ((stock, "stock FSDP2", "tab:gray"), (tide, "TIDE", "tab:blue")):
        times = [1e3 * s for s in timed_step_seconds(record)]
        steps = range(record["warmup"], record["warmup"] + len(times))
        right.plot(steps, times, color=color, linewidth=1, alpha=0.8)
        median = statistics.median(times)
        right.axhline(median, color=color, linestyle="--", label=f"{name}, median {median:.0f} ms")
    right.set(title="Step time", xlabel="step", ylabel="ms")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
