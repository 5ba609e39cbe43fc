"""The numbers: exact where they can be, in the promised order where they cannot, and the same bits every time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import launch
from models import BF16, Case, build, full_parameters, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies import apply_tide
from tide_strategies.collectives.schedule import Item
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner.rates import CPU_PAIR
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.exchange import process_group_exchange
from tide_strategies.runtime.group import GroupCollectives, needed_memory
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

F32, B16 = torch.float32, torch.bfloat16
ITEM = {F32: Item.F32, B16: Item.BF16}
BITS = {F32: torch.int32, B16: torch.int16}
#: What is staged at a time where nothing has been measured.
CHUNK_BYTES = int(CPU_PAIR.chunk_cap)
NAMES = {F32: "float32", B16: "bfloat16"}

# One-row scalars, fewer rows than ranks (so empty shards), rows that do not divide, rows of one item, nothing at all,
# and two that take several chunks of 4096 bytes.
SIZES: list[tuple[int, ...]] = [(1,), (1, 9), (3,), (2, 5), (7, 3), (0, 3), (5, 1, 2), (4, 4), (131, 17), (64, 33)]

# Stock FSDP2 refuses gradients without elements.
TRAINABLE = [s for s in SIZES if math.prod(s)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(BITS[tensor.dtype])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same_class(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN where NaN, infinities with their signs, and finite elsewhere."""
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.isposinf(), b.isposinf())
        and torch.equal(a.isneginf(), b.isneginf())
    )


def integers(size: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers of at most 16: sums of four of them are exact in bf16 (8 bits), in any order, and so are halves."""
    return torch.randint(-16, 17, tuple(size), generator=torch.Generator().manual_seed(seed)).to(dtype)


def randoms(size: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tuple(size), generator=torch.Generator().manual_seed(seed)).to(dtype)


INF, NAN = math.inf, math.nan
BIG = torch.finfo(B16).max  # the sum of two overflows fp32, too
# What two of the ranks contribute to one element; the others contribute 1.
SPECIAL_PAIRS = [
    *((a, 1.0) for a in (NAN, INF, -INF)),
    *itertools.combinations_with_replacement([NAN, INF, -INF], 2),
    (BIG, BIG),
    (-BIG, -BIG),
    (BIG, -BIG),
]


def specials(size: Sequence[int], dtype: torch.dtype, rank: int, world: int) -> torch.Tensor:
    """This rank's contribution: special pairs, whose halves come from different ranks, all over the tensor."""
    out = torch.ones(tuple(size), dtype=dtype)
    flat = out.view(-1)
    for i in range(flat.numel()):
        pair = SPECIAL_PAIRS[i % len(SPECIAL_PAIRS)]
        first = i // len(SPECIAL_PAIRS) % world
        if rank == first:
            flat[i] = pair[0]
        elif rank == (first + 1) % world:
            flat[i] = pair[1]
    return out


# --- through the runtime alone --------------------------------------------------------------------------------


@contextmanager
def runtime(
    rank: int, layout: GroupLayout, items: Sequence[Item], slots: int = 2, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[GroupCollectives]:
    world = layout.ranks
    exchange = process_group_exchange(dist.group.WORLD, 30.0, "the test")
    engine = Engine(exchange, rank, Topology(1, world), slots=slots, timeout_s=30.0)
    ring = SlotRing(lambda: engine.add_slot(layout.landing_bytes, "ring"), slots)
    engine.reserve(needed_memory([layout], engine.topology, rank, chunk_bytes))
    try:
        yield GroupCollectives(engine, "test", layout, items, ring, chunk_bytes)
    finally:
        dist.barrier()
        engine.close()


def layout_of(world: int, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]] = SIZES) -> GroupLayout:
    return GroupLayout(tuple(ParamShape.of(s, dtype.itemsize) for s in sizes), world)


