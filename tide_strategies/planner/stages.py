"""Collectives across nodes, timed stage by stage instead of operation by operation.

A model, not a replay: whole shards, node partials and rounds are the units, one rank stands for the L alike ranks of
its node, and what overlaps follows the paper's text (sections 3.1 and 4, algorithm 1). It runs on the same event engine
as replays, so rails, links and thread blocks are contended for; host time and HBM traffic are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tide_strategies.collectives.doubling import LAST_GROUPS, rounds
from tide_strategies.planner.events import Action, Simulation, Uses
from tide_strategies.planner.rates import Rates
from tide_strategies.planner.replay import Span
from tide_strategies.planner.sizing import STAGING_SLOTS, Sizing, round_sizes
from tide_strategies.topology import Topology


@dataclass
class Timed:
    """Seconds until the last node is through, and what each node's streams did."""

    seconds: float
    spans: list[Span] = field(default_factory=list)


class _Stream:
    """Work of one node that runs one piece after another."""

    def __init__(self, model: _Model, node: int, name: str) -> None:
        self.model, self.node, self.name = model, node, name
        self._queue: list[tuple[str, float, Uses, Action]] = []
        self._running = False

    def add(self, what: str, nbytes: float, uses: Uses, done: Action) -> None:
        self._queue.append((what, nbytes, uses, done))
        if not self._running:
            self._next()

    def _next(self) -> None:
        self._running = bool(self._queue)
        if not self._running:
            return
        what, nbytes, uses, done = self._queue.pop(0)
        simulation, start = self.model.simulation, self.model.simulation.now

        def end() -> None:
            self.model.spans.append(Span(self.node, self.name, what, start, simulation.now, int(nbytes)))
            self._next()
            done()

        simulation.after(self.model.rates.start_s, lambda: simulation.flow(nbytes, uses, end))


class _Model:
    def __init__(self, rates: Rates, topology: Topology, ctas: tuple[int, int]) -> None:
        self.rates, self.topology = rates, topology
        capacity = {
            "in": rates.intake,
            "out": rates.push,
            "rail out": rates.rail,
            "rail in": rates.rail,
            "sum": ctas[0] * rates.sum_per_cta,
            "land": min(ctas[1] * rates.land_per_cta, rates.land_cap),
        }
        self.simulation = Simulation(lambda resource: capacity[resource[0]])  # type: ignore[index]
        self.spans: list[Span] = []
        self.ends = 0

    def stream(self, node: int, name: str) -> _Stream:
        return _Stream(self, node, name)

    def put(self, node: int, to: int, nbytes: float, what: str, arrived: Action, sent: Action | None = None) -> None:
        start, late = self.simulation.now, self.rates.rail_signal_s

        def end() -> None:
            self.spans.append(Span(node, "rail", what, start, self.simulation.now, int(nbytes)))
            if sent is not None:
                sent()
            self.simulation.after(late, arrived)

        self.simulation.flow(nbytes, {("rail out", node): 1.0, ("rail in", to): 1.0}, end)

    def run(self, begin: Callable[[int], None]) -> Timed:
        for node in range(self.topology.nodes):
            self.simulation.after(self.rates.call_s + self.rates.signal_s, partial(begin, node))
        self.simulation.run()
        assert self.ends == self.topology.nodes, "every node comes to its end"
        return Timed(max(s.end for s in self.spans) + self.rates.signal_s, self.spans)


