"""Encoded programs: what is malformed is refused, naming the op and the word; a refused call changes nothing."""

from __future__ import annotations

import struct

import pytest

from tide_strategies._native import Arena, Program

COPY, SUM, ZERO, NOTIFY, AWAIT = range(5)
FP32, BF16, RAW = range(3)
ACCUMULATE, SCALED = 1, 2


def encode(ops, sources=(), streams=None, n_bases=0, n_counters=0, advance=()):
    """A program from lists of words; ops are padded to twelve words and form one stream unless told otherwise."""
    words = b"".join(struct.pack("<12q", *op, *[0] * (12 - len(op))) for op in ops)
    pairs = b"".join(struct.pack("<2q", *s) for s in sources)
    return Program(words, pairs, [(0, len(ops))] if streams is None else streams, n_bases, n_counters, list(advance))


def arena_pair(counters=8):
    """Two ranks of one arena, in one process."""
    first = Arena.create(2, 0, counters)
    return first, Arena.attach(first.fd, 2, 1, counters)


GOOD = {
    "copy": [COPY, 0, 0, 1, 0, 2, 3, 12, 12, FP32, FP32],
    "sum": [SUM, 0, 0, 8, FP32, BF16, 2, 0, 1],
    "zero": [ZERO, 0, 0, 8],
    "notify": [NOTIFY, 0, 1, -2],
    "await": [AWAIT, 0, 1, 1],
}


def one(op):
    return encode([op], sources=[(0, 0), (1, 8)], n_bases=2, n_counters=1)


@pytest.mark.parametrize("name", GOOD)
def test_well_formed_ops_are_accepted(name):
    program = one(GOOD[name])
    assert (program.n_ops, program.n_streams) == (1, 1)


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("copy", 0, -1),
        ("copy", 0, 5),
        ("copy", 1, 2),
        ("copy", 1, -1),
        ("copy", 2, -4),
        ("copy", 3, 2),
        ("copy", 4, -4),
        ("copy", 5, -1),
        ("copy", 6, -1),
        ("copy", 7, -1),
        ("copy", 8, -1),
        ("copy", 9, 3),
        ("copy", 10, 3),
        ("copy", 10, RAW),
        ("copy", 6, 2**62),
        ("copy", 7, 2**62),
        ("copy", 8, 2**62),
        ("sum", 1, 2),
        ("sum", 2, -1),
        ("sum", 3, -1),
        ("sum", 3, 2**62),
        ("sum", 4, RAW),
        ("sum", 5, RAW),
        ("sum", 6, 0),
        ("sum", 6, 3),
        ("sum", 7, 1),
        ("sum", 7, -1),
        ("sum", 8, 4),
        ("zero", 1, 2),
        ("zero", 2, -1),
        ("zero", 3, -1),
        ("notify", 1, 1),
        ("notify", 2, -1),
        ("notify", 2, 2**31),
        ("notify", 3, -1),
        ("notify", 3, -3),
        ("notify", 3, 1024),
        ("await", 1, 1),
        ("await", 2, -1),
        ("await", 2, 1024),
        ("await", 3, 2**31),
        ("await", 3, -(2**31) - 1),
    ],
)
def test_malformed_op_is_refused_naming_op_and_word(name, word, value):
    op = list(GOOD[name])
    op[word] = value
    with pytest.raises(ValueError, match=r"op 1, word \d+ is -?\d+; allowed: ") as caught:
        encode([GOOD["zero"], op], sources=[(0, 0), (1, 8)], n_bases=2, n_counters=1)
    assert f"is {value};" in str(caught.value) or "pitch" in str(caught.value) or "ends below" in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"streams": [(0, 2)]}, "stream 0"),
        ({"streams": [(0, 1), (-1, 1)]}, "stream 1"),
        ({"streams": [(0, -1)]}, "stream 0"),
        ({"streams": [(2**62, 2**62)]}, "stream 0"),
        ({"advance": [(1, 0, 1)]}, "advance 0"),
        ({"advance": [(0, -1, 1)]}, "advance 0"),
        ({"advance": [(0, 0, 2**31)]}, "advance 0"),
        ({"sources": [(2, 0)]}, "source 0"),
        ({"sources": [(0, -1)]}, "source 0"),
        ({"n_bases": -1}, "n_bases"),
        ({"n_counters": -1}, "n_counters"),
    ],
)
def test_malformed_program_is_refused(kwargs, words):
    with pytest.raises(ValueError, match=words):
        encode([[NOTIFY, 0, 1]], **{"n_bases": 2, "n_counters": 1, **kwargs})


