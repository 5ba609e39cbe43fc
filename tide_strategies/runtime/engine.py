"""One arena with its counters and staging, and the collectives that run through it.

There is one engine per installation and process group. It owns the shared memory of the group's ranks; parameter
groups get their collectives from it (``runtime/group.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tide_strategies import _native
from tide_strategies.collectives import signals
from tide_strategies.collectives.schedule import SELF, Schedule, Space
from tide_strategies.runtime import autopsy
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.bootstrap import agree
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.encode import Encoded, encode
from tide_strategies.runtime.failure import failure
from tide_strategies.runtime.rails.rail import Rail
from tide_strategies.runtime.slots import Landing, Slot
from tide_strategies.runtime.trace import Trace
from tide_strategies.topology import Topology

#: Codes that a rank leaves in the arena's abort record.
ABORT_FAILURE, ABORT_CLOSED = 1, 2


class Engine:
    """Shared memory and call order of one process group.

    Args:
        exchange: all-gathers a small payload among the ranks, in rank order.
        rank: this rank in the group.
        topology: all ranks of the group. Without a rail they share one arena: one node, or several virtual ones.
        slots: upper bound on landing slots (ring and pinned together), which sizes the counter table.
        timeout_s: bound of every wait.
        rail: connects the nodes; then the ranks of each node share an arena of their own. The engine closes it.

    Raises:
        TideArenaError: on every rank, if shared memory cannot be set up between them.
    """

    def __init__(
        self,
        exchange: Callable[[bytes], list[bytes]],
        rank: int,
        topology: Topology,
        *,
        slots: int,
        timeout_s: float,
        rail: Rail | None = None,
    ) -> None:
        self.rank, self.topology, self.timeout_s, self.rail = rank, topology, timeout_s, rail
        self._exchange = exchange
        self.book = CallBook(topology, slots)
        self._slots_used = 0
        host_ranks = topology.ranks if rail is None else topology.local_ranks
        try:
            self.arena = SharedArena.create(exchange, rank, topology.ranks, self.book.counters, timeout_s, host_ranks)
        except BaseException:
            self._close_rail()
            raise
        #: Where calls are noted, if they are (``runtime/trace.py``). The engine closes it.
        self.trace: Trace | None = None
        self._reductions = 0
        self._memory: dict[tuple[Space, int], dict[int, _native.Mapping]] = {}
        self._regions: dict[tuple[Space, int], int] = {}

    def add_slot(self, nbytes: int, part: str) -> Slot:
        """Make a landing slot of ``nbytes`` on every rank, counted as ``part`` of the arena."""
        # The ranks of a node share it. A landing has an address even where nothing lands.
        nodes = dict.fromkeys(self.topology.node_of(r) for r in self.arena.host)
        offsets = {node: self.arena.grow(max(nbytes, 1), part=part) for node in nodes}
        slot = Slot(self._slots_used, (self.arena.native, offsets[self.topology.node_of(self.rank)]))
        self._slots_used += 1
        if self.topology.lane:
            self._map_slot(slot.index, {r: offsets[self.topology.node_of(r)] for r in self.arena.host}, nbytes)
        return slot

    def _map_slot(self, slot: int, offsets: Mapping[int, int], nbytes: int) -> None:
        """Make the landings of other nodes known, into which a lane puts. No rank goes on before all know them."""
        error = None
        try:
            self._map(Space.LANDING, slot, offsets, max(nbytes, 1))
        except OSError as e:
            error = f"{type(e).__name__}: {e}"
        agree(self._exchange, self.rank, error, "mapping a landing slot", code="TIDE-F021")

    def landing(self, nbytes: int) -> Landing:
        """A landing of ``nbytes``, not yet in any slot."""
        return Landing(_native.Window(max(nbytes, 1)))

    def reserve(self, memory: Mapping[tuple[Space, int], int]) -> None:
        """Reserve what schedules need beside their arguments, for every rank and mapped by all. Called once.

        From then on the rail may bring what peers send.
        """
        for (space, index), nbytes in sorted(memory.items(), key=lambda item: (item[0][0].value, item[0][1])):
            offsets = {r: self.arena.grow(nbytes, part=space.value) for r in self.arena.host}
            self._map(space, index, offsets, nbytes)
        if self.rail is not None:
            self.rail.start(self.arena.native, self.book.counter(signals.RAILED))

    def _map(self, space: Space, index: int, offsets: Mapping[int, int], nbytes: int) -> None:
        maps = {r: _native.Mapping(self.arena.native, offset, nbytes) for r, offset in offsets.items()}
        self._regions[space, index] = len(self._memory)
        self._memory[space, index] = maps
        if self.rail is not None:
            self.rail.open(maps[self.rank].address, maps[self.rank].bytes)

    def region(self, space: Space, index: int) -> int:
        """Number of memory that was reserved (of a landing: by its slot), alike on all ranks."""
        return self._regions[space, index]

    def next_bank(self) -> int:
        """The bank of the next reduction across nodes: they alternate, whichever groups they belong to."""
        self._reductions += 1
        return self._reductions % 2

    def collective(self, schedule: Schedule, inputs: int, label: str) -> Collective:
        """Make a schedule callable. ``label`` names it in messages, for example "all-gather of 'blocks.3'"."""
        if self.rail is None:
            return Collective(self, encode(schedule, inputs), label)
        from tide_strategies.runtime.rails.collective import RailCollective  # it builds on this module

        return RailCollective(self, schedule, inputs, label)

    def address(self, space: Space, index: int, at: int) -> int:
        """Address in this process of memory that was reserved (of a landing: by its slot), of rank ``at`` (or SELF)."""
        return self._memory[space, index][self.rank if at == SELF else at].address

    def raise_failure(self, outcome: _native.Outcome, label: str) -> None:
        """Tell every rank that this one stops, then raise."""
        error = failure(
            outcome,
            rank=self.rank,
            call=label,
            counter=f"counter {self.book.counter_name(outcome.counter)}",
            peer_call=f"call {outcome.peer_seq}: {self.book.label(outcome.peer_tag)}",
            timeout_s=self.timeout_s,
            aborted=self.arena.native.aborted(),
            gone=None if self.rail is None else self.rail.words(outcome.writer),
        )
        wait = {
            "call": label,
            "counter": self.book.counter_name(outcome.counter),
            "writer": outcome.writer,
            "expected": outcome.expected,
            "seen": outcome.seen,
            "peer_call": self.book.label(outcome.peer_tag) if outcome.peer_seq >= 0 else "",
        }
        autopsy.record(
            rank=self.rank,
            pids=self.arena.host_pids,
            kind=outcome.status,
            message=str(error),
            waits=[wait] if outcome.op >= 0 and outcome.writer >= 0 else [],
        )
        self.arena.native.abort(ABORT_FAILURE, str(error).encode()[:400])
        if self.rail is not None:
            self.rail.abort()
        raise error

    def bytes_by_part(self) -> dict[str, int]:
        """Shared memory by part; it exists once for all ranks of the host (of the node, with a rail)."""
        return self.arena.bytes_by_part()

    def pinned_by_part(self) -> dict[str, int]:
        """Nothing: there is no device to reach it."""
        return {}

    def close(self) -> None:
        """Release the arena. Tensors that still show its memory keep their own part of it alive."""
        if self.trace is not None:
            self.trace.close()
        self._close_rail()
        self._memory.clear()
        self.arena.close()

    def _close_rail(self) -> None:
        if self.rail is not None:
            self.rail.close()


class Collective:
    """A schedule bound to an engine: one native call replays it."""

    def __init__(self, engine: Engine, encoded: Encoded, label: str) -> None:
        self._engine, self._encoded, self.label = engine, encoded, label
        self._streams = encoded.streams

    @property
    def operations(self) -> int:
        """Native operations of one call."""
        return len(self._encoded.operations)

    def addresses(self, landing: int = 0, output: int = 0, slot: int = 0) -> list[int]:
        """Addresses of everything but the inputs, in the order the program wants them.

        ``landing`` is this rank's, in ``slot``; those of other nodes are in the same slot.
        """
        fixed = {Space.LANDING: landing, Space.OUTPUT: output}
        return [
            fixed[space]
            if space in fixed and at < 0
            else self._engine.address(space, slot if space is Space.LANDING else index, at)
            for space, index, at in self._encoded.bases
        ]

    def _counters(self, slot: int = 0) -> list[int]:
        return [self._engine.book.counter(c, slot) for c in self._encoded.counters]

    def begin(self, inputs: Sequence[int], others: Sequence[int], tag: int, slot: int) -> Any:
        """Take the next place in the order of calls, to run stream by stream with :meth:`run`."""
        counters = self._counters(slot)
        return self._encoded.program.begin(self._engine.arena.native, [*inputs, *others], counters, tag, 1.0)

    def run(self, call: Any, stream: str) -> float:
        """Run one stream of a call; returns the seconds it waited for peers.

        Raises:
            TidePeerError: a peer died, stalled or reported an error.
            TideMismatchError: a peer runs another collective.
        """
        outcome = call.run(self._streams[stream], self._engine.timeout_s)
        if outcome.status != "ok":
            self._engine.raise_failure(outcome, self.label)
        return outcome.waited_s

    def replay(self, inputs: Sequence[int], others: Sequence[int], tag: int, divisor: float) -> float:
        """Run a whole call; returns the seconds it waited for peers. Raises like :meth:`run`."""
        engine = self._engine
        outcome = self._encoded.program.replay(
            engine.arena.native, [*inputs, *others], self._counters(), tag, divisor, engine.timeout_s
        )
        if outcome.status != "ok":
            engine.raise_failure(outcome, self.label)
        return outcome.waited_s
