"""``tide bench interference``: how much slower a kernel runs beside a collective, ours or stock's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from tide_strategies.cli.arguments import positive
from tide_strategies.cli.bench.options import numbers, rank_counts
from tide_strategies.cli.bench.ranks import Job, Place, Row
from tide_strategies.cli.bench.rows import Column, grouped_bars

ABOUT = """\
Each row is a kernel (the victim) that runs again and again on one stream while every rank runs a collective in a loop
on another (paper, sections 2.2 to 2.4 and Table 4). The one-wave GEMM has a tile for every SM, the many-wave GEMM a
thread block for each of its many tiles, the persistent GEMM (cuBLAS's) one on each SM for all of them; "CTAs" are the
thread blocks that the victim's kernel really had, "waves" those by the number of SMs. "alone" and "beside" are
milliseconds of one call of the victim: mean over a row of calls, median over the repeats, slowest rank; samples with
and without collectives take turns. "slowdown" is how much longer, in percent. "coll." is the collective's own time,
alone and beside the victim, and "covered" the share of samples in which it ran until after the victim's end: below 100
the slowdown is an underestimate. "raw copies" are the all-gather's bytes without its signals: what any copy costs. From
a recording on rank 0's GPU, "kernels us" is how long kernels of the collective ran beside a call of the victim, on
average, and "apart" the slowdown of those calls beside which none did. The SM-id probe fills every SM with thread
blocks that note where and when they began: "SMs" is how many had a thread block kept out in at least a tenth of the
launches, "displaced" in how many launches there was one.
"""

COLUMNS = [
    Column("victim", "victim", room=14),
    Column("beside", "beside", room=20),
    Column("ranks", "ranks"),
    Column("shape", "shape", room=18),
    Column("ctas", "CTAs"),
    Column("waves", "waves", ".2f"),
    Column("alone_ms", "alone ms", ".4f"),
    Column("beside_ms", "beside ms", ".4f"),
    Column("slowdown_percent", "slowdown %", ".1f"),
    Column("collective_ms", "coll. ms", ".3f"),
    Column("collective_beside_ms", "coll. beside", ".3f"),
    Column("covered_percent", "covered %", ".0f"),
    Column("kernel_us", "kernels us", ".1f"),
    Column("apart_percent", "apart %", ".1f"),
    Column("sms", "SMs"),
    Column("displaced_percent", "displaced %", ".0f"),
]
VICTIMS = ("one-wave GEMM", "many-wave GEMM", "persistent GEMM", "elementwise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--ranks", type=rank_counts, help="rank counts, comma separated (default: one per GPU)")
    parser.add_argument("--shard-mib", type=float, default=32.0, help="MiB of the collectives' shard (default: 32)")
    parser.add_argument("--params", type=positive, default=30, help="parameters per group (default: 30)")
    parser.add_argument("--repeats", type=positive, default=9, help="samples per row (default: 9)")
    parser.add_argument("--gemm", type=_shape, metavar="M,N,K", help="another GEMM in the place of the one-wave one")
    parser.add_argument("--sum-ctas", type=positive, help="thread blocks of our reduce-scatter's sum")
    parser.add_argument("--chunk-mib", type=float, help="MiB of a contribution staged at a time")
    parser.add_argument("--no-probe", action="store_true", help="leave the SM-id probe out")


def columns(device: str) -> list[Column]:
    """Columns of the table."""
    return COLUMNS


def jobs(arguments: argparse.Namespace, device: str) -> list[Job]:
    """One job per victim, and the probe."""
    collectives = {
        "shard_bytes": int(arguments.shard_mib * 2**20),
        "params": arguments.params,
        "sum_ctas": arguments.sum_ctas,
        "chunk_bytes": int(arguments.chunk_mib * 2**20) if arguments.chunk_mib else None,
    }
    work = {"collectives": collectives, "repeats": arguments.repeats}
    out = [Job(name, measure, {**work, "name": name, "one_wave": arguments.gemm}) for name in VICTIMS]
    return out if arguments.no_probe else [*out, Job("SM-id probe", probe, {"collectives": collectives})]


def measure(
    place: Place, name: str, one_wave: tuple[int, int, int] | None, collectives: dict[str, Any], repeats: int
) -> Iterator[Row]:
    """One victim beside each collective."""
    from tide_strategies.cli.bench.interference_work import victim_rows

    yield from victim_rows(place, name, one_wave, collectives, repeats)


def probe(place: Place, collectives: dict[str, Any]) -> Iterator[Row]:
    """Which SMs each collective occupies."""
    from tide_strategies.cli.bench.probe import probe_rows

    yield from probe_rows(place, collectives)


def _shape(text: str) -> tuple[int, int, int]:
    values = numbers(text)
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"takes M,N,K; got {text}")
    return values[0], values[1], values[2]


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Slowdowns: a group of bars for each victim."""
    measured = [r for r in rows if r.get("slowdown_percent") is not None]
    victims = list(dict.fromkeys((r["victim"], r["ranks"]) for r in measured))
    beside = list(dict.fromkeys(r["beside"] for r in measured))
    found = {(r["victim"], r["ranks"], r["beside"]): r["slowdown_percent"] for r in measured}
    labels = [f"{victim}\n{ranks} ranks" for victim, ranks in victims]
    grouped_bars(axes, labels, [(b, [found.get((*v, b)) for v in victims]) for b in beside], "slowdown in percent")
