"""Plans of the several-node reduce-scatter: who lands where and when, and which plans are refused.

The M contributors of a destination node are numbered in send order, c = 1 .. M (paper, equation 6): c < M is the node
(m - c) mod M, c = M the destination itself. They are cut into waves of at most ``wave_width``; the inbox of a wave is
one of two generations. Within a wave, contributor c's partial of sub-slice s lands on local rank (s - c) mod L of the
destination (equation 8), so that one reduction over the node's L inboxes adds the whole wave.

Schedules, the verifier and the protocol model all read the rules from here; a planner asks :func:`refusals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

#: What ``tide verify --base-plans`` goes through (paper, appendix D), with L = 8.
BASE_NODES, BASE_WIDTHS, BASE_ROUNDS, BASE_LOCAL_RANKS = range(2, 1025), range(1, 9), range(1, 33), 8


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave of one pass.

    Args:
        index: number of the wave in the call, over all passes.
        part: the pass.
        contributors: c of each contributor, ascending; the last wave of a pass ends with c = M.
        generation: which inbox.
        rounds: the remote contributors, at most ``round_width`` at a time.
    """

    index: int
    part: int
    contributors: range
    generation: int
    rounds: tuple[range, ...]

    @property
    def remote(self) -> range:
        """Contributors that send."""
        return range(self.rounds[0].start, self.rounds[-1].stop) if self.rounds else range(0)


