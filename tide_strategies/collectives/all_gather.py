"""The all-gather: every shard is written once, at its final address (paper, section 3).

Streams keep conditions apart (section 3.2): ``copy`` waits until the landing is free on every local rank and writes the
own shards; ``completion`` waits until every local rank has written; ``readiness`` is run when this rank has vacated the
landing, and lets the next user of it in. Where each rank has a landing of its own, ``cast`` puts the own shards into
the own landing, which needs nobody's leave. What is cast there ``copy`` sends on, and so runs after it; other shards it
sends from where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tide_strategies.collectives.schedule import (
    NODE,
    SELF,
    Await,
    Copy,
    Counter,
    Item,
    Notify,
    Op,
    Ref,
    Schedule,
    Space,
)
from tide_strategies.layout import GroupLayout
from tide_strategies.topology import Topology

#: Grows when a rank has vacated the landing slot. One per slot.
VACATED = Counter("vacated")
#: Grows when a rank's shards are in every local landing.
LANDED = Counter("landed")

#: Thread blocks of a GPU's cast for each of its sum: a sum keeps pace with links, a cast with memory.
CAST_CTAS = 2

_CAST = {(Item.F32, 2): Item.BF16, (Item.BF16, 4): Item.F32}


def reuse(topology: Topology, rank: int) -> Schedule:
    """Build rank's schedule for using a landing again that still holds the group's current values.

    Nothing is copied; what remains of the all-gather is to keep the next user of the slot out until all who read there
    have vacated it once more: every local rank, or, with one rank a node, this one (``rail_lane``).
    """
    if topology.lane:
        from tide_strategies.collectives.rail_lane import reuse_lane  # it builds on this module

        return reuse_lane(topology, rank)
    return Schedule(
        name="reuse",
        rank=rank,
        ranks=topology.ranks,
        streams={"completion": (), "readiness": (Notify(VACATED),)},
        advance={(VACATED, w): 1 for w in topology.node_ranks(rank)},
    )


def all_gather(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    shard_items: Sequence[Item],
    *,
    shared_landing: bool = True,
    interleave: bool = True,
) -> Schedule:
    """Build rank's schedule of the all-gather with direct landing.

    INPUT p is rank's padded shard of parameter p with elements ``shard_items[p]``; LANDING 0 is the group's landing.
    A shard whose element differs from the landing's is cast on the way (fp32 masters to bf16).

    Args:
        layout: the group's geometry.
        topology: one node, or several (``all_gather_nodes``; ``rail_lane`` for one rank a node).
        rank: whose schedule.
        shard_items: element of each shard.
        shared_landing: the node's ranks see one landing (one write reaches all: shared memory, or multicast);
            otherwise each has its own, and peers are written to one by one.
        interleave: across nodes, one stream for one thread; otherwise streams side by side.

    Raises:
        ValueError: if the topology does not fit the layout, or a cast is not f32 <-> bf16.
    """
    if topology.lane:
        from tide_strategies.collectives.rail_lane import all_gather_lane  # it builds on this module

        return all_gather_lane(layout, topology, rank, shard_items)
    if topology.nodes != 1:
        from tide_strategies.collectives.all_gather_nodes import all_gather_nodes  # it builds on this module

        return all_gather_nodes(
            layout, topology, rank, shard_items, shared_landing=shared_landing, interleave=interleave
        )
    if topology.ranks != layout.ranks or len(shard_items) != len(layout.params):
        raise ValueError(
            f"layout of {layout.ranks} ranks and {len(layout.params)} parameters does not fit "
            f"topology {topology} and {len(shard_items)} shard dtypes"
        )
    for shape, item in zip(layout.params, shard_items, strict=True):
        if item.size != shape.itemsize and (item, shape.itemsize) not in _CAST:
            raise ValueError(f"no cast from a shard of {item.value} to landing items of {shape.itemsize} bytes")
    peers = [r for r in topology.node_ranks(rank) if r != rank]
    place = tuple(_place(layout, rank, shard_items, NODE if shared_landing else SELF))
    send = place if shared_landing else tuple(_send(layout, topology, rank, shard_items))
    copy: tuple[Op, ...] = (*(Await(VACATED, w, 0) for w in peers), *send, Notify(LANDED))
    streams: dict[str, tuple[Op, ...]]
    if shared_landing:
        streams = {"copy": copy}
    elif _casts(layout, shard_items):
        streams = {"cast": place, "copy": copy}
    else:  # links are slower than memory, and giving a device many copies takes time too: peers' begin first
        streams = {"copy": copy, "cast": place}
    streams["completion"] = tuple(Await(LANDED, w, 1) for w in peers)
    streams["readiness"] = (Notify(VACATED),)
    return Schedule(
        name="all-gather",
        rank=rank,
        ranks=topology.ranks,
        streams=streams,
        advance={(c, w): 1 for c in (VACATED, LANDED) for w in topology.node_ranks(rank)},
    )


def _casts(layout: GroupLayout, shard_items: Sequence[Item]) -> bool:
    return any(item.size != shape.itemsize for shape, item in zip(layout.params, shard_items, strict=True))


def _place(layout: GroupLayout, rank: int, shard_items: Sequence[Item], at: int) -> Iterator[Copy]:
    """Each own shard to its place in the landing, cast if need be."""
    for p, (shape, item) in enumerate(zip(layout.params, shard_items, strict=True)):
        items = layout.valid_items(p, rank)
        if items:
            landing = item if item.size == shape.itemsize else _CAST[item, shape.itemsize]
            offset = layout.landing_offset(p, rank)
            yield Copy(Ref(Space.INPUT, p), Ref(Space.LANDING, 0, offset, at), items, item, landing)


def _send(layout: GroupLayout, topology: Topology, rank: int, shard_items: Sequence[Item]) -> Iterator[Copy]:
    """Each own shard to its place in every peer's landing, the next rank first; what is cast, from the own landing."""
    for step in range(1, topology.local_ranks):
        peer = topology.rank(topology.node_of(rank), (topology.local_of(rank) + step) % topology.local_ranks)
        for p, shape in enumerate(layout.params):
            items = layout.valid_items(p, rank)
            if items:
                offset, item = layout.landing_offset(p, rank), Item.of_size(shape.itemsize)
                cast = shard_items[p].size != shape.itemsize
                src = Ref(Space.LANDING, 0, offset) if cast else Ref(Space.INPUT, p)
                yield Copy(src, Ref(Space.LANDING, 0, offset, peer), items, item, item)
