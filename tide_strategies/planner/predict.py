"""Predicted times of collectives (replays within a node, stages across nodes), and the paper's tables beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.all_gather_nodes import all_gather_nodes
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.rail_lane import all_gather_lane, one_wave, reduce_scatter_lane
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item
from tide_strategies.collectives.two_level import reduce_scatter_nodes
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import stages
from tide_strategies.planner.calibrate import line
from tide_strategies.planner.limits import MOST_REPLAYED_ACROSS, MOST_REPLAYED_COPIES, copies
from tide_strategies.planner.memory import alone
from tide_strategies.planner.rates import PAPER, Rates
from tide_strategies.planner.replay import Call, Machine, Replayed, Thread, one_call, replay
from tide_strategies.planner.sizing import Sizing, solve
from tide_strategies.topology import Topology

_MIB = 2**20
#: Bytes of one contribution (to all ranks of a destination node) staged at a time across nodes; what Table 8's buffers
#: on one node imply for the paper.
NODES_CHUNK_BYTES = 16 * _MIB
#: Jobs of more ranks are timed by the stage model: a replay's work grows with the ranks and with their peers.
MOST_REPLAYED = 64
#: Chunks from which on a reduce-scatter's time is a line.
_MANY_CHUNKS = 16


def even_layout(ranks: int, items: int, params: int) -> GroupLayout:
    """A group of ``params`` equal bf16 parameters with ``items`` items of shard in all."""
    columns = 1024 if items >= 1024 * params else 1
    rows = max(1, items // params // columns)
    return GroupLayout(tuple(ParamShape(ranks * rows, columns, 2) for _ in range(params)), ranks)


def one_node_all_gather(
    machine: Machine, layout: GroupLayout, *, calls: int = 1, cast: bool = True, seed: int = 0, delay_s: float = 0.0
) -> Replayed:
    """Replay all-gathers of bf16 shards on one node, as executors run them. ``cast``: shards come from fp32 masters."""
    topology = machine.topology
    shared = machine.one_memory or machine.rates.multicast
    items = [Item.F32 if cast and s.itemsize == 2 else Item.of_size(s.itemsize) for s in layout.params]
    schedules = [all_gather(layout, topology, r, items, shared_landing=shared) for r in range(topology.ranks)]
    main = ("copy", "completion", "readiness")
    # What is not cast is brought to the own landing beside the copies to peers.
    together = [("cast", *main)] if cast else [main, ("cast",)]
    threads: list[tuple[int, Thread]] = []
    for schedule in schedules:
        steps = [Call(schedule) for _ in range(calls)]
        for streams in together:
            threads.append((schedule.rank, [(call, s) for call in steps for s in streams if s in schedule.streams]))
    return replay(machine, threads, seed=seed, delay_s=delay_s)


def one_node_reduce_scatter(
    machine: Machine,
    layout: GroupLayout,
    *,
    chunk_bytes: int = 4 * _MIB,
    calls: int = 1,
    seed: int = 0,
    delay_s: float = 0.0,
) -> Replayed:
    """Replay reduce-scatters of bf16 gradients to fp32 on one node: one thread on CPUs, push beside sum on GPUs."""
    topology = machine.topology
    together = [("main",)] if machine.one_memory else [("push",), ("sum",)]
    threads: list[tuple[int, Thread]] = []
    for rank in range(topology.ranks):
        schedule = reduce_scatter(
            layout,
            topology,
            rank,
            grad=Item.BF16,
            output=Item.F32,
            chunk_bytes=chunk_bytes,
            interleave=machine.one_memory,
        )
        steps = [Call(schedule) for _ in range(calls)]
        threads += [(rank, [(call, s) for call in steps for s in streams]) for streams in together]
    return replay(machine, threads, seed=seed, delay_s=delay_s)


def nodes_all_gather(machine: Machine, layout: GroupLayout, *, seed: int = 0, delay_s: float = 0.0) -> Replayed:
    """Replay one all-gather of adopted bf16 shards across nodes, streams side by side (section 3).

    With one CPU rank a node it is a lane's, from landing to landing (appendix F); GPU ranks stage theirs.
    """
    topology = machine.topology
    items = [Item.of_size(s.itemsize) for s in layout.params]
    if topology.lane and machine.one_memory:
        lanes = [all_gather_lane(layout, topology, rank, items) for rank in range(topology.ranks)]
        return replay(machine, one_call(lanes, [("copy", "completion")]), seed=seed, delay_s=delay_s)
    schedules = [
        all_gather_nodes(
            layout,
            topology,
            rank,
            items,
            shared_landing=machine.one_memory or machine.rates.multicast,
            interleave=False,
            adopted=True,
        )
        for rank in range(topology.ranks)
    ]
    return replay(
        machine, one_call(schedules, [("cast",), ("rail",), ("copy", "completion")]), seed=seed, delay_s=delay_s
    )


def nodes_reduce_scatter(
    machine: Machine,
    layout: GroupLayout,
    *,
    round_width: int,
    slot_reuse: bool = False,
    chunk_bytes: int = NODES_CHUNK_BYTES,
    seed: int = 0,
    delay_s: float = 0.0,
) -> Replayed:
    """Replay one reduce-scatter of bf16 gradients to fp32 across nodes: push, sum, network side by side (section 4).

    With one rank a node it is a lane's (appendix F), on GPUs for up to eight nodes.
    """
    topology, one_thread = machine.topology, machine.one_memory
    if one_wave(topology) or (topology.lane and one_thread):
        lanes = [
            reduce_scatter_lane(layout, topology, rank, grad=Item.BF16, output=Item.F32, interleave=one_thread)
            for rank in range(topology.ranks)
        ]
        together = [("read", "network")] if one_thread else [("read",), ("network",)]
        return replay(machine, one_call(lanes, together), seed=seed, delay_s=delay_s)
    plan = BasePlan(topology.nodes, topology.local_ranks, topology.local_ranks, round_width, slot_reuse)
    schedules = [
        reduce_scatter_nodes(
            layout,
            topology,
            rank,
            grad=Item.BF16,
            output=Item.F32,
            chunk_bytes=chunk_bytes,
            plan=plan,
            interleave=False,
            multicast=machine.rates.multicast,
        )
        for rank in range(topology.ranks)
    ]
    return replay(machine, one_call(schedules, [("push",), ("sum",), ("network",)]), seed=seed, delay_s=delay_s)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one all-gather and one reduce-scatter of a group, and how they were found."""

    all_gather_s: float
    reduce_scatter_s: float
    method: str
    sizing: Sizing


