"""Calls of collectives in the order in which a training step makes them, for all ranks at once.

A story knows what the caller does between calls: it makes gradients and frees them, uses parameters and vacates them.
With ``interleave`` each rank is one thread; otherwise the caller and every stream are threads of their own, tied
together only where the caller waits for a stream or a stream for the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tide_strategies.collectives.all_gather import all_gather, reuse
from tide_strategies.collectives.all_gather_nodes import all_gather_nodes, slot_offsets
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item, Schedule
from tide_strategies.collectives.subslices import SubSlices
from tide_strategies.layout import GroupLayout
from tide_strategies.topology import Topology
from tide_strategies.verify.machine import Machine
from tide_strategies.verify.memory import Actor, Run
from tide_strategies.verify.steps import Act, Call, Do, Join, Mark, Step
from tide_strategies.verify.violation import Violation

#: Changes a rank's schedule before it is used: (kind of call, its number, schedule) -> schedule.
Change = Callable[[str, int, Schedule], Schedule]


@dataclass(frozen=True)
class Gathered:
    """An all-gather of a story, or a use of what an earlier one left.

    Args:
        number: of the call.
        layout, slot: of the group, of its landing.
        calls: by rank.
        shards: number of the call whose shards are there.
    """

    number: int
    layout: GroupLayout
    slot: int
    calls: tuple[Call, ...]
    shards: int


@dataclass(frozen=True)
class Reduced:
    """A reduce-scatter of a story, its read phase issued."""

    number: int
    layout: GroupLayout
    output: Item
    calls: tuple[Call, ...]
    order: Callable[[int, int], Sequence[int]]


class Story:
    """Builds the work of all ranks call by call; :meth:`run` verifies it.

    Args:
        topology: M nodes x L ranks.
        interleave: one thread per rank.
        shared_landing: the ranks of a node have one landing (shared memory); otherwise each has its own.
        multicast: with landings of their own, one write still reaches all of a node.
        lane: with one rank a node, the collectives made for that.
        change: lets a test break schedules.
        machine: what runs the calls.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        interleave: bool = True,
        shared_landing: bool = True,
        multicast: bool = False,
        lane: bool = False,
        change: Change | None = None,
        machine: type[Machine] = Machine,
    ) -> None:
        self.topology, self.interleave, self.multicast = topology, interleave, multicast
        self.shared_landing, self.lane = shared_landing, lane
        self.machine = machine(topology.ranks, topology.local_ranks, shared_landing=shared_landing)
        self.checked = 0
        self._change = change or (lambda kind, number, schedule: schedule)
        self._threads: dict[tuple[int, str], list[Step]] = {(r, "caller"): [] for r in range(topology.ranks)}
        self._number = 0
        self._reductions: list[Reduced] = []

    def gather(
        self, layout: GroupLayout, items: Sequence[Item], slot: int, *, adopted: bool = False, head_bytes: int = 1 << 23
    ) -> Gathered:
        """Issue an all-gather into a landing slot."""
        number = self._next()
        calls = []
        for rank in range(self.topology.ranks):
            schedule = self._gather_schedule(layout, rank, items, adopted, head_bytes)
            names = self._shards(number, slot, layout, rank, items, adopted)
            owner = self.machine.landing_owner(rank)
            self.machine.add(owner, f"landing{slot}", layout.landing_bytes)
            call = Call(self._change("all-gather", number, schedule), number, names, slot)
            calls.append(call)
            streams = [s for s in schedule.streams if s not in ("completion", "readiness")]
            # The caller's own, before it lets the others begin, where it casts into its landing.
            if streams[0] == "cast" and self.topology.nodes == 1 and not self.multicast:
                self._caller(rank).append(Do(call, streams.pop(0)))
            self._issue(rank, call, streams, "gather")
            self._issue(rank, call, ["completion"] if not self.interleave else [], "gather", after=False)
        return Gathered(number, layout, slot, tuple(calls), number)

    def reuse(self, gathered: Gathered) -> Gathered:
        """Use a vacated landing again, into which nothing has been gathered since."""
        number = self._next()
        calls = []
        for rank in range(self.topology.ranks):
            schedule = self._change("reuse", number, reuse(self.topology, rank))
            calls.append(Call(schedule, number, (), gathered.slot))
            self._issue(rank, calls[-1], ["completion"] if not self.interleave else [], "gather")
        return replace(gathered, number=number, calls=tuple(calls))

    def use(self, gathered: Gathered) -> None:
        """Wait for an all-gather and look at every parameter of every rank."""
        for rank, call in enumerate(gathered.calls):
            steps = self._caller(rank)
            if self.interleave:
                steps.append(Do(call, "completion"))
            else:
                ends = [s for s in call.schedule.streams if s in ("copy", "completion")]
                if self._places_beside(call.schedule):
                    ends.append("cast")
                steps += [Join(("end", gathered.number, s)) for s in ends]
            steps.append(Act(partial(self._check_gathered, gathered, rank)))

    def vacate(self, gathered: Gathered) -> None:
        """Let the next all-gather into the slot."""
        for rank, call in enumerate(gathered.calls):
            self._caller(rank).append(Do(call, "readiness"))

    def reduce(
        self,
        layout: GroupLayout,
        *,
        grad: Item = Item.BF16,
        output: Item = Item.F32,
        chunk_bytes: int,
        plan: BasePlan | None = None,
        inside: Gathered | None = None,
    ) -> Reduced:
        """Make gradients and issue a reduce-scatter's read phase; ``inside``: in the slot of that all-gather."""
        number = self._next()
        earlier = self._reductions
        if len(earlier) >= 2 and inside is None:  # its gradients' storage is used again
            self._finish_reads(earlier[-2])
        calls = []
        for rank in range(self.topology.ranks):
            schedule = reduce_scatter(
                layout,
                self.topology,
                rank,
                grad=grad,
                output=output,
                chunk_bytes=chunk_bytes,
                interleave=self.interleave,
                plan=plan,
                bank=len(earlier) % 2,
                multicast=self.multicast and self.topology.nodes > 1,
            )
            inputs = self._gradients(number, layout, rank, grad, inside)
            name = f"output{number}"
            self.machine.add(rank, name, layout.output_items * output.size)
            call = Call(self._change("reduce-scatter", number, schedule), number, inputs, 0, name)
            calls.append(call)
            streams = list(schedule.streams)
            if self.interleave:
                streams = streams[:1]  # the network phase comes when the story says so
            self._issue(rank, call, streams, "reduce")
        reduced = Reduced(number, layout, output, tuple(calls), self._order(layout, plan))
        self._reductions.append(reduced)
        return reduced

    def finish(self, reduced: Reduced) -> None:
        """Run (one thread) or wait for the network phase, and look at every output."""
        for rank, call in enumerate(reduced.calls):
            steps = self._caller(rank)
            for stream in list(call.schedule.streams)[1 if self.interleave else 0 :]:
                steps.append(Do(call, stream) if self.interleave else Join(("end", reduced.number, stream)))
            steps.append(Act(partial(self._check_reduced, reduced, rank)))

    def finish_reads(self, reduced: Reduced) -> None:
        """Wait until the gradients may be freed, and free them."""
        self._finish_reads(reduced)

    def run(self) -> None:
        """Verify everything; raises Violation."""
        self.machine.run([(rank, name, steps) for (rank, name), steps in self._threads.items()])

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _caller(self, rank: int) -> list[Step]:
        return self._threads[rank, "caller"]

    def _places_beside(self, gather: Schedule) -> bool:
        """Whether own shards are copied to the own landing beside those to peers, as where nothing is cast."""
        return self.topology.nodes == 1 and next(iter(gather.streams)) == "copy" and "cast" in gather.streams

    def _issue(self, rank: int, call: Call, streams: Iterable[str], kind: str, *, after: bool = True) -> None:
        if self.interleave:
            self._caller(rank).extend(Do(call, s) for s in streams)
            return
        if after:
            self._caller(rank).append(Mark(("start", call.number)))
        for s in streams:
            thread = self._threads.setdefault((rank, f"{kind} {s}"), [])
            thread += [Join(("start", call.number)), Do(call, s), Mark(("end", call.number, s))]

    def _finish_reads(self, reduced: Reduced) -> None:
        for rank, call in enumerate(reduced.calls):
            if not self.interleave:
                ends = [s for s in call.schedule.streams if s != "network"]
                self._caller(rank).extend(Join(("end", reduced.number, s)) for s in ends)

    def _gather_schedule(
        self, layout: GroupLayout, rank: int, items: Sequence[Item], adopted: bool, head_bytes: int
    ) -> Schedule:
        everywhere = self.shared_landing or self.multicast
        staged = self.topology.nodes > 1 or (self.multicast and not self.interleave)
        if self.lane or not staged:
            return all_gather(layout, self.topology, rank, items, shared_landing=everywhere, interleave=self.interleave)
        return all_gather_nodes(
            layout,
            self.topology,
            rank,
            items,
            shared_landing=everywhere,
            interleave=self.interleave,
            adopted=adopted,
            head_bytes=head_bytes,
        )

    def _shards(
        self, number: int, slot: int, layout: GroupLayout, rank: int, items: Sequence[Item], adopted: bool
    ) -> list[tuple[str, int]]:
        """Let the caller fill the shards; where each lies."""
        offsets = slot_offsets(layout)
        names, acts = [], []
        for p, item in enumerate(items):
            valid = layout.valid_items(p, rank) * item.size
            name, at = (f"shards{slot}", offsets[p]) if adopted else (f"shard{slot}.{p}", 0)
            memory = self.machine.add(rank, name, offsets[-1] if adopted else valid)
            names.append((name, 0 if adopted else at))
            run = Run(valid, (("shard", number, rank, p, 0),), 0, item.size)
            acts.append((memory.name, name, at, run))
        self._caller(rank).append(Act(partial(self._fill, rank, [(n, at, run) for _, n, at, run in acts])))
        return names

    def _gradients(
        self, number: int, layout: GroupLayout, rank: int, grad: Item, inside: Gathered | None
    ) -> list[tuple[str, int]]:
        names, acts = [], []
        for p, shape in enumerate(layout.params):
            nbytes = shape.rows * shape.row_items * grad.size
            if inside is None:
                name, at = f"grad{len(self._reductions) % 2}.{p}", 0
                self.machine.add(rank, name, nbytes)
            else:
                name, at = f"landing{inside.slot}", inside.layout.landing_base(p)
            names.append((name, at))
            acts.append((name, at, Run(nbytes, (("grad", number, rank, p, 0),), 0, grad.size)))
        self._caller(rank).append(Act(partial(self._fill, rank, acts)))
        return names

    def _fill(self, rank: int, acts: Sequence[tuple[str, int, Run]], actor: Actor) -> None:
        for name, at, run in acts:
            self.machine.memories[rank, name].write(actor, at, [run])

    def _check_gathered(self, gathered: Gathered, rank: int, actor: Actor) -> None:
        memory = self.machine.memories[self.machine.landing_owner(rank), f"landing{gathered.slot}"]
        layout = gathered.layout
        for p, shape in enumerate(layout.params):
            for owner in range(layout.ranks):
                items = layout.valid_items(p, owner)
                if items:
                    runs = memory.read(actor, layout.landing_offset(p, owner), items * shape.itemsize)
                    want = (("shard", gathered.shards, owner, p, 0),)
                    if len(runs) != 1 or runs[0].first() != want or runs[0].size != shape.itemsize:
                        raise Violation("result", f"rank {rank}: parameter {p} of rank {owner} is {runs[:3]}")
        self.checked += 1

    def _order(self, layout: GroupLayout, plan: BasePlan | None) -> Callable[[int, int], Sequence[int]]:
        """The promised order of contributors: (rank, packed element) -> ranks."""
        t = self.topology
        if t.nodes == 1:
            return lambda rank, element: [*(u for u in range(t.ranks) if u != rank), rank]
        capacity = max(SubSlices(layout, t, 1).capacity, 1)

        def order(rank: int, element: int) -> Sequence[int]:
            out: list[int] = []
            for c in range(1, t.nodes + 1):
                node = (t.node_of(rank) - c) % t.nodes
                owner = t.rank(node, (element // capacity - c % t.nodes) % t.local_ranks)
                out += [*(u for u in t.node_ranks(owner) if u != owner), owner]
            return out

        return order

    def _check_reduced(self, reduced: Reduced, rank: int, actor: Actor) -> None:
        layout = reduced.layout
        memory = self.machine.memories[rank, f"output{reduced.number}"]
        for p in range(len(layout.params)):
            base, valid, padded = layout.output_offset(p), layout.valid_items(p, rank), layout.shard_items(p)
            done = 0
            for run in memory.read(actor, base * reduced.output.size, padded * reduced.output.size):
                items = run.nbytes // reduced.output.size
                self._check_run(reduced, rank, p, run, base + done, min(items, max(valid - done, 0)))
                if done + items > valid and run.first() != () and done >= valid:
                    raise Violation("result", f"rank {rank}: padding of parameter {p} holds {run.first()}")
                done += items
        self.checked += 1

    def _check_run(self, reduced: Reduced, rank: int, p: int, run: Run, element: int, items: int) -> None:
        if not items:
            return
        first = rank * reduced.layout.shard_items(p) + element - reduced.layout.output_offset(p)
        got = run.first() or ()
        want = [("grad", reduced.number, u, p, first) for u in reduced.order(rank, element)]
        if self.multicast:  # the switch adds in its own order
            got, want = tuple(sorted(got)), sorted(want)
        if list(got) != want or run.size != reduced.output.size:
            raise Violation("result", f"rank {rank}: element {element} is {got}, not {tuple(want)}")
