"""The all-gather across nodes: paced doubling on the rails, then straight into the landing (paper, section 3).

On a single node there are no rounds: what is left is one copy from the stage to the landings of all, by multicast.

Every rank's shards travel packed, in slots of the receive stage; as slots arrive, they are placed in the landing of all
ranks of the node, runs of slots by one strided copy per parameter. Streams keep conditions apart (section 3.2):

``cast`` puts the own shards into the first slot of the stage; ``rail`` runs the rounds; ``copy`` waits until the
landing is free and places slots; ``completion`` waits until the whole node has placed; ``readiness`` is run when this
rank has vacated the landing. For one thread, ``copy`` does the work of the first three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tide_strategies.collectives import signals
from tide_strategies.collectives.all_gather import _CAST, LANDED, VACATED
from tide_strategies.collectives.doubling import Part, Round, rounds
from tide_strategies.collectives.schedule import NODE, Await, Copy, Counter, Item, Notify, Op, Put, Ref, Schedule, Space
from tide_strategies.layout import GroupLayout, align
from tide_strategies.topology import Topology

#: Bytes of each transfer after which its receiver lets the next sender begin.
HEAD_BYTES = 8 * 1024 * 1024
#: Runs of at least this many slots move by one strided copy.
MERGED_FROM = 4
#: Shards start on multiples of this many bytes in a slot.
SLOT_ALIGNMENT = 16


def slot_offsets(layout: GroupLayout) -> tuple[int, ...]:
    """Byte of a stage slot where each parameter's shard begins; last, the bytes of a slot."""
    sizes = (align(layout.shard_bytes(p), SLOT_ALIGNMENT) for p in range(len(layout.params)))
    return tuple(accumulate(sizes, initial=0))


def all_gather_nodes(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    shard_items: Sequence[Item],
    *,
    shared_landing: bool = True,
    interleave: bool = True,
    adopted: bool = False,
    head_bytes: int = HEAD_BYTES,
) -> Schedule:
    """Build rank's schedule of the all-gather across several nodes.

    Args:
        layout: the group's geometry.
        topology: M nodes; one only with ``shared_landing`` and streams side by side.
        rank: whose schedule.
        shard_items: element of each shard; a shard whose element differs from the landing's is cast on the way.
        shared_landing: one write reaches the landing of all ranks of a node (shared memory, or multicast).
        interleave: for one thread; otherwise streams side by side.
        adopted: INPUT 0 is the packed shards, laid out like a slot of the stage and readable by the rail, and no cast
            is needed: nothing is copied in.
        head_bytes: of each transfer, what must be in before the next sender may begin.

    Raises:
        ValueError: if something does not fit.
    """
    if topology.ranks != layout.ranks or len(shard_items) != len(layout.params):
        raise ValueError(
            f"layout of {layout.ranks} ranks and {len(layout.params)} parameters does not fit "
            f"topology {topology} and {len(shard_items)} shard dtypes"
        )
    if topology.nodes == 1 and (interleave or adopted or not shared_landing):
        raise ValueError("on one node this is for streams side by side, a shared landing and shards that are copied in")
    if head_bytes < 1:
        raise ValueError(f"head_bytes must be at least 1; got {head_bytes}")
    for shape, item in zip(layout.params, shard_items, strict=True):
        if item.size != shape.itemsize and (adopted or (item, shape.itemsize) not in _CAST):
            how = "adopted shards are not cast" if adopted else "no cast"
            raise ValueError(f"{how} from a shard of {item.value} to landing items of {shape.itemsize} bytes")
    stage = topology.nodes * slot_offsets(layout)[-1]
    build = _Builder(layout, topology, rank, shard_items, shared_landing, interleave, adopted, head_bytes)
    return Schedule(
        name="all-gather",
        rank=rank,
        ranks=topology.ranks,
        streams={name: tuple(ops) for name, ops in build.streams().items()},
        advance=build.advance(),
        memory={(Space.STAGE, 0): stage} if stage else {},
    )


