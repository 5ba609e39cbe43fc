"""Values of benchmark options, read from text."""

from __future__ import annotations

import argparse

from tide_strategies.cli.arguments import positive


def numbers(text: str) -> list[int]:
    """Whole numbers from 1, comma separated."""
    return [positive(t) for t in text.split(",")]


def model_sizes(text: str) -> list[tuple[int, int]]:
    """Widths and depths such as ``4096x16``, comma separated."""
    out = []
    for size in text.split(","):
        width, by, depth = size.partition("x")
        if not by:
            raise argparse.ArgumentTypeError(f"sizes are WIDTHxDEPTH, such as 4096x16; got {size!r}")
        out.append((positive(width), positive(depth)))
    return out


def rank_counts(text: str) -> list[int]:
    """Rank counts, comma separated."""
    values = numbers(text)
    if min(values) < 2:
        raise argparse.ArgumentTypeError(f"collectives need at least 2 ranks; got {text}")
    return values


def sizes(text: str) -> list[float]:
    """Sizes above zero, comma separated."""
    values = [float(t) for t in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"sizes must be positive; got {text}")
    return values