@dataclass(frozen=True, slots=True)
class BasePlan:
    """The knobs on which safety depends.

    Args:
        nodes: M.
        local_ranks: L.
        wave_width: contributors per wave at most.
        round_width: k, concurrent transfers of a rank at most.
        slot_reuse: the memory-saving mode: an outbox of two rounds; otherwise it holds all remote partials.
        passes: how often the mapping is repeated, each time for one part of every sub-slice.
    """

    nodes: int
    local_ranks: int
    wave_width: int
    round_width: int
    slot_reuse: bool = False
    passes: int = 1

    @property
    def waves_per_pass(self) -> int:
        """W = ceil(M / wave_width)."""
        return -(-self.nodes // self.wave_width)

    @property
    def generations(self) -> int:
        """Inboxes: one if a call has a single wave, else two that take turns."""
        return 1 if self.waves_per_pass * self.passes == 1 else 2

    @property
    def remote(self) -> int:
        """Remote destinations of a rank over all passes."""
        return self.passes * (self.nodes - 1)

    def placement(self, c: int) -> int:
        """How far contributor c's placement is rotated: its partial of sub-slice s lands on local rank s minus this."""
        return c % self.nodes % self.local_ranks

    def waves(self) -> Iterator[Wave]:
        """All waves of a call in order."""
        for index in range(self.passes * self.waves_per_pass):
            part, w = divmod(index, self.waves_per_pass)
            first = w * self.wave_width + 1
            contributors = range(first, min(first + self.wave_width, self.nodes + 1))
            end = min(contributors.stop, self.nodes)
            rounds = tuple(
                range(c, min(c + self.round_width, end)) for c in range(contributors.start, end, self.round_width)
            )
            yield Wave(index, part, contributors, index % self.generations, rounds)

    def filled(self, wave: Wave) -> tuple[int, ...]:
        """Inbox blocks of local rank 0 that the wave fills, contributor by contributor (rank j: each plus j, mod L)."""
        return tuple(self.placement(c) for c in wave.contributors)

    def outbox_blocks(self) -> int:
        """n_out, blocks of one outbox bank: all remote partials, or two consecutive rounds of them (equation 9)."""
        if not self.slot_reuse:
            return max(self.remote, 1)
        return _rounds(self.nodes, self.wave_width, self.effective_round, self.passes)[1]

    @property
    def effective_round(self) -> int:
        """Transfers of the widest round: a round never exceeds its wave."""
        return min(self.round_width, self.wave_width)


def stale(plan: BasePlan) -> Iterator[tuple[Wave, frozenset[int]]]:
    """Each wave with the inbox blocks of local rank 0 that must be zeroed before it is landed.

    Nothing is known of a generation that this call has not used, so that every block which its first wave leaves out
    is zeroed; later, only what the wave before in the same generation left behind.
    """
    everything = frozenset(range(plan.local_ranks))
    last: dict[int, frozenset[int]] = {}
    for wave in plan.waves():
        filled = frozenset(plan.filled(wave))
        yield wave, last.get(wave.generation, everything) - filled
        last[wave.generation] = filled


def freed_by(plan: BasePlan, own_in_inbox: bool) -> list[int | None]:
    """Of each wave, the wave whose landing makes room for it: the last one before it in the same inbox.

    -1 and below count from the end of the call before, which had the same waves. None: the wave needs no inbox, since
    it is only the own node's, which lands from where it is (unless ``own_in_inbox``).
    """
    waves = list(plan.waves())
    using = [w for w in waves if w.rounds or own_in_inbox]
    out: list[int | None] = []
    for wave in waves:
        same = [w.index for w in using if w.generation == wave.generation]
        before = [i for i in same if i < wave.index]
        out.append((before[-1] if before else same[-1] - len(waves)) if wave in using else None)
    return out


def credited(plan: BasePlan, own_in_inbox: bool) -> list[frozenset[int]]:
    """Of each wave, the contributors that may send only with a credit from their destination.

    A send needs its destination to have landed the wave that was in the same inbox before. Partials that arrived since
    then prove it for their senders, and for everybody of whom these knew it when they sent; arrivals are awaited round
    by round, in the same order everywhere.
    """
    waves, m = list(plan.waves()), plan.nodes
    everyone = (1 << m) - 1
    needed: list[frozenset[int]] = []
    for wave, landed in zip(waves, freed_by(plan, own_in_inbox), strict=True):
        known = 0  # bit d: a node knows it of node n + d
        for i in range(wave.index if landed is None else landed + 1, wave.index):
            for ready in waves[i].rounds:  # a negative i is a wave of the call before
                known = _learnt(known, ready, m, everyone)
        out = set()
        for ready in wave.rounds:
            out |= {c for c in ready if not known >> c & 1}
            known = _learnt(known, ready, m, everyone)
        needed.append(frozenset(out))
    return needed


def _learnt(known: int, ready: range, nodes: int, everyone: int) -> int:
    """What a node knows after a round: what its senders knew before it, and that they sent."""
    out = known
    for c in ready:
        seen = known | 1  # the sender knows it of itself; it is node n - c
        out |= (seen >> c | seen << (nodes - c)) & everyone
    return out


def refusals(plan: BasePlan) -> tuple[str, ...]:
    """Why a plan must not run: empty if it may.

    Checked wave by wave: two contributors on one inbox block, a stale block that a landing would read, a contributor
    lost or landed twice, a round wider than allowed, an outbox block that is filled before it was sent.
    """
    why = _out_of_range(plan)
    if why:
        return (why,)
    faults, pair = _rounds(plan.nodes, plan.wave_width, plan.effective_round, plan.passes)
    blocks = plan.outbox_blocks()
    # While a round is being sent, the next one's partials must fit beside it.
    small = (f"two rounds need {pair} outbox blocks of {blocks}",) if blocks < pair else ()
    return (*_placement(plan.nodes, plan.local_ranks, plan.wave_width, plan.passes), *faults, *small)


def _out_of_range(plan: BasePlan) -> str:
    if plan.nodes < 2 or plan.local_ranks < 1:
        return f"several nodes are needed, with at least 1 rank each; got {plan.nodes}x{plan.local_ranks}"
    if not 1 <= plan.wave_width <= plan.local_ranks:
        return f"wave_width must be from 1 to {plan.local_ranks}, the ranks of a node; got {plan.wave_width}"
    if plan.round_width < 1 or plan.passes < 1:
        return f"round_width and passes must be at least 1; got {plan.round_width} and {plan.passes}"
    return ""


@cache
def _placement(nodes: int, local_ranks: int, wave_width: int, passes: int) -> tuple[str, ...]:
    plan = BasePlan(nodes, local_ranks, wave_width, wave_width, passes=passes)
    return placement_faults(plan, stale(plan))


def placement_faults(plan: BasePlan, zeroed: Iterable[tuple[Wave, frozenset[int]]]) -> tuple[str, ...]:
    """What is wrong with where contributors land: collisions, and blocks that are neither filled nor ``zeroed``."""
    out: list[str] = []
    clean: dict[int, set[int]] = {}  # blocks of each generation that hold zeros
    for wave, blocks in zeroed:
        seen: dict[int, int] = {}
        for c in wave.contributors:
            block = plan.placement(c)
            if block in seen:
                out.append(
                    f"collision: contributors {seen[block]} and {c} of wave {wave.index} share an inbox block; "
                    f"wave_width should divide {plan.local_ranks}"
                )
            seen[block] = c
        zeros = (clean.get(wave.generation, set()) | blocks) - set(seen)
        dirty = set(range(plan.local_ranks)) - set(seen) - zeros
        if dirty:
            out.append(f"stale: landing wave {wave.index} reads blocks {sorted(dirty)}, which an earlier wave left")
        clean[wave.generation] = zeros
    return tuple(out)


@cache
def _rounds(nodes: int, wave_width: int, round_width: int, passes: int) -> tuple[tuple[str, ...], int]:
    return round_faults(BasePlan(nodes, wave_width, wave_width, round_width, passes=passes))


def round_faults(plan: BasePlan) -> tuple[tuple[str, ...], int]:
    """What is wrong with the rounds (partials lost, sent twice, too many), and the most partials of two in a row."""
    out: list[str] = []
    sent = before = pair = 0
    for wave in plan.waves():
        for ready in wave.rounds:
            if not 0 < len(ready) <= plan.round_width or ready.stop > wave.contributors.stop:
                out.append(
                    f"a round of wave {wave.index} sends {ready}: outside the wave or wider than {plan.round_width}"
                )
            if wave.part * (plan.nodes - 1) + ready.start - 1 != sent:
                out.append(f"a round of wave {wave.index} begins with contributor {ready.start} after {sent} sends")
            sent, pair, before = sent + len(ready), max(pair, before + len(ready)), len(ready)
    if sent != plan.remote:
        out.append(f"{sent} partials are sent; {plan.remote} are due")
    return tuple(out), pair
