"""Copies, sums, and what is refused."""

from __future__ import annotations

import numpy as np
from stage import (
    ACCUMULATE,
    AWAIT,
    BF16,
    COPY,
    FP32,
    NOTIFY,
    OTHERS,
    RAW,
    SCALED,
    SUM,
    ZERO,
    array,
    calls,
    cell,
    controls,
    fake,
    finish,
    lone_control,
    memory,
    play,
    program,
    raises,
    run,
    scenario,
    until,
)

from tide_strategies._native import cuda
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import Item, Space
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.encode import encode
from tide_strategies.topology import Topology


@scenario
def copies_of_every_kind():
    rng = np.random.default_rng(0)
    src, dst = memory(), memory()
    array(src, np.uint8)[:] = rng.integers(0, 256, src.bytes, dtype=np.uint8)
    array(dst, np.uint8)[:] = 0xEE
    want = array(dst, np.uint8).copy()
    data = array(src, np.uint8)
    ops, at = [], 0
    for n in (1, 7, 0, 4096, 3, 100_000):
        ops.append([COPY, 0, 2 * at + 1, 1, at, 1, n, 0, 0, RAW, RAW])
        want[at : at + n] = data[2 * at + 1 : 2 * at + 1 + n]
        at += n + 5
    ops.append([COPY, 0, 5, 1, at, 6, 10, 20, 20, BF16, BF16])  # rows side by side
    want[at : at + 120] = data[5:125]
    at += 200
    ops.append([COPY, 0, 11, 1, at, 0, 10, 20, 20, RAW, RAW])  # no rows
    ops.append([COPY, 0, 11, 1, at, 13, 9, 50, 31, RAW, RAW])
    for r in range(13):
        want[at + 31 * r : at + 31 * r + 9] = data[11 + 50 * r : 20 + 50 * r]
    at += 13 * 31 + 7
    ops.append([ZERO, 1, at, 33])
    ops.append([ZERO, 1, at, 0])
    want[at : at + 33] = 0
    ops.append([COPY, 0, 0, 1, at + 40, 1, 16, 0, 0, FP32, FP32])
    want[at + 40 : at + 104] = data[:64]
    prog = program(ops, n_bases=2)
    assert prog.segments(0) == [("copies", 7), ("clear", 1), ("copies", 1)]
    control = lone_control()
    run(prog, control, [src.address, dst.address])
    assert np.array_equal(array(dst, np.uint8), want)
    # Runs of copies are given to the driver at once, where it takes that.
    assert calls("copies") == 8
    together = (calls("cuMemcpy3DBatchAsync"), calls("cuMemcpyBatchAsync"))
    one_by_one = (calls("cuMemcpyDtoDAsync"), calls("cuMemcpy2DAsync"))
    assert (together, one_by_one) in [((1, 1), (0, 0)), ((0, 0), (7, 1))]
    other = memory()
    array(other, np.uint8)[:] = array(dst, np.uint8)[:] = 0xEE
    for target in (other, dst):
        run(prog, control, [src.address, target.address])
        assert np.array_equal(array(target, np.uint8), want)


@scenario
def a_launch_keeps_its_places_when_later_ones_differ():
    """A later call with other addresses must not change where an earlier one, still waiting, copies to."""
    src, first, second = memory(), memory(), memory()
    array(src, np.uint8)[:] = 7
    array(first, np.uint8)[:] = array(second, np.uint8)[:] = 0
    (control, _), own = controls()
    prog = program(
        [[AWAIT, 0, 1, 1], [COPY, 0, 0, 1, 0, 1, 64, 0, 0, RAW, RAW]], n_bases=2, n_counters=1, advance=[(0, 1, 1)]
    )
    stream = cuda.Stream(0, 0)
    for dst in (first, second):
        prog.begin(control, [src.address, dst.address], [2], 1, 1.0).enqueue(0, stream.handle)
    assert not array(first, np.uint8).any()
    array(own[0], np.uint32)[(2 * 2 + 1) * 4] = 2
    until(lambda: array(second, np.uint8)[:64].all())
    assert array(first, np.uint8)[:64].all()


