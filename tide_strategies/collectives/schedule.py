"""The operations that a collective is made of, and the schedule that holds them.

A schedule is data: for one rank, ordered lists of small operations on named streams. Executors run it, the verifier
replays it, the simulator times it. Operands are symbolic (:class:`Ref`), so a schedule is built once per parameter
group and replayed with fresh addresses.

**Counters** carry all synchronisation. A counter has one cell per rank that writes it, which the ranks that it notifies
can see; a cell only grows, and only its writer changes it. ``Notify`` adds 1 to the own cell;
``Await(counter, writer, count)`` waits until the writer's cell has reached ``count`` more than the total that all
*earlier* calls add to it (``Schedule.advance`` says how much one call adds). So ``count == 0`` means "all earlier calls
are through", and the same schedule serves every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

#: ``Ref.at``: this rank's own memory.
SELF = -1
#: ``Ref.at``: all ranks of this node at once (NVSwitch multicast, or one physical landing that they share).
NODE = -2


class Item(Enum):
    """What one element of a copy or sum is; the raw kinds are moved without being looked at."""

    F32 = "f32"
    BF16 = "bf16"
    RAW1 = "raw1"
    RAW2 = "raw2"
    RAW4 = "raw4"
    RAW8 = "raw8"

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return {"f32": 4, "bf16": 2, "raw1": 1, "raw2": 2, "raw4": 4, "raw8": 8}[self.value]

    @property
    def raw(self) -> bool:
        """Whether the element is moved as bytes only."""
        return self.value.startswith("raw")

    @classmethod
    def of_size(cls, size: int) -> Item:
        """The raw element of 1, 2, 4 or 8 bytes."""
        return cls(f"raw{size}")


class Space(Enum):
    """Kinds of memory that a schedule addresses."""

    INPUT = "input"  # shard p (all-gather) or unsharded gradient p (reduce-scatter), where it already lies
    LANDING = "landing"  # unsharded parameters of the group
    OUTPUT = "output"  # packed reduce-scatter output
    STAGING = "staging"  # contributions pushed to the rank that sums them
    STAGE = "stage"  # all-gather receive stage of a rail
    OUTBOX = "outbox"  # node partials waiting for their rail
    INBOX = "inbox"  # node partials that arrived
    SPARE = "spare"  # own-node partials that may not land yet
    RUNNING = "running"  # fp32 sum of the waves landed so far, where the output is narrower


@dataclass(frozen=True, slots=True)
class Ref:
    """A symbolic address: ``offset`` bytes into memory ``space[index]`` of rank ``at`` (or SELF, or NODE)."""

    space: Space
    index: int = 0
    offset: int = 0
    at: int = SELF


@dataclass(frozen=True, slots=True)
class Counter:
    """A synchronisation counter with one cell per writing rank."""

    name: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``rows`` rows of ``items`` elements; pitches in bytes. Different items mean a cast (F32 <-> BF16)."""

    src: Ref
    dst: Ref
    items: int
    src_item: Item
    dst_item: Item
    rows: int = 1
    src_pitch: int = 0
    dst_pitch: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Send ``nbytes`` to rank ``dst.at`` over the rail, then add 1 to the own cell of ``signal`` there.

    The stream goes on when the source has been read; that the bytes arrived, only ``signal`` tells. Puts of one stream
    to one rank with one signal arrive in order, others in any.
    """

    src: Ref
    dst: Ref
    nbytes: int
    signal: Counter


@dataclass(frozen=True, slots=True)
class Sum:
    """dst = sources added in fp32 in the order given; ``scaled`` divides by the call's divisor before storing."""

    dst: Ref
    sources: tuple[Ref, ...]
    items: int
    src_item: Item
    dst_item: Item
    scaled: bool = False
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Land:
    """Fold fp32 node partials into dst in the order given.

    A source at NODE means the sum of that address over all ranks of the node: one multimem.ld_reduce.
    """

    dst: Ref
    sources: tuple[Ref, ...]
    items: int
    dst_item: Item
    scaled: bool = False
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Zero:
    """Set ``nbytes`` bytes to zero."""

    dst: Ref
    nbytes: int


@dataclass(frozen=True, slots=True)
class Notify:
    """Add 1 to the own cell of a counter, as rank ``to`` sees it (NODE: every rank of this node).

    To a rank of another node it travels like a put without bytes, in order with the puts that have the same signal.
    """

    counter: Counter
    to: int = NODE


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until ``writer``'s cell is ``count`` above the total of all earlier calls."""

    counter: Counter
    writer: int
    count: int


@dataclass(frozen=True, slots=True)
class Record:
    """Mark a point of this stream that others of the same call can wait for."""

    event: str


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """Continue only after the named point of another stream of the same call."""

    event: str


Op = Copy | Put | Sum | Land | Zero | Notify | Await | Record | WaitEvent


@dataclass(frozen=True)
class Schedule:
    """One rank's part in one collective.

    Args:
        name: which collective, for people.
        rank: this rank.
        ranks: N.
        streams: operations per stream, in an order in which one thread may run the streams one after another.
        advance: what one call adds to the cell of each (counter, writer).
        memory: bytes that every rank must provide of each (space, index) that is not an argument of the call.
        issue: (stream, number of operations) again and again: an order in which all operations can be given to queues
            that work in order, with nothing ever waiting for what is given later, on any rank. Empty: stream by stream.
            Whoever enqueues in this order cannot deadlock, however many streams share a queue.
    """

    name: str
    rank: int
    ranks: int
    streams: Mapping[str, tuple[Op, ...]]
    advance: Mapping[tuple[Counter, int], int]
    memory: Mapping[tuple[Space, int], int] = field(default_factory=dict)
    issue: tuple[tuple[str, int], ...] = ()
