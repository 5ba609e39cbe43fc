"""Whether the hosts of a group enqueue the same collectives in the same order.

The ranks of a host compare what they begin in memory that they share (``order.py``). Between hosts nothing that is
enqueued tells: a rail brings bytes and signals, whichever call they are of, and two hosts that differ could both come
to an end, with wrong parameters. So the first rank of each host keeps a digest of all that it has begun, and a thread
of its own publishes it now and then on a board, and reads that of the next host. A call costs a checksum of four bytes,
a third of a microsecond; all else is beside the training, and what differs is known up to two intervals later.

The board is another program's service (the process group's store), which may fail or not answer. Then calls are no
longer compared, which the log says once; nothing else depends on it.
"""

from __future__ import annotations

import atexit
import logging
import struct
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Protocol

from tide_strategies.errors import TideMismatchError
from tide_strategies.runtime.arena import SharedArena
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.failure import mismatch

#: Calls by which two hosts may differ in how far they are, or were when they last published, and still be compared.
_KEPT = 1 << 16
#: Calls that a word names: a difference in any of these is told to the call.
_TOLD = 1024
_TAG_BYTES = 4
_HEAD = struct.Struct("<QI")
#: How long the last comparison waits for the next host to publish its last calls, and how often it looks.
_LAST_S, _LOOK_S = 2.0, 0.05
#: How long the board may take to answer: at the end, and before the log says that it does not.
_END_S, _SILENT_S = 1.0, 30.0

_log = logging.getLogger("tide_strategies")


class Board(Protocol):
    """Where hosts leave words for each other. Calls may take any time, and raise; one thread makes them."""

    @property
    def interval_s(self) -> float:
        """How often each host may publish and read, in seconds, so that the board bears all of them."""

    def publish(self, key: str, value: bytes) -> None:
        """Put ``value`` in the place of what was published under ``key`` before."""

    def read(self, key: str) -> bytes | None:
        """What was last published under ``key``; None if nothing was. Does not wait for it."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank says that it has begun.

    Args:
        first: number of a call; those up to it are known by their digest alone.
        digest: of the tags of all calls up to ``first``.
        tags: of the calls after it, four bytes each.
    """

    first: int
    digest: int
    tags: bytes

    @property
    def last(self) -> int:
        """Number of the last call that it speaks of."""
        return self.first + len(self.tags) // _TAG_BYTES

    def digest_of(self, number: int) -> int:
        """Digest of all calls up to ``number``, from ``first`` to ``last``."""
        return zlib.crc32(self.tags[: (number - self.first) * _TAG_BYTES], self.digest)

    def tag(self, number: int) -> int | None:
        """Tag of call ``number``, if it is one of those that are named."""
        if not self.first < number <= self.last:
            return None
        return int.from_bytes(self.tags[(number - self.first - 1) * _TAG_BYTES :][:_TAG_BYTES], "little")

    def pack(self) -> bytes:
        """As bytes."""
        return _HEAD.pack(self.first, self.digest) + self.tags

    @classmethod
    def parse(cls, data: bytes) -> Word:
        """From bytes.

        Raises:
            ValueError: it is no such word.
        """
        if len(data) < _HEAD.size or (len(data) - _HEAD.size) % _TAG_BYTES:
            raise ValueError(f"{len(data)} bytes that are no word of this version of TIDE")
        first, digest = _HEAD.unpack_from(data)
        return cls(first, digest, data[_HEAD.size :])


class Calls:
    """What this rank has begun: the latest calls, and a digest of all up to each of them.

    A digest is the CRC-32 of the tags so far, which a swap of two neighbours always changes (its polynomial is
    irreducible, of degree 32, and so divides no ``(a ^ b) * (x**32 + 1)``); other differences escape it once in 2**32.
    """

    def __init__(self) -> None:
        self.begun = self._digest = 0
        self._tags = bytearray(_KEPT * _TAG_BYTES)
        self._digests = [0] * _KEPT

    def note(self, tag: int) -> None:
        """The next call begins, and is ``tag``."""
        number = self.begun + 1
        at, four = number % _KEPT, tag.to_bytes(_TAG_BYTES, "little")
        self._digests[at] = self._digest = zlib.crc32(four, self._digest)
        self._tags[at * _TAG_BYTES : at * _TAG_BYTES + _TAG_BYTES] = four
        self.begun = number  # last: what another thread reads up to here is there

    def word(self) -> Word:
        """What there is to say. From any thread."""
        last = self.begun
        first = max(last - _TOLD, 0)
        begin, end = ((n + 1) % _KEPT * _TAG_BYTES for n in (first, last))
        tags = self._tags[begin:end] if begin <= end else self._tags[begin:] + self._tags[:end]
        return Word(first, self._digests[first % _KEPT], bytes(tags))

    def tag(self, number: int) -> int:
        """Tag of a call that is kept."""
        return int.from_bytes(self._tags[number % _KEPT * _TAG_BYTES :][:_TAG_BYTES], "little")

    def compare(self, word: Word) -> tuple[int, int]:
        """How many calls are the same as ``word`` says, and the first one that is not, or 0. From any thread.

        Neither is known (0, 0) where the ranks are too far apart: this one has not come to the first call of the word,
        or what it kept of that is overwritten.
        """
        last = min(self.begun, word.last)
        if last < word.first:
            return 0, 0
        same, different = last, 0
        if self._digests[last % _KEPT] != word.digest_of(last):
            numbers = range(word.first, last + 1)
            different = next((n for n in numbers if self._digests[n % _KEPT] != word.digest_of(n)), last)
            same = 0
        # Only now: what is read while the main thread goes on may be overwritten meanwhile.
        return (0, 0) if self.begun - word.first >= _KEPT else (same, different)


