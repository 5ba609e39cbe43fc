"""Plain text tables that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

#: Columns that everything printed fits into.
WIDTH = 96


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their contents; numbers to the right, text to the left. The last column wraps at the edge."""
    cells = [[_text(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(headers), *cells]) for i in range(len(headers))]
    right = [all(not isinstance(row[i], str) for row in rows) and bool(rows) for i in range(len(headers))]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(WIDTH - before, 20))
    lines = []
    for row in [list(headers), ["-" * w for w in widths], *cells]:
        last = textwrap.wrap(row[-1], widths[-1]) or [""]
        fixed = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row[:-1], widths, right, strict=False)]
        lines.append("  ".join([*fixed, last[0].rjust(widths[-1]) if right[-1] else last[0]]).rstrip())
        lines += [" " * before + more for more in last[1:]]
    return "\n".join(lines)


def wrapped(text: str, indent: str = "") -> str:
    """Text broken at :data:`WIDTH`."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def gib(nbytes: float) -> str:
    """Bytes as GiB, or MiB below one hundredth of that, or B if that is more exact."""
    if nbytes >= 2**30 / 100:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 / 100 else f"{int(nbytes)} B"


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
