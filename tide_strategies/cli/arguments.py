"""Values that commands read from their words."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number from 1 to a billion."""
    if not text.strip().isdecimal() or not 1 <= int(text[:20]) <= 10**9:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10^9; got {text[:40]!r}")
    return int(text)