@scenario
def malformed_programs_are_refused():
    with raises(ValueError, "op 1, word 0 is 9"):
        program([[ZERO, 0, 0, 8], [9]], n_bases=1)
    with raises(ValueError, "op 0: a copy on the device moves bytes"):
        program([[COPY, 0, 0, 0, 0, 1, 8, 0, 0, FP32, BF16]], n_bases=1)
    with raises(ValueError, "op 0: pitches of 4 and 8"):
        program([[COPY, 0, 0, 0, 0, 2, 8, 4, 8, RAW, RAW]], n_bases=1)
    with raises(ValueError, "op 1: counter 0 is notified by stream 0 too"):
        program([[NOTIFY, 0, 1, OTHERS]] * 2, streams=[(0, 1), (1, 1)], n_counters=1)
    with raises(ValueError, "readers holds -1"):
        program([], readers=[-1])
    with raises(ValueError, "ops has 5 bytes"):
        cuda.Program(b"12345", b"", [], 0, 0, [])


@scenario
def unsuitable_calls_are_refused_and_change_nothing():
    (control, _), own = controls()
    good = program([[NOTIFY, 0, 1, OTHERS]], n_bases=1, n_counters=2, advance=[(0, 0, 1)])
    args = {"bases": [0], "counters": [2, 3], "tag": 1, "divisor": 1.0}
    for change, words in [
        ({"bases": []}, "bases has 0 entries"),
        ({"counters": [1]}, "counters has 1 entries"),
        ({"counters": [1, 1]}, "must differ"),
        ({"counters": [1, 4]}, "counters[1] is 4"),
        ({"tag": -1}, "tag"),
        ({"tag": 2**32}, "tag"),
        ({"divisor": 0.0}, "divisor"),
        ({"divisor": float("nan")}, "divisor"),
    ]:
        with raises(ValueError, words):
            good.begin(control, **{**args, **change})
    for bad, words in [
        (program([[AWAIT, 0, 2, 1]], n_counters=1), "writer rank 2; the control has 2"),
        (program([[AWAIT, 0, 0, 1]], n_counters=1), "of this rank itself, which it does not notify"),
        (program([[NOTIFY, 0, 1, 2]], n_counters=1, advance=[(0, 0, 1)]), "notifies rank 2"),
        (program([[NOTIFY, 0, 1, OTHERS]], n_counters=1), "by 1 in all, but its advance for rank 0 is 0"),
        (program([], n_counters=1, advance=[(0, 0, 1)]), "by 0 in all, but its advance for rank 0 is 1"),
    ]:
        with raises(ValueError, words):
            bad.begin(control, [], [0], 0, 1.0)
    alone = cuda.Control(0, 2, 0, 4, memory(), [None, None])
    with raises(ValueError, "notifies rank 1, whose counters are not mapped here"):
        good.begin(alone, **args)
    assert run(good, control, [0], [2, 3]).seq == 1
    assert cell(own[1], 2, 2, 0) == 1


@scenario
def unsuitable_controls_are_refused():
    m = memory()
    for args, words in [
        ((0, 0, 0, 1, m, []), "ranks is 0"),
        ((0, 2, 2, 1, m, [None] * 2), "rank is 2"),
        ((0, 2, 0, 0, m, [None] * 2), "counters is 0"),
        ((0, 2, 0, 1, m, [None]), "peers has 1 entries"),
        ((0, 2, 0, 1 << 20, m, [None] * 2), "the own mapping has 2097152 bytes; 33554432 are needed"),
        ((1, 2, 0, 1, m, [None] * 2), "the own mapping is for device 0, not 1"),
        ((5, 2, 0, 1, m, [None] * 2), "device is 5"),
    ]:
        with raises(ValueError, words):
            cuda.Control(*args)
    assert cuda.Control.control_bytes(8, 3) == 8 * 3 * 16


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def of_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def kernel(staged, src, dst, pointers, extra=2):
    return fake.fake_sum_function(staged, src, dst, pointers, extra)


