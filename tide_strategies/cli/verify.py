"""``tide verify``: prove schedules free of races, deadlocks and lost contributions, without running them."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from tide_strategies.cli.arguments import positive
from tide_strategies.collectives.plan import BasePlan, refusals
from tide_strategies.collectives.rail_lane import one_wave
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Copy, Item
from tide_strategies.collectives.signals import RAILS
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.architectures import PRESETS, preset
from tide_strategies.topology import Topology
from tide_strategies.verify.base_plans import base_plans, connections, copy_descriptors
from tide_strategies.verify.faults import FAULTS, Fault, broken, found, places, schedules
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload, variants

_ABOUT = """\
Schedules of all ranks are run together on symbolic memory with vector clocks: what is not ordered by a counter in every
execution is a race, whatever happens to come first. Results are compared element by element: every contribution once,
in the promised order. docs/protocol.md says what is proven and what is not.

  tide verify                                              a sample of plans, layouts and topologies
  tide verify --topology 8x8 --preset llama-3.1-70b        one model's groups
  tide verify --topology 8x8 --side-by-side --multicast    the same as GPUs with multicast run it
  tide verify --base-plans                                 every base plan, accepted or rejected
  tide verify --faults                                     broken schedules must be found
"""
_PRESET = "llama-3.1-70b"
#: Bytes staged at a time when real geometry is verified.
_CHUNK_BYTES = 8 * 1024 * 1024
#: (nodes, local ranks, wave width, round width, passes) of the sample.
_SAMPLE = ((2, 2, 2, 2, 1), (3, 2, 2, 1, 1), (5, 2, 1, 2, 2), (5, 4, 4, 2, 1), (9, 2, 2, 2, 1), (4, 3, 3, 1, 3))
#: Nodes of the sample's groups with one rank on each.
_LANES = (2, 5, 10)
#: Faults that may change nothing at a place (a signal that comes first anyway); of every other, each must be found.
_MAY_CHANGE_NOTHING = frozenset({"early signal", "wait that comes late", "wait for too much"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide verify``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--base-plans", action="store_true", help="count accepted and rejected base plans")
    what.add_argument("--topology", type=_topology, metavar="MxL", help="nodes x ranks per node, with --preset")
    what.add_argument("--faults", action="store_true", help="break schedules and see that each fault is found")
    parser.add_argument("--preset", choices=sorted(PRESETS), help=f"model (with --topology; default: {_PRESET})")
    parser.add_argument(
        "--passes", type=positive, help="sub-slice passes (with --base-plans or --topology; default: 1)"
    )
    parser.add_argument("--slot-reuse", action="store_true", help="outbox of two rounds (with --topology)")
    parser.add_argument(
        "--side-by-side", action="store_true", help="streams and a landing per rank, as on GPUs (with --topology)"
    )
    parser.add_argument(
        "--multicast", action="store_true", help="one write or reduction reaches a node (with --side-by-side)"
    )
    parser.add_argument("--round-width", type=positive, help="puts of a round (with --topology; default: 4)")
    parser.add_argument("--chunk-bytes", type=positive, help="bytes staged at a time (with --topology; default: 8 MiB)")
    parser.add_argument("--calls", type=positive, help="calls in a row (with --topology; default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")


@dataclass(frozen=True)
class _Outcome:
    """Whether nothing is wrong, the last line in words, and the same for machines."""

    ok: bool
    words: str
    facts: dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Verify; 0 if nothing is wrong."""
    for name in ("preset", "calls", "slot_reuse", "passes", "side_by_side", "multicast", "round_width", "chunk_bytes"):
        used = arguments.topology is not None or (name == "passes" and arguments.base_plans)
        if getattr(arguments, name) and not used:
            also = " or --base-plans" if name == "passes" else ""
            print(f"tide verify: --{name.replace('_', '-')} says nothing without --topology{also}", file=sys.stderr)
            return 2
    if arguments.multicast and not arguments.side_by_side:
        print("tide verify: --multicast is for GPUs, whose streams run --side-by-side: give both", file=sys.stderr)
        return 2
    arguments.preset, arguments.calls = arguments.preset or _PRESET, arguments.calls or 3
    arguments.passes, arguments.round_width = arguments.passes or 1, arguments.round_width or 4
    arguments.chunk_bytes = arguments.chunk_bytes or _CHUNK_BYTES
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        outcome = _outcome(arguments)
    if arguments.json:
        print(json.dumps({"ok": outcome.ok, "seconds": time.perf_counter() - start, **outcome.facts}, indent=1))
    if not outcome.ok:
        print(f"tide verify: {outcome.words}", file=sys.stderr)
    elif not arguments.json:
        print(outcome.words)
    return 0 if outcome.ok else 1


@dataclass(frozen=True)
class _Tried:
    """A fault in a schedule: at how many places it was tried, and at how many found. ``always``: it must be at all."""

    schedule: str
    fault: str
    places: int
    found: int
    always: bool

    @property
    def missed(self) -> bool:
        return self.found < (self.places if self.always else 1)


