"""``tide timeline``: a collective's schedule in time, predicted by the simulator or measured by a job's ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tide_strategies.cli.plan import load_rates
from tide_strategies.config import parse_topology
from tide_strategies.errors import TideConfigError
from tide_strategies.planner import limits, measured, predict, stages, timeline
from tide_strategies.planner.reading import read_json
from tide_strategies.planner.replay import Machine, Span
from tide_strategies.planner.sizing import solve
from tide_strategies.topology import Topology

#: Traces of a profiler are large, but fit a memory.
_MOST_BYTES = 2 << 30
_ABOUT = """\
The schedules that executors run are replayed, operation by operation; beyond 64 ranks on several nodes it is the stage
model (docs/simulator.md). In the terminal, # is work and . is waiting. --trace opens in https://ui.perfetto.dev or
chrome://tracing. With --measured, the picture is of a job that had TIDE_TRACE=DIR in its environment (or the option
debug.trace); with --from, of what a torch profiler trace (export_chrome_trace) measured. Examples:

  tide timeline reduce-scatter --topology 1x4 --mib 32 --rates h200-pair
  tide timeline all-gather --topology 8x8 --mib 128 --svg ag.svg --trace ag.json
  tide timeline --measured traced --window 2000:2100 --svg step.svg
  tide timeline --from profile.json --svg profile.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide timeline``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("collective", nargs="?", choices=["all-gather", "reduce-scatter"], default="reduce-scatter")
    add("--topology", default="1x2", help="nodes x ranks of a node (default: 1x2)")
    add("--mib", type=float, default=32.0, help="MiB of bf16 shard or fp32 output on each rank (default: 32)")
    add("--params", type=int, default=30, help="parameters of the group (default: 30)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="what the ranks run on (default: cuda)")
    add("--rates", help="as of tide plan")
    add("--seed", type=int, default=0, help="seed of the delays (default: 0)")
    add("--delay-us", type=float, default=0.0, help="delay every operation and signal by up to this (replays)")
    add("--from", dest="profile", type=Path, metavar="FILE", help="draw the TIDE ranges of a torch profiler trace")
    add("--measured", type=Path, metavar="DIR", help="draw the calls that ranks noted there (debug.trace, TIDE_TRACE)")
    add("--window", metavar="MS:MS", help="of a measured timeline: from and to, in milliseconds (default: all)")
    add("--svg", type=Path, metavar="FILE", help="write a picture")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    add("--json", action="store_true", help="print the trace instead of a picture")


def run(arguments: argparse.Namespace) -> int:
    """Simulate or read, then draw."""
    spans: Sequence[Span]
    if arguments.measured is not None and arguments.profile is not None:
        raise TideConfigError("--measured and --from name two timelines: give one of them")
    if arguments.measured is not None:
        spans, title = _of_ranks(arguments.measured, arguments.window)
    elif arguments.window is not None:
        raise TideConfigError("--window is for --measured")
    elif arguments.profile is not None:
        spans, title = _measured(arguments.profile), f"TIDE in {arguments.profile}"
    else:
        spans, title = _predicted(arguments)
    trace = timeline.to_json(timeline.chrome_trace(spans))
    try:
        if arguments.svg is not None:
            arguments.svg.write_text(timeline.svg(spans, title))
        if arguments.trace is not None:
            arguments.trace.write_text(trace)
    except OSError as e:
        raise TideConfigError(f"cannot write: {e}") from None
    if arguments.json:
        print(trace, end="")
        return 0
    print(title)
    print(timeline.text(spans))
    for file in (arguments.svg, arguments.trace):
        if file is not None:
            print(f"written to {file}")
    return 0


def _measured(file: Path) -> list[Span]:
    return timeline.spans_of_profile(read_json(file, "a trace", _MOST_BYTES))


def _of_ranks(folder: Path, window: str | None) -> tuple[list[Span], str]:
    recordings = measured.read(folder)
    spans, missing = measured.aligned(recordings), sum(r.missing for r in recordings)
    if not spans:
        raise TideConfigError(f"the ranks that wrote into {folder} have made no call")
    title = f"{len(spans)} calls of {len({r.rank for r in recordings})} ranks in {folder}"
    title += f" ({missing} more had no room in the files)" if missing else ""
    if window is None:
        return spans, title
    first, _, last = window.partition(":")
    try:
        bounds = (float(first) / 1e3, float(last) / 1e3)
    except ValueError:
        bounds = (0.0, 0.0)
    if not 0 <= bounds[0] < bounds[1] < float("inf"):
        raise TideConfigError(f"--window is two times in milliseconds, as in 100:250; got {window!r}")
    spans = measured.within(spans, *bounds)
    if not spans:
        raise TideConfigError(f"nothing happened between {first} and {last} ms")
    return spans, f"{title}, from {bounds[0] * 1e3:g} to {bounds[1] * 1e3:g} ms"


def _predicted(arguments: argparse.Namespace) -> tuple[Sequence[Span], str]:
    stated = parse_topology(arguments.topology)
    topology = Topology(stated.nodes, stated.gpus_per_node)
    limits.check_topology(topology)
    for name, low, high in (("mib", 2**-10, 2**20), ("params", 1, 10_000), ("delay_us", 0, 10**9)):
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise TideConfigError(f"--{name.replace('_', '-')} must be from {low} to {high}; got {value}")
    if topology.nodes > 1:
        print(f"simulating {topology} ...", file=sys.stderr, flush=True)
    rates, nbytes = load_rates(arguments.rates, arguments.device), int(arguments.mib * 2**20)
    sizing = solve(rates, topology, nbytes)
    gather = arguments.collective == "all-gather"
    if topology.nodes > 1 and topology.ranks <= predict.MOST_REPLAYED:
        machine = Machine(rates=rates, topology=topology, sum_ctas=sizing.sum_ctas, landing_ctas=sizing.landing_ctas)
        layout = predict.even_layout(topology.ranks, nbytes // (2 if gather else 4), arguments.params)
        delays = {"seed": arguments.seed, "delay_s": arguments.delay_us / 1e6}
        found = (
            predict.nodes_all_gather(machine, layout, **delays)
            if gather
            else predict.nodes_reduce_scatter(machine, layout, round_width=sizing.round_width, **delays)
        )
        spans, seconds, how = found.spans, found.seconds, "replay"
    elif topology.nodes > 1:
        timed = (
            stages.all_gather(rates, topology, nbytes)
            if gather
            else stages.reduce_scatter(rates, topology, nbytes, sizing)
        )
        spans, seconds, how = timed.spans, timed.seconds, "stage model, one rank for each node"
    else:
        cpu = arguments.device == "cpu"
        machine = Machine(rates=rates, topology=topology, sum_ctas=1 if cpu else sizing.sum_ctas, one_memory=cpu)
        layout = predict.even_layout(topology.ranks, nbytes // (2 if gather else 4), arguments.params)
        replayed = (predict.one_node_all_gather if gather else predict.one_node_reduce_scatter)(
            machine, layout, seed=arguments.seed, delay_s=arguments.delay_us / 1e6
        )
        spans, seconds, how = replayed.spans, replayed.seconds, "replay"
    words = f"{arguments.collective} of {arguments.mib:g} MiB on {topology} ranks, rates of {rates.name}"
    return spans, f"{words}: {seconds * 1e3:.3f} ms ({how})"
