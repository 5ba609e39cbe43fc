"""The sizing equations (paper, section 5 and appendix G): waves, rounds, thread blocks, outbox depth, bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.config import LEAST_CHUNK
from tide_strategies.errors import TideConfigError
from tide_strategies.layout import align
from tide_strategies.planner.rates import MIB, Rates
from tide_strategies.topology import Topology

Mode = Literal["in_place", "slot_reuse"]

#: Arrival skew that the sum budget absorbs (gamma_skew), the share of wire time that the last landing may take
#: (eta_tail), the share that waits may take before rounds widen, and the widest round (k_max). Appendix G.
SKEW, TAIL, WAIT_SHARE, MAX_ROUND_WIDTH = 1.5, 0.05, 0.10, 4
#: Local staging slots (n_stg, section 5.4).
STAGING_SLOTS = 2
#: Sub-slice passes at most: the numbers that appendix D checks.
MAX_PASSES = 4
#: Thread blocks of a sum or a landing at most: no GPU has a use for more, whatever rates somebody states.
MAX_CTAS = 128


def rounds_of(nodes: int, round_width: int, wave_width: int, mode: Mode = "in_place") -> BasePlan:
    """Waves, rounds, inbox generations and outbox blocks of one pass over M >= 2 nodes (``collectives/plan.py``).

    Raises:
        TideConfigError: fewer than two nodes, or a width below 1.
    """
    if nodes < 2 or min(round_width, wave_width) < 1:
        raise TideConfigError(
            f"rounds need two nodes or more, and widths of at least 1; got {nodes}, {round_width}, {wave_width}"
        )
    return BasePlan(nodes, wave_width, wave_width, round_width, slot_reuse=mode == "slot_reuse")


def round_sizes(nodes: int, round_width: int, wave_width: int) -> list[int]:
    """Transfers in each network round of one pass (raises as :func:`rounds_of`)."""
    return [len(r) for wave in rounds_of(nodes, round_width, wave_width).waves() for r in wave.rounds]


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the solver chooses for one group.

    Args:
        round_width: k, rail transfers in flight.
        sum_ctas: thread blocks of the node-local sum (C_sum).
        landing_ctas: thread blocks of the landing (C_mc).
        rounds: network rounds of a pass.
        waves: W.
        wire_s: t_NIC, seconds of the rail alone.
    """

    round_width: int
    sum_ctas: int
    landing_ctas: int
    rounds: int
    waves: int
    wire_s: float


def solve(rates: Rates, topology: Topology, output_bytes: int, *, grad_itemsize: int = 2, passes: int = 1) -> Sizing:
    """Choose thread blocks and round width for a reduce-scatter (equations 13 and 14, and the rule after them).

    With one node there is no rail to keep pace with: the sum is sized to the node's own links in its place, in fours
    and without the factor for skew (what arrives early waits in its bank, and peers push alike), and nothing lands.

    Args:
        rates: of the machine.
        topology: M x L.
        output_bytes: S_fp32, bytes of one rank's fp32 output.
        grad_itemsize: 2 (bf16) or 4.
        passes: n_part, sub-slice passes.

    Raises:
        TideConfigError: output_bytes or passes below 1, or another item size.
    """
    if output_bytes < 1 or passes < 1 or grad_itemsize not in (2, 4):
        raise TideConfigError(
            f"the solver needs output_bytes and passes of at least 1 and 2 or 4 bytes per gradient item; got "
            f"{output_bytes}, {passes}, {grad_itemsize}"
        )
    nodes, local = topology.nodes, topology.local_ranks
    read_per_output = local * grad_itemsize / 4
    if nodes == 1:
        # Output bytes/s at which the L - 1 contributions can arrive.
        arriving = rates.push * 4 / (max(local - 1, 1) * grad_itemsize)
        ctas = align(_blocks((read_per_output + 1) * arriving / rates.sum_per_cta), 4)
        return Sizing(0, ctas, 0, 0, 1, 0.0)
    wire_s = (nodes - 1) * output_bytes / rates.rail
    sum_ctas = _blocks(SKEW * (read_per_output + 1) * rates.rail / rates.sum_per_cta)
    tail = _blocks(output_bytes / passes / (TAIL * wire_s * rates.land_per_cta))
    landing_ctas = max(1, min(tail, math.floor(rates.land_cap / rates.land_per_cta)))
    width = _round_width(nodes, local, wire_s, rates.round_wait_s)
    rounds = len(round_sizes(nodes, width, local))
    waves = rounds_of(nodes, width, local).waves_per_pass
    return Sizing(width, sum_ctas, landing_ctas, rounds, waves, wire_s)


