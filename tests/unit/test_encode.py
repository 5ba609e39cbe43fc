"""The native table says what the schedule says, word for word."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.all_gather import all_gather, reuse
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import (
    NODE,
    SELF,
    Await,
    Copy,
    Counter,
    Item,
    Land,
    Notify,
    Op,
    Put,
    Record,
    Ref,
    Schedule,
    Space,
    Sum,
    WaitEvent,
    Zero,
)
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.encode import AWAIT, COPY, NOTIFY, SUM, WORDS, ZERO, Encoded, encode
from tide_strategies.topology import Topology

FP32, BF16, RAW = range(3)  # as csrc/program.h numbers them
ACCUMULATE, SCALED = 1, 2


class Table:
    """Keeps what the native program would be given."""

    def __init__(
        self, ops: bytes, sources: bytes, streams: Sequence[tuple[int, int]], bases: int, counters: int, advance: Any
    ) -> None:
        words, pairs = array("q", ops), array("q", sources)
        self.rows = [tuple(words[i : i + WORDS]) for i in range(0, len(words), WORDS)]
        self.sources = [tuple(pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
        self.streams, self.bases, self.counters, self.advance = list(streams), bases, counters, list(advance)


def schedule(*ops: Op, advance: dict[tuple[Counter, int], int] | None = None, **streams: tuple[Op, ...]) -> Schedule:
    named = streams or {"main": ops}
    return Schedule(name="test", rank=0, ranks=2, streams=named, advance=advance or {})


def row(*words: int) -> tuple[int, ...]:
    return (*words, *[0] * (WORDS - len(words)))


IN0, IN1 = Ref(Space.INPUT, 0, 8), Ref(Space.INPUT, 1, 4)
LANDING = Ref(Space.LANDING, 0, 256, NODE)
STAGING = Ref(Space.STAGING, 0, 64, 1)
OUTPUT = Ref(Space.OUTPUT, 0, 12)
LANDS = 1
A, B = Counter("a"), Counter("b", 3)

# One operation, its rows, and its sources. Two inputs come first, so 2 is the first base after them; the sources of a
# sum are numbered before its destination.
CASES: list[tuple[Op, list[tuple[int, ...]], list[tuple[int, int]]]] = [
    (Copy(IN1, LANDING, 5, Item.F32, Item.F32), [row(COPY, 1, 4, 2, 256, 1, 20, 0, 0, RAW, RAW)], []),
    (Copy(IN1, LANDING, 5, Item.RAW8, Item.RAW8), [row(COPY, 1, 4, 2, 256, 1, 40, 0, 0, RAW, RAW)], []),
    (Copy(IN0, LANDING, 5, Item.F32, Item.BF16), [row(COPY, 0, 8, 2, 256, 1, 5, 0, 0, FP32, BF16)], []),
    (
        Copy(IN0, STAGING, 5, Item.BF16, Item.F32, rows=3, src_pitch=10, dst_pitch=32),
        [row(COPY, 0, 8, 2, 64, 3, 5, 10, 32, BF16, FP32)],
        [],
    ),
    (Put(IN0, STAGING, 77, A), [row(COPY, 0, 8, 2, 64, 1, 77, 0, 0, RAW, RAW), row(NOTIFY, 0, 1, 1)], []),
    (
        Sum(OUTPUT, (STAGING, IN1, IN0), 9, Item.BF16, Item.F32, scaled=True),
        [row(SUM, 3, 12, 9, BF16, FP32, 3, 0, SCALED)],
        [(2, 64), (1, 4), (0, 8)],
    ),
    (Sum(OUTPUT, (IN0,), 9, Item.F32, Item.BF16), [row(SUM, 2, 12, 9, FP32, BF16, 1, 0, 0)], [(0, 8)]),
    (
        Land(OUTPUT, (STAGING, IN0), 9, Item.BF16, scaled=True, accumulate=True),
        [row(SUM, 3, 12, 9, FP32, BF16, 2, 0, SCALED | ACCUMULATE, LANDS)],
        [(2, 64), (0, 8)],
    ),
    (Zero(OUTPUT, 44), [row(ZERO, 2, 12, 44)], []),
    (Notify(B), [row(NOTIFY, 0, 1, Notify(B).to)], []),
    (Notify(B, to=1), [row(NOTIFY, 0, 1, 1)], []),
    (Await(B, 1, 7), [row(AWAIT, 0, 1, 7)], []),
    (Record("e"), [], []),
]


@pytest.mark.parametrize(("op", "rows", "sources"), CASES, ids=lambda v: type(v).__name__ if isinstance(v, Op) else "")
def test_each_operation_has_its_words(op: Op, rows: list[Any], sources: list[Any]) -> None:
    encoded = encode(schedule(op), 2, Table)
    assert encoded.program.rows == rows
    assert encoded.program.sources == sources
    assert encoded.operations == (op,) * len(rows)
    assert encoded.program.bases == 2 + len(encoded.bases)
    assert encoded.program.counters == len(encoded.counters)


def test_every_operation_there_is_has_a_case() -> None:
    assert {type(op) for op, *_ in CASES} | {WaitEvent} == set(Op.__args__)


def test_memory_and_counters_are_numbered_once_in_order_of_use() -> None:
    ops = (Zero(OUTPUT, 4), Zero(LANDING, 4), Zero(Ref(Space.OUTPUT, 0, 99), 4), Notify(B), Notify(A), Await(B, 1, 1))
    encoded = encode(schedule(*ops, advance={(A, 1): 2, (B, 0): 3, (Counter("c"), 1): 1}), 3, Table)
    assert encoded.inputs == 3
    assert encoded.bases == ((Space.OUTPUT, 0, SELF), (Space.LANDING, 0, NODE))
    assert [r[1] for r in encoded.program.rows[:3]] == [3, 4, 3]
    # A counter that only other ranks use counts as well: its total must advance here.
    assert encoded.counters == (B, A, Counter("c"))
    assert encoded.program.advance == [(1, 1, 2), (0, 0, 3), (2, 1, 1)]


def test_the_same_space_of_two_ranks_is_two_addresses() -> None:
    here, there = Ref(Space.STAGING, 0, 0, SELF), Ref(Space.STAGING, 0, 0, 1)
    encoded = encode(schedule(Zero(here, 4), Zero(there, 4), Zero(Ref(Space.STAGING, 1, 0, 1), 4)), 0, Table)
    assert len(encoded.bases) == 3


def test_streams_keep_their_order_and_bounds() -> None:
    encoded = encode(
        schedule(first=(Notify(A), Record("e"), Notify(B)), empty=(), last=(WaitEvent("e"), Await(A, 1, 1))), 0, Table
    )
    assert encoded.streams == {"first": 0, "empty": 1, "last": 2}
    assert encoded.program.streams == [(0, 2), (2, 0), (2, 1)]


def test_an_event_must_be_recorded_by_an_earlier_stream() -> None:
    with pytest.raises(ValueError, match="event 'e' is awaited before any earlier stream records it"):
        encode(schedule(first=(WaitEvent("e"),), last=(Record("e"),)), 0, Table)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_input_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"operation names input {index} of 2"):
        encode(schedule(Copy(Ref(Space.INPUT, index), LANDING, 1, Item.F32, Item.F32)), 2, Table)


# --- whole schedules ------------------------------------------------------------------------------------------

shapes = st.builds(ParamShape, st.integers(0, 11), st.integers(0, 4), st.sampled_from([2, 4]))
layouts = st.builds(GroupLayout, st.lists(shapes, max_size=4).map(tuple), st.integers(1, 5))


def read_back(encoded: Encoded) -> dict[str, list[Any]]:
    """What the table says, in terms of the schedule."""

    def at(base: int, offset: int) -> tuple[Any, int]:
        if base < encoded.inputs:
            return (Space.INPUT, base, SELF), offset
        return encoded.bases[base - encoded.inputs], offset

    def read(r: tuple[int, ...]) -> tuple[Any, ...]:
        if r[0] == COPY:
            return ("copy", at(r[1], r[2]), at(r[3], r[4]), *r[5:])
        if r[0] == SUM:
            sources = [at(*s) for s in encoded.program.sources[r[7] : r[7] + r[6]]]
            return ("sum", at(r[1], r[2]), r[3], r[4], r[5], sources, r[8])
        if r[0] == ZERO:
            return ("zero", at(r[1], r[2]), r[3])
        return ("notify" if r[0] == NOTIFY else "await", encoded.counters[r[1]], *r[2:4])

    rows = [read(r) for r in encoded.program.rows]
    return {name: rows[slice(n, n + c)] for name, (n, c) in zip(encoded.streams, encoded.program.streams, strict=True)}


def said(op: Op) -> tuple[Any, ...]:
    """The same of an operation that the single-node builders use."""

    def at(ref: Ref) -> tuple[Any, int]:
        return (ref.space, ref.index, ref.at), ref.offset

    kinds = {Item.F32: FP32, Item.BF16: BF16}
    if isinstance(op, Copy):
        same = op.src_item == op.dst_item
        items = op.items * op.src_item.size if same else op.items
        types = (RAW, RAW) if same else (kinds[op.src_item], kinds[op.dst_item])
        return ("copy", at(op.src), at(op.dst), op.rows, items, op.src_pitch, op.dst_pitch, *types, 0)
    if isinstance(op, Sum):
        flags = ACCUMULATE * op.accumulate + SCALED * op.scaled
        types = (kinds[op.src_item], kinds[op.dst_item])
        return ("sum", at(op.dst), op.items, *types, [at(s) for s in op.sources], flags)
    if isinstance(op, Zero):
        return ("zero", at(op.dst), op.nbytes)
    if isinstance(op, Notify):
        return ("notify", op.counter, 1, op.to)
    assert isinstance(op, Await)
    return ("await", op.counter, op.writer, op.count)


@settings(max_examples=80, deadline=None)
@given(layouts, st.integers(0, 4), st.sampled_from([16, 48]), st.sampled_from([Item.F32, Item.BF16]))
def test_what_is_read_back_is_the_schedule_and_the_executor_accepts_it(
    layout: GroupLayout, rank: int, chunk: int, grad: Item
) -> None:
    topology, rank = Topology(1, layout.ranks), rank % layout.ranks
    inputs = len(layout.params)
    for made, count in (
        (all_gather(layout, topology, rank, [Item.F32] * inputs), inputs),
        (reduce_scatter(layout, topology, rank, grad=grad, output=Item.F32, chunk_bytes=chunk), inputs),
        (reuse(topology, rank), 0),
    ):
        encoded = encode(made, count, Table)
        assert read_back(encoded) == {name: [said(op) for op in ops] for name, ops in made.streams.items()}
        assert encoded.operations == tuple(op for ops in made.streams.values() for op in ops)
        totals = {(encoded.counters[c], w): amount for c, w, amount in encoded.program.advance}
        assert totals == dict(made.advance)
        native = encode(made, count).program
        assert (native.n_ops, native.n_streams) == (len(encoded.operations), len(made.streams))
