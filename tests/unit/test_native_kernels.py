"""Copies, casts and sums, bit for bit against numpy and torch, in every instruction-set variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_program import ACCUMULATE, BF16, COPY, FP32, RAW, SCALED, SUM, ZERO, encode

from tide_strategies import _native


@pytest.fixture(params=_native.kernel_variants())
def variant(request):
    before = _native.kernel_variant()
    _native.use_kernel_variant(request.param)
    yield request.param
    _native.use_kernel_variant(before)


@pytest.fixture(scope="module")
def arena():
    return _native.Arena.create(1, 0, 1)


def replay(arena, ops, buffers, sources=(), divisor=1.0):
    program = encode(ops, sources, n_bases=len(buffers))
    outcome = program.replay(arena, [b.ctypes.data for b in buffers], [], 0, divisor, 10.0)
    assert outcome.status == "ok"


def cast(arena, values, src, dst):
    out = np.zeros(values.size, np.uint16 if dst == BF16 else np.uint32)
    replay(arena, [[COPY, 0, 0, 1, 0, 1, values.size, 0, 0, src, dst]], [values, out])
    return out


def to_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def to_fp32(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def test_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="baseline"):
        _native.use_kernel_variant("sse9")


def test_all_bf16_patterns_widen_exactly_and_come_back(arena, variant):
    halves = np.arange(65536, dtype=np.uint16)
    wide = cast(arena, halves, BF16, FP32)
    assert np.array_equal(wide, halves.astype(np.uint32) << 16)
    back = cast(arena, wide, FP32, BF16)
    nan = np.isnan(to_fp32(halves))
    assert np.array_equal(back[~nan], halves[~nan])
    assert np.array_equal(back[nan], halves[nan] | 0x40)  # NaN stays, quiet, with its sign and payload


def test_narrowing_rounds_to_nearest_even_as_torch_does(arena, variant):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_003, dtype=np.uint32)
    halves = rng.integers(0, 2**16, 50_000, dtype=np.uint32) << 16
    ties = halves | 0x8000
    around_zero = [0, 0x80000000, 1, 0x80000001, 0x7FFF, 0x8000, 0x8001, 0x007FFFFF, 0x00800000]
    around_infinity = [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
    nans = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]
    edges = np.array([*around_zero, *around_infinity, *nans], np.uint32)
    values = np.concatenate([bits, ties, ties - 1, ties + 1, edges]).view(np.float32)
    got, want = cast(arena, values, FP32, BF16), to_bf16(values)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(to_fp32(got[nan])).all()
    assert np.array_equal(np.isinf(to_fp32(got)), np.isinf(to_fp32(want)))


def bits_of(values, dtype):
    return values.view(np.uint32) if dtype == FP32 else to_bf16(values)


def reference_sum(contributions, divisor, old):
    acc = contributions[0].copy()
    for c in contributions[1:]:
        acc = acc + c
    if divisor != 1.0:
        acc = acc / np.float32(divisor)
    return acc if old is None else old + acc


@pytest.mark.parametrize("n_sources", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize(("src", "dst"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP32, BF16)])
def test_sum_has_the_promised_order_and_one_rounding_per_addition(arena, variant, n_sources, src, dst):
    rng = np.random.default_rng(n_sources)
    for elements, shift, divisor, accumulate in [
        (0, 0, 1.0, False),
        (1, 0, 1.0, True),
        (33, 1, 4.0, False),
        (2047, 3, 3.0, True),
        (2048, 0, 7.0, False),
        (2049, 1, 1.0, True),
        (10_001, 2, 0.125, False),
    ]:
        wide = [
            (rng.standard_normal(elements) * 10.0 ** rng.integers(-3, 4, elements)).astype(np.float32)
            for _ in range(n_sources)
        ]
        if src == BF16:
            wide = [to_fp32(to_bf16(w)) for w in wide]
        old = rng.standard_normal(elements).astype(np.float32)
        if dst == BF16:
            old = to_fp32(to_bf16(old))
        # Every operand starts `shift` bytes into its buffer: nothing may rely on alignment.
        inputs = [np.frombuffer(b"\0" * shift + bits_of(w, src).tobytes() + b"\xaa" * 8, np.uint8) for w in wide]
        out = np.frombuffer(bytearray(b"\xbb" * shift + bits_of(old, dst).tobytes() + b"\xbb" * 8), np.uint8)
        op = [SUM, n_sources, shift, elements, src, dst, n_sources, 0, SCALED | ACCUMULATE * accumulate]
        replay(arena, [op], [*inputs, out], [(i, shift) for i in range(n_sources)], divisor)
        want = bits_of(reference_sum(wide, divisor, old if accumulate else None), dst).tobytes()
        assert out.tobytes() == b"\xbb" * shift + want + b"\xbb" * 8, (elements, shift, divisor, accumulate)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 1024.0, 2.0**-20, 2.0**127, 3.0, 6.0, 0.1, -2.0, -5.0])
def test_division_is_exact_division(arena, variant, divisor):
    rng = np.random.default_rng(2)
    values = rng.integers(0, 2**32, 5001, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    out = np.zeros_like(values)
    replay(arena, [[SUM, 1, 0, values.size, FP32, FP32, 1, 0, SCALED]], [values, out], [(0, 0)], divisor)
    with np.errstate(over="ignore", under="ignore"):
        want = values / np.float32(divisor)
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))


def test_only_sums_marked_as_scaled_are_divided(arena, variant):
    values, plain, scaled = (np.full(5, v, np.float32) for v in (6.0, 1.0, 1.0))
    ops = [[SUM, 1, 0, 5, FP32, FP32, 1, 0, ACCUMULATE], [SUM, 2, 0, 5, FP32, FP32, 1, 0, ACCUMULATE | SCALED]]
    replay(arena, ops, [values, plain, scaled], [(0, 0)], 3.0)
    assert (plain == 7.0).all()
    assert (scaled == 3.0).all()


def test_sum_keeps_infinities_and_nans(arena, variant):
    inf, nan = np.float32("inf"), np.float32("nan")
    a = np.array([inf, inf, nan, -inf, 3e38], np.float32)
    b = np.array([1.0, -inf, 1.0, -inf, 3e38], np.float32)
    out = np.zeros(5, np.uint16)
    replay(arena, [[SUM, 2, 0, 5, FP32, BF16, 2, 0, 0]], [a, b, out], [(0, 0), (1, 0)])
    assert np.array_equal(to_fp32(out), np.array([inf, nan, nan, -inf, inf], np.float32), equal_nan=True)


def test_sum_may_write_over_one_of_its_sources(arena, variant):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(5000).astype(np.float32) for _ in range(2))
    want = a + b
    replay(arena, [[SUM, 1, 0, 5000, FP32, FP32, 2, 0, 0]], [a, b], [(0, 0), (1, 0)])
    assert np.array_equal(b, want)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 7),
    elements=st.integers(0, 65),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    offsets=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    types=st.sampled_from([(FP32, FP32), (BF16, BF16), (RAW, RAW), (FP32, BF16), (BF16, FP32)]),
    seed=st.integers(0, 1000),
)
def test_strided_copy_matches_numpy(arena, rows, elements, gaps, offsets, types, seed):
    size = {FP32: 4, BF16: 2, RAW: 1}
    rng = np.random.default_rng(seed)
    src_pitch, dst_pitch = elements * size[types[0]] + gaps[0], elements * size[types[1]] + gaps[1]
    src = rng.integers(0, 256, offsets[0] + rows * src_pitch + 1, dtype=np.uint8)
    dst = rng.integers(0, 256, offsets[1] + rows * dst_pitch + 1, dtype=np.uint8)
    want = dst.copy()
    for r in range(rows):
        at = offsets[0] + r * src_pitch
        row = src[at : at + elements * size[types[0]]].copy()
        if types[0] != types[1] and types[0] == FP32:
            halves = row.view(np.uint16)[1::2].copy()
            halves[(halves & 0x7F80) == 0x7F80] = 0x3F80  # no NaN here: which NaN comes out is another test
            row.view(np.uint16)[1::2] = halves
            src[at : at + row.size] = row
            row = to_bf16(row.view(np.float32)).view(np.uint8)
        elif types[0] != types[1]:
            row = to_fp32(row.view(np.uint16)).view(np.uint8)
        want[offsets[1] + r * dst_pitch :][: row.size] = row
    op = [COPY, 0, offsets[0], 1, offsets[1], rows, elements, src_pitch, dst_pitch, *types]
    replay(arena, [op], [src, dst])
    assert np.array_equal(dst, want)


def test_zero_clears_exactly_its_range(arena):
    data = np.full(100, 7, np.uint8)
    replay(arena, [[ZERO, 0, 3, 50], [ZERO, 0, 90, 0]], [data])
    assert np.array_equal(data, np.array([7] * 3 + [0] * 50 + [7] * 47, np.uint8))