def gathered(group: GroupCollectives, shards: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The unsharded parameters, padded, as copies."""
    layout, window = group.layout, group.landing.window
    group.issue([s.data_ptr() for s in shards])
    group.complete()
    out = []
    for p in range(len(layout.params)):
        n = layout.ranks * layout.shard_items(p)
        view = torch.from_dlpack(window.tensor(layout.landing_base(p), n, NAMES[dtype])) if n else torch.empty(0)
        out.append(view.to(dtype).clone())
    group.vacate()
    return out


def reduced(
    group: GroupCollectives, gradients: Sequence[torch.Tensor], output: torch.dtype, divisor: float
) -> torch.Tensor:
    """The packed shard; it begins as NaN, so what is not written shows."""
    out = torch.full((group.layout.output_items,), NAN, dtype=output)
    everything = tuple(range(len(gradients)))
    addresses = [g.data_ptr() for g in gradients]
    group.reduce_scatter(everything, ITEM[gradients[0].dtype], ITEM[output], addresses, out.data_ptr(), divisor)
    return out


def own_slice(full: torch.Tensor, layout: GroupLayout, p: int, rank: int) -> torch.Tensor:
    """Rank's shard of a full (D, ...) tensor, with its padding as zeros."""
    n, padded = layout.valid_items(p, rank), layout.shard_items(p)
    start = rank * padded
    out = torch.zeros(padded, dtype=full.dtype)
    out[:n] = full.reshape(-1)[start : start + n]
    return out


def promised(all_ranks: Sequence[torch.Tensor], owner: int, divisor: float, output: torch.dtype) -> torch.Tensor:
    """The promised arithmetic: staged contributions in rank order, then the own one; every addition rounded to fp32."""
    order = [r for r in range(len(all_ranks)) if r != owner] + [owner]
    total = all_ranks[order[0]].float()
    for r in order[1:]:
        total = total + all_ranks[r].float()
    return (total / torch.tensor(divisor, dtype=F32)).to(output)


def packed_reference(
    contributions: Callable[[int, int], torch.Tensor],
    layout: GroupLayout,
    rank: int,
    divisor: float,
    output: torch.dtype,
) -> torch.Tensor:
    """The whole packed shard of ``rank`` by the promised arithmetic; padding is zero."""
    parts = []
    for p in range(len(layout.params)):
        total = promised([contributions(r, p) for r in range(layout.ranks)], rank, divisor, output)
        parts.append(own_slice(total, layout, p, rank))
    return torch.cat(parts)


def _order(rank: int, world: int, out: dict[str, Any]) -> None:
    """Bytes of random sums against the emulation, for each source and output, divisors that are and are not exact."""
    for source, output, divisor in [
        (F32, F32, world),
        (B16, F32, world),
        (F32, B16, 3.0),
        (B16, B16, 1.0),
        (F32, F32, 0.7),
    ]:
        layout = layout_of(world, source)

        def contribution(r: int, p: int, source: torch.dtype = source) -> torch.Tensor:
            return randoms(SIZES[p], source, 100 * r + p)

        gradients = [contribution(rank, p) for p in range(len(SIZES))]
        with runtime(rank, layout, [Item.of_size(source.itemsize)] * len(SIZES)) as group:
            got = reduced(group, gradients, output, divisor)
        want = packed_reference(contribution, layout, rank, divisor, output)
        out[f"order {source} to {output} by {divisor}"] = same_bits(got, want)


def _negative_zero(rank: int, world: int, out: dict[str, Any]) -> None:
    layout = layout_of(world, F32)
    gradients = [torch.full(s, -0.0) for s in SIZES]
    with runtime(rank, layout, [Item.RAW4] * len(SIZES)) as group:
        got = reduced(group, gradients, F32, world)
    want = packed_reference(lambda r, p: gradients[p], layout, rank, world, F32)
    out["negative zeros"] = same_bits(got, want) and bool(want.view(torch.int32).ne(0).any())


def _knobs(rank: int, world: int, out: dict[str, Any]) -> None:
    """Chunk sizes, slot counts and repetitions: one result, to the bit."""
    layout = layout_of(world, B16)
    gradients = [randoms(s, B16, 1000 * rank + i) for i, s in enumerate(SIZES)]
    shards = [randoms((layout.shard_items(p),), F32, 77 * rank + p) for p in range(len(SIZES))]
    first: list[torch.Tensor] = []
    same = []
    for chunk_bytes, slots in [(4096, 1), (65536, 2), (CHUNK_BYTES, 3), (4096, 3), (65536, 1)]:
        with runtime(rank, layout, [Item.F32] * len(SIZES), slots, chunk_bytes) as group:
            for _ in range(3):
                result = [reduced(group, gradients, F32, world), *gathered(group, shards, B16)]
                # Padding of a landing belongs to nobody; everything else is compared.
                valid = [result[0]] + [r[: math.prod(s)] for r, s in zip(result[1:], SIZES, strict=True)]
                first = first or valid
                same.append(all(same_bits(a, b) for a, b in zip(first, valid, strict=True)))
    out["knobs"] = all(same) and len(same) == 15


def _casts(rank: int, world: int, out: dict[str, Any]) -> None:
    """Every rank gathers what torch's own cast gives, bit for bit, and NaN as NaN."""
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (40_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    # Ties and their neighbours; denormals; the largest values, which round to infinity; NaNs whose payload is low.
    halves = torch.randint(-(2**15), 2**15, (2_000,), generator=generator, dtype=torch.int32) << 16
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001])
    edges, signs = edges.to(torch.int32), torch.tensor(-(2**31)).to(torch.int32)
    all_bits = torch.cat([edges, edges | signs, halves, halves | 0x8000, halves | 0x8001, halves | 0x7FFF, patterns])
    values = all_bits[: len(all_bits) // world * world].view(F32)
    assert values.isnan().sum() > 100
    assert values.isinf().sum() >= 2
    assert ((values != 0) & (values.abs() < torch.finfo(F32).tiny)).sum() > 100
    for source, target in [(F32, B16), (B16, F32), (F32, F32), (B16, B16)]:
        full = values if source is F32 else all_bits.to(torch.int16)[: len(values)].view(B16)
        layout = GroupLayout((ParamShape(len(values), 1, target.itemsize),), world)
        shard = own_slice(full, layout, 0, rank)
        item = ITEM[source] if source is not target else Item.of_size(source.itemsize)
        with runtime(rank, layout, [item]) as group:
            got = gathered(group, [shard], target)[0]
        want, nan = full.to(target), full.isnan()
        name = f"cast {source} to {target}"
        out[name] = torch.equal(bits(got)[~nan], bits(want)[~nan]) and bool(got[nan].isnan().all())
        if source is target:  # moved, not looked at: NaNs keep their payload
            out[name] = torch.equal(bits(got), bits(full))


def _special_sums(rank: int, world: int, out: dict[str, Any]) -> None:
    for source, output in [(F32, F32), (B16, F32), (B16, B16), (F32, B16)]:
        layout = layout_of(world, source)
        gradients = [specials(s, source, rank, world) for s in SIZES]
        with runtime(rank, layout, [Item.of_size(source.itemsize)] * len(SIZES)) as group:
            got = reduced(group, gradients, output, world)

        def contribution(r: int, p: int, source: torch.dtype = source) -> torch.Tensor:
            return specials(SIZES[p], source, r, world)

        want = packed_reference(contribution, layout, rank, world, output)
        assert want.isnan().any()
        assert want.isinf().any()
        finite = want.isfinite()
        out[f"special {source} to {output}"] = same_class(got, want) and torch.equal(got[finite], want[finite])


def _empty(rank: int, world: int, out: dict[str, Any]) -> None:
    """A group of which nothing exists still takes part in the order of calls."""
    sizes: list[tuple[int, ...]] = [(0, 4), (3, 0)]
    layout = layout_of(world, F32, sizes)
    with runtime(rank, layout, [Item.RAW4] * 2) as group:
        nothing = [torch.zeros(s) for s in sizes]
        values = gathered(group, nothing, F32)
        total = reduced(group, nothing, F32, world)
    out["empty"] = [v.numel() for v in values] == [0, 0] and total.numel() == 0


RUNTIME_CHECKS = [_order, _negative_zero, _knobs, _casts, _special_sums, _empty]


# --- through FSDP2 --------------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Parameters of given sizes; the gradient of each is exactly what the forward is given for it."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int, integer: bool) -> None:
        super().__init__()
        make = integers if integer else randoms
        self.values = nn.ParameterList(nn.Parameter(make(s, dtype, seed + i)) for i, s in enumerate(sizes))
        self.seen: list[torch.Tensor] = []

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        self.seen = [p.detach().clone() for p in self.values]
        return sum(((p * g).sum(dtype=F32) for p, g in zip(self.values, gradients, strict=True)), torch.zeros(()))


class Pair(nn.Module):
    """A root with parameters of its own around an inner block, so that two groups are at work."""

    def __init__(self, dtype: torch.dtype, seed: int, integer: bool) -> None:
        super().__init__()
        self.outer, self.inner = (Probe(TRAINABLE, dtype, seed + i, integer) for i in (0, 50))

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.outer(gradients) + self.inner(gradients)


POLICIES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "bf16": (B16, {}),
    "bf16 to fp32": (B16, {"reduce_dtype": F32}),
    "fp32 as bf16": (F32, {"param_dtype": B16, "reduce_dtype": F32}),
    "fp32 as bf16 to bf16": (F32, {"param_dtype": B16, "reduce_dtype": B16}),
}


