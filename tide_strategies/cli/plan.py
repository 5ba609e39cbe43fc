"""``tide plan``: what a job would run, what it would hold and how long its collectives would take; no GPU needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_strategies.cli.arguments import positive
from tide_strategies.cli.tables import gib, table, wrapped
from tide_strategies.config import AllGatherConfig, parse_topology
from tide_strategies.errors import TideConfigError
from tide_strategies.planner import architectures, calibrate, limits, memory, predict
from tide_strategies.planner.groups import Group, Model
from tide_strategies.planner.knobs import Knobs, choose
from tide_strategies.planner.rates import NAMED, Rates, built_in
from tide_strategies.planner.reading import read_json
from tide_strategies.planner.sizing import rounds_of, solve
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.group import needed_device_memory
from tide_strategies.runtime.cuda.multicast import why_unicast
from tide_strategies.runtime.cuda.pieces import sending_bytes
from tide_strategies.runtime.group import needed_memory
from tide_strategies.topology import Topology

if TYPE_CHECKING:  # torch: only for a Python path
    from tide_strategies.fsdp2.footprint import Footprint

_ABOUT = f"""\
MODEL is a preset ({", ".join(architectures.PRESETS)}), a Hugging Face config.json or the folder that
holds one, or a Python path (package.module:function; needs torch and runs that function on the meta device). The
function returns the model, or the model and a function that computes the loss of one rank's batch: then the step is run
dry as well, for its peak of memory. Examples:

  tide plan llama-3.1-70b --nodes 8 --gpus 8
  tide plan ./my-model/config.json --nodes 1 --gpus 8 --rates h200-pair --json
  tide plan tide_strategies.cli.demo_model:planned --gpus 2 --device cpu --precision 32-true

Memory is what this version's runtime allocates, to the byte (beyond 4096 ranks the paper's closed form, section 5.4),
and times come from replaying the schedules that run; across nodes, beyond 64 ranks, from a stage model
(docs/simulator.md). Times are of collectives by themselves, at the given rates.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("model", metavar="MODEL", help="preset, config.json, or package.module:function")
    add("--nodes", type=positive, default=1, help="nodes (default: 1)")
    add("--gpus", type=positive, default=8, help="GPUs (or processes) of one node (default: 8)")
    add("--topology", help="both at once, as in 8x8")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="what the ranks run on (default: cuda)")
    add("--mode", choices=["in_place", "slot_reuse"], default="in_place", help="reduce_scatter.mode")
    add("--slots", type=positive, default=2, help="all_gather.slots (default: 2)")
    add(
        "--multicast",
        choices=["auto", "on", "off"],
        default="auto",
        help="all_gather.multicast, on GPUs that have it; auto: from three ranks a node (default: auto)",
    )
    add(
        "--precision",
        choices=["bf16-mixed", "bf16-true", "32-true"],
        default="bf16-mixed",
        help="gathered and stored items: bf16 and fp32, bf16 and bf16, fp32 and fp32 (default: bf16-mixed)",
    )
    add(
        "--wrap",
        choices=["vocab", "blocks"],
        default="vocab",
        help="presets and configs: embedding and head as groups of their own, or left to the root (default: vocab)",
    )
    add(
        "--rates",
        help=f"{', '.join(NAMED)}, calibrated (this machine's latest plan: auto), or a file of rates "
        "(default: paper, on CPUs cpu-pair)",
    )
    add("--activations-gib", type=float, metavar="GIB", help="what a rank keeps of a forward, where MODEL has no step")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    stated = parse_topology(arguments.topology) if arguments.topology else None
    topology = Topology(stated.nodes, stated.gpus_per_node) if stated else Topology(arguments.nodes, arguments.gpus)
    limits.check_topology(topology)
    AllGatherConfig(slots=arguments.slots)
    model, footprint = load_model(arguments, topology.ranks)
    rates = load_rates(arguments.rates, arguments.device)
    if arguments.device == "cuda" and arguments.multicast != "auto":
        rates = replace(rates, multicast=uses_multicast(topology, arguments.multicast))
    plan = make_plan(model, topology, rates, arguments, footprint)
    print(json.dumps(plan, indent=1) if arguments.json else _words(plan))
    return 0


