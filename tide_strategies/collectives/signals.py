"""Counters of the several-node collectives.

A cell has one audience: either every rank of the writer's node, or one rank. Counters with an index by node or round
are made so that each (counter, writer) has one reader, and so one cell serves shared memory and rails alike.
"""

from __future__ import annotations

from tide_strategies.collectives.schedule import Counter

#: Names of the counters of which every landing slot has its own.
PER_SLOT = frozenset({"vacated", "opened"})

#: Names of the counters by which reductions tell ranks of other nodes; all else that these are told is of all-gathers.
REDUCING = frozenset({"arrived", "credit"})
#: Communicators of a rail: all-gathers and reductions have one each, or a call of one would wait for the other's.
RAILS = 2

#: Every wave: the writer's inbox holds what the wave needs. Read by the node.
FILLED = Counter("filled")
#: The writer has landed a wave out of the inboxes of its node. Read by the node.
EMPTIED = Counter("emptied")
#: The writer's stage may be written again. Read by its sender of the first doubling round.
STAGE_FREE = Counter("stage_free")
#: With one rank a node: the writer has vacated the landing, into which its sender of the first round writes.
OPENED = Counter("opened")
#: Of the writer to itself, between its streams: one more partial is summed.
SUMMED = Counter("summed")
#: Of the writer to itself, between its streams: the own shards are in the stage.
PLACED = Counter("placed")
#: Of the writer to itself, between its streams: all forwards of an all-gather have been read.
FORWARDED = Counter("forwarded")
#: Of the writer to itself, between its streams: the own stage may be used again.
RELEASED = Counter("released")
#: In no schedule; of a rail that sends beside the streams: so many puts to the writer have been read at their source.
RAILED = Counter("railed")


def sent(bank: int) -> Counter:
    """Of the writer to itself: partials left a bank of the outbox, or (last in a call) the whole bank is free."""
    return Counter("sent", bank)


def arrived(node: int) -> Counter:
    """A partial of the writer is in the inbox of its rail peer on ``node``."""
    return Counter("arrived", node)


def credit(node: int) -> Counter:
    """The writer's rail peer on ``node`` may send it the next partial."""
    return Counter("credit", node)


def gathered(step: int) -> Counter:
    """A part of the writer's shards of a doubling round is in the stage of that round's target."""
    return Counter("gathered", step)


def clear(step: int) -> Counter:
    """The writer has the heads of the round before: its sender of round ``step`` may begin."""
    return Counter("clear", step)