def test_truncated_bytes_are_refused():
    with pytest.raises(ValueError, match="ops has 95 bytes"):
        Program(b"\0" * 95, b"", [], 0, 0, [])
    with pytest.raises(ValueError, match="sources has 8 bytes"):
        Program(b"", b"\0" * 8, [], 0, 0, [])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"bases": []}, "bases has 0 entries"),
        ({"counters": [1]}, "counters has 1 entries"),
        ({"counters": [1, 1]}, "must differ"),
        ({"counters": [1, 8]}, r"counters\[1\] is 8"),
        ({"tag": -1}, "tag"),
        ({"tag": 2**32}, "tag"),
        ({"divisor": 0.0}, "divisor"),
        ({"divisor": float("nan")}, "divisor"),
        ({"divisor": 1e-300}, "divisor"),
    ],
)
def test_refused_call_changes_nothing(kwargs, words):
    first, second = arena_pair()
    program = encode([[NOTIFY, 0, 1]], n_bases=1, n_counters=2, advance=[(0, 0, 5)])
    good = {"bases": [0], "counters": [2, 3], "tag": 1, "divisor": 1.0}
    with pytest.raises(ValueError, match=words):
        program.begin(first, **{**good, **kwargs})
    call = program.begin(first, **good)
    assert call.seq == 1
    watcher = encode([[AWAIT, 0, 0, 1]], n_counters=1)
    assert call.run(0, 1.0).status == "ok"
    assert watcher.replay(second, [], [2], 1, 1.0, 1.0).status == "ok"


def test_writer_beyond_the_arena_is_refused():
    arena = Arena.create(1, 0, 1)
    with pytest.raises(ValueError, match="writer rank 1; the arena has 1 ranks"):
        encode([[AWAIT, 0, 1, 1]], n_counters=1).begin(arena, [], [0], 0, 1.0)


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan")])
def test_unbounded_timeout_is_refused(timeout_s):
    arena = Arena.create(1, 0, 1)
    call = encode([[ZERO, 0, 0, 0]], n_bases=1).begin(arena, [0], [], 0, 1.0)
    with pytest.raises(ValueError, match="timeout_s"):
        call.run(0, timeout_s)
    with pytest.raises(ValueError, match="stream is 1"):
        call.run(1, 1.0)


def test_streams_of_one_call_run_interleaved_with_other_calls():
    first, second = arena_pair()
    writer = encode([[NOTIFY, 0, 1], [NOTIFY, 0, 1]], streams=[(0, 1), (1, 1)], n_counters=1, advance=[(0, 0, 2)])
    reader = encode([[AWAIT, 0, 0, 1], [AWAIT, 0, 0, 2]], streams=[(0, 1), (1, 1)], n_counters=1, advance=[(0, 0, 2)])
    a, b = (writer.begin(first, [], [0], 1, 1.0) for _ in range(2))
    c, d = (reader.begin(second, [], [0], 1, 1.0) for _ in range(2))
    assert a.run(0, 1.0).status == "ok"
    assert c.run(0, 1.0).status == "ok"
    late = c.run(1, 0.02)
    assert (late.status, late.expected, late.seen, late.op) == ("timeout", 2, 1, 1)
    assert a.run(1, 1.0).status == "ok"
    assert c.run(1, 1.0).status == "ok"
    assert b.run(0, 1.0).status == "ok"
    assert d.run(0, 1.0).status == "ok"
    assert d.run(1, 0.02).expected == 4