def load_rates(text: str | None, device: str) -> Rates:
    """Rates by name or from a file; None for the device's default.

    Raises:
        TideConfigError: neither.
    """
    if text is None:
        return NAMED["cpu-pair" if device == "cpu" else "paper"]
    if text in NAMED:
        return NAMED[text]
    if text == "calibrated":
        where = calibrate.folder("auto")
        if where is None:
            raise TideConfigError("--rates calibrated: this user has no home to keep calibrations in")
        try:
            return calibrate.newest(where, device)
        except ValueError as e:
            raise TideConfigError(f"--rates calibrated: {e}; train with plan: auto first") from None
    try:
        return Rates.from_dict(read_json(Path(text), "rates"))
    except TideConfigError as e:
        raise TideConfigError(
            f"--rates is {', '.join(NAMED)}, calibrated, or a JSON file of rates; {text!r} cannot be read as one ({e})"
        ) from None


def load_model(options: argparse.Namespace, ranks: int) -> tuple[Model, Footprint | None]:
    """The model that MODEL names, and what its step holds if it has one; torch is imported for a Python path only."""
    text, wrap = options.model, options.wrap
    itemsize, master = {"bf16-mixed": (2, 4), "bf16-true": (2, 2), "32-true": (4, 4)}[options.precision]
    if Path(text).exists():
        return architectures.from_file(Path(text), itemsize=itemsize, master_itemsize=master, wrap=wrap), None
    if os.sep in text or text.endswith(".json"):
        raise TideConfigError(f"no file {text!r}: MODEL is a preset, a config.json or its folder, or a Python path")
    if ":" in text:
        from tide_strategies.cli.offline import planned

        print(f"building {text} on the meta device ...", file=sys.stderr, flush=True)
        return planned(text, ranks, options.precision, options.device)
    return architectures.preset(text, itemsize=itemsize, master_itemsize=master, wrap=wrap), None


def make_plan(
    model: Model, topology: Topology, rates: Rates, options: argparse.Namespace, footprint: Footprint | None
) -> dict[str, Any]:
    """Everything that is printed, as plain values: bytes, seconds, numbers."""
    itemsize = 4 if options.precision == "32-true" else 2
    output = 4 * max(g.layout(topology.ranks).output_items for g in model.groups)
    # What the runtime will take: from what it measures, or from what is built in.
    knobs = choose(
        rates if options.rates else built_in(options.device),
        topology,
        [g.layout(topology.ranks) for g in model.groups],
        options.device,
    )
    limits.check_model(model, topology, knobs.chunk_bytes)
    kinds = _kinds(model, topology, rates, options.device, knobs)
    largest = solve(rates, topology, max(output, 1))
    ring = memory.Ring(slots=options.slots)
    arena, method = _arena(model, topology, largest.round_width, knobs, ring, options)
    pinned = pinned_of_gpu_ranks(model.groups, topology, arena, ring) if options.device == "cuda" else {}
    forecast = memory.step(model, topology, arena, mode=options.mode, itemsize=itemsize)
    depth = 0
    if topology.nodes > 1:
        plan = rounds_of(topology.nodes, largest.round_width, topology.local_ranks, options.mode)
        depth = plan.outbox_blocks()
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active_share": model.active_share,
            "groups": len(model.groups),
        },
        "topology": {"nodes": topology.nodes, "local_ranks": topology.local_ranks, "ranks": topology.ranks},
        "rates": rates.to_dict(),
        "plan": {"mode": options.mode, "outbox_blocks": depth, **asdict(largest), "sum_ctas": kinds[0]["sum_ctas"]},
        "knobs": knobs.to_dict(),
        "arena": {"bytes": arena, "total": sum(arena.values()), "method": method},
        "pinned_by_messages": {"bytes": pinned, "total": sum(pinned.values())},
        "memory": {k: v for k, v in asdict(forecast).items() if k != "arena"},
        "peak": _peak(forecast, topology, options, footprint),
        "groups": kinds,
        "step": {
            "all_gather_s": sum(k["all_gather_s"] * k["groups"] * (2 if k["resharded"] else 1) for k in kinds),
            "reduce_scatter_s": sum(k["reduce_scatter_s"] * k["groups"] for k in kinds),
        },
    }


def _peak(
    forecast: memory.StepForecast, topology: Topology, options: argparse.Namespace, footprint: Footprint | None
) -> dict[str, Any] | None:
    """What a rank holds at the highest point of a step, as far as the step is known."""
    total = sum(forecast.arena.values())
    # CPU ranks share one arena, of which each has its part.
    share = total // topology.ranks if options.device == "cpu" else total
    if footprint is not None:
        held = {"tide": footprint.tide, "stock": footprint.stock}
        found = memory.peak_of_dry_run(forecast, share, **{k: max(n, footprint.optimizer) for k, n in held.items()})
        return {**asdict(found), "forward": footprint.forward}
    if options.activations_gib is None:
        return None
    if not 0 <= options.activations_gib < 2**20:
        raise TideConfigError(f"--activations-gib must be from 0 to {2**20}; got {options.activations_gib}")
    activations = int(options.activations_gib * 2**30)
    return {**asdict(memory.peak_of_activations(forecast, share, activations)), "forward": activations}