def group_times(
    rates: Rates,
    layout: GroupLayout,
    topology: Topology,
    *,
    one_memory: bool = False,
    chunk_bytes: int = 4 * _MIB,
    sum_ctas: int | None = None,
) -> Times:
    """Predict a group's collectives by themselves, bf16 with fp32 reduction.

    Args:
        rates: of one rank.
        layout: the group's geometry.
        topology: M x L.
        one_memory: whether a node's ranks are CPU processes.
        chunk_bytes: of the reduce-scatter, on one node.
        sum_ctas: thread blocks of the sum on one node; None for the solver's.
    """
    output = 4 * max(1, layout.output_items)
    sizing = solve(rates, topology, output)
    work = topology.ranks * copies(layout, topology, chunk_bytes if topology.nodes == 1 else NODES_CHUNK_BYTES)
    if topology.nodes > 1 and topology.ranks <= MOST_REPLAYED and work <= MOST_REPLAYED_ACROSS:
        machine = Machine(
            rates=rates,
            topology=topology,
            sum_ctas=1 if one_memory else sizing.sum_ctas,
            landing_ctas=1 if one_memory else sizing.landing_ctas,
            one_memory=one_memory,
        )
        return Times(
            nodes_all_gather(machine, layout).seconds,
            nodes_reduce_scatter(machine, layout, round_width=sizing.round_width).seconds,
            "replay",
            sizing,
        )
    if topology.nodes > 1:
        shard = sum(layout.shard_bytes(p) for p in range(len(layout.params)))
        return Times(
            stages.all_gather(rates, topology, shard).seconds,
            stages.reduce_scatter(rates, topology, output, sizing).seconds,
            "stage model",
            sizing,
        )
    ctas = 1 if one_memory else sum_ctas or sizing.sum_ctas
    machine = Machine(rates=rates, topology=topology, sum_ctas=ctas, one_memory=one_memory)

    def reduced(part: GroupLayout) -> float:
        return one_node_reduce_scatter(machine, part, chunk_bytes=chunk_bytes).seconds

    method, share = "replay", max(work // MOST_REPLAYED_COPIES, 2)
    parts = [_part(layout, share * times) for times in (1, 2)]
    many_chunks = layout.output_items * 2 > _MANY_CHUNKS * chunk_bytes
    if work > MOST_REPLAYED_COPIES and many_chunks and parts[0].output_items > parts[1].output_items:
        # Chunk follows chunk at a steady pace: two parts of the group are on the line that the whole is on.
        method = "replay of a part"
        call_s, rate = line([(float(part.output_items), reduced(part)) for part in parts])
        reduce_scatter_s = call_s + layout.output_items / rate
    else:
        reduce_scatter_s = reduced(layout)
    return Times(one_node_all_gather(machine, layout).seconds, reduce_scatter_s, method, replace(sizing, sum_ctas=ctas))


def _part(layout: GroupLayout, share: int) -> GroupLayout:
    """A group with one in ``share`` of every parameter's items, sharded alike: fewer rows, or shorter ones."""

    def cut(shape: ParamShape) -> ParamShape:
        if shape.rows >= share * layout.ranks:
            return replace(shape, rows=shape.rows // share)
        return replace(shape, row_items=-(-shape.row_items // share))

    return GroupLayout(tuple(map(cut, layout.params)), layout.ranks)


#: (nodes, MiB of shard) -> TIDE-AG, min, ms; P = 30 (Table 7).
TABLE_7 = {
    **{(1, 32): 0.38, (2, 32): 1.11, (4, 32): 2.57, (8, 32): 5.52},
    **{(1, 128): 1.40, (2, 128): 4.19, (4, 128): 9.76, (8, 128): 20.89},
}
#: (nodes, MiB of output) -> TIDE-RS, min, ms, and its buffer in GiB; P = 16 (Table 8).
TABLE_8 = {
    **{(1, 32): (0.41, 0.29), (2, 32): (2.08, 0.58), (4, 32): (3.70, 0.61), (8, 32): (6.61, 0.64)},
    **{(1, 128): (1.29, 0.38), (2, 128): (7.63, 2.26), (4, 128): (13.93, 2.38), (8, 128): (25.02, 2.51)},
}
#: One node: the training budget (section 7.1), and the chunk that Table 8's one-node buffers imply (0.25 GiB of staging
#: for two slots of eight contributions).
_ONE_NODE_CTAS, _ONE_NODE_CHUNK = 16, 16 * _MIB


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of the paper beside the prediction, both in ``unit``; ``bound`` is the largest error accepted."""

    what: str
    nodes: int
    mib: int
    measured: float
    predicted: float
    unit: str
    method: str
    bound: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return f"{self.what}, {self.nodes} nodes, {self.mib} MiB"


def paper_comparison(rates: Rates = PAPER) -> list[Compared]:
    """Predict the paper's Tables 7 and 8 (min columns)."""
    rows = [
        Compared("all-gather", nodes, mib, ms, _paper_all_gather(rates, nodes, mib), "ms", "replay", 0.05)
        for (nodes, mib), ms in TABLE_7.items()
    ]
    for (nodes, mib), (ms, gib) in TABLE_8.items():
        sizing = solve(rates, Topology(nodes, 8), mib * _MIB)
        predicted = _paper_reduce_scatter(rates, nodes, mib, sizing)
        rows.append(Compared("reduce-scatter", nodes, mib, ms, predicted, "ms", "replay", 0.15))
        buffer = alone(nodes, 8, mib * _MIB, sizing.round_width) / 2**30
        rows.append(Compared("reduce-scatter buffer", nodes, mib, gib, buffer, "GiB", "closed form", 0.15))
    return rows


def _paper_all_gather(rates: Rates, nodes: int, mib: int) -> float:
    machine = Machine(rates=rates, topology=Topology(nodes, 8))
    layout = even_layout(8 * nodes, mib * _MIB // 2, 30)
    if nodes > 1:
        return nodes_all_gather(machine, layout).seconds * 1e3
    return one_node_all_gather(machine, layout, cast=False).seconds * 1e3


def _paper_reduce_scatter(rates: Rates, nodes: int, mib: int, sizing: Sizing) -> float:
    layout = even_layout(8 * nodes, mib * _MIB // 4, 16)
    ctas = sizing.sum_ctas if nodes > 1 else _ONE_NODE_CTAS
    machine = Machine(rates=rates, topology=Topology(nodes, 8), sum_ctas=ctas, landing_ctas=sizing.landing_ctas)
    if nodes > 1:
        return nodes_reduce_scatter(machine, layout, round_width=sizing.round_width).seconds * 1e3
    return one_node_reduce_scatter(machine, layout, chunk_bytes=_ONE_NODE_CHUNK).seconds * 1e3
