"""Sequences of calls that bring every reuse of memory about: the same group twice in a row, then another, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.schedule import Item, Space, Sum
from tide_strategies.layout import GroupLayout
from tide_strategies.topology import Topology
from tide_strategies.verify.machine import Machine
from tide_strategies.verify.story import Change, Gathered, Reduced, Story

#: Two banks, two slots and two inboxes are all used again within this many calls.
CALLS = 6


@dataclass(frozen=True)
class Workload:
    """Calls to verify.

    Args:
        kind: ``all-gather``, ``reduce-scatter`` or ``step`` (both, as in a backward pass).
        topology: M x L.
        layouts: parameter groups, used in turn, each twice in a row.
        plan: of the reduce-scatters; None on a single node and for a lane.
        lane: the collectives for one rank a node.
        interleave: one thread per rank.
        multicast: one write or one reduction reaches all of a node.
        shared_landing: the ranks of a node have one landing; never with ``multicast`` or ``slot_reuse``.
        ahead: a call is issued before the one before it is finished; in a step, an all-gather before the reduction.
        adopted: all-gathers read packed shards in place.
        slot_reuse: in a step, gradients lie in the landing slot.
        mixed: every other reduce-scatter has the other outbox, full or of two rounds.
        output: element of the reduce-scatter's output.
        chunk_bytes: bytes staged at a time.
        head_bytes: heads of the all-gather's transfers.
        calls: how many of each kind.
        reuse: each landing is used once more after it was vacated, in the place of another all-gather.
    """

    kind: str
    topology: Topology
    layouts: tuple[GroupLayout, ...]
    plan: BasePlan | None = None
    lane: bool = False
    interleave: bool = True
    multicast: bool = False
    shared_landing: bool = True
    ahead: bool = True
    adopted: bool = False
    slot_reuse: bool = False
    mixed: bool = False
    output: Item = Item.F32
    chunk_bytes: int = 256
    head_bytes: int = 48
    calls: int = CALLS
    reuse: bool = False

    def story(self, change: Change | None = None, *, count: bool = True, machine: type[Machine] = Machine) -> Story:
        """Build the calls, each schedule passed through ``change``."""
        story = Story(
            self.topology,
            interleave=self.interleave,
            shared_landing=self.shared_landing and not self.multicast and not self.slot_reuse,
            multicast=self.multicast,
            lane=self.lane,
            change=change,
            machine=machine,
        )
        story.machine.count = count
        {"all-gather": self._gathers, "reduce-scatter": self._reductions, "step": self._step}[self.kind](story)
        return story

    def verify(self) -> int:
        """Run it; returns how many results were looked at. Raises Violation."""
        story = self.story()
        story.run()
        return story.checked

    def _groups(self) -> Iterator[GroupLayout]:
        for i in range(self.calls):
            yield self.layouts[i // 2 % len(self.layouts)]

    def _gathers(self, story: Story) -> None:
        pending: list[Gathered] = []
        for i, layout in enumerate(self._groups()):
            pending.append(self._gather(story, layout, i % 2))
            if len(pending) > self.ahead:
                self._use_up(story, pending.pop(0))
        for gathered in pending:
            self._use_up(story, gathered)

    def _use_up(self, story: Story, gathered: Gathered) -> None:
        story.use(gathered)
        story.vacate(gathered)
        if self.reuse:
            again = story.reuse(gathered)
            story.use(again)
            story.vacate(again)

    def _reductions(self, story: Story) -> None:
        pending: list[Reduced] = []
        for i, layout in enumerate(self._groups()):
            plan = self.plan
            if plan is not None and self.mixed and i % 2:
                plan = replace(plan, slot_reuse=not plan.slot_reuse)
            if self.interleave and pending and not self._may_wait(pending[-1]):
                story.finish(pending.pop())
            pending.append(story.reduce(layout, output=self.output, chunk_bytes=self.chunk_bytes, plan=plan))
            # One thread may put a network phase off until after the next read phase; side by side, nobody waits.
            if not self.ahead or (self.interleave and len(pending) > 1):
                story.finish(pending.pop(0))
        for reduced in pending:
            story.finish(reduced)

    @staticmethod
    def _may_wait(reduced: Reduced) -> bool:
        """Whether the next read phase may come before this network phase, which then must not read gradients."""
        streams = list(reduced.calls[0].schedule.streams)
        network = (call.schedule.streams[s] for call in reduced.calls for s in streams[1:])
        sums = (op for ops in network for op in ops if isinstance(op, Sum))
        return not any(source.space is Space.INPUT for op in sums for source in op.sources)

    def _step(self, story: Story) -> None:
        """A backward pass: while a group's gradients are reduced, the next group is gathered."""
        pending: list[Reduced] = []
        current = self._gather(story, self.layouts[0], 0)
        for i, layout in enumerate(self._groups()):
            story.use(current)
            following = self.layouts[(i + 1) // 2 % len(self.layouts)]
            if self.slot_reuse:
                pending.append(self._reduce(story, layout, current))
                if self.interleave:
                    story.finish(pending.pop())
                story.finish_reads(pending[-1]) if pending else None
                story.vacate(current)
                current = self._gather(story, following, (i + 1) % 2)
                continue
            story.vacate(current)
            if self.ahead:
                current = self._gather(story, following, (i + 1) % 2)
            pending.append(self._reduce(story, layout, None))
            if not self.ahead:  # of the reduction, though still of its network phase
                current = self._gather(story, following, (i + 1) % 2)
            if self.interleave:
                story.finish(pending.pop())
        story.use(current)
        story.vacate(current)
        for reduced in pending:
            story.finish(reduced)

    def _gather(self, story: Story, layout: GroupLayout, slot: int) -> Gathered:
        items = [Item.of_size(p.itemsize) for p in layout.params]
        return story.gather(layout, items, slot, adopted=self.adopted, head_bytes=self.head_bytes)

    def _reduce(self, story: Story, layout: GroupLayout, inside: Gathered | None) -> Reduced:
        return story.reduce(layout, output=self.output, chunk_bytes=self.chunk_bytes, plan=self.plan, inside=inside)


def variants(workload: Workload) -> Iterator[Workload]:
    """The same calls by one thread and by streams side by side, with and without calls ahead, both landings."""
    for interleave in (True, False):
        for multicast in (False, True):
            for ahead in (False, True):
                yield replace(workload, interleave=interleave, multicast=multicast, ahead=ahead)
