"""Groups with one rank on each node, such as the shards of routed experts: collectives on the rail alone (appendix F).

Nothing is local to a node, so nothing needs to be staged for one. The all-gather doubles from landing to landing. The
reduce-scatter sends gradients in their own dtype and adds what arrives, up to eight contributions at a time, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tide_strategies.collectives import signals
from tide_strategies.collectives.all_gather import _CAST
from tide_strategies.collectives.doubling import Round, rounds
from tide_strategies.collectives.plan import BasePlan, Wave, credited, freed_by, refusals
from tide_strategies.collectives.schedule import (
    Await,
    Copy,
    Counter,
    Item,
    Land,
    Notify,
    Op,
    Put,
    Ref,
    Schedule,
    Space,
    Sum,
    Zero,
)
from tide_strategies.collectives.subslices import SubSlices
from tide_strategies.layout import GroupLayout
from tide_strategies.topology import Topology

#: Contributions that one sum adds at most.
WAVE_WIDTH = 8


def one_wave(topology: Topology) -> bool:
    """Whether it is a lane whose reductions add all contributions at once."""
    return topology.lane and topology.nodes <= WAVE_WIDTH


def all_gather_lane(layout: GroupLayout, topology: Topology, rank: int, shard_items: Sequence[Item]) -> Schedule:
    """Build rank's schedule of the all-gather of a group with one rank a node; operands as in ``all_gather``.

    Streams: ``copy`` (casts the own shards into the own landing and forwards), ``completion`` (waits for what ``copy``
    did not have to wait for), ``readiness``. The parameters are complete after both ``copy`` and ``completion``.

    Raises:
        ValueError: if something does not fit.
    """
    if topology.local_ranks != 1 or topology.ranks != layout.ranks or len(shard_items) != len(layout.params):
        raise ValueError(
            f"layout of {layout.ranks} ranks and {len(layout.params)} parameters does not fit "
            f"topology {topology} (one rank a node) and {len(shard_items)} shard dtypes"
        )
    steps = list(rounds(topology.nodes, rank))
    counts = {r.step: max(len(_transfers(layout, r.source, r.slots)), 1) for r in steps}
    seen: dict[int, int] = {}
    copy: list[Op] = [*_place_own(layout, rank, shard_items)]
    for r in steps:
        copy += _run_round(layout, rank, r, counts, seen)
    missing = [r for r in steps if seen.get(r.step, 0) < counts[r.step]]
    advance = {(signals.gathered(r.step), r.source): counts[r.step] for r in steps}
    advance.update({(signals.clear(r.step), r.target): 1 for r in steps if r.step})
    advance[signals.OPENED, steps[0].target] = 1
    return Schedule(
        name="all-gather",
        rank=rank,
        ranks=topology.ranks,
        streams={
            "copy": tuple(copy),
            "completion": tuple(Await(signals.gathered(r.step), r.source, counts[r.step]) for r in missing),
            "readiness": (Notify(signals.OPENED, steps[0].source),),
        },
        advance=advance,
    )


def reuse_lane(topology: Topology, rank: int) -> Schedule:
    """Build rank's schedule for using its landing again, as ``all_gather.reuse`` does within a node."""
    first = next(rounds(topology.nodes, rank))
    return Schedule(
        name="reuse",
        rank=rank,
        ranks=topology.ranks,
        streams={"completion": (), "readiness": (Notify(signals.OPENED, first.source),)},
        advance={(signals.OPENED, first.target): 1},
    )


def _place_own(layout: GroupLayout, rank: int, shard_items: Sequence[Item]) -> Iterator[Copy]:
    for p, (shape, item) in enumerate(zip(layout.params, shard_items, strict=True)):
        if item.size != shape.itemsize and (item, shape.itemsize) not in _CAST:
            raise ValueError(f"no cast from a shard of {item.value} to landing items of {shape.itemsize} bytes")
        items = layout.valid_items(p, rank)
        if items:
            placed = item if item.size == shape.itemsize else _CAST[item, shape.itemsize]
            yield Copy(Ref(Space.INPUT, p), Ref(Space.LANDING, 0, layout.landing_offset(p, rank)), items, item, placed)