@scenario
def sums_of_odd_sizes():
    rng = np.random.default_rng(1)
    sizes = [1, 7, 256, 257, 0, 1000, 4096, 5]
    for staged, src, dst, divisor in [
        (1, BF16, FP32, 2.0),
        (3, FP32, BF16, 3.0),
        (0, BF16, BF16, 1.0),
        (7, FP32, FP32, 6.0),
    ]:
        item, kind = (2, np.uint16) if src == BF16 else (4, np.float32)
        gradients, staging, output = [memory() for _ in sizes], memory(), memory()
        array(output, np.uint8)[:] = 0xEE
        of = of_bf16 if src == BF16 else (lambda x: x)
        to = to_bf16 if src == BF16 else (lambda x: x.astype(np.float32))
        pitch = 32 * 1024
        ops, sources, wants, at, out = [], [], [], 0, 0
        for i, n in enumerate(sizes):
            own = array(gradients[i], kind)
            own[:] = to(rng.standard_normal(own.size))
            total = None
            for s in range(staged):
                piece = array(staging, kind, at * item + s * pitch, n)
                piece[:] = to(rng.standard_normal(n))
                sources.append((len(sizes), at * item + s * pitch))
                total = of(piece).copy() if total is None else total + of(piece)
            mine = of(own[i + 3 : i + 3 + n])
            sources.append((i, (i + 3) * item))
            total = mine if total is None else total + mine
            flags = SCALED if i != 2 else 0
            if flags:
                total = total / np.float32(divisor)
            dst_item = 2 if dst == BF16 else 4
            ops.append([SUM, len(sizes) + 1, out * dst_item, n, src, dst, staged + 1, i * (staged + 1), flags])
            wants.append((out, total))
            at, out = at + n + 1, out + n
        prog = program(ops, sources, n_bases=len(sizes) + 2)
        with raises(ValueError, "call set_sum_kernel first"):
            prog.begin(control := lone_control(), [0] * 10, [], 0, 1.0)
        prog.set_sum_kernel(kernel(staged, src, dst, 3), 128, 100_000, 2, 3, 256, 2, device=0)
        # Scaling breaks the run before and after sum 2; three addresses fit a launch.
        assert prog.sum_launches == 4
        assert prog.sum_tiles == sum(-(-n // 256) for n in sizes)
        launched = calls("cuLaunchKernel")
        run(prog, control, [*(g.address for g in gradients), staging.address, output.address], divisor=divisor)
        assert calls("cuLaunchKernel") - launched == 4
        assert fake.fake_last_grid() <= 2
        got = array(output, np.uint16 if dst == BF16 else np.float32)
        for begin, want in wants:
            want = to_bf16(want) if dst == BF16 else want
            assert np.array_equal(got[begin : begin + want.size], want), (staged, begin)
        assert (array(output, np.uint8)[out * dst_item : out * dst_item + 64] == 0xEE).all()


@scenario
def unsuitable_sums_are_refused():
    def plan(ops, sources, **change):
        prog = program(ops, sources, n_bases=4)
        args = {"threads": 128, "shared_bytes": 0, "ctas": 4, "max_pointers": 4, "tile": 64, "extra_null_pointers": 2}
        prog.set_sum_kernel(change.pop("function", kernel(2, FP32, FP32, 4)), **{**args, **change}, device=0)
        return prog

    good = [SUM, 3, 0, 8, FP32, FP32, 3, 0, SCALED]
    sources = [(2, 0), (2, 64), (0, 0)]
    assert plan([good], sources).sum_launches == 1
    for change, words in [
        ({"function": 0}, "function is 0"),
        ({"threads": 0}, "threads"),
        ({"threads": 1025}, "threads"),
        ({"shared_bytes": -1}, "shared_bytes"),
        ({"ctas": 0}, "ctas"),
        ({"max_pointers": 0}, "max_pointers"),
        ({"max_pointers": 257}, "max_pointers"),
        ({"tile": 0}, "tile"),
        ({"extra_null_pointers": -1}, "extra_null_pointers"),
    ]:
        with raises(ValueError, words):
            plan([good], sources, **change)
    for op, these, words in [
        ([SUM, 3, 0, 8, FP32, FP32, 3, 0, ACCUMULATE], sources, "do not accumulate"),
        (good, [(2, 0), (1, 64), (0, 0)], "staged sources in one area"),
        (good, [(2, 0), (2, 64), (2, 128)], "staged sources in one area"),
        ([SUM, 3, 0, 8, FP32, FP32, 4, 0, 0], [(2, 0), (2, 64), (2, 192), (0, 0)], "constant distance"),
        (good, [(2, 0), (2, 62), (0, 0)], "multiple of its 4 bytes"),
        (good, [(2, 0), (2, 64), (0, 2)], "a gradient at a multiple"),
        ([SUM, 3, 2, 8, FP32, FP32, 3, 0, 0], sources, "an output at a multiple"),
    ]:
        with raises(ValueError, words):
            plan([op], these)
    two = program([good, [SUM, 3, 0, 8, FP32, FP32, 2, 1, SCALED]], sources, n_bases=4)
    assert two.sum_kinds == [(False, 3, FP32, FP32, False), (False, 2, FP32, FP32, False)]
    two.set_sum_kernel(kernel(2, FP32, FP32, 4), 32, 0, 1, 4, 64, 2, device=0)
    with raises(ValueError, "the program has sums of kind 1: call set_sum_kernel first"):
        two.begin(lone_control(), [0] * 4, [], 0, 1.0)
    for bad in (-1, 2):
        with raises(ValueError, f"kind is {bad}; the program has 2 kinds"):
            two.set_sum_kernel(kernel(1, FP32, FP32, 4), 32, 0, 1, 4, 64, 2, device=0, kind=bad)
    with raises(ValueError, "no CUDA context is current"):
        program([good], sources, n_bases=4).set_sum_kernel(1, 1, 0, 1, 1, 1, 0)
    with raises(RuntimeError, "cuFuncSetAttribute"):
        plan([good], sources, function=4711, shared_bytes=64 << 10)
    elsewhere = program([good], sources, n_bases=4)
    elsewhere.set_sum_kernel(kernel(2, FP32, FP32, 4), 32, 0, 1, 4, 64, 2, device=1)
    with raises(ValueError, "the sum kernel is for device 1, the control for device 0"):
        elsewhere.begin(lone_control(), [0] * 4, [], 0, 1.0)


@scenario
def landings_from_anywhere():
    """Partials in several places, in the order given; what is added to the same place takes turns."""
    n, rng = 1000, np.random.default_rng(2)
    inboxes, output, bf16 = [memory() for _ in range(3)], memory(), memory()
    for m in inboxes:
        array(m, np.float32)[:] = rng.standard_normal(m.bytes // 4)
    at = [(0, 64), (1, 4096), (2, 8), (1, 64), (2, 4096)]
    flags, lands = SCALED | ACCUMULATE, 1
    ops = [
        [SUM, 3, 400, n, FP32, FP32, 3, 0, SCALED, lands],
        [SUM, 3, 400, n, FP32, FP32, 2, 3, flags, lands],
        [SUM, 3, 400 + 4 * n, n, FP32, FP32, 2, 3, 0, lands],
        [SUM, 3, 400, n // 2, FP32, FP32, 2, 1, flags, lands],
        [SUM, 3, 400 + 2 * n, n // 2, FP32, FP32, 2, 0, flags, lands],
        [SUM, 3, 400 + 2 * n, n, FP32, FP32, 2, 1, flags, lands],
        [SUM, 4, 8, n, FP32, BF16, 2, 3, SCALED, lands],
    ]
    prog = program(ops, at, n_bases=5)
    # The third does not accumulate, and the sixth meets the fourth and the fifth.
    runs = [("sums", k) for k in (1, 1, 1, 2, 1, 1)]
    assert prog.segments(0) == runs
    assert prog.sum_kinds == [
        (True, 3, FP32, FP32, False),
        (True, 2, FP32, FP32, True),
        (True, 2, FP32, FP32, False),
        (True, 2, FP32, BF16, False),
    ]
    for number, (_, sources, _, dst, accumulate) in enumerate(prog.sum_kinds):
        function = fake.fake_land_function(sources, dst, accumulate, 3, 2)
        prog.set_sum_kernel(function, 128, 0, 4, 3, 64, 2, device=0, kind=number)
    places = [m.address for m in inboxes]

    def partial(number, count):
        base, offset = at[number]
        return array(inboxes[base], np.float32, offset, count)

    for divisor in (np.float32(4), np.float32(3)):  # multiplied with an exact reciprocal; divided by
        array(output, np.float32)[:] = -7
        run(prog, lone_control(), [*places, output.address, bf16.address], divisor=float(divisor))
        want = np.full(2 * n, -7, np.float32)
        want[:n] = ((partial(0, n) + partial(1, n)) + partial(2, n)) / divisor
        want[:n] += (partial(3, n) + partial(4, n)) / divisor
        want[n:] = partial(3, n) + partial(4, n)
        want[: n // 2] += (partial(1, n // 2) + partial(2, n // 2)) / divisor
        want[n // 2 : n] += (partial(0, n // 2) + partial(1, n // 2)) / divisor
        want[n // 2 : n // 2 + n] += (partial(1, n) + partial(2, n)) / divisor
        assert np.array_equal(array(output, np.float32, 400, 2 * n), want)
        assert np.array_equal(array(bf16, np.uint16, 8, n), to_bf16((partial(3, n) + partial(4, n)) / divisor))
    crowded = program(ops[:1], at, n_bases=5)
    with raises(ValueError, "max_pointers is 2; a sum has sources in 3 places"):
        crowded.set_sum_kernel(fake.fake_land_function(3, FP32, 0, 2, 2), 128, 0, 4, 2, 64, 2, device=0)


@scenario
def streams_of_a_rank_may_wait_for_each_other():
    """By counters of its own, which order calls too; lanes without a stream are given another time."""
    (control, _), own = controls()
    src, dst = memory(), memory()
    array(src, np.uint8)[:] = 7
    ops = [
        [AWAIT, 0, 0, 1],
        [COPY, 0, 0, 1, 0, 1, 64, 0, 0, RAW, RAW],
        [NOTIFY, 0, 1, 0],
    ]
    prog = program(ops, streams=[(0, 2), (2, 1)], n_bases=2, n_counters=1, advance=[(0, 0, 1)])
    streams = cuda.Stream(0, 0), cuda.Stream(0, 0)
    call = prog.begin(control, [src.address, dst.address], [1], 1, 1.0)
    call.enqueue_lanes([streams[0].handle, 0])
    array(dst, np.uint8)[:64] = 0
    assert control.outstanding() == 1
    call.enqueue_lanes([0, streams[1].handle])
    until(lambda: array(dst, np.uint8)[:64].all())
    finish()
    assert cell(own[0], 2, 1, 0) == 1


@scenario
def reduce_in_two_streams():
    """A push and a sum stream per rank, kept in step by counters: two rounds through one staging area."""
    made, _ = controls()
    n, rounds = 1000, 6
    staging = [memory() for _ in range(2)]
    grads = [memory() for _ in range(2)]
    outs = [memory() for _ in range(2)]
    keep = []
    for r in range(2):
        array(grads[r], np.float32)[: 2 * n] = np.arange(2 * n) * (r + 1)
    for r in range(2):
        p = 1 - r
        # Bases: own gradient, own staging, output, the peer's staging. Counters: pushed, consumed.
        ops = [
            [AWAIT, 1, p, 0],
            [COPY, 0, p * n * 4, 3, 0, 1, n * 4, 0, 0, RAW, RAW],
            [NOTIFY, 0, 1, p],
            [AWAIT, 0, p, 1],
            [SUM, 2, 0, n, FP32, FP32, 2, 0, SCALED],
            [NOTIFY, 1, 1, OTHERS],
        ]
        prog = program(
            ops, [(1, 0), (0, r * n * 4)], [(0, 3), (3, 3)], 4, 2, [(c, w, 1) for c in (0, 1) for w in (0, 1)]
        )
        prog.set_sum_kernel(kernel(1, FP32, FP32, 1), 128, 0, 8, 1, 128, 2, device=0)
        streams = cuda.Stream(0, 0), cuda.Stream(0, 0)
        keep.append((prog, streams))
        bases = [grads[r].address, staging[r].address, outs[r].address, staging[p].address]
        for _ in range(rounds):
            call = prog.begin(made[r], bases, [0, 1], 3, 2.0)
            call.enqueue(0, streams[0].handle)
            call.enqueue(1, streams[1].handle)
    until(lambda: made[0].outstanding() == 0 and made[1].outstanding() == 0)
    finish()
    for r in range(2):
        assert np.array_equal(array(outs[r], np.float32)[:n], (np.arange(2 * n) * 3)[r * n : r * n + n] / np.float32(2))


@scenario
def one_hardware_queue_for_all_streams_is_enough():
    """However many streams share a queue that works in order, nothing waits for what comes later in it."""
    ranks = 2
    layout = GroupLayout((ParamShape(96, 100, 4), ParamShape(7, 30, 4)), ranks)
    cells = [cuda.Allocation(r, cuda.Control.control_bytes(ranks, 4)) for r in range(ranks)]
    grads = [[memory(device=r) for _ in layout.params] for r in range(ranks)]
    staging, outs = ([memory(device=r) for r in range(ranks)] for _ in range(2))
    rng = np.random.default_rng(1)
    keep, made = [], []
    for r in range(ranks):
        maps = [cuda.Mapping(c, r) for c in cells]
        made.append(cuda.Control(r, ranks, r, 4, maps[r], [None if p == r else maps[p] for p in range(ranks)]))
        for shape, g in zip(layout.params, grads[r], strict=True):
            items = shape.rows * shape.row_items
            array(g, np.float32)[:items] = rng.integers(-9, 9, items)
    for r in range(ranks):
        schedule = reduce_scatter(
            layout, Topology(1, ranks), r, grad=Item.F32, output=Item.F32, chunk_bytes=4096, interleave=False
        )
        assert len(schedule.issue) > 6, "there are chunks enough for one to wait for the sum of an earlier one"
        encoded = encode(schedule, len(layout.params), cuda.Program)
        encoded.program.set_sum_kernel(kernel(1, FP32, FP32, 4), 128, 0, 8, 4, 128, 2, device=r)
        where = {Space.STAGING: lambda at: staging[at].address, Space.OUTPUT: lambda at, r=r: outs[r].address}
        bases = [g.address for g in grads[r]] + [where[space](at) for space, _, at in encoded.bases]
        numbers = {"consumed": 0, "pushed": 1}
        counters = [numbers[c.name] + c.index for c in encoded.counters]
        streams = cuda.Stream(r, 0), cuda.Stream(r, 0)
        keep.append((encoded, streams))
        for _ in range(3):
            encoded.program.begin(made[r], bases, counters, 5, 1.0).enqueue_lanes([s.handle for s in streams])
    until(lambda: all(c.outstanding() == 0 for c in made))
    for r in range(ranks):
        finish(r)
        for p, shape in enumerate(layout.params):
            n = layout.valid_items(p, r)
            first = r * layout.shard_items(p)
            want = sum(array(grads[k][p], np.float32)[first : first + n] for k in range(ranks))
            at = layout.output_offset(p)
            assert np.array_equal(array(outs[r], np.float32)[at : at + n], want), (r, shape)


if __name__ == "__main__":
    play(globals())
