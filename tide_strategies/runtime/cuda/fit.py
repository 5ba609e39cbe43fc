"""Fit a schedule to a device: what the framework's own kernels do is left out, and own cells are counted too."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import replace

from tide_strategies.collectives.schedule import Await, Copy, Counter, Land, Notify, Op, Put, Schedule, Sum

#: Stream whose copies the framework's kernels make, or a kernel of ours that casts (``casts_by_kernel``).
CASTS = "cast"
#: Streams that are left of it, on either side of the copies: when they may begin, and that they are done.
BEFORE_CAST, AFTER_CAST = "before cast", "after cast"

#: Every source and result that begins at a multiple of so many bytes can be moved in the widest loads and stores.
_VECTOR_BYTES = 16


def fit(schedule: Schedule) -> Schedule:
    """The same schedule without the caller's copies, and with what the device must know to count its own cells."""
    return counted(without_casts(schedule))


def without_casts(schedule: Schedule) -> Schedule:
    """The same schedule without the caller's copies."""
    streams: dict[str, tuple[Op, ...]] = {}
    for name, ops in schedule.streams.items():
        if name != CASTS:
            streams[name] = ops
            continue
        parts = {
            BEFORE_CAST: tuple(op for op in ops if isinstance(op, Await)),
            AFTER_CAST: tuple(op for op in ops if not isinstance(op, (Await, Copy))),
        }
        streams.update({part: kept for part, kept in parts.items() if kept})
    return replace(schedule, streams=streams)


def casts_by_kernel(schedule: Schedule) -> Schedule:
    """The same schedule with each cast as the sum of one source, for a kernel that works with few thread blocks."""
    casts = (op for op in schedule.streams[CASTS] if isinstance(op, Copy))
    sums = tuple(Sum(op.dst, (op.src,), op.items, op.src_item, op.dst_item, scaled=False) for op in casts)
    return counted(replace(schedule, streams={**schedule.streams, CASTS: sums}))


def counted(schedule: Schedule) -> Schedule:
    """The same schedule, which says what it adds to each cell of this rank.

    A device stores totals rather than adding, so that a call has to know them, whether or not this rank waits for any.
    """
    others = {key: n for key, n in schedule.advance.items() if key[1] != schedule.rank}
    return replace(schedule, advance={**others, **_own_totals(schedule)})


def _own_totals(schedule: Schedule) -> Mapping[tuple[Counter, int], int]:
    told: collections.Counter[Counter] = collections.Counter()
    for ops in schedule.streams.values():
        told.update(op.counter for op in ops if isinstance(op, Notify))
        told.update(op.signal for op in ops if isinstance(op, Put))
    return {(counter, schedule.rank): count for counter, count in told.items()}


def sums_aligned(schedule: Schedule, landing: bool) -> bool:
    """Whether all sums (all landings) move whole vectors, if every address that a call brings is aligned."""
    for ops in schedule.streams.values():
        for op in ops:
            if isinstance(op, Land if landing else Sum):
                offsets = [op.dst.offset, *(s.offset for s in op.sources)]
                if any(offset % _VECTOR_BYTES for offset in offsets):
                    return False
    return True
