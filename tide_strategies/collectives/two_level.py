"""The reduce-scatter across nodes: node partials, Latin-square placement, waves (paper, sections 4.2 and 5.2).

Read phase: level 1 turns gradients into fp32 partials, one block of the outbox per remote destination and a spare for
the own node. Network phase: rounds of puts over the rails, each wave into the inbox of its generation; when a wave is
in, every rank folds its rows of all the node's inboxes into its output.

Streams: ``read`` and ``network`` for one thread that runs them in this order (other calls may come between), or
``push``, ``sum`` and ``network`` side by side. Gradients may be freed when the streams but ``network`` are through; for
one thread and an outbox smaller than a call, when ``network`` is.

Calls of one engine alternate between two banks, and all use one plan but for ``slot_reuse``: a credit that one plan
needs, another may not give.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from tide_strategies.collectives import signals
from tide_strategies.collectives.level_one import LevelOne, Partial
from tide_strategies.collectives.plan import BasePlan, Wave, credited, freed_by, refusals, stale
from tide_strategies.collectives.reduce_scatter import BANKS, CONSUMED, Issue, pushed
from tide_strategies.collectives.schedule import (
    NODE,
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
    Zero,
)
from tide_strategies.collectives.subslices import PIECE_ALIGNMENT, SubSlices
from tide_strategies.layout import GroupLayout
from tide_strategies.topology import Topology


def default_plan(topology: Topology) -> BasePlan:
    """Waves as wide as a node, rounds of four."""
    return BasePlan(topology.nodes, topology.local_ranks, topology.local_ranks, 4)


def reduce_scatter_nodes(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    *,
    grad: Item,
    output: Item,
    chunk_bytes: int,
    plan: BasePlan | None = None,
    bank: int = 0,
    interleave: bool = True,
    multicast: bool = False,
) -> Schedule:
    """Build rank's schedule of the reduce-scatter across several nodes.

    INPUT p is the unsharded gradient of parameter p, contiguous (D, K) elements ``grad``; OUTPUT 0 is the packed shard
    of ``layout.output_items`` elements ``output``, as on a single node.

    Args:
        layout: the group's geometry.
        topology: M >= 2 nodes.
        rank: whose schedule.
        grad: element of the gradients, F32 or BF16.
        output: element of the output, F32 or BF16.
        chunk_bytes: bytes of one contribution staged at a time, for all L ranks of a destination node.
        plan: waves, rounds, passes and mode; by default :func:`default_plan`.
        bank: of the outbox and spares, 0 and 1 in turn from call to call.
        interleave: for one thread; otherwise streams side by side.
        multicast: land by one switch reduction over all L inboxes, for which blocks without a partial are zeroed;
            otherwise by reading just the partials of the wave, the own node's where it lies.

    Raises:
        ValueError: if something does not fit, or the plan is refused.
    """
    plan = plan or default_plan(topology)
    if topology.ranks != layout.ranks or (plan.nodes, plan.local_ranks) != (topology.nodes, topology.local_ranks):
        raise ValueError(
            f"layout of {layout.ranks} ranks, topology {topology} and a plan for {plan.nodes}x{plan.local_ranks} "
            "do not fit"
        )
    if grad.raw or output.raw:
        raise ValueError(f"gradients and output must be f32 or bf16; got {grad.value} and {output.value}")
    if bank not in (0, 1):
        raise ValueError(f"bank must be 0 or 1; got {bank}")
    least = PIECE_ALIGNMENT * topology.local_ranks
    if chunk_bytes < least or chunk_bytes % PIECE_ALIGNMENT:
        raise ValueError(f"chunk_bytes must be a multiple of {PIECE_ALIGNMENT} from {least}; got {chunk_bytes}")
    why = refusals(plan)
    if why:
        raise ValueError(f"plan {plan} is refused: {'; '.join(why)}")
    build = _Builder(layout, topology, rank, plan, grad, output, chunk_bytes, bank, interleave, multicast)
    streams, issue = build.streams()
    return Schedule(
        name="reduce-scatter",
        rank=rank,
        ranks=topology.ranks,
        streams={name: tuple(ops) for name, ops in streams.items()},
        advance={key: n for key, n in build.advance().items() if n},
        memory={key: n for key, n in build.memory().items() if n},
        issue=issue,
    )


class _Builder:
    def __init__(
        self,
        layout: GroupLayout,
        topology: Topology,
        rank: int,
        plan: BasePlan,
        grad: Item,
        output: Item,
        chunk_bytes: int,
        bank: int,
        interleave: bool,
        multicast: bool,
    ) -> None:
        self.layout, self.topology, self.rank, self.plan = layout, topology, rank, plan
        self.output, self.bank, self.interleave, self.multicast = output, bank, interleave, multicast
        self.slices = SubSlices(layout, topology, plan.passes)
        self.level_one = LevelOne(self.slices, plan, rank, grad, chunk_bytes)
        self.node, self.local = topology.node_of(rank), topology.local_of(rank)
        self.peers = self.level_one.peers
        self.waves = list(plan.waves())
        self.zeroed = [blocks for _, blocks in stale(plan)] if multicast else [frozenset[int]()] * len(self.waves)
        self.credited = credited(plan, multicast)
        self.freed_by = freed_by(plan, multicast)
        self.blocks = plan.outbox_blocks()
        # Remote partials in the order in which they are sent, J = 0, 1, ...; the own ones may not wait for a block.
        remote = [self._remote(j) for j in range(plan.remote)]
        own = [Partial(plan.nodes, q, Ref(Space.SPARE, bank, q * self.slices.block_bytes)) for q in range(plan.passes)]
        self.early = [*remote[: self.blocks], *own]
        self.late = remote[self.blocks :]
        self.position = {partial: i for i, partial in enumerate([*self.early, *self.late])}
        self.remote, self.own = remote, own
        self.round_of = self._rounds()
        #: Rounds after which a stream that waits for outbox blocks hears of it, in order.
        self.heard = sorted({self.round_of[j] for j in range(len(self.late))})

    def streams(self) -> tuple[dict[str, list[Op]], Issue]:
        """Operations of each stream, and the order in which they may be issued (side by side)."""
        names = ("read", "network") if self.interleave else ("push", "sum", "network")
        out: dict[str, list[Op]] = {name: [] for name in names}
        issue: list[tuple[str, int]] = []
        for stream, ops in self._in_order():
            before = len(out[stream])
            out[stream].extend(ops)
            if len(out[stream]) > before:
                issue.append((stream, len(out[stream]) - before))
        if self.interleave:
            return out, ()
        runs = itertools.groupby(issue, key=lambda item: item[0])
        return out, tuple((stream, sum(count for _, count in run)) for stream, run in runs)

    def _in_order(self) -> Iterator[tuple[str, Iterable[Op]]]:
        """Everything, with its stream: no operation waits for one that a rank has later in this order."""
        self._summed = self._fills = self._empties = self._sends = 0
        if not self.interleave:  # the first block and spare were last used two calls ago
            yield "sum", [Await(signals.sent(self.bank), self.rank, 0)]
        yield from self._form(self.early, "read")
        for wave in self.waves:
            for ready in wave.rounds:
                yield "network", self._send(wave, ready)
                # What was sent makes room for as many partials, while the transfers are under way.
                freed = self.late[self._sends : self._sends + len(ready)]
                self._sends += len(ready)
                yield from self._form(freed, "network")
                yield "network", self._arrivals(wave, ready)
            yield "network", self._land(wave)
        yield "network", self._zero_padding()
        if not self.interleave:
            yield "network", [Notify(signals.sent(self.bank), self.rank)]

    def _form(self, partials: Sequence[Partial], thread: str) -> Iterator[tuple[str, Iterable[Op]]]:
        """The read phase of ``partials``, on a stream of the one thread or on streams of its own."""
        if self.interleave:
            yield thread, self.level_one.interleaved(partials)
        elif partials:
            yield from self.level_one.side_by_side(partials, self._before, self._after)

    def advance(self) -> dict[tuple[Counter, int], int]:
        """What one call adds to every cell that this rank waits for."""
        out: dict[tuple[Counter, int], int] = {}
        for w in self.peers:
            out[pushed(self.local), w] = self.level_one.made[self.local]
            out[CONSUMED, w] = self.level_one.made[self.topology.local_of(w)]
            out[signals.FILLED, w] = self._fills
            out[signals.EMPTIED, w] = self._empties
        for w in self.topology.rail_ranks(self.rank):
            if w != self.rank:
                out[signals.arrived(self.node), w] = self.plan.passes
                c = (self.topology.node_of(w) - self.node) % self.plan.nodes
                out[signals.credit(self.node), w] = sum(c in needed for needed in self.credited)
        if not self.interleave:
            out[signals.SUMMED, self.rank] = len(self.position)
            out[signals.sent(self.bank), self.rank] = len(self.heard) + 1
        return out

    def memory(self) -> dict[tuple[Space, int], int]:
        """Bytes that every rank provides."""
        block = self.slices.block_bytes
        out = {
            (Space.STAGING, 0): BANKS * (self.topology.local_ranks - 1) * self.level_one.chunk_bytes,
            (Space.OUTBOX, self.bank): self.blocks * block,
            (Space.SPARE, self.bank): self.plan.passes * block,
        }
        out.update({(Space.INBOX, g): self.topology.local_ranks * block for g in range(self.plan.generations)})
        if self._running:
            out[Space.RUNNING, 0] = self.layout.output_items * 4
        return out

    @property
    def _running(self) -> bool:
        """Whether waves are added up beside the output, which would round every sum on the way."""
        return self.output is not Item.F32 and self.plan.waves_per_pass > 1

    def _remote(self, j: int) -> Partial:
        part, c = divmod(j, self.plan.nodes - 1)
        offset = j % self.blocks * self.slices.block_bytes
        return Partial(c + 1, part, Ref(Space.OUTBOX, self.bank, offset))

    def _rounds(self) -> list[int]:
        """The round that sends each remote partial."""
        sizes = [len(r) for wave in self.waves for r in wave.rounds]
        return [number for number, size in enumerate(sizes) for _ in range(size)]

    # Read phase.

    def _before(self, partial: Partial) -> Iterator[Op]:
        """Wait until the block's last partial left it, side by side."""
        j = self.position[partial] - len(self.own)
        if partial.dst.space is Space.OUTBOX and j >= self.blocks:
            heard = self.heard.index(self.round_of[j - self.blocks]) + 1
            yield Await(signals.sent(self.bank), self.rank, heard)

    def _after(self, partial: Partial) -> Iterator[Op]:
        yield Notify(signals.SUMMED, self.rank)

    # Network phase.

    def _await_sum(self, partial: Partial) -> Iterator[Op]:
        needed = self.position[partial] + 1
        if not self.interleave and needed > self._summed:
            self._summed = needed
            yield Await(signals.SUMMED, self.rank, needed)

    def _send(self, wave: Wave, ready: range) -> Iterator[Op]:
        for c in ready:
            target = self.level_one.target(c)
            peer = self.topology.rank(target, self.local)
            partial = self.remote[wave.part * (self.plan.nodes - 1) + c - 1]
            yield from self._await_sum(partial)
            if c in self.credited[wave.index]:
                yield Await(signals.credit(self.node), peer, self._credits_before(wave, c))
            s = self.level_one.subslice(c, self.local)
            dst = Ref(Space.INBOX, wave.generation, s * self.slices.block_bytes, peer)
            nbytes = self.slices.live_bytes(target, s, wave.part)
            if nbytes:
                yield Put(partial.dst, dst, nbytes, signals.arrived(target))
            else:
                yield Notify(signals.arrived(target), peer)
        if not self.interleave and self.round_of[self._sends] in self.heard:
            yield Notify(signals.sent(self.bank), self.rank)

    def _arrivals(self, wave: Wave, ready: range) -> Iterator[Op]:
        for c in ready:
            sender = self.topology.rank((self.node - c) % self.plan.nodes, self.local)
            yield Await(signals.arrived(self.node), sender, wave.part + 1)

    def _credits_before(self, wave: Wave, c: int) -> int:
        """Credits of this call that a send waits for: none where the call before gave the last one."""
        earned = [i for i, by in enumerate(self.freed_by) if by is not None and by >= 0 and c in self.credited[i]]
        return sum(i <= wave.index for i in earned) if wave.index in earned else 0

    def _land(self, wave: Wave) -> Iterator[Op]:
        """Complete the own inbox, land the wave out of the node's inboxes, and pass them on."""
        completed = list(self._complete(wave))
        yield from completed
        if self.peers and (wave.rounds or completed or self.multicast):
            self._fills += 1
            yield Notify(signals.FILLED)
            yield from (Await(signals.FILLED, w, self._fills) for w in self.peers)
            if self.interleave:
                self.level_one.all_summed()
        first, last = wave.contributors.start == 1, wave.contributors.stop > self.plan.nodes
        for turn in range(self.topology.local_ranks):  # every rank begins with another inbox
            s = (self.local + turn) % self.topology.local_ranks
            yield from self._land_subslice(wave, s, first, last)
        yield from self._free(wave.index)

    def _free(self, landed: int) -> Iterator[Op]:
        """Let remote ranks into the inbox of a wave: for a later one of this call, or for the next call."""
        n = len(self.waves)
        freed = [self.credited[i] for i, by in enumerate(self.freed_by) if by in (landed, landed - n)]
        credits = [c for needed in freed for c in sorted(needed)]
        # Peers read the own spare until they have landed. One thread hears of that in time by what they push.
        spare = landed + 1 == n and not self.multicast and not self.interleave
        if self.peers and (credits or spare):
            self._empties += 1
            yield Notify(signals.EMPTIED)
            yield from (Await(signals.EMPTIED, w, self._empties) for w in self.peers)
        for c in credits:
            sender = (self.node - c) % self.plan.nodes
            yield Notify(signals.credit(sender), self.topology.rank(sender, self.local))

    def _complete(self, wave: Wave) -> Iterator[Op]:
        """What the own inbox lacks once the remote partials are in: the own node's, and zeros."""
        for block in sorted((self.local + b) % self.topology.local_ranks for b in self.zeroed[wave.index]):
            # Whatever pass it is landed in before a partial comes.
            nbytes = max(self.slices.live_bytes(self.node, block, q) for q in range(self.plan.passes))
            if nbytes:
                yield Zero(Ref(Space.INBOX, wave.generation, block * self.slices.block_bytes), nbytes)
        if self.plan.nodes not in wave.contributors:
            return
        own = self.own[wave.part]
        yield from self._await_sum(own)
        nbytes = self.slices.live_bytes(self.node, self.local, wave.part)
        if self.multicast and nbytes:
            dst = Ref(Space.INBOX, wave.generation, self.local * self.slices.block_bytes)
            yield Copy(own.dst, dst, nbytes // 4, Item.RAW4, Item.RAW4)

    def _land_subslice(self, wave: Wave, s: int, first: bool, last: bool) -> Iterator[Op]:
        low, high = self.slices.bounds(s, wave.part)
        for begin, items in self.slices.valid(self.rank, low, high):
            offset = s * self.slices.block_bytes + (self.local * self.slices.part_items + begin - low) * 4
            sources = [Ref(Space.INBOX, wave.generation, offset, at) for at in self._holders(wave, s)]
            if not self.multicast and last:
                spare = self.own[wave.part].dst.offset + offset - s * self.slices.block_bytes
                sources[-1] = Ref(Space.SPARE, self.bank, spare, sources[-1].at)
            running = Ref(Space.RUNNING, 0, begin * 4)
            # What the switch adds up has one source; what lies elsewhere is added by a landing of its own.
            if self._running and (self.multicast or not last):
                yield Land(running, tuple(sources), items, Item.F32, accumulate=not first)
                if not last:
                    continue
                sources = []
            if self._running:
                sources.insert(0, running)
            dst = Ref(Space.OUTPUT, 0, begin * self.output.size)
            accumulate = not first and not self._running
            yield Land(dst, tuple(sources), items, self.output, scaled=True, accumulate=accumulate)

    def _holders(self, wave: Wave, s: int) -> list[int]:
        """Ranks whose inbox holds the wave's partials of sub-slice ``s``, in contributor order (equation 8)."""
        if self.multicast:
            return [NODE]
        local = [(s - self.plan.placement(c)) % self.topology.local_ranks for c in wave.contributors]
        return [self.topology.rank(self.node, j) for j in local]

    def _zero_padding(self) -> Iterator[Op]:
        for p in range(len(self.layout.params)):
            valid, padded = self.layout.valid_items(p, self.rank), self.layout.shard_items(p)
            if valid < padded:
                offset = (self.layout.output_offset(p) + valid) * self.output.size
                yield Zero(Ref(Space.OUTPUT, 0, offset), (padded - valid) * self.output.size)
