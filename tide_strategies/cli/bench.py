"""``tide bench collectives``: our all-gather and reduce-scatter beside the stock path, in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tide_strategies.cli.bench_collectives import Row, measure

_ABOUT = """\
Each row is one collective over one parameter group, measured for both paths in the same processes, in alternating
blocks of calls. Times are medians over the repeats of the slowest rank. "stock" is what FSDP2 runs: all-gather, then
copy-out; chunk_cat with upcast, then reduce-scatter. "limit" is the time to move the same bytes with memcpy on all
ranks at once: for the all-gather one copy of the shard, for the reduce-scatter one copy of what a rank pushes, plus
one pass that reads all contributions and writes the output. The shard is the bf16 shard (all-gather) or the fp32
output (reduce-scatter, from bf16 gradients). "host" is the cost of a call beyond the copying: calls in a row on
parameters of a few bytes, waits for the peers included.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide bench``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    parser.add_argument("what", choices=["collectives"], help="what to measure")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], help="rank counts, comma separated (default: 2,4)")
    parser.add_argument(
        "--shard-mib",
        type=_sizes,
        default=[1.0, 8.0, 32.0],
        help="shard sizes in MiB, comma separated (default: 1,8,32)",
    )
    parser.add_argument("--params", type=_positive, default=30, help="parameters per group (default: 30)")
    parser.add_argument("--repeats", type=_positive, default=15, help="timed calls per row (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as JSON too")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON."""
    if arguments.json is not None and not arguments.json.parent.is_dir():
        print(f"tide bench: no folder {arguments.json.parent} for --json", file=sys.stderr)
        return 2
    rows: list[Row] = []
    print(_header(), flush=True)
    for ranks in arguments.ranks:
        sizes = [int(s * 2**20) for s in arguments.shard_mib]
        for row in measure(ranks, sizes, arguments.params, arguments.repeats):
            rows.append(row)
            print(_line(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
        print(f"rows written to {arguments.json}")
    return 0


def _header() -> str:
    return (
        f"{'collective':<15} {'ranks':>5} {'shard MiB':>9} {'params':>6} {'ours ms':>9} {'stock ms':>9} "
        f"{'limit ms':>9} {'stock/ours':>10} {'ours/limit':>10} {'host us':>8}"
    )


def _line(r: Row) -> str:
    return (
        f"{r.collective:<15} {r.ranks:>5} {r.shard_bytes / 2**20:>9.2f} {r.params:>6} {r.ours_ms:>9.3f} "
        f"{r.stock_ms:>9.3f} {r.limit_ms:>9.3f} {r.stock_ms / r.ours_ms:>10.1f} {r.ours_ms / r.limit_ms:>10.2f} "
        f"{r.host_us:>8.1f}"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return value


def _numbers(text: str) -> list[int]:
    values = [_positive(t) for t in text.split(",")]
    if min(values) < 2:
        raise argparse.ArgumentTypeError(f"collectives need at least 2 ranks; got {text}")
    return values


def _sizes(text: str) -> list[float]:
    values = [float(t) for t in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"sizes must be positive; got {text}")
    return values
