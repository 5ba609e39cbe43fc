"""The host's side of the message rail between GPU nodes: threads that send, receive, and listen to one peer each.

They make no call into the driver. What they tell a stream, or hear from one, are words in pinned memory: a driver's
call that waits for the device (to load a kernel, to give memory back) may hold a lock of the driver's while the device
waits for what a thread here is to bring.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Await, Counter, Schedule
from tide_strategies.errors import TideTimeoutError
from tide_strategies.runtime.cuda.pieces import PIECES
from tide_strategies.runtime.cuda.rail import Arrival
from tide_strategies.runtime.encode import encode
from tide_strategies.runtime.failure import PATIENCE, STOP
from tide_strategies.runtime.rails.gloo import WHILE_CONNECTED, lost, tensor_at
from tide_strategies.runtime.rails.message import Kind, Message, parse, payload

#: Messages to one peer that streams have not come to yet; beyond that the host waits for them, within bounds.
_UNDER_WAY = 4096
#: Messages that may come in while one is dealt with.
_AHEAD = 4
#: Of a message without bytes, and of words of farewell.
_HEAD_BYTES, WORDS_BYTES = 64, 2048
#: Tags of messages and their bytes, for all-gathers and for reductions; of words; and one that nobody sends with.
_TAGS = ((1, 2), (3, 4))
_WORDS, NOBODY = 5, 6
#: How often a thread that waits for a stream looks whether it is to end.
_LOOK_S = 0.2
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Link:
    """A connection with one peer.

    Args:
        group: the gloo group; ``place``: the peer's rank in it.
        peer: its rank.
        control: cells of this rank in host memory.
        timeout_s: bound of waits for the peer.
        lose: is told why the peer will take or send nothing more, as a predicate of it, and whether that is a fault.
        ending: set when the threads are to end.
    """

    group: Any
    place: int
    peer: int
    control: cuda.Control
    timeout_s: float
    lose: Callable[[int, str, bool], None]
    ending: threading.Event = field(default_factory=threading.Event)

    @property
    def bound(self) -> datetime.timedelta:
        """Of a message under way: later than whoever waits on a stream, which then has the first word."""
        return datetime.timedelta(seconds=self.timeout_s + 10.0)


class _Thread(threading.Thread, ABC):
    """Runs until there is nothing more to do with its peer."""

    def __init__(self, what: str, link: Link) -> None:
        super().__init__(name=f"tide-rail-{what}-{link.peer}", daemon=True)
        self._link = link

    def run(self) -> None:
        try:
            self._work()
        except ValueError as e:
            self._link.lose(self._link.peer, f"has sent {e}", True)
        except Exception as e:
            self._link.lose(self._link.peer, lost(e), False)

    @abstractmethod
    def _work(self) -> None:
        """What the thread does; ValueError: the peer has sent what cannot be."""


class Outgoing(_Thread):
    """What collectives of one kind send to a peer.

    A stream copies bytes to the next piece of pinned memory once that is free, and says so; the thread sends pieces in
    the order in which they were enqueued, and says which are free.

    Args:
        link: the peer.
        kind: 0 for all-gathers, 1 for reductions.
        room: number of the control's counter, in the peer's cell, by which streams wait for a free piece.
        device: CUDA device ordinal.
        piece_bytes: of a piece; the same on all ranks.
    """

    def __init__(self, link: Link, kind: int, room: int, device: int, piece_bytes: int) -> None:
        super().__init__(f"{'gathers' if kind == 0 else 'sums'}-to", link)
        self._tags, self._room, self._piece = _TAGS[kind], room, piece_bytes
        self._memory = cuda.HostMemory(device, PIECES * piece_bytes, PIECES)
        first = self._memory.address
        self._pieces = [tensor_at(first + i * piece_bytes, piece_bytes) for i in range(PIECES)]
        heads = [bytearray(_HEAD_BYTES) for _ in range(PIECES)]
        self._heads = [(head, torch.frombuffer(head, dtype=torch.uint8)) for head in heads]
        self._wait = waiting(link.control, link.peer, 1)
        self._queue: queue.SimpleQueue[tuple[Message, int] | threading.Event | None] = queue.SimpleQueue()
        self._messages = self._tickets = 0  # enqueued so far; tickets are numbers of pieces
        self._sent: deque[list[Any]] = deque()  # sends under way, by piece
        self._freed = 0
        link.control.deliver(room, link.peer, PIECES)

    @property
    def pinned_bytes(self) -> int:
        """Host memory of its pieces and their words."""
        return self._memory.pinned_bytes

    def enqueue(self, message: Message, source: int, stream: int) -> Arrival:
        """Send a message with the bytes at ``source``, if it has some, when the stream comes to it.

        The peer has all of it when what is returned has arrived.

        Raises:
            TideTimeoutError: thousands of messages before it have not been sent in time.
        """
        self._limit()
        self._messages += 1
        ticket, at = self._tickets, 0
        # Known to the thread before the stream waits for it.
        self._queue.put((replace(message, seq=self._messages), ticket))
        while at < message.nbytes or ticket == self._tickets:
            slot, n = ticket % PIECES, min(self._piece, message.nbytes - at)
            self._wait.begin(self._link.control, [], [self._room], 0, 1.0).enqueue(0, stream)
            if n:
                self._memory.fetch(slot * self._piece, source + at, n, stream)
            ticket, at = ticket + 1, at + n
            self._memory.mark(slot, ticket & _WORD, stream)
        self._tickets = ticket
        return Arrival(self._link.peer, self._room, (PIECES + ticket) & _WORD)

    def flush(self) -> threading.Event:
        """An event that is set when everything enqueued so far is sent."""
        mark = threading.Event()
        self._queue.put(mark)
        return mark

    def end(self) -> None:
        """Let the thread end when it looks next."""
        self._link.ending.set()
        self._queue.put(None)

    def _limit(self) -> None:
        deadline = time.monotonic() + self._link.timeout_s
        while self._queue.qsize() >= _UNDER_WAY:
            if time.monotonic() > deadline or self._link.control.released:
                raise TideTimeoutError(
                    f"TIDE: no progress within timeout_s={self._link.timeout_s:g}: {_UNDER_WAY} messages to rank "
                    f"{self._link.peer} wait to be sent. {PATIENCE} {STOP}"
                )
            time.sleep(0.001)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._finish()
                item.set()
            elif not self._send(*item):
                return
            elif self._queue.empty():
                self._finish()

    def _send(self, message: Message, ticket: int) -> bool:
        """Send a message when the stream has come to it; False if it is not to be sent any more."""
        link, at, first = self._link, 0, ticket
        while at < message.nbytes or ticket == first:
            slot, n = ticket % PIECES, min(self._piece, message.nbytes - at)
            ticket += 1
            if not self._filled(slot, ticket):
                return False
            works = []
            if ticket == first + 1:
                head, tensor = self._heads[slot]
                packed = message.pack()
                head[: len(packed)] = packed
                works.append(link.group.send([tensor], link.place, self._tags[0]))
            if n:
                works.append(link.group.send([self._pieces[slot][:n]], link.place, self._tags[1]))
            self._sent.append(works)
            if len(self._sent) > PIECES // 2:
                self._finish(1)
            at += n
        return True

    def _filled(self, slot: int, ticket: int) -> bool:
        if self._memory.marked(slot, ticket & _WORD, 0.0):
            return True
        self._finish()  # the stream may be waiting for these
        while not self._memory.marked(slot, ticket & _WORD, _LOOK_S):
            if self._link.ending.is_set():
                return False
        return True

    def _finish(self, pieces: int = PIECES) -> None:
        """Wait for so many of the sends under way, and give their pieces back."""
        for _ in range(min(pieces, len(self._sent))):
            for work in self._sent.popleft():
                work.wait(self._link.bound)
            self._freed += 1
            self._link.control.deliver(self._room, self._link.peer, (PIECES + self._freed) & _WORD)


class Incoming(_Thread):
    """What a peer sends for collectives of one kind: bytes to where streams fetch them, and its counters.

    Args:
        link: the peer.
        kind: 0 for all-gathers, 1 for reductions.
        counters: how many counters peers may tell of.
        regions: by number, where bytes go that are put into it, and how many; shared with whoever adds to it.
        piece_bytes: as of :class:`Outgoing`.
    """

    def __init__(
        self, link: Link, kind: int, counters: int, regions: Mapping[int, tuple[int, int]], piece_bytes: int
    ) -> None:
        super().__init__(f"{'gathers' if kind == 0 else 'sums'}-from", link)
        self._tags, self._counters, self._regions, self._piece = _TAGS[kind], counters, regions, piece_bytes
        self._totals = [0] * counters
        self._messages = 0

    def _work(self) -> None:
        posted = deque(self._post(bytearray(_HEAD_BYTES)) for _ in range(_AHEAD))
        while True:
            work, head = posted.popleft()
            work.wait(WHILE_CONNECTED)
            message = parse(head, [nbytes for _, nbytes in self._regions.values()], self._counters)
            self._messages += 1
            if message.seq != self._messages:
                raise ValueError(f"message {message.seq} where message {self._messages} was due")
            if message.nbytes:
                self._receive(message)
            posted.append(self._post(head))
            self._totals[message.counter] += 1
            self._link.control.deliver(message.counter, self._link.peer, self._totals[message.counter] & _WORD)

    def _post(self, head: bytearray) -> tuple[Any, bytearray]:
        tensor = torch.frombuffer(head, dtype=torch.uint8)
        return self._link.group.recv([tensor], self._link.place, self._tags[0]), head

    def _receive(self, message: Message) -> None:
        address = self._regions[message.region][0] + message.offset
        whole, works = tensor_at(address, message.nbytes), []
        for at in range(0, message.nbytes, self._piece):
            works.append(self._link.group.recv([whole[at : at + self._piece]], self._link.place, self._tags[1]))
        for work in works:
            work.wait(self._link.bound)


class Listener(_Thread):
    """Hears why a peer stops, or that it takes leave.

    Args:
        link: the peer.
        stopped: is told which rank stopped first, and why.
    """

    def __init__(self, link: Link, stopped: Callable[[int, str], None]) -> None:
        super().__init__("words-from", link)
        self._stopped = stopped

    def say(self, message: Message, words: bytes = b"") -> Any:
        """Send words; what to wait for."""
        packed = message.pack(words)
        tensor = torch.frombuffer(packed, dtype=torch.uint8)
        return self._link.group.send([tensor], self._link.place, _WORDS), tensor

    def _work(self) -> None:
        buffer = bytearray(WORDS_BYTES)
        while True:
            self._link.group.recv([torch.frombuffer(buffer, dtype=torch.uint8)], self._link.place, _WORDS).wait(
                WHILE_CONNECTED
            )
            message = parse(buffer, [], 0)
            if message.kind is Kind.LEAVE:
                self._link.lose(self._link.peer, "has left (TIDE was closed there, or the program ended)", False)
                return
            self._stopped(message.seq, bytes(payload(buffer, message)).decode(errors="replace"))


def waiting(control: cuda.Control, writer: int, count: int) -> cuda.Program:
    """A wait of one stream until the writer's cell of a counter has grown by ``count``."""
    counter = Counter("signal")
    ops = (Await(counter, writer, count),)
    schedule = Schedule("wait", control.rank, control.ranks, {"main": ops}, {(counter, writer): count})
    made: cuda.Program = encode(schedule, 0, cuda.Program).program
    return made
