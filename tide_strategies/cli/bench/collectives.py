"""``tide bench collectives``: our all-gather and reduce-scatter beside the stock path, in one run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tide_strategies.cli.arguments import positive
from tide_strategies.cli.bench.options import rank_counts, sizes
from tide_strategies.cli.bench.ranks import Job, Place, Row
from tide_strategies.cli.bench.rows import Column, grouped_bars, ratio

ABOUT = """\
Each row is one collective over one parameter group, measured for both paths in the same processes, in alternating
blocks of calls. Times are medians over the repeats of the slowest rank; data is random. "all_gather" starts from bf16
shards, "all_gather_cast" casts them from fp32 masters first; the shard is the bf16 shard. "reduce_scatter" starts from
per-parameter bf16 gradients; the shard is its fp32 output. "stock" is what FSDP2 runs: all-gather, then copy-out;
chunk_cat with upcast, then reduce-scatter. "limit" moves what must move and no more: for the all-gather raw copies of
the shard to every peer, for the reduce-scatter raw copies of what a rank pushes, plus one pass that reads all
contributions and writes the output (CPU: memcpy; GPU: copies between the cards, in the same run). "% limit" is the
limit's time in percent of ours. "host" is the cost to the calling thread: on a GPU the time to enqueue a call, on the
CPU that of a call on parameters of a few bytes, waits for the peers included. On a GPU, "kernels", "us" and "CTAs" are
the kernels of one call on rank 0's card, their time, and the thread blocks of the largest; "SM-us" is each kernel's
time by the SMs that it can occupy. "copy us" is the time in which copies of ours run, "idle us" that in which neither
copies nor kernels do: latencies of signals, waits and starts.
"""

COLUMNS = [
    Column("collective", "collective", room=15),
    Column("ranks", "ranks"),
    Column("shard_mib", "shard MiB", ".2f"),
    Column("params", "params"),
    Column("ours_ms", "ours ms", ".3f"),
    Column("stock_ms", "stock ms", ".3f"),
    Column("limit_ms", "limit ms", ".3f"),
    Column("stock_to_ours", "stock/ours", ".2f"),
    Column("percent_of_limit", "% limit", ".1f"),
    Column("limit_gbps", "limit GB/s", ".0f"),
    Column("ours_host_us", "host us", ".1f"),
    Column("stock_host_us", "stock host", ".1f"),
]
GPU_COLUMNS = [
    *COLUMNS,
    *(
        Column(f"{who}_{key}", f"{'' if who == 'ours' else 'stock '}{title}", form)
        for who in ("ours", "stock")
        for key, title, form in (("kernels", "kernels", ".1f"), ("kernel_us", "us", ".0f"), ("ctas", "CTAs", "d"))
    ),
    Column("ours_sm_us", "SM-us", ".0f"),
    Column("stock_sm_us", "stock SM-us", ".0f"),
    Column("ours_copy_us", "copy us", ".0f"),
    Column("ours_idle_us", "idle us", ".0f"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--ranks", type=rank_counts, help="rank counts, comma separated (CPU: 2,4; GPU: one per GPU)")
    parser.add_argument("--shard-mib", type=sizes, help="MiB of a shard, comma separated (CPU: 1,8,32; GPU: 32,128)")
    parser.add_argument("--params", type=positive, default=30, help="parameters per group (default: 30)")
    parser.add_argument("--repeats", type=positive, default=15, help="times per row (default: 15)")
    parser.add_argument("--sum-ctas", type=positive, help="GPU: thread blocks of the reduce-scatter's sum")
    parser.add_argument("--chunk-mib", type=float, help="GPU: MiB of a contribution staged at a time")


def columns(device: str) -> list[Column]:
    """Columns of the table."""
    return GPU_COLUMNS if device == "cuda" else COLUMNS


def jobs(arguments: argparse.Namespace, device: str) -> list[Job]:
    """One job per collective and size."""
    names = (
        ["all_gather", "all_gather_cast", "reduce_scatter"] if device == "cuda" else ["all_gather", "reduce_scatter"]
    )
    shards = arguments.shard_mib or ([32.0, 128.0] if device == "cuda" else [1.0, 8.0, 32.0])
    tuning = {
        "sum_ctas": arguments.sum_ctas,
        "chunk_bytes": int(arguments.chunk_mib * 2**20) if arguments.chunk_mib else None,
    }
    return [
        Job(
            f"{name}, shard of {mib:g} MiB",
            measure,
            {
                "collective": name,
                "shard_bytes": int(mib * 2**20),
                "params": arguments.params,
                "repeats": arguments.repeats,
                "tuning": tuning,
            },
        )
        for mib in shards
        for name in names
    ]


def measure(
    place: Place, collective: str, shard_bytes: int, params: int, repeats: int, tuning: dict[str, Any]
) -> Iterator[Row]:
    """Measure one collective for one size."""
    from tide_strategies.cli.bench.timing import median_ms

    with _stream(place):
        if place.on_gpu:
            from tide_strategies.cli.bench.pairs_cuda import pair as gpu_pair

            pair = gpu_pair(place, collective, shard_bytes, params, **tuning)
        else:
            from tide_strategies.cli.bench.pairs_cpu import pair as cpu_pair

            pair = cpu_pair(place, collective, shard_bytes, params)
        times = median_ms(place, repeats, {"ours": pair.ours, "stock": pair.stock, "limit": pair.limit})
        sent = (place.ranks - 1) * pair.shard_bytes
        row: Row = {
            "collective": collective,
            "ranks": place.ranks,
            "shard_mib": pair.shard_bytes / 2**20,
            "params": params,
            "ours_ms": times["ours"],
            "stock_ms": times["stock"],
            "limit_ms": times["limit"],
            "stock_to_ours": ratio(times["stock"], times["ours"]),
            "percent_of_limit": percent(times["limit"], times["ours"]),
            "limit_gbps": ratio(sent / 1e6, times["limit"]) if collective == "all_gather" else None,
            "notes": list(pair.notes),
        }
        row.update(_gpu_host_and_kernels(place, pair, row["notes"]) if place.on_gpu else {})
        pair.close()
        if not place.on_gpu:
            from tide_strategies.cli.bench.pairs_cpu import host_us

            row["ours_host_us"] = host_us(place, collective, params)
        yield row


def percent(part: float | None, whole: float | None) -> float | None:
    """``part`` in percent of ``whole``."""
    share = ratio(part, whole)
    return None if share is None else 100 * share


def _gpu_host_and_kernels(place: Place, pair: Any, notes: list[str]) -> Row:
    from tide_strategies.cli.bench.kernels import kernel_activity
    from tide_strategies.cli.bench.timing import host_us

    row: Row = {}
    for who, call in (("ours", pair.ours), ("stock", pair.stock)):
        row[f"{who}_host_us"] = host_us(place, call)
        found = kernel_activity(place, call) if call is not None else None
        if isinstance(found, str):
            notes.append(f"{who}: no SM time: {found}")
        elif found is not None:
            row.update({f"{who}_{key}": value for key, value in asdict(found).items()})
    return row


def _stream(place: Place) -> contextlib.AbstractContextManager[Any]:
    """A stream of one's own on a GPU: collectives never run on the default one."""
    if not place.on_gpu:
        return contextlib.nullcontext()
    import torch

    stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(place.device))
    return stream


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Times of ours, stock and the limit for each row."""
    labels = [f"{r['collective']}\n{r['ranks']} ranks, {r['shard_mib']:g} MiB" for r in rows]
    series = [(who, [r[f"{who}_ms"] for r in rows]) for who in ("ours", "stock", "limit")]
    grouped_bars(axes, labels, series, "ms")
