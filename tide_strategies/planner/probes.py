"""Small schedules that measure a machine, and the rates that their times come to.

They are schedules like any other: executors run them, and the simulator replays them, which is how they are tested (a
machine with known rates must give these rates back). All ranks run the same probe at once, so that what they share (a
memory, a link, a rail) is shared as it is in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tide_strategies.collectives import signals
from tide_strategies.collectives.reduce_scatter import BANKS, CONSUMED, pushed
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
    Sum,
)
from tide_strategies.planner.calibrate import line
from tide_strategies.planner.rates import MIB, Rates
from tide_strategies.topology import Topology

#: Chunks that are tried where one thread pushes and sums, as far as the bulk probes have that many bytes.
CHUNKS = tuple(2**n for n in range(17, 23))
#: Staging of all ranks of a node together on CPUs, and of one GPU, while it is measured.
_NODE_BYTES, _GPU_BYTES = 256 * MIB, 512 * MIB
#: How often the probes of waits, operations and rounds repeat what they measure.
REPEATS = 64
#: A larger chunk has to be faster by this share of the time to be taken, so that noise does not make staging larger.
_WORTH = 0.03
_TINY = 16
_STEEPEST = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to measure.

    Args:
        name: what, with a size: "push", "sum", "land", "fabric", "rail" (bytes), "chunk" (bytes of a chunk), "wait",
            "passed", "round", "operation", "call" (repeats). "fabric" is "land", to be run with more thread blocks than
            it needs; "passed" are waits that are over.
        size: see ``name``.
        schedule: one rank's part.
    """

    name: str
    size: int
    schedule: Schedule


