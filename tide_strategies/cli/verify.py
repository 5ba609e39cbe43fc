"""``tide verify``: prove schedules free of races, deadlocks and lost contributions, without running them."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from dataclasses import replace

from tide_strategies.collectives.plan import BasePlan, refusals
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Copy, Item
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.architectures import PRESETS, preset
from tide_strategies.topology import Topology
from tide_strategies.verify.base_plans import base_plans, connections, copy_descriptors
from tide_strategies.verify.faults import FAULTS, broken, found, places, schedules
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload, variants

_ABOUT = """\
Schedules of all ranks are run together on symbolic memory with vector clocks: what is not ordered by a counter in every
execution is a race, whatever happens to come first. Results are compared element by element: every contribution once,
in the promised order. docs/protocol.md says what is proven and what is not.

  tide verify                                              a sample of plans, layouts and topologies
  tide verify --topology 8x8 --preset llama-3.1-70b        one model's groups
  tide verify --base-plans                                 every base plan, accepted or rejected
  tide verify --faults                                     broken schedules must be found
"""
#: Bytes staged at a time when real geometry is verified.
_CHUNK_BYTES = 8 * 1024 * 1024
#: (nodes, local ranks, wave width, round width, passes) of the sample.
_SAMPLE = ((2, 2, 2, 2, 1), (3, 2, 2, 1, 1), (5, 2, 1, 2, 2), (5, 4, 4, 2, 1), (9, 2, 2, 2, 1), (4, 3, 3, 1, 3))
#: Nodes of the sample's groups with one rank on each.
_LANES = (2, 5, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide verify``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--base-plans", action="store_true", help="count accepted and rejected base plans")
    what.add_argument("--topology", type=_topology, metavar="MxL", help="nodes x ranks per node, with --preset")
    what.add_argument("--faults", action="store_true", help="break schedules and see that each fault is found")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="llama-3.1-70b", help="model (with --topology)")
    parser.add_argument("--passes", type=int, default=1, help="sub-slice passes (with --base-plans or --topology)")
    parser.add_argument("--slot-reuse", action="store_true", help="outbox of two rounds (with --topology)")
    parser.add_argument("--calls", type=int, default=3, help="calls in a row (with --topology; default: 3)")


def run(arguments: argparse.Namespace) -> int:
    """Verify; 0 if nothing is wrong."""
    if arguments.passes < 1 or arguments.calls < 1:
        print("tide verify: --passes and --calls must be at least 1", file=sys.stderr)
        return 2
    if arguments.base_plans:
        return _base_plans(arguments.passes)
    if arguments.faults:
        return _faults()
    if arguments.topology is not None:
        return _real(arguments)
    return _all("sample", _sample())


def _base_plans(passes: int) -> int:
    start = time.perf_counter()
    counts = None
    for counts in base_plans(passes=passes):
        if counts.nodes % 128 == 0:
            print(f"up to {counts.nodes:>4} nodes: accepted {counts.accepted} rejected {counts.rejected}", flush=True)
    assert counts is not None
    flat, coalesced = copy_descriptors(64, 8, 30)
    whole, rails = connections(8, 8)
    print(f"copies per reduce-scatter at 64x8 with 30 parameters: at most {flat} flat, {coalesced} coalesced; ", end="")
    print(f"{_copies(64, 8, 30)} in a schedule, whose sub-slices meet few parameters each")
    print(f"queue pairs of a rank at 8x8: {whole[0]}, by rails {rails[0]}; barrier steps: {whole[1]}, {rails[1]}")
    print(f"{time.perf_counter() - start:.0f} s")
    print(f"accepted {counts.accepted} rejected {counts.rejected}")
    return 0


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


def _real(arguments: argparse.Namespace) -> int:
    topology: Topology = arguments.topology
    plan = None
    # One rank a node has collectives of its own, without a choice of plans.
    lane = topology.lane and not arguments.slot_reuse and arguments.passes == 1
    if topology.nodes > 1 and not lane:
        width = topology.local_ranks
        plan = BasePlan(topology.nodes, width, width, 4, arguments.slot_reuse, arguments.passes)
        why = refusals(plan)
        if why:
            print(f"tide verify: refused: {'; '.join(why)}", file=sys.stderr)
            return 1
    base = Workload(
        "reduce-scatter",
        topology,
        (),
        plan=plan,
        lane=lane,
        ahead=False,
        chunk_bytes=_CHUNK_BYTES,
        head_bytes=8 * 1024 * 1024,
        calls=arguments.calls,
    )
    work = [
        (f"{kind} of {arguments.preset} {name}", replace(base, kind=kind, layouts=(layout,)))
        for name, layout in _layouts(arguments.preset, topology.ranks).items()
        for kind in ("all-gather", "reduce-scatter")
    ]
    return _all(f"{topology}", work)


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


def _all(what: str, work: list[tuple[str, Workload]]) -> int:
    start = time.perf_counter()
    results = 0
    for name, workload in work:
        begin = time.perf_counter()
        gc.disable()  # millions of small objects, none of them in a cycle: looking for cycles takes a third of the time
        try:
            results += workload.verify()
        except Violation as violation:
            print(f"{name}: {violation}", file=sys.stderr)
            return 1
        finally:
            gc.enable()
        threads = "one thread" if workload.interleave else "side by side"
        landing = ", multicast" if workload.multicast else ""
        print(f"clean: {name} ({threads}{landing}, {time.perf_counter() - begin:.1f} s)", flush=True)
    took = time.perf_counter() - start
    print(f"{what}: {len(work)} workloads, {results} results complete, nothing wrong ({took:.0f} s)")
    return 0


def _faults() -> int:
    groups = (
        GroupLayout((ParamShape(12, 4, 2),), 6),
        GroupLayout((ParamShape(24, 3, 2), ParamShape(6, 4, 2)), 6),
    )
    missed = total = 0
    nodes = Workload("all-gather", Topology(3, 2), groups, plan=BasePlan(3, 2, 2, 1), head_bytes=20)
    lane = Workload("all-gather", Topology(6, 1), groups, lane=True)
    for which, kind in itertools.product((nodes, lane), ("all-gather", "reduce-scatter")):
        base, name = replace(which, kind=kind), f"{kind} of a lane" if which.lane else kind
        for fault in FAULTS:
            hit = caught = 0
            for interleave, multicast in itertools.product((True, False), (False,) if base.lane else (False, True)):
                alike = [replace(base, interleave=interleave, multicast=multicast, ahead=a) for a in (True, False)]
                schedule = schedules(alike[0], kind)[0]
                for place in places(schedule, fault.hits):
                    change = broken(fault, kind, 0, place, schedule.streams[place[0]][place[1]])
                    hit, caught = hit + 1, caught + (found(alike, change, count=True) is not None)
            if not hit:
                continue
            total += 1
            missed += caught == 0
            print(f"{name}: {fault.name}: {caught} of {hit} found; the rest runs clean", flush=True)
    print(f"{total} kinds of faults, {missed} never found")
    return 1 if missed else 0


def _topology(text: str) -> Topology:
    try:
        nodes, local = (int(t) for t in text.lower().split("x"))
        return Topology(nodes, local)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no topology such as 8x8: {e}") from None
