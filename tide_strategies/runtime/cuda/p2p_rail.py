"""The rail between GPU nodes that works anywhere: messages of torch.distributed (gloo), through pinned host memory.

A put goes the way of a piece: the stream waits for a free piece of pinned memory, copies bytes there, and says so in a
word that a thread of the host looks at, which sends them. The receiver has pinned memory as large as what peers put
into, and writes bytes where they belong; credits of the schedule say that they are awaited nowhere else by then. It
then stores into a cell of host memory, for which the intake waits and copies the bytes on to the device: from the
peer's own schedule it knows what comes with each signal. So a put never waits for the peer's device, only for its
network, and everything that streams are given is enqueued in the schedule's order, as with any rail.

All-gathers and reductions have threads, pieces and connections' tags of their own (``p2p_threads``). Waits of streams
are those of a ``cuda.Control`` whose cells are in host memory, which has bounds, a record, and a release.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Space
from tide_strategies.collectives.signals import RAILS
from tide_strategies.errors import TidePeerError, TideTimeoutError
from tide_strategies.runtime.bootstrap import Exchange, agree
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.p2p_threads import (
    NOBODY,
    WORDS_BYTES,
    Incoming,
    Link,
    Listener,
    Outgoing,
    waiting,
)
from tide_strategies.runtime.cuda.pieces import piece_bytes
from tide_strategies.runtime.cuda.rail import Arrival, Part
from tide_strategies.runtime.failure import PATIENCE, STOP
from tide_strategies.runtime.rails.gloo import LINGER_S, break_off, close_at_exit, join
from tide_strategies.runtime.rails.message import Kind, Message
from tide_strategies.topology import Topology

#: A wait shorter than this is not worth asking whether its peer is there.
_SUSPICIOUS_S = 1.0
#: Beyond the timeout, after which waits are let pass without the watchdog if it cannot run.
_STARVED_S = 5.0
#: How long a rank that stops takes to tell why.
_TELLING_S = 2.0
#: How long the host waits before it gives exceptions a chance.
_SLICE_S = 0.2
_KINDS = ("all-gathers", "reduce-scatters")


class CudaP2PRail:
    """A rail of one process group on this rank. Peers are ranks of the topology; streams are handles.

    Args:
        group: the gloo group of the rail's ranks, in the order of nodes, used by nobody else (``connect_gloo``).
        exchange: all-gathers a small payload among all ranks, in rank order.
        rank: this rank.
        topology: nodes and ranks; a rail joins the ranks of one place in their nodes.
        device: CUDA device ordinal.
        timeout_s: bound of every wait for a peer.
        book: of the engine's counters.
    """

    fetches = True

    def __init__(
        self,
        group: Any,
        exchange: Exchange,
        rank: int,
        topology: Topology,
        device: int,
        timeout_s: float,
        book: CallBook,
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._group, self._exchange, self._device, self._book = group, exchange, device, book
        self._pid, self._closed, self._stopped = os.getpid(), False, False
        self._control = cuda.Control.in_host_memory(device, topology.ranks, rank, book.counters + RAILS)
        self._numbers: dict[tuple[Space, int], int] = {}
        self._regions: dict[int, tuple[int, int]] = {}  # by number: address of the host's copy, and bytes
        self._memory: dict[tuple[Space, int], tuple[cuda.HostMemory, int]] = {}  # and where it is on the device
        self._takes: dict[tuple[int, int], cuda.Program] = {}
        self._taken: dict[tuple[int, int], int] = {}  # signals by (writer, counter)
        self._gone: dict[int, tuple[str, float]] = {}  # why, and since when
        self._fault: TidePeerError | None = None
        piece = piece_bytes(topology.nodes)
        self._links: dict[int, Link] = {}
        self._out: dict[int, list[Outgoing]] = {}
        self._in: dict[int, list[Incoming]] = {}
        self._listeners: dict[int, Listener] = {}
        kinds = range(RAILS)
        for place, peer in enumerate(topology.rail_ranks(rank)):
            if peer == rank:
                continue
            link = self._links[peer] = Link(group, place, peer, self._control, timeout_s, self._lose)
            self._out[peer] = [Outgoing(link, k, book.counters + k, device, piece) for k in kinds]
            self._in[peer] = [Incoming(link, k, book.counters, self._regions, piece) for k in kinds]
            self._listeners[peer] = Listener(link, self._hear)
        # Some calls into the driver hold the interpreter's lock while they wait for room in a queue.
        self._control.release_after(timeout_s + _STARVED_S)
        close_at_exit(self)
        for thread in self._threads():
            thread.start()

    def register(self, space: Space, index: int, memory: cuda.Mapping) -> None:
        """Let memory of a schedule be put from and into. Collective; the same on all ranks, with equal sizes.

        Raises:
            TideArenaError: on every rank alike, if one has no room for its copy in host memory.
        """
        number = self._numbers[space, index] = len(self._numbers)
        self._regions[number] = 0, 0
        if space is Space.OUTBOX:  # puts read it, and none writes into it
            return
        host, error = None, None
        try:
            host = cuda.HostMemory(self._device, memory.bytes)
        except (OSError, MemoryError, RuntimeError) as e:
            error = f"{type(e).__name__}: {e}"
        agree(self._exchange, self.rank, error, f"pinning {memory.bytes} bytes of host memory", code="TIDE-F021")
        assert host is not None
        self._memory[space, index] = host, memory.address
        self._regions[number] = host.address, host.bytes

    def put(
        self, peer: int, source: int, nbytes: int, space: Space, index: int, offset: int, counter: int, stream: int
    ) -> Arrival:
        """Send ``nbytes`` from address ``source`` to byte ``offset`` of the peer's (space, index), then notify.

        Raises:
            ValueError: memory that is not registered.
            TideTimeoutError: thousands of messages before it have not been sent in time.
        """
        number = self._numbers.get((space, index))
        if number is None:
            raise ValueError(f"{space.value} {index} is not registered with the rail")
        kind = Kind.LONG_PUT if nbytes else Kind.NOTIFY
        message = Message(kind, counter, region=number, offset=offset, nbytes=nbytes)
        return self._sender(peer, counter).enqueue(message, source, stream)

    def notify(self, peer: int, counter: int, stream: int) -> Arrival:
        """Send one signal of ``counter`` to ``peer``, after what was sent to it before for collectives of this kind.

        Raises like :meth:`put`.
        """
        return self._sender(peer, counter).enqueue(Message(Kind.NOTIFY, counter), 0, stream)

    def take(self, writer: int, counter: int, count: int, stream: int, parts: Sequence[Part] = ()) -> Arrival:
        """Let the stream go on when ``count`` signals have come beyond those before, and ``parts`` are in place."""
        wait_for = self._takes.get((writer, count))
        if wait_for is None:
            wait_for = self._takes[writer, count] = waiting(self._control, writer, count)
        wait_for.begin(self._control, [], [counter], 0, 1.0).enqueue(0, stream)
        for part in parts:
            host, address = self._memory[part.space, part.index]
            host.store(address + part.offset, part.offset, part.nbytes, stream)
        total = self._taken[writer, counter] = (self._taken.get((writer, counter), 0) + count) % (1 << 32)
        return Arrival(writer, counter, total)

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Wait on the host until peers have what this rank sends and it has what they send, or it stops.

        That is up to threads of Python. A call of torch's that holds the interpreter's lock while a stream's queue has
        no room would keep them from it, and a stream that has to wait for them would never make room: so nothing is
        given to the program's streams that has to, nor while a peer's has to. The device waits for the same then, if it
        has nothing else to do.

        Raises:
            TidePeerError: one of these peers is gone.
            TideTimeoutError: they have not in time, and nothing has stopped this rank for that.
        """
        begun = time.monotonic()
        for a in arrivals:
            while not self._control.delivered(a.counter, a.writer, a.total, _SLICE_S):
                # Who watches the streams has the first word.
                now, words = time.monotonic(), self._words(a.counter, a.writer)
                gone, since = self._gone.get(a.writer, ("", now))
                if now - since > 2 * _SUSPICIOUS_S:
                    raise TidePeerError(f"TIDE: rank {a.writer} {gone}: {words}. {STOP}")
                if now - begun > self.timeout_s + _STARVED_S:
                    raise TideTimeoutError(
                        f"TIDE: no progress within timeout_s={self.timeout_s:g}: {words}. {PATIENCE} {STOP}"
                    )

    def check(self) -> None:
        """Raise if a peer has stopped or gone wrong, or a stream is held up here by one that is gone or too slow.

        A stream's time counts from the first check that finds it there, so it is to be called every now and then.

        Raises:
            TidePeerError: a peer stopped first, is gone, or has sent what cannot be.
            TideTimeoutError: naming what is awaited, and of whom.
        """
        if self._fault is not None:
            raise self._fault
        for wait in self._control.overdue(min(_SUSPICIOUS_S, self.timeout_s)):
            if wait["writer"] in self._gone:
                gone, _ = self._gone[wait["writer"]]
                raise TidePeerError(f"TIDE: rank {wait['writer']} {gone}: {self._blocked(wait)}. {STOP}")
        for wait in self._control.overdue(self.timeout_s):
            raise TideTimeoutError(
                f"TIDE: no progress within timeout_s={self.timeout_s:g}: {self._blocked(wait)}. {PATIENCE} {STOP}"
            )
        if self._control.released and not self._stopped:
            raise TideTimeoutError(
                f"TIDE: no progress within timeout_s={self.timeout_s:g}: rank {self.rank} waited on its device for "
                f"messages, and in a call that let nothing else run. {STOP}"
            )

    def stop(self, why: str = "") -> None:
        """This rank stops: let its streams go on, and tell the peers why. From any thread; bounded."""
        if self._stopped:
            return
        self._stopped = True
        self._control.release()
        for link in self._links.values():
            link.ending.set()
        text = why.encode()[: WORDS_BYTES // 2]
        self._say(Message(Kind.ABORT, seq=self.rank, nbytes=len(text)), text, _TELLING_S)

    def close(self) -> None:
        """Send what is left, take leave, and end. Bounded in time, whatever the peers do. Idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if not self._stopped:
            self._flush(LINGER_S)
            self._say(Message(Kind.LEAVE), b"", _TELLING_S)
            # Closing a connection could take from a peer what it has not read yet: it takes leave when it has.
            join(self._listeners.values(), LINGER_S)
        for senders in self._out.values():
            for sender in senders:
                sender.end()
        for link in self._links.values():
            break_off(self._group, link.place, NOBODY)
        join(self._threads(), LINGER_S)
        self._stopped = True

    def pinned_by_part(self) -> dict[str, int]:
        """Bytes of pinned host memory: twins of what peers put into, pieces for what is sent, and cells."""
        senders = [sender for threads in self._out.values() for sender in threads]
        out = {"control": self._control.pinned_bytes, "pieces": sum(s.pinned_bytes for s in senders)}
        for (space, _), (host, _) in self._memory.items():
            out[space.value] = out.get(space.value, 0) + host.pinned_bytes
        return out

    def outstanding(self) -> int:
        """How many times a stream has yet to get through a wait of this rail's."""
        return self._control.outstanding()

    def _threads(self) -> list[threading.Thread]:
        senders = [t for threads in self._out.values() for t in threads]
        receivers = [t for threads in self._in.values() for t in threads]
        return [*senders, *receivers, *self._listeners.values()]

    def _sender(self, peer: int, counter: int) -> Outgoing:
        if peer not in self._out:
            raise ValueError(f"rank {peer} is not on the rail of rank {self.rank}, which joins {sorted(self._out)}")
        return self._out[peer][self._book.reduces(counter)]

    def _lose(self, peer: int, words: str, fault: bool) -> None:
        self._gone.setdefault(peer, (words, time.monotonic()))
        if fault and self._fault is None:
            self._fault = TidePeerError(f"TIDE: rank {peer} {words}. {STOP}")

    def _hear(self, rank: int, why: str) -> None:
        if self._fault is None:
            self._fault = TidePeerError(f"TIDE: rank {rank} stopped first: {why}")

    def _say(self, message: Message, words: bytes, seconds: float) -> None:
        """Tell all peers, and wait for so long in all until they have heard it."""
        deadline, under_way = time.monotonic() + seconds, []
        for listener in self._listeners.values():
            with contextlib.suppress(RuntimeError):  # a peer that has gone
                under_way.append(listener.say(message, words))
        for work, _ in under_way:
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def _flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        marks = [(sender, sender.flush()) for senders in self._out.values() for sender in senders]
        for sender, mark in marks:
            while not mark.is_set() and sender.is_alive() and time.monotonic() < deadline:
                mark.wait(0.02)

    def _blocked(self, wait: dict[str, Any]) -> str:
        words = self._words(wait["counter"], wait["writer"])
        return f"{words}: expected {wait['expected']}, seen {wait['seen']}"

    def _words(self, number: int, writer: int) -> str:
        if number >= self._book.counters:
            kind = _KINDS[number - self._book.counters]
            return f"rank {self.rank} has sent to rank {writer} for {kind} what that does not receive"
        return f"rank {self.rank} awaits counter {self._book.counter_name(number)} of rank {writer} on the rail"