class _Builder:
    def __init__(
        self,
        layout: GroupLayout,
        topology: Topology,
        rank: int,
        shard_items: Sequence[Item],
        shared_landing: bool,
        interleave: bool,
        adopted: bool,
        head_bytes: int,
    ) -> None:
        self.layout, self.topology, self.rank, self.shard_items = layout, topology, rank, shard_items
        self.interleave, self.adopted, self.head_bytes = interleave, adopted, head_bytes
        self.node, self.local = topology.node_of(rank), topology.local_of(rank)
        self.peers = [r for r in topology.node_ranks(rank) if r != rank]
        self.landings = [NODE] if shared_landing else [rank, *self.peers]
        self.offsets = slot_offsets(layout)
        self.slot_bytes = self.offsets[-1]
        self.rounds = list(rounds(topology.nodes, self.node))
        #: What each stream has seen of each round, so that nothing is awaited twice.
        self.seen: dict[tuple[str, Counter], int] = {}

    def streams(self) -> dict[str, list[Op]]:
        ends: dict[str, list[Op]] = {
            "completion": [Await(LANDED, w, 1) for w in self.peers],
            "readiness": [Notify(VACATED)] if self.peers else [],
        }
        if self.interleave:
            return {"copy": [*self._one_thread()], **ends}
        cast: list[Op] = [] if self.adopted else [Await(signals.RELEASED, self.rank, 0), *self._cast()]
        if not self.adopted:
            cast.append(Notify(signals.PLACED, self.rank))
        copy = [*self._enter(), *self._place(0, range(1))]
        for r in self.rounds:
            copy += self._receive("copy", r)
        copy += self._announce()
        rail = {"rail": [*self._rail()]} if self.rounds else {}
        return {"cast": cast, **rail, "copy": copy, **ends}

    def advance(self) -> dict[tuple[Counter, int], int]:
        """What one call adds to every cell that this rank waits for, and to its own that ``reuse`` counts as well."""
        node = self.topology.node_ranks(self.rank) if self.peers else ()
        out: dict[tuple[Counter, int], int] = {(c, w): 1 for c in (VACATED, LANDED) for w in node}
        for r in self.rounds:
            source, target = self._peer(r.source), self._peer(r.target)
            out[signals.gathered(r.step), source] = len(self._parts(r))
            if r.step:
                out[signals.clear(r.step), target] = 1
            else:
                out[signals.STAGE_FREE, target] = 1
        if not self.interleave:
            if self.rounds:
                out[signals.FORWARDED, self.rank] = 1
            if not self.adopted:
                out.update({(c, self.rank): 1 for c in (signals.PLACED, signals.RELEASED)})
        return out

    def _parts(self, r: Round) -> list[Part]:
        """Parts of a round's transfer; with adopted shards, the first slot lies elsewhere and is cut off."""
        out: list[Part] = []
        for part in r.parts(self.slot_bytes, self.head_bytes):
            if self.adopted and part.begin < self.slot_bytes < part.end:
                out.append(Part(part.begin, self.slot_bytes, range(0)))
                part = Part(self.slot_bytes, part.end, part.complete)
            out.append(part)
        return out

    def _peer(self, node: int) -> int:
        return self.topology.rank(node, self.local)

    def _one_thread(self) -> Iterator[Op]:
        yield from () if self.adopted else self._cast()
        entered = False
        for r in self.rounds:
            yield from self._open("copy", r)
            yield from self._send("copy", r)
            if not entered:  # while the first transfer is under way
                yield from self._enter()
                yield from self._place(0, range(1))
                entered = True
        # The last transfers of others do not wait for what this rank places.
        for r in self.rounds:
            yield from self._receive("copy", r)
        yield from self._announce()

    def _cast(self) -> Iterator[Op]:
        """The own shards into slot 0."""
        for p, (shape, item) in enumerate(zip(self.layout.params, self.shard_items, strict=True)):
            items = self.layout.valid_items(p, self.rank)
            if items:
                placed = item if item.size == shape.itemsize else _CAST[item, shape.itemsize]
                yield Copy(Ref(Space.INPUT, p), Ref(Space.STAGE, 0, self.offsets[p]), items, item, placed)

    def _enter(self) -> Iterator[Op]:
        """The landing is free on every rank of the node; the own slot is filled."""
        yield from (Await(VACATED, w, 0) for w in self.peers)
        if not self.interleave and not self.adopted:
            yield Await(signals.PLACED, self.rank, 1)

    def _rail(self) -> Iterator[Op]:
        if not self.adopted:
            yield Await(signals.PLACED, self.rank, 1)
        for r in self.rounds:
            yield from self._open("rail", r)
            yield from self._send("rail", r)
        yield Notify(signals.FORWARDED, self.rank)

    def _await_parts(self, stream: str, r: Round, count: int) -> Iterator[Op]:
        key = (stream, signals.gathered(r.step))
        if count > self.seen.get(key, 0):
            self.seen[key] = count
            yield Await(key[1], self._peer(r.source), count)

    def _open(self, stream: str, r: Round) -> Iterator[Op]:
        """Everything that a round waits for: room at the target, its leave, and what is to be forwarded."""
        if r.step:
            # Pacing: the sender of this round may begin once the heads of the round before are in.
            yield from self._await_parts(stream, self.rounds[r.step - 1], 1)
            yield Notify(signals.clear(r.step), self._peer(r.source))
            yield Await(signals.clear(r.step), self._peer(r.target), 1)
        else:  # the heads that later rounds wait for come from one who waited for this
            yield Await(signals.STAGE_FREE, self._peer(r.target), 0)
        for before in self.rounds[: r.step]:
            if before.first < r.slots:
                yield from self._await_parts(stream, before, len(self._parts(before)))

    def _send(self, stream: str, r: Round) -> Iterator[Op]:
        target = self._peer(r.target)
        signal = signals.gathered(r.step)
        for part in self._parts(r):
            own = self.adopted and part.begin < self.slot_bytes
            src = Ref(Space.INPUT, 0, part.begin) if own else Ref(Space.STAGE, 0, part.begin)
            if part.end > part.begin:
                dst = Ref(Space.STAGE, 0, r.first * self.slot_bytes + part.begin, target)
                yield Put(src, dst, part.end - part.begin, signal)
            else:
                yield Notify(signal, target)

    def _receive(self, stream: str, r: Round) -> Iterator[Op]:
        """Place the slots of a round as they arrive."""
        for n, part in enumerate(self._parts(r)):
            if part.complete:
                yield from self._await_parts(stream, r, n + 1)
                yield from self._place(r.first, part.complete)

    def _place(self, first: int, slots: range) -> Iterator[Op]:
        """Slots ``first`` plus each of ``slots`` into the landings, in runs of consecutive nodes."""
        begin, end = first + slots.start, first + slots.stop
        wrap = self.topology.nodes - self.node  # the slot of node 0
        for low, high in ((begin, min(end, wrap)), (max(begin, wrap), end)):
            if low < high:
                for p in range(len(self.layout.params)):
                    yield from self._place_run(p, low, high)

    def _place_run(self, p: int, low: int, high: int) -> Iterator[Op]:
        node = (self.node + low) % self.topology.nodes
        ranks = [self.topology.rank(node + i, self.local) for i in range(high - low)]
        items = [self.layout.valid_items(p, r) for r in ranks]
        full = sum(n == items[0] for n in items) if items[0] else 0
        runs = [(0, full)] if full >= MERGED_FROM else [(i, 1) for i in range(full)]
        # The end of the parameter leaves one rank with fewer rows, and the ranks after it with none.
        runs += [(i, 1) for i in range(full, len(items)) if items[i]]
        item = Item.of_size(self.layout.params[p].itemsize)
        size = self.layout.shard_bytes(p)
        for at in self.landings:
            for i, rows in runs:
                src = Ref(Space.STAGE, 0, (low + i) * self.slot_bytes + self.offsets[p])
                if self.adopted and low + i == 0:
                    src = Ref(Space.INPUT, 0, self.offsets[p])
                dst = Ref(Space.LANDING, 0, self.layout.landing_offset(p, ranks[i]), at)
                pitches = (self.slot_bytes, self.topology.local_ranks * size) if rows > 1 else (0, 0)
                yield Copy(src, dst, items[i], item, item, rows, *pitches)

    def _announce(self) -> Iterator[Op]:
        """Everything is placed: tell the node, and let the rail peers into the stage again."""
        if self.peers:
            yield Notify(LANDED)
        if self.rounds:
            if not self.interleave:
                yield Await(signals.FORWARDED, self.rank, 1)
            yield Notify(signals.STAGE_FREE, self._peer(self.rounds[0].source))
        if not self.interleave and not self.adopted:
            yield Notify(signals.RELEASED, self.rank)
