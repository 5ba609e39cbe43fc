"""Level 1 of the several-node reduce-scatter: one fp32 partial per destination node and local rank (paper, 4.1).

For a destination, every local rank owns one sub-slice of all its L ranks. The others push their gradients' rows into
the owner's staging area, in chunks; the owner adds them in local-rank order, then its own, read where autograd left it.
Destination ranks are consecutive, so one strided copy moves a piece of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import BANKS, CONSUMED, pushed
from tide_strategies.collectives.schedule import Await, Copy, Item, Notify, Op, Ref, Space, Sum
from tide_strategies.collectives.subslices import PIECE_ALIGNMENT, Piece, SubSlices


@dataclass(frozen=True, slots=True)
class Partial:
    """One partial that a rank forms: for contributor step ``c`` of pass ``part``, stored at ``dst``."""

    c: int
    part: int
    dst: Ref


Around = Callable[[Partial], Iterator[Op]]


def _nothing(_: Partial) -> Iterator[Op]:
    return iter(())


def _one_ahead(pushes: list[list[Op]], sums: list[list[Op]]) -> Iterator[tuple[str, list[Op]]]:
    """Push one chunk ahead of the sums: no operation waits for one that a rank has later in this order."""
    yield from (("push", ops) for ops in pushes[:1])
    for i, ops in enumerate(sums):
        yield from (("push", ahead) for ahead in pushes[i + 1 : i + 2])
        yield "sum", ops


class LevelOne:
    """Builds one rank's pushes and sums for a list of partials, in order and alike on all ranks of a node."""

    def __init__(self, slices: SubSlices, plan: BasePlan, rank: int, grad: Item, chunk_bytes: int) -> None:
        topology = slices.topology
        self.slices, self.plan, self.rank, self.grad, self.chunk_bytes = slices, plan, rank, grad, chunk_bytes
        self.node, self.local, self.local_ranks = topology.node_of(rank), topology.local_of(rank), topology.local_ranks
        self.peers = [r for r in topology.node_ranks(rank) if r != rank]
        self.row_pitch = chunk_bytes // self.local_ranks // PIECE_ALIGNMENT * PIECE_ALIGNMENT
        #: Chunks of each owner so far, by local rank.
        self.made = [0] * self.local_ranks
        self._known_consumed: dict[int, int] = {}

    def target(self, c: int) -> int:
        """Destination node of contributor step ``c``."""
        return (self.node + c) % self.plan.nodes

    def subslice(self, c: int, local: int) -> int:
        """The sub-slice that local rank ``local`` owns in step ``c`` (equation 7)."""
        return (local + self.plan.placement(c)) % self.local_ranks

    def interleaved(self, partials: Sequence[Partial]) -> Iterator[Op]:
        """Pushes one chunk ahead of the sums, for one thread."""
        for _, ops in _one_ahead(*self._form(partials, _nothing, _nothing, one_thread=True)):
            yield from ops

    def side_by_side(
        self, partials: Sequence[Partial], before: Around, after: Around
    ) -> Iterator[tuple[str, list[Op]]]:
        """Pushes and sums, each with its stream, in an order in which one thread may run them too.

        ``before`` and ``after`` give what else the sums of a partial begin and end with.
        """
        yield from _one_ahead(*self._form(partials, before, after, one_thread=False))

    def all_summed(self) -> None:
        """Note that all peers are known to have summed all chunks so far."""
        self._known_consumed = dict(enumerate(self.made))

    def _form(
        self, partials: Sequence[Partial], before: Around, after: Around, *, one_thread: bool
    ) -> tuple[list[list[Op]], list[list[Op]]]:
        owners = [self._chunks(partials, local) for local in range(self.local_ranks)]
        steps = max((len(c) for c in owners), default=0)
        pushes: list[list[Op]] = [[] for _ in range(steps)]
        for i in range(steps):
            for turn in range(1, self.local_ranks):  # the next rank first: no owner is everybody's first target
                owner = (self.local + turn) % self.local_ranks
                if i < len(owners[owner]):
                    pushes[i] += self._push(owner, self.made[owner] + i, *owners[owner][i])
        # A peer pushes chunk i before it sums chunk i - 1, and one thread has waited for that sum in order to push
        # chunk i + 1: then there is no need to wait for the push.
        ahead = {w: len(owners[self.slices.topology.local_of(w)]) - 1 if one_thread else 0 for w in self.peers}
        sums = self._sums(partials, owners[self.local], before, after, ahead)
        sums += [[] for _ in range(steps - len(sums))]
        if one_thread and owners[self.local]:
            # Whoever pushed the first of these chunks had summed all chunks before.
            self._known_consumed = {o: max(self._known_consumed.get(o, -1), n) for o, n in enumerate(self.made)}
        for local, chunks in enumerate(owners):
            self.made[local] += len(chunks)
        return pushes, sums

    def _chunks(self, partials: Sequence[Partial], local: int) -> list[tuple[Partial, tuple[Piece, ...]]]:
        return [
            (partial, pieces)
            for partial in partials
            for pieces in self.slices.chunks(
                self.target(partial.c), self.subslice(partial.c, local), partial.part, self.grad, self.row_pitch
            )
        ]

    def _sums(
        self,
        partials: Sequence[Partial],
        chunks: list[tuple[Partial, tuple[Piece, ...]]],
        before: Around,
        after: Around,
        ahead: dict[int, int],
    ) -> list[list[Op]]:
        own: dict[Partial, list[tuple[Piece, ...]]] = {}
        for partial, pieces in chunks:
            own.setdefault(partial, []).append(pieces)
        steps: list[list[Op]] = []
        first: list[Op] = []  # signals of partials that hold nothing, before the first that does
        number = self.made[self.local]
        for partial in partials:
            for n, pieces in enumerate(own.get(partial, ())):
                step = number - self.made[self.local]
                new = [w for w in self.peers if step == 0 or step >= ahead[w]]
                steps.append([*(before(partial) if n == 0 else ()), *self._sum(number, partial, pieces, new)])
                number += 1
            (steps[-1] if steps else first).extend(after(partial))
        if first:
            steps[:1] = [[*first, *(steps[0] if steps else ())]]
        return steps

    def _staging(self, owner: int, sender: int, number: int, row: int, at: int) -> Ref:
        slot = sender - (sender > owner)
        bank = (number % BANKS) * (self.local_ranks - 1) + slot
        offset = bank * self.chunk_bytes + row * self.row_pitch + at
        return Ref(Space.STAGING, 0, offset, self.node * self.local_ranks + owner)

    def _gradient(self, c: int, piece: Piece, row: int) -> Ref:
        destination = self.target(c) * self.local_ranks + row
        items = destination * self.slices.layout.shard_items(piece.p) + piece.start
        return Ref(Space.INPUT, piece.p, items * self.grad.size)

    def _push(self, owner: int, number: int, partial: Partial, pieces: tuple[Piece, ...]) -> Iterator[Op]:
        owner_rank = self.node * self.local_ranks + owner
        # The bank was last used BANKS chunks ago, or by an earlier call, whose chunks may have used any bank.
        count = max(0, number - BANKS + 1)
        if count > self._known_consumed.get(owner, -1):
            self._known_consumed[owner] = count
            yield Await(CONSUMED, owner_rank, count)
        for piece in pieces:
            pitch = self.slices.layout.shard_items(piece.p) * self.grad.size
            parts = [(0, piece.items, piece.rows)] if piece.rows else []
            parts += [(piece.rows, piece.tail, 1)] if piece.tail else []
            for row, items, rows in parts:
                src = self._gradient(partial.c, piece, row)
                dst = self._staging(owner, self.local, number, row, piece.at)
                yield Copy(src, dst, items, self.grad, self.grad, rows, pitch, self.row_pitch)
        yield Notify(pushed(owner), owner_rank)

    def _sum(self, number: int, partial: Partial, pieces: tuple[Piece, ...], new: Sequence[int]) -> Iterator[Op]:
        yield from (Await(pushed(self.local), w, number + 1) for w in new)
        dst = partial.dst
        for piece in pieces:
            for row, items in piece.lines():
                staged = tuple(
                    self._staging(self.local, w, number, row, piece.at)
                    for w in range(self.local_ranks)
                    if w != self.local
                )
                offset = dst.offset + (row * self.slices.part_items + piece.column) * 4
                yield Sum(
                    dst=Ref(dst.space, dst.index, offset),
                    sources=(*staged, self._gradient(partial.c, piece, row)),
                    items=items,
                    src_item=self.grad,
                    dst_item=Item.F32,
                )
        if self.peers:
            yield Notify(CONSUMED)
