"""Fit a schedule to a device: a kernel casts, and own cells are counted too."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import replace

from tide_strategies.collectives.schedule import Copy, Counter, Land, Notify, Op, Put, Schedule, Sum

#: Every source and result that begins at a multiple of so many bytes can be moved in the widest loads and stores.
_VECTOR_BYTES = 16


def with_casts(schedule: Schedule) -> Schedule:
    """The same schedule with each cast as the sum of one source, for a kernel that works with few thread blocks.

    Copies that cast nothing stay copies, which take no thread block.
    """
    return replace(schedule, streams={name: tuple(map(_cast, ops)) for name, ops in schedule.streams.items()})


def _cast(op: Op) -> Op:
    if isinstance(op, Copy) and op.src_item is not op.dst_item:
        return Sum(op.dst, (op.src,), op.items, op.src_item, op.dst_item, scaled=False)
    return op


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