def _outcome(arguments: argparse.Namespace) -> _Outcome:
    if arguments.base_plans:
        return _base_plans(arguments.passes)
    if arguments.faults:
        return _faults()
    if arguments.topology is not None:
        return _real(arguments)
    return _all("sample", _sample())


def _base_plans(passes: int) -> _Outcome:
    start = time.perf_counter()
    counts = None
    for counts in base_plans(passes=passes):
        if counts.nodes % 128 == 0:
            print(f"up to {counts.nodes:>4} nodes: accepted {counts.accepted} rejected {counts.rejected}", flush=True)
    assert counts is not None
    flat, coalesced = copy_descriptors(64, 8, 30)
    in_schedule = _copies(64, 8, 30)
    (whole, rail), (_, rails) = connections(8, 8, rails=1), connections(8, 8)
    print(f"copies per reduce-scatter at 64x8 with 30 parameters: at most {flat} flat, {coalesced} coalesced; ", end="")
    print(f"{in_schedule} in a schedule, whose sub-slices meet few parameters each")
    for what, i in (("queue pairs of a rank", 0), ("barrier steps", 1)):
        print(f"{what} at 8x8: {whole[i]} in one communicator of all; by rails {rail[i]}, and {rails[i]} ", end="")
        print(f"with the {RAILS} communicators a rail that the runtime has")
    print(f"{time.perf_counter() - start:.0f} s")
    facts = {
        "nodes": counts.nodes,
        "accepted": counts.accepted,
        "rejected": counts.rejected,
        "copies": {"flat": flat, "coalesced": coalesced, "in_schedule": in_schedule},
        "queue_pairs": {"whole": whole[0], "rails": rail[0], "runtime": rails[0]},
        "barrier_steps": {"whole": whole[1], "rails": rail[1], "runtime": rails[1]},
    }
    return _Outcome(True, f"accepted {counts.accepted} rejected {counts.rejected}", facts)


def _layouts(name: str, ranks: int) -> dict[str, GroupLayout]:
    """The geometries that occur among a model's groups, each under the name of the first group that has it."""
    layouts: dict[GroupLayout, str] = {}
    for group in preset(name).groups:
        layouts.setdefault(group.layout(ranks), group.name)
    return {first: layout for layout, first in layouts.items()}


def _copies(nodes: int, local_ranks: int, params: int) -> int:
    """Copies that one rank pushes in a reduce-scatter of parameters alike."""
    ranks = nodes * local_ranks
    layout = GroupLayout((ParamShape(ranks, 512, 2),) * params, ranks)
    schedule = reduce_scatter(
        layout,
        Topology(nodes, local_ranks),
        0,
        grad=Item.BF16,
        output=Item.F32,
        chunk_bytes=_CHUNK_BYTES,
    )
    return sum(isinstance(op, Copy) for op in schedule.streams["read"])


def _real(arguments: argparse.Namespace) -> _Outcome:
    topology: Topology = arguments.topology
    base = Workload(
        "reduce-scatter",
        topology,
        (),
        interleave=not arguments.side_by_side,
        shared_landing=not arguments.side_by_side,
        multicast=arguments.multicast,
        ahead=False,
        chunk_bytes=arguments.chunk_bytes,
        head_bytes=8 * 1024 * 1024,
        calls=arguments.calls,
    )
    gather, reduction = replace(base, kind="all-gather"), base
    # One rank a node has collectives of its own, without a choice of plans; GPUs gather through the stage all the same,
    # and reduce so on few nodes.
    lane = topology.lane and not arguments.slot_reuse and arguments.passes == 1
    if lane and (not arguments.side_by_side or one_wave(topology)):
        gather, reduction = replace(gather, lane=not arguments.side_by_side), replace(reduction, lane=True)
    elif topology.nodes > 1:
        width, local = topology.local_ranks, topology.local_ranks
        plan = BasePlan(topology.nodes, local, width, arguments.round_width, arguments.slot_reuse, arguments.passes)
        why = refusals(plan)
        if why:
            return _Outcome(False, f"refused: {'; '.join(why)}", {"refused": list(why)})
        gather, reduction = replace(gather, plan=plan), replace(reduction, plan=plan)
    work = [
        (f"{work.kind} of {arguments.preset} {name}", replace(work, layouts=(layout,)))
        for name, layout in _layouts(arguments.preset, topology.ranks).items()
        for work in (gather, reduction)
    ]
    try:
        return _all(f"{topology}", work)
    except ValueError as e:  # bytes of a chunk that no schedule can have
        return _Outcome(False, str(e), {"refused": [str(e)]})