def _transfers(layout: GroupLayout, node: int, slots: int) -> list[tuple[int, int]]:
    """Landing bytes (offset, length) of the first ``slots`` slots of ``node``: runs of nodes, per parameter."""
    nodes = layout.ranks
    runs = [(node, min(node + slots, nodes)), (0, max(node + slots - nodes, 0))]
    out = []
    for p, shape in enumerate(layout.params):
        for first, end in runs:
            nbytes = sum(layout.valid_items(p, r) for r in range(first, end)) * shape.itemsize
            if nbytes:
                out.append((layout.landing_offset(p, first), nbytes))
    return out


def _run_round(layout: GroupLayout, rank: int, r: Round, counts: dict[int, int], seen: dict[int, int]) -> Iterator[Op]:
    def arrivals(step: int, count: int) -> Iterator[Op]:
        if count > seen.get(step, 0):
            seen[step] = count
            yield Await(signals.gathered(step), (rank + (1 << step)) % layout.ranks, count)

    if r.step:
        yield from arrivals(r.step - 1, 1)
        yield Notify(signals.clear(r.step), r.source)
        yield Await(signals.clear(r.step), r.target, 1)
    else:
        yield Await(signals.OPENED, r.target, 0)
    for before in range(r.step):
        if 1 << before < r.slots:
            yield from arrivals(before, counts[before])
    transfers = _transfers(layout, rank, r.slots)
    for offset, nbytes in transfers:
        here, there = Ref(Space.LANDING, 0, offset), Ref(Space.LANDING, 0, offset, r.target)
        yield Put(here, there, nbytes, signals.gathered(r.step))
    if not transfers:
        yield Notify(signals.gathered(r.step), r.target)


def lane_plan(nodes: int, round_width: int = 4) -> BasePlan:
    """The plan of a lane: an inbox holds up to eight contributions, and no placement is needed."""
    return BasePlan(nodes, WAVE_WIDTH, WAVE_WIDTH, round_width)


def reduce_scatter_lane(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    *,
    grad: Item,
    output: Item,
    bank: int = 0,
    round_width: int = 4,
    interleave: bool = True,
) -> Schedule:
    """Build rank's schedule of the reduce-scatter of a group with one rank a node; operands as in ``reduce_scatter``.

    Streams: ``read`` (gradients into the outbox; then they may be freed) and ``network``.

    Raises:
        ValueError: if something does not fit.
    """
    if topology.local_ranks != 1 or topology.nodes < 2 or topology.ranks != layout.ranks:
        raise ValueError(f"a layout of {layout.ranks} ranks and topology {topology} do not make a lane of 2 and more")
    if grad.raw or output.raw:
        raise ValueError(f"gradients and output must be f32 or bf16; got {grad.value} and {output.value}")
    if bank not in (0, 1):
        raise ValueError(f"bank must be 0 or 1; got {bank}")
    plan = lane_plan(topology.nodes, round_width)
    if why := refusals(plan):
        raise ValueError(f"plan {plan} is refused: {'; '.join(why)}")
    return _Lane(layout, topology, rank, plan, grad, output, bank, interleave).schedule()