def arena_of_cpu_ranks(
    groups: Sequence[Group], topology: Topology, *, knobs: Knobs, ring: memory.Ring
) -> dict[str, int]:
    """Bytes of shared memory by part that CPU ranks of one host will share, by the runtime's own counts."""
    layouts = [g.layout(topology.ranks) for g in groups]
    return memory.arena_on_cpu(
        groups,
        topology,
        counters=CallBook(topology, len(groups) + ring.slots).counters,
        reserved=needed_memory(layouts, topology, 0, knobs.chunk_bytes, knobs.base_plan(topology)),
        ring=ring,
    )


def arena_of_gpu_ranks(
    groups: Sequence[Group], topology: Topology, *, knobs: Knobs, ring: memory.Ring, mode: str, multicast: bool
) -> dict[str, int]:
    """Bytes of device memory by part that each GPU will hold, by the runtime's own counts, whatever the rail."""
    layouts = [g.layout(topology.ranks) for g in groups]
    return memory.arena_on_gpu(
        groups,
        topology.ranks,
        counters=CallBook(topology, len(groups) + ring.slots).counters,
        reserved=needed_device_memory(
            layouts,
            topology,
            0,
            knobs.chunk_bytes,
            mode == "slot_reuse",
            plan=knobs.base_plan(topology),
            multicast=multicast,
        ),
        ring=ring,
    )


def pinned_of_gpu_ranks(
    groups: Sequence[Group], topology: Topology, arena: dict[str, int], ring: memory.Ring
) -> dict[str, int]:
    """Bytes of pinned host memory by part of each GPU's process with this arena, if messages connect the nodes."""
    if topology.nodes == 1:
        return {}
    counters = CallBook(topology, len(groups) + ring.slots).counters
    return memory.pinned_by_messages(arena, topology, counters=counters, sending=sending_bytes(topology.nodes))


def uses_multicast(topology: Topology, stated: str) -> bool:
    """Whether ranks on GPUs of their own, which have multicast, will use it; ``stated`` is auto, on or off."""
    capable = [{"refusal": "", "uuid": str(rank)} for rank in range(topology.ranks)]
    return not why_unicast(capable, topology, "auto" if stated == "auto" else stated == "on")


def _arena(
    model: Model, topology: Topology, width: int, knobs: Knobs, ring: memory.Ring, options: argparse.Namespace
) -> tuple[dict[str, int], str]:
    groups = model.groups
    if topology.ranks == 1:
        return {}, "one rank has nobody to communicate with"
    if options.device == "cpu":
        parts = arena_of_cpu_ranks(groups, topology, knobs=knobs, ring=ring)
        return parts, "exact, shared by all ranks of one host"
    if topology.nodes > 1 and topology.ranks > limits.MOST_COUNTED:
        parts = memory.arena_across_nodes(groups, topology, mode=options.mode, round_width=width, ring=ring)
        return parts, "closed form (paper, section 5.4), on each GPU"
    multicast = uses_multicast(topology, options.multicast)
    parts = arena_of_gpu_ranks(groups, topology, knobs=knobs, ring=ring, mode=options.mode, multicast=multicast)
    return parts, f"exact, on each GPU, {'with' if multicast else 'without'} multicast"


def _kinds(model: Model, topology: Topology, rates: Rates, device: str, knobs: Knobs) -> list[dict[str, Any]]:
    """Groups of equal shapes together, with sizes and predicted times."""
    kinds: dict[Any, dict[str, Any]] = {}
    for group in model.groups:
        key = (group.params, group.resharded)
        if key in kinds:
            kinds[key]["groups"] += 1
            continue
        layout = group.layout(topology.ranks)
        if topology.nodes > 1:
            print(f"simulating the collectives of {group.name} ...", file=sys.stderr, flush=True)
        times = predict.group_times(
            rates,
            layout,
            topology,
            one_memory=device == "cpu",
            chunk_bytes=knobs.chunk_bytes,
            sum_ctas=knobs.sum_ctas,
        )
        kinds[key] = {
            "first": group.name,
            "groups": 1,
            "resharded": group.resharded,
            "parameters": len(group.params),
            "unsharded_bytes": layout.landing_bytes,
            "output_bytes": 4 * layout.output_items,
            "all_gather_s": times.all_gather_s,
            "reduce_scatter_s": times.reduce_scatter_s,
            "method": times.method,
            "sum_ctas": times.sizing.sum_ctas,
        }
    return list(kinds.values())


