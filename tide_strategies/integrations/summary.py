"""One line that says what TIDE does for a model, for a framework's log."""

from __future__ import annotations

from collections import Counter

from tide_strategies.report import TideReport


def summary_line(report: TideReport) -> str:
    """For example ``TIDE: 7 of 8 groups accelerated; 1 stock (TIDE-F003: shard dimension is 1)``."""
    if not report.installed or not report.groups:
        return f"TIDE: {report.status}"
    stock = [g for g in report.groups if g.path != "tide"]
    line = f"TIDE: {len(report.groups) - len(stock)} of {len(report.groups)} groups accelerated"
    if stock:
        reasons = Counter(f"{g.code}: {g.reason}" for g in stock)
        told = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.most_common())
        line += f"; {len(stock)} stock ({told})"
    return line