class _Lane:
    def __init__(
        self,
        layout: GroupLayout,
        topology: Topology,
        rank: int,
        plan: BasePlan,
        grad: Item,
        output: Item,
        bank: int,
        interleave: bool,
    ) -> None:
        self.layout, self.rank, self.plan, self.bank, self.interleave = layout, rank, plan, bank, interleave
        self.grad, self.output, self.nodes = grad, output, topology.nodes
        self.slices = SubSlices(layout, topology, 1)
        self.block = self.slices.part_items * grad.size
        self.waves = list(plan.waves())
        self.credited, self.freed_by = credited(plan, False), freed_by(plan, False)
        self.running = output is not Item.F32 and len(self.waves) > 1

    def schedule(self) -> Schedule:
        others = [w for w in range(self.nodes) if w != self.rank]
        advance: dict[tuple[Counter, int], int] = {(signals.arrived(self.rank), w): 1 for w in others}
        for w in others:
            needed = sum((w - self.rank) % self.nodes in c for c in self.credited)
            advance.update({(signals.credit(self.rank), w): needed} if needed else {})
        if not self.interleave:
            advance.update({(signals.SUMMED, self.rank): self.nodes, (signals.sent(self.bank), self.rank): 1})
        widest = min(WAVE_WIDTH, self.nodes - 1)  # the own contribution is in no inbox
        memory = {(Space.INBOX, g): widest * self.block for g in range(self.plan.generations)}
        memory[Space.OUTBOX, self.bank] = (self.nodes - 1) * self.block
        memory[Space.SPARE, self.bank] = self.block
        if self.running:
            memory[Space.RUNNING, 0] = self.layout.output_items * 4
        return Schedule(
            name="reduce-scatter",
            rank=self.rank,
            ranks=self.nodes,
            streams={"read": tuple(self._read()), "network": tuple(self._network())},
            advance=advance,
            memory={key: n for key, n in memory.items() if n},
        )

    def _read(self) -> Iterator[Op]:
        if not self.interleave:
            yield Await(signals.sent(self.bank), self.rank, 0)
        for c in range(1, self.nodes + 1):
            target = (self.rank + c) % self.nodes
            for p in range(len(self.layout.params)):
                items = self.layout.valid_items(p, target)
                if items:
                    src = Ref(Space.INPUT, p, target * self.layout.shard_items(p) * self.grad.size)
                    at = self.layout.output_offset(p) * self.grad.size
                    yield Copy(src, self._own(c, at), items, self.grad, self.grad)
            if not self.interleave:
                yield Notify(signals.SUMMED, self.rank)

    def _own(self, c: int, at: int) -> Ref:
        """Where what this rank contributes in step ``c`` waits."""
        if c == self.nodes:
            return Ref(Space.SPARE, self.bank, at)
        return Ref(Space.OUTBOX, self.bank, (c - 1) * self.block + at)

    def _network(self) -> Iterator[Op]:
        for wave in self.waves:
            for ready in wave.rounds:
                for c in ready:
                    yield from self._send(wave, c)
                for c in ready:
                    yield Await(signals.arrived(self.rank), (self.rank - c) % self.nodes, 1)
            if not self.interleave and self.nodes in wave.contributors:
                yield Await(signals.SUMMED, self.rank, self.nodes)
            yield from self._add(wave)
            freed = [i for i, by in enumerate(self.freed_by) if by in (wave.index, wave.index - len(self.waves))]
            for c in (c for i in freed for c in sorted(self.credited[i])):
                sender = (self.rank - c) % self.nodes
                yield Notify(signals.credit(sender), sender)
        for p in range(len(self.layout.params)):
            valid, padded = self.layout.valid_items(p, self.rank), self.layout.shard_items(p)
            if valid < padded:
                offset = (self.layout.output_offset(p) + valid) * self.output.size
                yield Zero(Ref(Space.OUTPUT, 0, offset), (padded - valid) * self.output.size)
        if not self.interleave:
            yield Notify(signals.sent(self.bank), self.rank)

    def _send(self, wave: Wave, c: int) -> Iterator[Op]:
        target = (self.rank + c) % self.nodes
        if not self.interleave:
            yield Await(signals.SUMMED, self.rank, c)
        if c in self.credited[wave.index]:
            by = self.freed_by[wave.index]
            yield Await(signals.credit(self.rank), target, int(by is not None and by >= 0))
        nbytes = self.slices.live_bytes(target, 0, 0) // 4 * self.grad.size
        if nbytes:
            dst = Ref(Space.INBOX, wave.generation, self._place(wave, c), target)
            yield Put(self._own(c, 0), dst, nbytes, signals.arrived(target))
        else:
            yield Notify(signals.arrived(target), target)

    def _place(self, wave: Wave, c: int) -> int:
        return (c - wave.contributors.start) * self.block

    def _add(self, wave: Wave) -> Iterator[Op]:
        first, last = wave.index == 0, wave.index + 1 == len(self.waves)
        for begin, items in self.slices.valid(self.rank, 0, self.layout.output_items):
            at = begin * self.grad.size
            sources = [
                Ref(Space.SPARE, self.bank, at)
                if c == self.nodes
                else Ref(Space.INBOX, wave.generation, self._place(wave, c) + at)
                for c in wave.contributors
            ]
            dst = Ref(Space.OUTPUT, 0, begin * self.output.size)
            if not self.running:
                yield Sum(dst, tuple(sources), items, self.grad, self.output, scaled=True, accumulate=not first)
                continue
            # A narrower output would round every wave's sum.
            running = Ref(Space.RUNNING, 0, begin * 4)
            yield Sum(running, tuple(sources), items, self.grad, Item.F32, accumulate=not first)
            if last:
                yield Land(dst, (running,), items, self.output, scaled=True)