def _words(plan: dict[str, Any]) -> str:
    model, topology, memo, step = plan["model"], plan["topology"], plan["memory"], plan["step"]
    active = f" ({model['active_share']:.0%} of them used by a token)" if model["active_share"] < 1 else ""
    lines = [
        f"{model['name']}: {_count(model['parameters'])} parameters{active} in {model['groups']} groups",
        f"{topology['nodes']} x {topology['local_ranks']} = {topology['ranks']} ranks; rates: {plan['rates']['name']}",
        "",
        *_plan_lines(plan),
        "",
        f"Arena: {gib(plan['arena']['total'])} ({plan['arena']['method']})",
        _parts(plan["arena"]["bytes"]),
        *_pinned_lines(plan["pinned_by_messages"]),
        "",
        "Memory of one rank during a step, activations apart",
        _comparison(memo, plan["plan"]["mode"]),
        *_peak_lines(plan["peak"]),
        "",
        "Collectives by themselves, predicted",
        table(["groups", "first", "unsharded", "all-gather ms", "reduce-scatter ms", "by"], _rows(plan["groups"])),
        wrapped(
            f"In a step, if nothing overlapped: {step['all_gather_s'] * 1e3:.1f} ms of all-gathers (twice where a "
            f"group reshards) and {step['reduce_scatter_s'] * 1e3:.1f} ms of reduce-scatters."
        ),
    ]
    return "\n".join(lines)


def _plan_lines(plan: dict[str, Any]) -> Iterable[str]:
    p = plan["plan"]
    yield f"Plan for the largest group ({p['mode']})"
    chunks = f"chunks of {gib(plan['knobs']['chunk_bytes'])}"
    if plan["topology"]["nodes"] == 1:
        yield f"  {p['sum_ctas']} thread block(s) sum, in {chunks}; one node has no rounds and no landings"
        return
    yield (
        f"  {p['waves']} wave(s) in {p['rounds']} round(s) of up to {p['round_width']} transfers; "
        f"{p['sum_ctas']} thread blocks sum, {p['landing_ctas']} land; {chunks};"
    )
    yield f"  {p['outbox_blocks']} outbox blocks a bank; {p['wire_s'] * 1e3:.2f} ms on the wire"


def _pinned_lines(pinned: dict[str, Any]) -> Iterable[str]:
    if pinned["bytes"]:
        yield ""
        yield f"Pinned host memory for each GPU, if messages connect the nodes (rail: p2p): {gib(pinned['total'])}"
        yield _parts(pinned["bytes"])


def _parts(by_part: dict[str, int]) -> str:
    return table(["part", "bytes", "size"], [(k, v, gib(v)) for k, v in by_part.items()])


def _comparison(memo: dict[str, int], mode: str) -> str:
    private = f"of which {gib(memo['symmetric_private'])} can hold nothing else"
    beside = "arena and the previous group's gradients" if mode == "in_place" else "arena"
    rows = [
        ("states (all three)", gib(memo["states"]), "stored parameters, fp32 gradients, two fp32 moments; sharded"),
        ("TIDE", gib(memo["tide"]), beside),
        ("stock FSDP2", gib(memo["stock"]), "parameters, next all-gather's output, packed fp32 gradients"),
        ("FSDP2+SymmMem", gib(memo["symmetric"]), f"the same, {private}"),
    ]
    return table(["held", "size", "what"], rows)


def _peak_lines(peak: dict[str, Any] | None) -> Iterable[str]:
    if peak is None:
        yield wrapped(
            "A step's peak needs its activations: let MODEL give (model, function that computes a batch's loss), "
            "or state --activations-gib."
        )
        return
    how = "by a dry run of the step" if peak["how"] == "dry run" else "at most, with the activations stated"
    yield wrapped(
        f"Peak of a step on one rank, {how}: {gib(peak['tide'])} with TIDE, {gib(peak['stock'])} with stock FSDP2, "
        f"{gib(peak['forward'])} of both kept by the forward."
    )


def _rows(kinds: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            k["groups"],
            k["first"],
            gib(k["unsharded_bytes"]),
            k["all_gather_s"] * 1e3,
            k["reduce_scatter_s"] * 1e3,
            k["method"],
        )
        for k in kinds
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"
