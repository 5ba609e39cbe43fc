"""The rail that works anywhere: point-to-point messages of torch.distributed (gloo), by threads beside the streams.

For every rank on this rank's rail there is a sending and a receiving thread. Streams begin to send and go on; the
sender says when a source has been read. The receiver writes what arrives where it belongs and then adds to the peer's
cell in this host's arena, so that waiting is the same as within a host. Threads never wait for each other, nor for a
stream: whatever the schedules do, what was sent is taken in.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies._native import Arena
from tide_strategies.runtime.rails.gloo import (
    LINGER_S,
    WHILE_CONNECTED,
    break_off,
    bytes_at,
    close_at_exit,
    connect_gloo,
    join,
    lost,
    tensor_at,
)
from tide_strategies.runtime.rails.message import INLINE_BYTES, MESSAGE_BYTES, Kind, Message, parse, payload
from tide_strategies.topology import Topology

_MESSAGES, _BYTES, _NOBODY = 1, 2, 3  # tags
#: Messages that may come in while one is dealt with.
_AHEAD = 4
#: Beyond ``timeout_s``, so that whoever waits for a send has the first word.
_GRACE_S = 5.0


class P2PRail:
    """Messages between the ranks of one rail, one on each node.

    Args:
        group: the gloo process group of the rail's ranks, used by nobody else.
        ranks: these ranks, in the group's order.
        rank: this rank.
        timeout_s: bound of every wait for a peer.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._group, self._pid = group, os.getpid()
        self._places = {r: i for i, r in enumerate(ranks) if r != rank}
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._memory: list[tuple[int, int]] = []
        self._gone: dict[int, str] = {}
        self._closed = False

    def open(self, address: int, nbytes: int) -> None:
        """See :meth:`Rail.open`."""
        self._memory.append((address, nbytes))

    def start(self, arena: Arena, railed: int) -> None:
        """See :meth:`Rail.start`."""
        self._arena, self._railed = arena, railed
        for peer, place in self._places.items():
            self._senders[peer] = _Sender(self, peer, place)
            self._receivers[peer] = _Receiver(self, peer, place)
        for thread in (*self._senders.values(), *self._receivers.values()):
            thread.start()
        close_at_exit(self)

    def notify(self, peer: int, counter: int, seq: int, tag: int) -> None:
        """See :meth:`Rail.notify`."""
        self._senders[peer].send(Message(Kind.NOTIFY, counter, seq, tag))

    def put(
        self, peer: int, address: int, nbytes: int, region: int, offset: int, counter: int, seq: int, tag: int
    ) -> None:
        """See :meth:`Rail.put`."""
        sender = self._senders[peer]
        if nbytes > INLINE_BYTES:
            sender.send(Message(Kind.LONG_PUT, counter, seq, tag, region, offset, nbytes), address=address)
            return
        sender.send(Message(Kind.PUT, counter, seq, tag, region, offset, nbytes), bytes_at(address, nbytes))
        # It has been read, perhaps before longer ones: that is in order, for all puts so far are awaited at once.
        self._arena.deliver(self._railed, peer)

    def words(self, peer: int) -> str | None:
        """See :meth:`Rail.words`."""
        return self._gone.get(peer)

    def abort(self) -> None:
        """See :meth:`Rail.abort`."""
        record = self._arena.aborted()
        if record is None:
            return
        rank, code, text = record
        for sender in self._senders.values():
            # Codes of this package are small positive numbers.
            sender.send(Message(Kind.ABORT, code, rank, nbytes=len(text)), text)
        self._flush(LINGER_S)

    def close(self) -> None:
        """See :meth:`Rail.close`."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._senders:
            self._end_threads()

    def _end_threads(self) -> None:
        for sender in self._senders.values():
            sender.send(Message(Kind.LEAVE))
        self._flush(LINGER_S)
        # Closing a connection could take from a peer what it has not read yet: it takes leave when it has.
        if self._arena.aborted() is None:
            join(self._receivers.values(), LINGER_S)
        self._disconnect()
        join(self._receivers.values(), LINGER_S)
        join(self._senders.values(), LINGER_S)

    def _flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        marks = [threading.Event() for _ in self._senders]
        for mark, sender in zip(marks, self._senders.values(), strict=True):
            sender.under_way.put(mark)
        for mark, sender in zip(marks, self._senders.values(), strict=True):
            while not mark.is_set() and sender.is_alive() and time.monotonic() < deadline:
                mark.wait(0.02)

    def _disconnect(self) -> None:
        """Make every wait of the threads end."""
        for peer, place in self._places.items():
            if self._receivers[peer].is_alive() or self._senders[peer].is_alive():
                break_off(self._group, place, _NOBODY)
        for sender in self._senders.values():
            sender.under_way.put(None)

    def _lose(self, peer: int, words: str) -> None:
        self._gone.setdefault(peer, words)
        self._arena.lose(peer)


class _Sender(threading.Thread):
    """Sending begins in the caller's thread; this one waits until it is done."""

    def __init__(self, rail: P2PRail, peer: int, place: int) -> None:
        super().__init__(name=f"tide-rail-to-{peer}", daemon=True)
        #: Messages that are being sent, marks to set when everything before is sent, None to end.
        self.under_way: queue.SimpleQueue[_Sending | threading.Event | None] = queue.SimpleQueue()
        self._rail, self._peer, self._place = rail, peer, place
        self._bound = datetime.timedelta(seconds=rail.timeout_s + _GRACE_S)

    def send(self, message: Message, text: bytes | memoryview = b"", address: int = 0) -> None:
        """Begin to send a message with ``text`` in it, or with the bytes at ``address`` behind it."""
        tensors = [torch.frombuffer(message.pack(text), dtype=torch.uint8)]
        if message.kind is Kind.LONG_PUT:
            tensors.append(tensor_at(address, message.nbytes))
        send = self._rail._group.send
        try:
            works = [send([t], self._place, tag) for t, tag in zip(tensors, (_MESSAGES, _BYTES), strict=False)]
        except RuntimeError as e:  # the connection is gone, which matters to those who wait for the peer
            self._rail._lose(self._peer, lost(e))
            return
        self.under_way.put(_Sending(works, tensors, message.kind is Kind.LONG_PUT))

    def run(self) -> None:
        try:
            while (sending := self.under_way.get()) is not None:
                if isinstance(sending, threading.Event):
                    sending.set()
                    continue
                for work in sending.works:
                    work.wait(self._bound)
                if sending.reads:
                    self._rail._arena.deliver(self._rail._railed, self._peer)
        except Exception as e:
            self._rail._lose(self._peer, lost(e))