def paced_ctas(rates: Rates, topology: Topology, chunk: int, ctas: int) -> int:
    """Thread blocks of a sum on one node, from ``ctas`` that keep pace with pushes, for chunks of so many bytes.

    With two banks a chunk is pushed once the one before the last has been summed, which word of the push and word of
    the sum enclose: what they take is not there to sum in. At most twice ``ctas``, for small chunks are all waits.
    """
    pushing_s = max(topology.local_ranks - 1, 1) * chunk / rates.push
    summing_s = pushing_s - 2 * (rates.start_s + rates.signal_s)
    return min(align(math.ceil(ctas * min(pushing_s / max(summing_s, 1e-9), 2.0)), 4), MAX_CTAS)


def _blocks(wanted: float) -> int:
    return min(math.ceil(wanted), MAX_CTAS)


def passes_of(rates: Rates, topology: Topology, output_bytes: int, sizing: Sizing) -> int:
    """n_part: as many passes as bring the last landing down to its share of the wire time, if their rounds pay.

    More passes make the landing after the last round smaller (equation 14), where thread blocks cannot, but each
    repeats all rounds with their waits, which may take their usual share of the wire time. Large calls can afford it.
    """
    if topology.nodes == 1:
        return 1
    landing = min(sizing.landing_ctas * rates.land_per_cta, rates.land_cap)
    wanted = math.ceil(min(output_bytes / (TAIL * sizing.wire_s * landing), MAX_PASSES))
    waits = max(sizing.rounds * rates.round_wait_s, 1e-12)
    affordable = math.floor(min(WAIT_SHARE * sizing.wire_s / waits, MAX_PASSES))
    return max(1, min(wanted, affordable))


def chunk_bytes(rates: Rates, slice_bytes: int, *, one_thread: bool) -> int:
    """Bytes of one contribution to stage at a time, for contributions of at most ``slice_bytes``.

    Where pushes and sums run side by side, a chunk of c bytes costs its fixed time o once for each of the S / c chunks,
    and the sum of the last chunk, c / (push rate) as sums keep pace with pushes, hides behind nothing: the best c is
    sqrt(o S push). A chunk takes no less to move than the host takes to enqueue the next. One thread that pushes and
    sums in turns has no such tail: its chunks are as large as gains something.

    Args:
        rates: of the machine.
        slice_bytes: S, bytes of the largest contribution.
        one_thread: whether one thread pushes and sums (CPU ranks).
    """
    if one_thread:
        return _between(rates.chunk_cap, 1, rates.chunk_cap, LEAST_CHUNK)
    fixed_s = rates.start_s + rates.signal_s
    step = MIB if rates.chunk_cap >= MIB else LEAST_CHUNK
    return _between(math.sqrt(fixed_s * slice_bytes * rates.push), rates.push * rates.chunk_s, rates.chunk_cap, step)


def _between(value: float, low: float, high: float, step: int) -> int:
    """The value brought into [low, high] (high wins) and up to a multiple of ``step``, the last below ``high``."""
    return max(min(align(math.ceil(min(max(value, low), high)), step), int(high) // step * step), LEAST_CHUNK)


def _round_width(nodes: int, wave_width: int, wire_s: float, round_wait_s: float) -> int:
    """k: doubled while waits cost more than their share of wire time and doubling saves rounds."""
    width = min(2, nodes - 1)
    while True:
        wider = min(2 * width, MAX_ROUND_WIDTH, nodes - 1)
        now, then = (len(round_sizes(nodes, w, wave_width)) for w in (width, wider))
        if now * round_wait_s <= WAIT_SHARE * wire_s or then >= now:
            return width
        width = wider


def staging_bound(
    nodes: int, output_bytes: int, *, mode: Mode, round_width: int = MAX_ROUND_WIDTH, wave_width: int = 8
) -> int:
    """Area_RS: bound on the bytes of reduce-scatter staging on one GPU, for L = 8 and bf16 gradients (equations 10-12).

    In place this is equation 11 with n_out = M - 1; with slots reused it is equation 12, whose n_out is bounded by 2k.
    The output, the gradients, and the all-gather's ring and stage are not in it.
    """
    depth = nodes - 1 if mode == "in_place" else 2 * round_width
    blocks = 4 * STAGING_SLOTS + 8 * rounds_of(nodes, round_width, wave_width).generations + 2 * depth + 2
    return blocks * output_bytes


def live_bound(nodes: int, shard_bytes: int, *, mode: Mode, local_ranks: int = 8, round_width: int = 4) -> float:
    """Bound on what is live on one GPU during a layer's backward, in bytes (section 5.4; FSDP2 holds 4 N S).

    Two ring slots and the receive stage, the staging, and in place the previous layer's bf16 gradients.

    Args:
        nodes: M.
        shard_bytes: S, bytes of one rank's bf16 shard of the largest group.
        mode: where gradients rest.
        local_ranks: L.
        round_width: k.
    """
    group = nodes * local_ranks * shard_bytes
    staging = staging_bound(nodes, 2 * shard_bytes, mode=mode, round_width=round_width, wave_width=local_ranks)
    ring_and_stage = (2 + 1 / local_ranks) * group
    return ring_and_stage + staging + (group if mode == "in_place" else 0)
