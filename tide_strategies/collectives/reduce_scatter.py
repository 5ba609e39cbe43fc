"""The reduce-scatter, level 1: push slices to their owner, sum there in fp32 (paper, section 4.1).

Every rank pushes its slice of every gradient to the rank that owns it, in chunks, through a bounded staging area of
two banks; the owner adds the staged slices in local-rank order, then its own, which it reads where autograd left it.
Padding is never sent: owners know what is padding and zero it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.schedule import (
    Await,
    Copy,
    Counter,
    Item,
    Notify,
    Op,
    Ref,
    Schedule,
    Space,
    Sum,
    Zero,
)
from tide_strategies.layout import GroupLayout, align
from tide_strategies.topology import Topology

#: Chunks of one owner that may be in its staging area at once.
BANKS = 2
#: Every piece starts on a multiple of this many bytes in staging, so that vector loads are aligned.
PIECE_ALIGNMENT = 16


def pushed(owner: int) -> Counter:
    """Grows when the writer has pushed a chunk into ``owner``'s staging."""
    return Counter("pushed", owner)


#: Grows when the writer has summed a chunk out of its own staging.
CONSUMED = Counter("consumed")


Issue = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """``items`` elements of parameter ``p`` from element ``start`` of the owner's shard, at ``at`` bytes of a chunk."""

    p: int
    start: int
    items: int
    at: int