#: Runs a probe once and returns when this rank's part is done.
Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Probes ready to run.

    Args:
        topology: of the ranks.
        every: what is probed.
        runs: of each of them.
    """

    topology: Topology
    every: list[Probe]
    runs: list[Run]


#: Seconds of each probe, of the slowest rank.
Seconds = Mapping[tuple[str, int], float]


def bulk_bytes(topology: Topology, *, one_thread: bool) -> int:
    """Bytes for each peer that the bulk probes move at most, which INPUT 0 holds; OUTPUT 0 holds twice as many.

    A power of two. From there down to a quarter of it the rate is the slope, so that fixed costs are not in it.
    """
    local = topology.local_ranks
    peers = max(local - 1, 1)
    room, most = (_NODE_BYTES // (local * peers), 8 * MIB) if one_thread else (_GPU_BYTES // peers, 64 * MIB)
    return 1 << max(min(room, most).bit_length() - 1, 16)


def probes(topology: Topology, rank: int, *, one_thread: bool, multicast: bool = False) -> list[Probe]:
    """What ``rank`` runs, in an order that all ranks share; each has one stream, ``main``.

    INPUT 0 and OUTPUT 0 are as of :func:`bulk_bytes`; other memory is in the schedules. On several nodes the rails are
    measured as well. With ``one_thread`` (CPU ranks) chunk sizes are tried. With ``multicast`` the switch adds up what
    lands.
    """
    large = bulk_bytes(topology, one_thread=one_thread)
    build = _Builder(topology, rank, large, multicast)
    out = [
        Probe("call", 1, build.schedule([])),
        Probe("operation", REPEATS, build.schedule(build.tiny())),
        Probe("wait", REPEATS, build.waits()),
    ]
    if not one_thread:
        out.append(Probe("passed", REPEATS, build.passed()))
    for nbytes in (large // 4, large):
        out.append(Probe("push", nbytes, build.schedule(build.push(nbytes), staged=nbytes)))
        out.append(Probe("sum", nbytes, build.schedule(build.sums(nbytes), staged=nbytes)))
    if topology.nodes > 1:
        for nbytes in (large // 4, large):
            lands = build.schedule(build.lands(nbytes), sent=nbytes)
            out += [Probe(name, nbytes, lands) for name in (("land",) if one_thread else ("land", "fabric"))]
            out.append(Probe("rail", nbytes, build.rail(nbytes)))
        out.append(Probe("round", REPEATS // 4, build.rounds(REPEATS // 4)))
    if one_thread and topology.local_ranks > 1:
        out += [Probe("chunk", c, build.chunked(c)) for c in CHUNKS if c <= large // 2]
    return out


def memory(every: Sequence[Probe]) -> dict[tuple[Space, int], int]:
    """Bytes that every rank must provide beside the arguments."""
    out: dict[tuple[Space, int], int] = {}
    for probe in every:
        for key, nbytes in probe.schedule.memory.items():
            out[key] = max(out.get(key, 0), nbytes)
    return out


class _Builder:
    def __init__(self, topology: Topology, rank: int, large: int, multicast: bool) -> None:
        self.topology, self.rank, self.large, self.multicast = topology, rank, large, multicast
        self.node = topology.node_ranks(rank)
        self.peers = [r for r in self.node if r != rank]
        self.own = pushed(topology.local_of(rank))

    def schedule(
        self,
        ops: Sequence[Op],
        advance: Mapping[tuple[Counter, int], int] | None = None,
        *,
        staged: int = 0,
        sent: int = 0,
    ) -> Schedule:
        """One stream ``main``, with room to stage so much from every other rank of the node, and to send and receive.

        Partials are sent from the outbox into the inbox, as reductions do: rails reach no other memory.
        """
        rows = max(len(self.peers), 1)
        memory = {(Space.STAGING, 0): rows * staged, (Space.OUTBOX, 0): sent, (Space.INBOX, 0): sent}
        return Schedule(
            name="probe",
            rank=self.rank,
            ranks=self.topology.ranks,
            streams={"main": tuple(ops)},
            advance=dict(advance or {}),
            memory={key: n for key, n in memory.items() if n},
        )

    @property
    def _landed(self) -> int:
        """Partials of one landing."""
        return min(self.topology.nodes, self.topology.local_ranks)

    def _slot(self, owner: int, sender: int) -> int:
        """Row of a sender in its owner's staging."""
        index = self.topology.local_of(sender)
        return max(index - (index > self.topology.local_of(owner)), 0)

    def tiny(self) -> list[Op]:
        return [_copy(Ref(Space.INPUT), Ref(Space.OUTPUT, 0, i * _TINY), _TINY) for i in range(REPEATS)]

    def push(self, nbytes: int) -> list[Op]:
        """``nbytes`` to every peer of the node (to oneself where there is none)."""
        return [
            _copy(Ref(Space.INPUT), Ref(Space.STAGING, 0, self._slot(to, self.rank) * nbytes, to), nbytes)
            for to in self.peers or [self.rank]
        ]

    def sums(self, nbytes: int) -> list[Op]:
        """What is staged and the own contribution, bf16 into fp32."""
        staged = [Ref(Space.STAGING, 0, i * nbytes, self.rank) for i in range(max(len(self.peers), 1))]
        sources = (*staged, Ref(Space.INPUT))
        return [Sum(Ref(Space.OUTPUT), sources, nbytes // 2, Item.BF16, Item.F32, scaled=True)]

    def lands(self, nbytes: int) -> list[Op]:
        """As many fp32 partials as a wave has, one from each inbox of the node."""
        holders = [NODE] if self.multicast else self.node[: self._landed]
        sources = tuple(Ref(Space.INBOX, 0, 0, at) for at in holders)
        return [Land(Ref(Space.OUTPUT), sources, nbytes // 4, Item.F32)]

    def waits(self) -> Schedule:
        """All ranks of a node step by step: each waits for the next one's step (for its own, if alone)."""
        ops: list[Op] = []
        for step in range(REPEATS):
            ops += [self._told(), Await(CONSUMED, self._next_rank(), step + 1)]
        return self.schedule(ops, {(CONSUMED, self._next_rank()): REPEATS})

    def passed(self) -> Schedule:
        """Copies, each after a wait for the same step of the next rank: but for the first, it is over."""
        ops: list[Op] = [self._told()]
        for copy in self.tiny():
            ops += [Await(CONSUMED, self._next_rank(), 1), copy]
        return self.schedule(ops, {(CONSUMED, self._next_rank()): 1})

    def _next_rank(self) -> int:
        return self.node[(self.topology.local_of(self.rank) + 1) % len(self.node)]

    def _told(self) -> Notify:
        return Notify(CONSUMED, NODE if self.peers else self.rank)  # a device hears of its own cell by name alone

    def rail(self, nbytes: int) -> Schedule:
        """``nbytes`` to the next node and from the node before."""
        to, source = self._rail_peers()
        own, theirs = self._arrived()
        put = Put(Ref(Space.OUTBOX), Ref(Space.INBOX, 0, 0, to), nbytes, theirs)
        return self.schedule([put, Await(own, source, 1)], {(own, source): 1}, sent=nbytes)

    def rounds(self, repeats: int) -> Schedule:
        """Network rounds that move next to nothing: a credit, a put, an arrival."""
        to, source = self._rail_peers()
        own, theirs = self._arrived()
        credit_own, credit_theirs = signals.credit(self._node(source)), signals.credit(self._node(self.rank))
        ops: list[Op] = []
        for step in range(repeats):
            # The credit goes to the sender, whose cell for it is named by this rank's own node.
            ops += [Notify(credit_own, source), Await(credit_theirs, to, step + 1)]
            ops += [Put(Ref(Space.OUTBOX), Ref(Space.INBOX, 0, 0, to), _TINY, theirs), Await(own, source, step + 1)]
        return self.schedule(ops, {(credit_theirs, to): repeats, (own, source): repeats}, sent=_TINY)

    def _node(self, rank: int) -> int:
        return self.topology.node_of(rank)

    def _rail_peers(self) -> tuple[int, int]:
        """The rail peers on the next node and on the node before."""
        nodes, node, local = self.topology.nodes, self._node(self.rank), self.topology.local_of(self.rank)
        return self.topology.rank((node + 1) % nodes, local), self.topology.rank((node - 1) % nodes, local)

    def _arrived(self) -> tuple[Counter, Counter]:
        """Counters of what arrives here, and of what this rank sends."""
        to, _ = self._rail_peers()
        return signals.arrived(self._node(self.rank)), signals.arrived(self._node(to))

    def chunked(self, nbytes: int) -> Schedule:
        """A reduce-scatter's level 1 in one thread: all bytes for every peer, ``nbytes`` at a time."""
        steps = self.large // nbytes
        ops = list(self._chunked(nbytes, steps))
        advance = {(CONSUMED, r): steps for r in self.peers} | {(self.own, r): steps for r in self.peers}
        return self.schedule(ops, advance, staged=BANKS * nbytes)

    def _chunked(self, nbytes: int, steps: int) -> Iterator[Op]:
        def push(c: int) -> Iterator[Op]:
            for to in self.peers:
                yield Await(CONSUMED, to, max(0, c - BANKS + 1))
                at = (c % BANKS * len(self.peers) + self._slot(to, self.rank)) * nbytes
                yield _copy(Ref(Space.INPUT, 0, c * nbytes), Ref(Space.STAGING, 0, at, to), nbytes)
                yield Notify(pushed(self.topology.local_of(to)), to)

        yield from push(0)
        for c in range(steps):
            if c + 1 < steps:
                yield from push(c + 1)
            yield from (Await(self.own, r, c + 1) for r in self.peers)
            rows = range(c % BANKS * len(self.peers), (c % BANKS + 1) * len(self.peers))
            staged = [Ref(Space.STAGING, 0, i * nbytes, self.rank) for i in rows]
            sources = (*staged, Ref(Space.INPUT, 0, c * nbytes))
            yield Sum(Ref(Space.OUTPUT, 0, 2 * c * nbytes), sources, nbytes // 2, Item.BF16, Item.F32, scaled=True)
            yield Notify(CONSUMED)


def _copy(src: Ref, dst: Ref, nbytes: int) -> Copy:
    return Copy(src, dst, nbytes // 2, Item.BF16, Item.BF16)


def rates_of(
    seconds: Seconds,
    topology: Topology,
    base: Rates,
    name: str,
    *,
    one_thread: bool,
    ctas: int = 1,
    landing_ctas: int = 1,
) -> Rates:
    """The rates that probes took these times at; what they do not tell is ``base``'s.

    Args:
        seconds: of every probe of :func:`probes`.
        topology: M x L.
        base: rates of such a machine.
        name: of the result, for people.
        one_thread: as of :func:`probes`. On GPUs a call's own time, that of enqueueing a collective, is not probed.
        ctas: thread blocks of the sum that was timed.
        landing_ctas: thread blocks of the probe "land".

    Raises:
        ValueError: times of a probe are missing.
        TideConfigError: the times make no rates.
    """
    peers = max(topology.local_ranks - 1, 1)
    push = _rate(seconds, "push") * peers
    # Of each byte of a contribution: all contributions are read, and the fp32 sum is written.
    summed = _rate(seconds, "sum") * (peers + 1 + 2)
    fixed_s = _only(seconds, "call")[1]
    tiny, took = _only(seconds, "operation")
    waits, waited = _only(seconds, "wait")
    found = replace(
        base,
        name=name,
        push=push,
        intake=push if one_thread or not base.multicast else max(push, base.intake),
        local=push if one_thread else base.local,
        sum_per_cta=summed / ctas,
        call_s=fixed_s if one_thread else base.call_s,
        start_s=max(took - fixed_s, 0.0) / tiny,
        signal_s=max(waited - fixed_s, 0.0) / waits,
    )
    if _sizes(seconds, "passed"):
        times, took = _only(seconds, "passed")
        # A copy after a wait is no batch with the one before: what it takes to start is the wait's.
        found = replace(found, wait_s=max((took - fixed_s) / times - found.start_s - found.own_copy_s, 0.0))
    if one_thread:  # what all ranks of a node moved at once, read and written
        found = replace(found, memory=max(base.memory, 2 * topology.local_ranks * push, summed))
    if _sizes(seconds, "rail"):
        found = _with_rails(seconds, found, fixed_s, landing_ctas)
    chunks = dict(_sizes(seconds, "chunk"))
    return replace(found, chunk_cap=_best_chunk(chunks)) if chunks else found


def _with_rails(seconds: Seconds, found: Rates, fixed_s: float, landing_ctas: int) -> Rates:
    """What nodes add. ``fixed_s``: of a call."""
    land = _rate(seconds, "land")
    cap = max(land, _rate(seconds, "fabric")) if _sizes(seconds, "fabric") else land
    rounds, took = _only(seconds, "round")
    # A round is two ways over the rail: the credit's, then the put's.
    wait_s = max(took - fixed_s, 0.0) / rounds
    return replace(
        found,
        rail=_rate(seconds, "rail"),
        land_per_cta=land / landing_ctas,
        land_cap=cap,
        round_wait_s=wait_s,
        rail_signal_s=wait_s / 2,
    )


def _best_chunk(seconds: Mapping[float, float]) -> float:
    """The smallest chunk that is not clearly slower than the fastest one, within which larger ones gain nothing."""
    fastest = min(seconds.values())
    return min(size for size, t in seconds.items() if t <= fastest * (1 + _WORTH))


def _sizes(seconds: Seconds, name: str) -> list[tuple[float, float]]:
    return [(float(size), t) for (which, size), t in seconds.items() if which == name]


def _rate(seconds: Seconds, name: str) -> float:
    """Bytes/s of a bulk probe: the slope between its sizes, unless that is out of the question.

    Fixed costs are no half of the larger size's time: a steeper slope is noise, and the mean rate is taken.
    """
    sizes = _sizes(seconds, name)
    _, slope = line(sizes)
    nbytes, took = max(sizes)
    mean = nbytes / max(took, 1e-9)
    return slope if mean <= slope <= _STEEPEST * mean else mean


def _only(seconds: Seconds, name: str) -> tuple[float, float]:
    """Size and time of the one probe of a name."""
    found = _sizes(seconds, name)
    if len(found) != 1:
        raise ValueError(f"no times of the probe {name!r}")
    return found[0]