@dataclass(frozen=True, slots=True)
class _Sending:
    """Sends under way, the tensors that they read, and whether these include the source of a put."""

    works: list[Any]
    tensors: list[torch.Tensor]
    reads: bool


class _Receiver(threading.Thread):
    def __init__(self, rail: P2PRail, peer: int, place: int) -> None:
        super().__init__(name=f"tide-rail-from-{peer}", daemon=True)
        self._rail, self._peer, self._place = rail, peer, place
        self._bound = datetime.timedelta(seconds=rail.timeout_s + _GRACE_S)

    def run(self) -> None:
        rail = self._rail
        try:
            posted = deque(self._post(bytearray(MESSAGE_BYTES)) for _ in range(_AHEAD))
            while True:
                work, buffer = posted.popleft()
                work.wait(WHILE_CONNECTED)
                message = parse(buffer, [nbytes for _, nbytes in rail._memory], rail._arena.counters)
                if not self._take(message, buffer):
                    return
                posted.append(self._post(buffer))
        except ValueError as e:
            rail._lose(self._peer, f"has sent {e}")
        except Exception as e:
            rail._lose(self._peer, lost(e))

    def _post(self, buffer: bytearray) -> tuple[Any, bytearray]:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        return self._rail._group.recv([tensor], self._place, _MESSAGES), buffer

    def _take(self, message: Message, buffer: bytearray) -> bool:
        """Do what a message says; False if it is the last one."""
        rail, arena = self._rail, self._rail._arena
        if message.kind is Kind.LEAVE:
            rail._lose(self._peer, "has left (TIDE was closed there, or the program ended)")
            return False
        if message.kind is Kind.ABORT:
            arena.abort(message.counter, bytes(payload(buffer, message)), message.seq)
            return True
        if message.nbytes:
            address = rail._memory[message.region][0] + message.offset
            if message.kind is Kind.PUT:
                bytes_at(address, message.nbytes)[:] = payload(buffer, message)
            else:
                rail._group.recv([tensor_at(address, message.nbytes)], self._place, _BYTES).wait(self._bound)
        arena.deliver(message.counter, self._peer, 1, message.seq, message.tag)
        return True


def open_rail(group: dist.ProcessGroup, topology: Topology, rank: int, name: str, timeout_s: float) -> P2PRail:
    """Connect the ranks on the rail of ``rank``. Collective; arguments and errors as of :func:`connect_gloo`."""
    return P2PRail(connect_gloo(group, topology, rank, name, timeout_s), topology.rail_ranks(rank), rank, timeout_s)