def all_gather(rates: Rates, topology: Topology, shard_bytes: int) -> Timed:
    """Recursive doubling on every rail with multicast (or unicast) scatters (section 3.1).

    Args:
        rates: of one rank.
        topology: M x L.
        shard_bytes: S.
    """
    nodes, local = topology.nodes, topology.local_ranks
    model = _Model(rates, topology, (1, 1))
    counts = [r.slots for r in rounds(nodes, 0)]
    scatters = [model.stream(n, "scatter") for n in range(nodes)]
    left = [nodes for _ in range(nodes)]
    # All L ranks write at once: a GPU takes in L shards, its own among them, for each that a rank sends.

    def uses(node: int) -> Uses:
        return {("in", node): float(local)} if rates.multicast else {("out", node): float(max(local - 1, 1))}

    def scattered(node: int, shards: int) -> Action:
        def done() -> None:
            left[node] -= shards
            model.ends += left[node] == 0

        return done

    def exchange(node: int, number: int) -> None:
        if number == len(counts):
            return
        to, last = (node - 2**number) % nodes, number == len(counts) - 1
        groups = min(LAST_GROUPS, counts[number]) if last else 1
        sizes = [counts[number] // groups + (g < counts[number] % groups) for g in range(groups)]

        def send(index: int) -> None:
            def arrived() -> None:
                name = f"scatter of round {number}"
                scatters[to].add(name, sizes[index] * shard_bytes, uses(to), scattered(to, sizes[index]))
                if index == groups - 1:
                    exchange(to, number + 1)

            following = (lambda: send(index + 1)) if index + 1 < groups else None
            model.put(node, to, sizes[index] * shard_bytes, f"round {number}", arrived, following)

        send(0)

    def begin(node: int) -> None:
        scatters[node].add("own shard", shard_bytes, uses(node), scattered(node, 1))
        exchange(node, 0)

    return model.run(begin)


def reduce_scatter(
    rates: Rates, topology: Topology, output_bytes: int, sizing: Sizing, *, grad_itemsize: int = 2
) -> Timed:
    """Two-level reduce-scatter: push and sum per destination, puts in rounds, one landing per wave (section 4).

    A put starts once its own destination is summed; a round ends with the arrivals of all its transfers; the own node
    is summed last and lands with the last wave.

    Args:
        rates: of one rank.
        topology: M x L, M at least 2.
        output_bytes: S_fp32.
        sizing: thread blocks and round width.
        grad_itemsize: 2 or 4.
    """
    nodes, local = topology.nodes, topology.local_ranks
    model = _Model(rates, topology, (sizing.sum_ctas, sizing.landing_ctas))
    sizes = round_sizes(nodes, sizing.round_width, local)
    workers = [_Reduction(model, n, sizes, output_bytes, grad_itemsize) for n in range(nodes)]
    for worker in workers:
        worker.peers = workers
    return model.run(lambda node: workers[node].begin())


class _Reduction:
    """One node's part in a reduce-scatter. Step c sends to node n + c; step M is the own node."""

    def __init__(self, model: _Model, node: int, sizes: list[int], output_bytes: int, grad_itemsize: int) -> None:
        self.model, self.node, self.sizes, self.output_bytes = model, node, sizes, output_bytes
        topology = model.topology
        self.nodes, self.local = topology.nodes, topology.local_ranks
        self.pushed_bytes = output_bytes * grad_itemsize * (self.local - 1) / 4
        self.summed_bytes = output_bytes * (grad_itemsize * self.local + 4) / 4
        self.push, self.sum = model.stream(node, "push"), model.stream(node, "sum")
        self.land = model.stream(node, "land")
        self.peers: list[_Reduction] = []
        self.started, self.free, self.round = 0, STAGING_SLOTS, 0
        self.summed: set[int] = set()
        self.arrived: set[int] = set()
        self.sent: set[int] = set()
        self.landed = 0

    def begin(self) -> None:
        self._push_next()

    def _push_next(self) -> None:
        if self.free == 0 or self.started == self.nodes:
            return
        self.free -= 1
        self.started += 1
        step = self.started

        def pushed() -> None:
            self.sum.add(
                f"sum for step {step}", self.summed_bytes, {("sum", self.node): 1.0}, lambda: self._summed(step)
            )
            self._push_next()

        self.push.add(f"push for step {step}", self.pushed_bytes, {("out", self.node): 1.0}, pushed)

    def _summed(self, step: int) -> None:
        self.free += 1
        self.summed.add(step)
        self._push_next()
        self._network()

    def _network(self) -> None:
        """Put what the round may send and has been summed; go on to the next round once all has arrived."""
        while self.round < len(self.sizes):
            first = 1 + sum(self.sizes[: self.round])
            steps = range(first, first + self.sizes[self.round])
            for step in steps:
                if step in self.summed and step not in self.sent:
                    self.sent.add(step)
                    to = self.peers[(self.node + step) % self.nodes]
                    self.model.put(
                        self.node, to.node, self.output_bytes, f"put of step {step}", partial(to._arrive, step)
                    )
            if not self.arrived.issuperset(steps) or not self.sent.issuperset(steps):
                return
            self.round += 1
        self._land()

    def _arrive(self, step: int) -> None:
        self.arrived.add(step)
        self._land()
        self._network()

    def _land(self) -> None:
        """Land waves in order, each once all its contributors are there."""
        while self.landed < -(-self.nodes // self.local):
            first = 1 + self.landed * self.local
            wave = set(range(first, min(first + self.local, self.nodes + 1)))
            there = self.arrived | ({self.nodes} & self.summed)
            if not wave <= there:
                return
            self.landed += 1
            last = self.nodes in wave

            def done(last: bool = last) -> None:
                self.model.ends += last

            self.land.add(f"landing of wave {self.landed - 1}", self.output_bytes, {("land", self.node): 1.0}, done)
