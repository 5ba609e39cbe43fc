"""``tide bench step``: training steps of a Llama-style block stack, ours beside stock FSDP2, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from tide_strategies.cli.arguments import positive
from tide_strategies.cli.bench.options import model_sizes, numbers, rank_counts
from tide_strategies.cli.bench.ranks import Job, Place, Row
from tide_strategies.cli.bench.rows import Column, grouped_bars, ratio

ABOUT = """\
Each row is one way of training the same block stack (RMSNorm, causal grouped-query attention, SwiGLU; bf16 parameters
and gradients, fp32 masters and fp32 reduction), all in the same processes, in alternating blocks of steps. "compute
only" is the same model with nothing to communicate: bf16 parameters on every rank. "step" is forward and backward, with
--optimizer the fused AdamW too (else it runs between the timed parts): median of the slowest rank. "exposed" is the
step less the compute-only step of the same row group, "of stock" its ratio to stock's. "host" is the time to enqueue a
step, nothing awaited. "alloc" is the peak of torch's allocator, "arena" what TIDE holds outside of it, "device" the
growth of the card's memory in use over the variant's life, which counts both (and the allocator's cache): each from
steps of that variant alone, optimizer included, largest rank. "loss" is that of the last of those steps,
"groups" how many of the parameter groups TIDE runs. With --sweep, "stock FSDP2 again" is stock once more in the same
run, so its ratio to stock says what noise is, and "TIDE auto" lets calibration choose between stock and TIDE by group.
With --trace, steps are recorded as well, on rank 0's GPU: on the stream that computes, the time before the first kernel
("lead"), of the kernels, between them ("gaps", and of those the ones over 20 us), and after the last ("tail").
"""

COLUMNS = [
    Column("variant", "variant", room=27),
    Column("ranks", "ranks"),
    Column("width", "width"),
    Column("depth", "depth"),
    Column("tokens", "tokens"),
    Column("step_ms", "step ms", ".2f"),
    Column("to_stock", "of stock", ".3f"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("exposed_to_stock", "of stock", ".3f"),
    Column("host_ms", "host ms", ".2f"),
    Column("allocated_gib", "alloc GiB", ".2f"),
    Column("arena_gib", "arena GiB", ".2f"),
    Column("device_gib", "device GiB", ".2f"),
    Column("loss", "loss", ".6f"),
    Column("groups", "groups"),
]
_TRACED = [
    Column("lead_ms", "lead ms", ".2f"),
    Column("kernels_ms", "kernels ms", ".2f"),
    Column("gaps_ms", "gaps ms", ".2f"),
    Column("long_gaps_ms", "long gaps", ".2f"),
    Column("tail_ms", "tail ms", ".2f"),
]
#: Device -> (width, depth); deeper stacks of width 8,192 leave no room for all variants on one card.
_SWEEP = {
    "cuda": [(1024, 4), (1024, 16), (2048, 4), (2048, 16), (4096, 4), (4096, 16), (8192, 4)],
    "cpu": [(64, 1), (64, 8), (128, 4), (256, 4), (512, 2), (1024, 2)],
}
_GPU = {"widths": [4096], "depths": [8], "tokens": [1024, 4096, 16384]}
_CPU = {"widths": [256], "depths": [2], "tokens": [256]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--ranks", type=rank_counts, help="rank counts, comma separated (CPU: 2,4; GPU: one per GPU)")
    parser.add_argument("--tokens", type=numbers, help="tokens per rank, comma separated (GPU: 1024,4096,16384)")
    parser.add_argument("--widths", type=numbers, help="model widths, comma separated (GPU: 4096)")
    parser.add_argument("--depths", type=numbers, help="numbers of blocks, comma separated (GPU: 8)")
    parser.add_argument("--hidden", type=positive, help="width of the SwiGLU (default: about 11/6 of the width)")
    parser.add_argument("--sequence", type=positive, default=4096, help="longest sequence (default: 4096)")
    parser.add_argument(
        "--sweep",
        nargs="?",
        type=model_sizes,
        const=[],
        metavar="SIZES",
        help="plan auto too, over these widths and depths (8192x4,4096x16: one or a few, where all of them take too "
        f"long), else over those of --widths and --depths, else on GPUs over {_sweep_words()}",
    )
    parser.add_argument("--optimizer", action="store_true", help="time the optimizer too")
    parser.add_argument("--steps", type=positive, default=12, help="timed steps per variant and row (default: 12)")
    parser.add_argument("--trace", action="store_true", help="GPU: record where the time of steps goes too")
    parser.add_argument("--variants", help='some of the variants, comma separated, for example "stock FSDP2"')
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of TIDE, such as reduce_scatter.sum_ctas=32; may be repeated",
    )


def _sweep_words() -> str:
    return ", ".join(f"{width}x{depth}" for width, depth in _SWEEP["cuda"])


def columns(device: str) -> list[Column]:
    """Columns of the table."""
    if device == "cuda":
        return [*COLUMNS, *_TRACED]
    return [c for c in COLUMNS if not c.key.endswith(("_gib", "host_ms"))]


def jobs(arguments: argparse.Namespace, device: str) -> list[Job]:
    """One job per width and depth; it gives the rows of all variants and token counts.

    Raises:
        TideConfigError: an option is wrong, or says what another one says too.
    """
    from tide_strategies.cli.bench.model import hidden_width

    default = _GPU if device == "cuda" else _CPU
    options = tide_options(arguments.option)
    variants = chosen_variants(arguments.variants, arguments.sweep is not None)
    return [
        Job(
            f"width {width}, depth {depth}",
            measure,
            {
                "width": width,
                "hidden": arguments.hidden or hidden_width(width),
                "depth": depth,
                "tokens": sorted(arguments.tokens or default["tokens"]),
                "sequence": arguments.sequence,
                "steps": arguments.steps,
                "optimizer": arguments.optimizer,
                "options": options,
                "names": variants,
                "trace": arguments.trace,
            },
        )
        for width, depth in swept_sizes(arguments, device)
    ]


def swept_sizes(arguments: argparse.Namespace, device: str) -> list[tuple[int, int]]:
    """Widths and depths: those that are stated, or the default's, or those of a sweep.

    Raises:
        TideConfigError: they are stated twice.
    """
    from tide_strategies.errors import TideConfigError

    default, stated = _GPU if device == "cuda" else _CPU, arguments.widths or arguments.depths
    if arguments.sweep and stated:
        raise TideConfigError("--sweep with sizes and --widths or --depths both say what to measure: state one of them")
    if arguments.sweep:
        return list(arguments.sweep)
    if arguments.sweep is not None and not stated:
        return _SWEEP[device]
    return [(w, d) for w in arguments.widths or default["widths"] for d in arguments.depths or default["depths"]]


def chosen_variants(text: str | None, sweep: bool) -> list[str]:
    """Names of variants, comma separated, in the table's order; None for the usual ones, or those of a sweep.

    Raises:
        TideConfigError: there is no such variant.
    """
    from tide_strategies.cli.bench.variants import SWEPT, USUAL, VARIANTS
    from tide_strategies.errors import TideConfigError

    if text is None:
        return list(SWEPT if sweep else USUAL)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise TideConfigError(f"--variants: there is no {name!r}; there are: {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name in names]


def tide_options(texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a mapping; values are numbers or words.

    Raises:
        TideError: a text has another form, or TIDE has no such option.
    """
    from tide_strategies.config import TideConfig
    from tide_strategies.errors import TideConfigError

    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise TideConfigError(f"--option takes NAME=VALUE; got {text!r}")
        words = {"true": True, "false": False}
        out[name] = int(value) if value.isdecimal() else words.get(value.lower(), value)
    TideConfig.from_any(out)
    return out


def measure(place: Place, tokens: Sequence[int], **work: Any) -> Iterator[Row]:
    """Rows of one model size: for each number of tokens one per variant."""
    from tide_strategies.cli.bench.step_work import StepWork

    run = StepWork(place, **work)
    times = {count: run.times(count) for count in tokens}
    memory = run.memory(tokens)  # after the timing: by now everything that is loaded lazily is there
    for count in tokens:
        about = {**run.about, "tokens": count, "notes": run.notes}
        yield from rows_of(run.names, times[count], memory[count], about, run.labels)


def rows_of(
    names: Sequence[str],
    times: dict[str, Row],
    memory: dict[str, Row],
    about: Row,
    labels: dict[str, str],
) -> Iterator[Row]:
    """Put together what was measured of each variant, and its ratios to stock; ``labels`` are other names to show."""
    from tide_strategies.cli.bench.variants import COMPUTE, STOCK

    def step_ms(name: str) -> float | None:
        return times.get(name, {}).get("step_ms")

    compute, stock = step_ms(COMPUTE), step_ms(STOCK)
    stock_exposed = _less(stock, compute)
    for name in names:
        exposed = None if name == COMPUTE else _less(step_ms(name), compute)
        yield {
            "variant": labels.get(name, name),
            **about,
            **times.get(name, {}),
            **memory.get(name, {}),
            "to_stock": ratio(step_ms(name), stock),
            "exposed_ms": exposed,
            "exposed_to_stock": ratio(exposed, stock_exposed),
        }


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def draw(axes: Any, rows: Sequence[Row]) -> None:
    """Step times: a group of bars for each model and number of tokens."""
    groups = list(dict.fromkeys((r["ranks"], r["width"], r["depth"], r["tokens"]) for r in rows))
    names = list(dict.fromkeys(r["variant"] for r in rows))
    found = {(r["ranks"], r["width"], r["depth"], r["tokens"], r["variant"]): r.get("step_ms") for r in rows}
    labels = [f"{n} ranks, {w} x {d}\n{t} tokens" for n, w, d, t in groups]
    grouped_bars(axes, labels, [(name, [found.get((*g, name)) for g in groups]) for name in names], "ms per step")