def _sample() -> list[tuple[str, Workload]]:
    work: list[tuple[str, Workload]] = []
    for nodes in _LANES:
        step = Workload("step", Topology(nodes, 1), _uneven(nodes), lane=True, calls=4)
        again = replace(step, kind="all-gather", reuse=True)
        work += [(f"{w.kind} of a lane of {nodes}", w) for b in (step, again) for w in variants(b) if not w.multicast]
    for m, l, width, rounds, passes in _SAMPLE:  # noqa: E741
        topology, groups = Topology(m, l), _uneven(m * l)
        for slot_reuse in (False, True):
            plan = BasePlan(m, l, width, rounds, slot_reuse, passes)
            base = Workload("step", topology, groups, plan=plan, slot_reuse=slot_reuse, calls=4)
            work += [(f"{w.kind} {plan}", w) for w in variants(base)]
        reduction = Workload("reduce-scatter", topology, groups, plan=replace(plan, slot_reuse=False), mixed=True)
        work += [(f"mixed {w.kind} {plan}", w) for w in variants(reduction)]
    return work


def _uneven(n: int) -> tuple[GroupLayout, GroupLayout]:
    return (
        GroupLayout((ParamShape(3 * n - 1, 5, 2), ParamShape(2, 3, 2)), n),
        GroupLayout((ParamShape(2 * n + 1, 8, 2), ParamShape(n, 4, 2), ParamShape(0, 4, 2)), n),
    )


def _all(what: str, work: list[tuple[str, Workload]]) -> _Outcome:
    facts = {"what": what, "workloads": len(work)}
    start = time.perf_counter()
    results = 0
    for name, workload in work:
        begin = time.perf_counter()
        gc.disable()  # millions of small objects, none of them in a cycle: looking for cycles takes a third of the time
        try:
            results += workload.verify()
        except Violation as violation:
            wrong = {"workload": name, "kind": violation.kind, "words": str(violation)}
            return _Outcome(False, f"{name}: {violation}", {**facts, "results": results, "violations": [wrong]})
        finally:
            gc.enable()
        threads = "one thread" if workload.interleave else "side by side"
        landing = ", multicast" if workload.multicast else "" if workload.shared_landing else ", a landing per rank"
        print(f"clean: {name} ({threads}{landing}, {time.perf_counter() - begin:.1f} s)", flush=True)
    took = time.perf_counter() - start
    words = f"{what}: {len(work)} workloads, {results} results complete, nothing wrong ({took:.0f} s)"
    return _Outcome(True, words, {**facts, "results": results, "violations": []})


def _faults() -> _Outcome:
    groups = (
        GroupLayout((ParamShape(12, 4, 2),), 6),
        GroupLayout((ParamShape(24, 3, 2), ParamShape(6, 4, 2)), 6),
    )
    nodes = Workload("all-gather", Topology(3, 2), groups, plan=BasePlan(3, 2, 2, 1), head_bytes=20)
    lane = Workload("all-gather", Topology(6, 1), groups, lane=True)
    tried = []
    for which, kind in itertools.product((nodes, lane), ("all-gather", "reduce-scatter")):
        base, name = replace(which, kind=kind), f"{kind} of a lane" if which.lane else kind
        for fault in FAULTS:
            hit, caught = _places_found(base, fault)
            if not hit:
                continue
            one = _Tried(name, fault.name, hit, caught, fault.name not in _MAY_CHANGE_NOTHING)
            tried.append(one)
            rest = ": MISSED" if one.missed else "; the rest runs clean" if caught < hit else ""
            print(f"{name}: {fault.name}: {caught} of {hit} found{rest}", flush=True)
    missed = [t for t in tried if t.missed]
    kinds, everywhere = len({t.fault for t in tried}), sum(t.places for t in tried)
    words = f"{kinds} kinds of faults, {len(tried)} pairs of a kind and a schedule, {everywhere} places"
    facts = {
        "kinds": kinds,
        "pairs": len(tried),
        "places": everywhere,
        "missed": len(missed),
        "faults": [asdict(t) for t in tried],
    }
    if missed:
        which_ones = "; ".join(f"{t.fault} of the {t.schedule} ({t.found} of {t.places})" for t in missed)
        return _Outcome(False, f"{words}; not found where it must be: {which_ones}", facts)
    return _Outcome(True, f"{words}: each found wherever it must be", facts)


def _places_found(base: Workload, fault: Fault) -> tuple[int, int]:
    """At how many places of the schedules of rank 0 a fault hits, and at how many it is found."""
    hit = caught = 0
    for interleave, multicast in itertools.product((True, False), (False,) if base.lane else (False, True)):
        alike = [replace(base, interleave=interleave, multicast=multicast, ahead=a) for a in (True, False)]
        schedule = schedules(alike[0], base.kind)[0]
        for place in places(schedule, fault.hits):
            change = broken(fault, base.kind, 0, place, schedule.streams[place[0]][place[1]])
            hit, caught = hit + 1, caught + (found(alike, change, count=True) is not None)
    return hit, caught


def _topology(text: str) -> Topology:
    try:
        nodes, local = (int(t) for t in text.lower().split("x"))
        return Topology(nodes, local)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no topology of one node or more, such as 8x8") from None