def _through_fsdp2(
    policy: str, integer: bool, tide: bool, gradient: Callable[[int, torch.dtype], torch.Tensor], **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradient shards and gathered parameters of one forward and backward."""
    dtype, kwargs = POLICIES[policy]
    model = Pair(dtype, 7, integer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**kwargs))
    handle = apply_tide(model, {"timeout_s": 30, "strict": True, **options}) if tide else None
    compute = kwargs.get("param_dtype", dtype)
    model([gradient(p, compute) for p in range(len(TRAINABLE))]).backward()
    shards = [p.grad.to_local().clone() for p in model.parameters()]
    seen = [*model.outer.seen, *model.inner.seen]
    if handle is not None:
        report = handle.report()
        assert all(g.path == "tide" and g.reduce_scatter.calls == 1 for g in report.groups), str(report)
        assert not any(g.reduce_scatter.stock_calls for g in report.groups)
        handle.close()
    return shards, seen


def _fsdp2_equal(rank: int, world: int, out: dict[str, Any]) -> None:
    """Integers: the same bytes as stock, gathered and reduced. Special values: the same classes as stock."""
    for policy in POLICIES:
        stock, tide = (
            _through_fsdp2(policy, True, on, lambda p, d: integers(TRAINABLE[p], d, 1000 * rank + p))
            for on in (False, True)
        )
        out[f"integers: {policy}"] = all(
            same_bits(a, b) for got, want in zip(tide, stock, strict=True) for a, b in zip(got, want, strict=True)
        )
        assert any(g.abs().sum() > 0 for g in stock[0])
        stock, tide = (
            _through_fsdp2(policy, True, on, lambda p, d: specials(TRAINABLE[p], d, rank, world))
            for on in (False, True)
        )
        assert any(g.isnan().any() for g in stock[0]) or rank > 0
        # The finite ones differ only where bf16 sums round on the way (1 + 1 + BIG - BIG); classes do not.
        out[f"special: {policy}"] = all(same_class(a, b) for a, b in zip(tide[0], stock[0], strict=True))


def _fsdp2_close(rank: int, world: int, out: dict[str, Any]) -> None:
    """Random inputs against the mean in fp64 of the very inputs that the ranks gave."""
    worst: dict[str, float] = {}
    for policy in POLICIES:
        shards, _ = _through_fsdp2(policy, False, True, lambda p, d: randoms(TRAINABLE[p], d, 1000 * rank + p))
        dtype, kwargs = POLICIES[policy]
        compute = kwargs.get("param_dtype", dtype)
        layout = layout_of(world, compute, TRAINABLE)
        worst[policy] = 0.0
        for index, got in enumerate(shards):
            p = index % len(TRAINABLE)
            mean = sum(randoms(TRAINABLE[p], compute, 1000 * r + p).double() for r in range(world)) / world
            want = own_slice(mean, layout, p, rank)[: got.numel()]
            if got.numel() == 0:
                continue
            error = (got.double().view(-1) - want).abs()
            if got.dtype is B16 or kwargs.get("reduce_dtype") is B16:
                # Stored as bf16, whose significand has 8 bits: at most 2^-8 of the value on top.
                error = (error - want.abs() * 2.0**-8).clamp(min=0)
            worst[policy] = max(worst[policy], (error.max() / max(1.0, want.abs().max().item())).item())
    out["errors"] = worst


def _fsdp2_knobs(rank: int, world: int, out: dict[str, Any]) -> None:
    """Training gives the same bits for every chunk size, slot count and cache, and again on a second run."""
    case = Case("knobs", uneven=True, policy=BF16, steps=2, accumulate=2)
    first = None
    same = []
    for chunk_bytes, slots, cache in [
        (4096, 1, "turnaround"),
        (65536, 2, "turnaround"),
        ("auto", 3, "off"),
        ("auto", 2, "microbatch"),
        (4096, 1, "turnaround"),
    ]:
        model = build(case, world)
        options = {"reduce_scatter.chunk_bytes": chunk_bytes, "all_gather.slots": slots, "all_gather.cache": cache}
        handle = apply_tide(model, {"timeout_s": 30, "strict": True, **options})
        losses = train(model, case, rank)
        values = full_parameters(model)
        handle.close()
        first = first or (losses, values)
        same.append(losses == first[0] and all(same_bits(values[n], first[1][n]) for n in values))
    out["fsdp2 knobs"] = all(same) and len(same) == 5


def _checks(rank: int, world: int, checks: list[Callable[[int, int, dict[str, Any]], None]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for check in checks:
        check(rank, world, out)
    return out


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    """Rank count -> what each rank found, each rank count in one launch."""
    everything = [*RUNTIME_CHECKS, _fsdp2_equal, _fsdp2_close, _fsdp2_knobs]
    return {world: launch(world, _checks, everything, timeout=180) for world in (2, 4)} | {
        3: launch(3, _checks, RUNTIME_CHECKS, timeout=120)
    }


def _failed(results: list[dict[str, Any]], prefix: str) -> list[tuple[int, str]]:
    checked = [[name for name in r if name.startswith(prefix)] for r in results]
    assert checked[0], f"nothing was checked for {prefix!r}"
    return [(rank, name) for rank, names in enumerate(checked) for name in names if results[rank][name] is not True]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("order", id="sums_are_made_in_the_promised_order_to_the_bit"),
        pytest.param("negative zeros", id="negative_zeros_stay_negative"),
        pytest.param("knobs", id="chunks_slots_and_repetition_change_no_bit"),
        pytest.param("cast", id="casts_equal_torchs_to_the_bit_and_nan_stays_nan"),
        pytest.param("special", id="nan_and_infinities_come_out_in_their_class"),
        pytest.param("empty", id="a_group_without_items_takes_part"),
    ],
)
def test_the_runtime(results: dict[int, list[dict[str, Any]]], world: int, what: str) -> None:
    assert _failed(results[world], what) == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "what",
    [
        *(
            pytest.param(f"integers: {p}", id=f"integers_in_{p}_equal_stock_to_the_bit".replace(" ", "_"))
            for p in POLICIES
        ),
        *(
            pytest.param(f"special: {p}", id=f"special_values_in_{p}_have_stocks_class".replace(" ", "_"))
            for p in POLICIES
        ),
        pytest.param("fsdp2 knobs", id="training_gives_the_same_bits_for_every_setting"),
    ],
)
def test_fsdp2(results: dict[int, list[dict[str, Any]]], world: int, what: str) -> None:
    names = [r for r in results[world] if what in r]
    assert len(names) == world
    assert all(r[what] is True for r in results[world])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_sums_are_close_to_fp64(results: dict[int, list[dict[str, Any]]], world: int, policy: str) -> None:
    """Within 1e-5 of max(1, the largest): at most four fp32 additions of normal deviates below 6, then a division.

    Error <= 4 * 2^-24 * (4 * 6) / 4 = 1.5e-6 in absolute terms, an order of magnitude below the bound.
    """
    assert max(r["errors"][policy] for r in results[world]) <= 1e-5
