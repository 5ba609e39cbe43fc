"""The order of additions across nodes, on the native executor: random values, added as the design promises, to the bit.

A node's partial is made in fp32, its ranks in order and the owner's own contribution last. Partials are added in the
order in which they land, that of the node before first and the own one last, wave by wave: an fp32 output takes each
wave's sum, divided; a narrower one is divided and rounded once, at the end. No knob but the wave width, which groups
the operands, changes a bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from test_native_nodes import World, to_bf16

from tide_strategies.collectives.plan import BasePlan, refusals
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item
from tide_strategies.collectives.subslices import SubSlices
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology

SHAPES = [(2, 4), (4, 2), (3, 2), (5, 1), (5, 2)]
DIVISOR = 3.0  # no power of two: a division, and one rounding


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """To bf16, to nearest and even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def layout_of(ranks: int) -> GroupLayout:
    """Rows that do not divide, fewer rows than ranks, and a parameter that sub-slices cut anywhere."""
    return GroupLayout((ParamShape(3 * ranks - 1, 7, 2), ParamShape(2, 3, 2), ParamShape(2 * ranks + 1, 5, 2)), ranks)


def promised(
    layout: GroupLayout, topology: Topology, rank: int, grads: list[list[np.ndarray]], wave_width: int, output: Item
) -> np.ndarray:
    """Rank's packed shard: ``grads[r][p]`` is parameter p's gradient on rank r, flat and in fp32."""
    out = np.zeros(layout.output_items, np.float32)
    capacity = SubSlices(layout, topology, 1).capacity
    m, local_ranks = topology.nodes, topology.local_ranks
    for p in range(len(layout.params)):
        begin, items, at = rank * layout.shard_items(p), layout.valid_items(p, rank), layout.output_offset(p)
        sub_slice = (at + np.arange(items)) // capacity
        for s in np.unique(sub_slice):
            where = np.flatnonzero(sub_slice == s)
            partials = []
            for c in range(1, m + 1):  # in send order, the own node last
                node = (topology.node_of(rank) - c) % m
                owner = topology.rank(node, int(s - c % m) % local_ranks)
                order = [*(r for r in topology.node_ranks(owner) if r != owner), owner]
                partials.append(_added([grads[r][p][begin + where] for r in order]))
            waves = [partials[i : i + wave_width] for i in range(0, m, wave_width)]
            if output is Item.F32:
                out[at + where] = _added([_added(wave) / np.float32(DIVISOR) for wave in waves])
            else:
                before = [_added([_added(wave) for wave in waves[:-1]])] if len(waves) > 1 else []
                out[at + where] = _added([*before, *waves[-1]]) / np.float32(DIVISOR)
    return out if output is Item.F32 else rounded(out)


def _added(terms: list[np.ndarray]) -> np.ndarray:
    """In fp32, one after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def random_values(layout: GroupLayout, ranks: int) -> list[list[np.ndarray]]:
    """By rank and parameter: of sizes so different that sums round, and cancelling so that what was rounded shows."""
    rng, out = np.random.default_rng(1), []
    for _ in range(ranks - 1):
        sizes = [s.rows * s.row_items for s in layout.params]
        out.append([(rng.standard_normal(n) * np.exp2(rng.integers(-9, 10, n))).astype(np.float32) for n in sizes])
    last = [-sum(own[p].astype(np.float64) for own in out) for p in range(len(layout.params))]
    return [*out, [values.astype(np.float32) for values in last]]


def knobs(shape: tuple[int, int], everything: bool) -> Iterator[tuple[BasePlan, int]]:
    """Plans with the bytes of a chunk; pairwise, every value with every other, or all of them."""
    widths = [w for w in range(1, shape[1] + 1) if not refusals(BasePlan(*shape, w, 1))]
    product = list(itertools.product(widths, (1, 2, 4), (1, 2, 3), (64, 1024), (False, True)))
    seen: set[tuple[tuple[int, object], ...]] = set()
    for values in product:
        pairs = set(itertools.combinations(enumerate(values), 2))
        if everything or pairs - seen:
            seen |= pairs
            width, rounds, passes, chunk, slot_reuse = values
            yield BasePlan(*shape, width, rounds, slot_reuse, passes), chunk


@pytest.mark.parametrize(
    ("grad", "output"), [(Item.BF16, Item.F32), (Item.F32, Item.BF16)], ids=["bf16 to fp32", "fp32 to bf16"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_random_values_are_added_in_the_promised_order_whatever_the_knobs(request, shape, grad, output) -> None:
    topology = Topology(*shape)
    n, layout = topology.ranks, layout_of(topology.ranks)
    values = random_values(layout, n)
    if grad is Item.BF16:
        inputs = [[to_bf16(v) for v in own] for own in values]
        values = [[widened(bits) for bits in own] for own in inputs]
    else:
        inputs = values
    widths = range(1, max(shape) + 1)
    want = {w: [promised(layout, topology, rank, values, w, output) for rank in range(n)] for w in widths}
    other = [promised(layout, topology, rank, values[::-1], widths[0], output) for rank in range(n)]
    differ = sum(a.tobytes() != b.tobytes() for a, b in zip(want[widths[0]], other, strict=True))
    assert differ > n // 2, "the order must matter"
    everything = request.config.getoption("--all")
    plans: list[tuple[BasePlan | None, int]] = list(knobs(shape, everything))
    if not everything:  # each of the two element types has its half of them
        plans = plans[grad is Item.F32 :: 2]
    if topology.lane:
        plans.append((None, 64))  # the lane's own collective
    for plan, chunk_bytes in plans:
        world, outputs = World(topology), np.full((2, n, layout.output_items), np.nan, np.float32)
        calls = []
        for rank in range(n):
            knob = {"grad": grad, "output": output, "chunk_bytes": chunk_bytes, "plan": plan}
            own = [reduce_scatter(layout, topology, rank, bank=bank, **knob) for bank in (0, 1)]
            calls.append([(schedule, inputs[rank], 0, outputs[bank, rank]) for bank, schedule in enumerate(own)])
        world.run(calls, divisor=DIVISOR)
        for bank, rank in itertools.product((0, 1), range(n)):
            got = outputs[bank, rank]
            wanted = want[plan.wave_width if plan else n][rank]  # a lane's wave holds all of five
            assert got.tobytes()[: wanted.nbytes] == wanted.tobytes(), (plan, chunk_bytes, bank, rank)