def chunks(layout: GroupLayout, owner: int, item: Item, chunk_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut what ``owner`` receives from one rank into chunks of at most ``chunk_bytes``. All ranks cut alike."""
    out: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    at = 0
    for p in range(len(layout.params)):
        start, end = 0, layout.valid_items(p, owner)
        while start < end:
            room = (chunk_bytes - at) // item.size
            if room <= 0:
                out.append(tuple(current))
                current, at = [], 0
                continue
            items = min(room, end - start)
            current.append(Piece(p, start, items, at))
            at = align(at + items * item.size, PIECE_ALIGNMENT)
            start += items
    if current:
        out.append(tuple(current))
    return out


def reduce_scatter(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    *,
    grad: Item,
    output: Item,
    chunk_bytes: int,
    interleave: bool = True,
    plan: BasePlan | None = None,
    bank: int = 0,
    multicast: bool = False,
) -> Schedule:
    """Build rank's schedule of the reduce-scatter.

    INPUT p is the unsharded gradient of parameter p, contiguous (D, K) elements ``grad``; OUTPUT 0 is the packed shard
    of ``layout.output_items`` elements ``output``; STAGING 0 of every rank holds ``memory[STAGING, 0]`` bytes.
    With ``interleave`` one stream ``main`` alternates pushes and sums, one chunk apart, for a single thread to run;
    without, ``push`` and ``sum`` run side by side. Across nodes, ``plan``, ``bank`` and ``multicast`` count too
    (``two_level.reduce_scatter_nodes``; with one rank a node and no plan, ``rail_lane``).

    Raises:
        ValueError: if the topology does not fit the layout, if ``grad`` or ``output`` is not
            F32 or BF16, or if ``chunk_bytes`` is not a positive multiple of 16.
    """
    if topology.lane and plan is None:
        from tide_strategies.collectives.rail_lane import reduce_scatter_lane  # it builds on this module

        return reduce_scatter_lane(layout, topology, rank, grad=grad, output=output, bank=bank, interleave=interleave)
    if topology.nodes != 1:
        from tide_strategies.collectives.two_level import reduce_scatter_nodes  # it builds on this module

        return reduce_scatter_nodes(
            layout,
            topology,
            rank,
            grad=grad,
            output=output,
            chunk_bytes=chunk_bytes,
            plan=plan,
            bank=bank,
            interleave=interleave,
            multicast=multicast,
        )
    if topology.ranks != layout.ranks:
        raise ValueError(f"layout of {layout.ranks} ranks does not fit topology {topology}")
    if grad.raw or output.raw:
        raise ValueError(f"gradients and output must be f32 or bf16; got {grad.value} and {output.value}")
    if chunk_bytes <= 0 or chunk_bytes % PIECE_ALIGNMENT:
        raise ValueError(f"chunk_bytes must be a positive multiple of {PIECE_ALIGNMENT}; got {chunk_bytes}")
    build = _Builder(layout, topology, rank, grad, output, chunk_bytes)
    streams, issue = build.interleaved() if interleave else build.side_by_side()
    advance = {(pushed(o), w): n for o, n in build.counts.items() for w in build.senders(o)}
    advance.update({(CONSUMED, o): n for o, n in build.counts.items()})
    return Schedule(
        name="reduce-scatter",
        rank=rank,
        ranks=topology.ranks,
        streams=streams,
        advance={key: n for key, n in advance.items() if n},
        memory={(Space.STAGING, 0): BANKS * (topology.ranks - 1) * chunk_bytes},
        issue=issue,
    )


class _Builder:
    def __init__(
        self, layout: GroupLayout, topology: Topology, rank: int, grad: Item, output: Item, chunk_bytes: int
    ) -> None:
        self.layout, self.rank, self.ranks = layout, rank, topology.ranks
        self.grad, self.output, self.chunk_bytes = grad, output, chunk_bytes
        self.chunks = {o: chunks(layout, o, grad, chunk_bytes) for o in range(self.ranks)}
        self.counts = {o: len(c) if self.ranks > 1 else 0 for o, c in self.chunks.items()}

    def senders(self, owner: int) -> list[int]:
        return [r for r in range(self.ranks) if r != owner]

    def interleaved(self) -> tuple[dict[str, tuple[Op, ...]], Issue]:
        """Everything on one stream."""
        return {"main": tuple(op for _, ops in self._in_order() for op in ops)}, ()

    def side_by_side(self) -> tuple[dict[str, tuple[Op, ...]], Issue]:
        """All pushes on one stream, all sums on another; the counters keep them in step."""
        ordered = [(stream, op) for stream, ops in self._in_order() for op in ops]
        streams = {name: tuple(op for stream, op in ordered if stream == name) for name in ("push", "sum")}
        runs = itertools.groupby(ordered, key=lambda item: item[0])
        return streams, tuple((stream, sum(1 for _ in run)) for stream, run in runs)

    def _in_order(self) -> Iterator[tuple[str, tuple[Op, ...]]]:
        """Push one chunk ahead of the sums: no operation waits for one that a rank has later in this order."""
        yield "sum", tuple(self._zero_padding())
        yield "push", tuple(self._push(0))
        for c in range(self._steps):
            yield "push", tuple(self._push(c + 1))
            yield "sum", tuple(self._sum(c))

    @property
    def _steps(self) -> int:
        return max(len(c) for c in self.chunks.values())

    def _staging(self, owner: int, sender: int, chunk: int, at: int) -> Ref:
        slot = sender - (sender > owner)
        offset = ((chunk % BANKS) * (self.ranks - 1) + slot) * self.chunk_bytes + at
        return Ref(Space.STAGING, 0, offset, owner)

    def _gradient(self, owner: int, piece: Piece) -> Ref:
        items = owner * self.layout.shard_items(piece.p) + piece.start
        return Ref(Space.INPUT, piece.p, items * self.grad.size)

    def _push(self, c: int) -> Iterator[Op]:
        # Start with the next rank, not with rank 0: no owner is everybody's first target.
        for step in range(1, self.ranks):
            owner = (self.rank + step) % self.ranks
            if c >= len(self.chunks[owner]):
                continue
            # The bank was last used BANKS chunks ago, or by an earlier call, whose chunks may have used any bank.
            yield Await(CONSUMED, owner, max(0, c - BANKS + 1))
            for piece in self.chunks[owner][c]:
                yield Copy(
                    src=self._gradient(owner, piece),
                    dst=self._staging(owner, self.rank, c, piece.at),
                    items=piece.items,
                    src_item=self.grad,
                    dst_item=self.grad,
                )
            yield Notify(pushed(owner), owner)

    def _sum(self, c: int) -> Iterator[Op]:
        if c >= len(self.chunks[self.rank]):
            return
        senders = self.senders(self.rank)
        yield from (Await(pushed(self.rank), w, c + 1) for w in senders)
        for piece in self.chunks[self.rank][c]:
            staged = tuple(self._staging(self.rank, w, c, piece.at) for w in senders)
            offset = self.layout.output_offset(piece.p) + piece.start
            yield Sum(
                dst=Ref(Space.OUTPUT, 0, offset * self.output.size),
                sources=(*staged, self._gradient(self.rank, piece)),
                items=piece.items,
                src_item=self.grad,
                dst_item=self.output,
                scaled=True,
            )
        if senders:
            yield Notify(CONSUMED)

    def _zero_padding(self) -> Iterator[Op]:
        for p in range(len(self.layout.params)):
            valid, padded = self.layout.valid_items(p, self.rank), self.layout.shard_items(p)
            if valid < padded:
                offset = (self.layout.output_offset(p) + valid) * self.output.size
                yield Zero(Ref(Space.OUTPUT, 0, offset), (padded - valid) * self.output.size)