class HostOrder:
    """Compares the calls of a host with those of the next one; on the first rank of each host.

    Args:
        host: shared memory of its ranks, which have stopped if it has been aborted.
        book: names for calls.
        board: where hosts leave words.
    """

    def __init__(self, host: SharedArena, book: CallBook, board: Board) -> None:
        self._host, self._book, self._board = host, book, board
        self._rank, self._peer = host.rank, (host.host[-1] + 1) % host.size
        self._calls = Calls()
        #: Takes note of the next call, given its tag.
        self.note = self._calls.note
        self._published = self._compared = 0
        self._ahead: Word | None = None
        self._found: TideMismatchError | None = None
        self._asked: float | None = None  # since when the board has not answered
        self._told, self._closing = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="tide-host-order", daemon=True)
        self._thread.start()
        # A thread that is within the board's code when the interpreter finalises could end the process with an abort.
        atexit.register(self._at_exit)

    def look(self) -> TideMismatchError | None:
        """What has been found so far. Waits for nothing."""
        asked = self._asked
        if asked is not None and time.monotonic() - asked > _SILENT_S:
            words = f"the store has not answered for {_SILENT_S:g} s"
            # Not here: whoever looks has waits to bound, and the log may be held up.
            threading.Thread(target=self._lose, args=(words,), daemon=True).start()
            self._asked = None
        return None if self._closing.is_set() else self._found

    def close(self) -> TideMismatchError | None:
        """Compare for the last time, and end; what has been found. Bounded in time, whatever the board does."""
        atexit.unregister(self._at_exit)
        self._closing.set()
        self._thread.join(_LAST_S + _END_S)
        if self._thread.is_alive():
            self._lose("the store does not answer")
        return self._found

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._board.interval_s) and self._found is None:
                self._exchange()
            deadline = time.monotonic() + _LAST_S
            while not self._through and self._host.aborted() is None and time.monotonic() < deadline:
                self._exchange()
                if not self._through:  # the next host has yet to publish its last calls
                    time.sleep(_LOOK_S)
        except Exception as e:
            self._lose(f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}")

    @property
    def _through(self) -> bool:
        """Whether there is nothing more to find."""
        return self._found is not None or self._compared == self._published == self._calls.begun

    def _exchange(self) -> None:
        """Publish what is new here, and compare with what is new there."""
        if self._through:  # a store that nobody needs any more may go
            return
        self._asked = time.monotonic()
        own = self._calls.word()
        if own.last > self._published:
            self._board.publish(str(self._rank), own.pack())
            self._published = own.last
        word = self._ahead or self._read()
        self._asked = None
        if word is not None:
            # Too far ahead, it is kept until this host gets there: the next word would be farther still.
            self._ahead = word if self._calls.begun < word.first else None
            same, different = self._calls.compare(word)
            self._compared = max(self._compared, same)
            if different:
                self._found = mismatch(self._words(word, different))

    def _read(self) -> Word | None:
        data = self._board.read(str(self._peer))
        return None if data is None else Word.parse(data)

    def _words(self, word: Word, number: int) -> str:
        tag = word.tag(number)
        if tag is None:
            return (
                f"in call {number} or before, too long ago to tell in which, rank {self._rank} began another one than "
                f"rank {self._peer}, on another host"
            )
        own, other = (self._book.label(t) for t in (self._calls.tag(number), tag))
        return f"rank {self._rank} began call {number}, {own}, while rank {self._peer}, on another host, began {other}"

    def _lose(self, why: str) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "TIDE: rank %d cannot compare its calls with those of rank %d, on another host, beyond call %d of %d "
                "(%s). Training goes on; should the hosts begin different collectives from now on, they are not told.",
                self._rank,
                self._peer,
                self._compared,
                self._calls.begun,
                why,
            )

    def _at_exit(self) -> None:
        found = self.close()
        if found is not None:
            sys.stderr.write(f"tide_strategies: {found}\n")
