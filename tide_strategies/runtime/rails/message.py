"""What travels on a rail: messages of bounded size, each followed by the bytes of a put if they do not fit in.

A message says which of the sender's cells grows, and where bytes go; it also names the sender's call, by which the
receiver notices that they run different collectives. What arrives is checked against this rank's own memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

#: Longest message; the receiver posts buffers of this size. What fits needs no agreement on when to send it.
MESSAGE_BYTES = 256 * 1024
#: The same on both sides, or they refuse each other.
_MAGIC = 0x54494452
_HEAD = struct.Struct("<IIIIIIQQ")
#: Puts of at most this many bytes travel within their message.
INLINE_BYTES = MESSAGE_BYTES - _HEAD.size


class Kind(IntEnum):
    """What a message is."""

    NOTIFY = 1
    PUT = 2  # the bytes are in the message
    LONG_PUT = 3  # the bytes follow
    ABORT = 4  # the sender has stopped; the bytes are why
    LEAVE = 5  # the sender is through with everything and says no more


@dataclass(frozen=True, slots=True)
class Message:
    """One message, without the bytes that it carries.

    Args:
        kind: what it is.
        counter: number of the counter whose cell grows by 1; of an abort, its code.
        seq, tag: the sender's call; of an abort, ``seq`` is the rank that stopped first.
        region: number of the receiver's memory that bytes go to.
        offset: where in it, in bytes.
        nbytes: how many bytes.
    """

    kind: Kind
    counter: int = 0
    seq: int = 0
    tag: int = 0
    region: int = 0
    offset: int = 0
    nbytes: int = 0

    def pack(self, payload: bytes | memoryview = b"") -> bytearray:
        """The message as bytes, ``payload`` behind it."""
        out = bytearray(_HEAD.size + len(payload))
        words = (self.kind, self.counter, self.seq, self.tag, self.region, self.offset, self.nbytes)
        _HEAD.pack_into(out, 0, _MAGIC, *words)
        out[_HEAD.size :] = payload
        return out


def parse(buffer: bytearray, regions: list[int], counters: int) -> Message:
    """Read a message for a rank that has ``regions`` (bytes of each) and so many ``counters``.

    Raises:
        ValueError: it is no message of this version of TIDE, or names what is not there.
    """
    magic, kind, counter, seq, tag, region, offset, nbytes = _HEAD.unpack_from(buffer)
    if magic != _MAGIC or kind not in Kind.__members__.values():
        raise ValueError(f"something that is no message of this version of TIDE (kind {kind})")
    message = Message(Kind(kind), counter, seq, tag, region, offset, nbytes)
    if message.kind in (Kind.ABORT, Kind.LEAVE):
        if nbytes > INLINE_BYTES:
            raise ValueError(f"a message of {nbytes} bytes; at most {INLINE_BYTES} fit")
        return message
    if counter >= counters:
        raise ValueError(f"a notification of counter {counter}; there are {counters}")
    if message.kind is Kind.NOTIFY:
        return message
    if region >= len(regions) or offset + nbytes > regions[region]:
        raise ValueError(f"a put of {nbytes} bytes to byte {offset} of region {region}; there are {regions}")
    if message.kind is Kind.PUT and nbytes > INLINE_BYTES:
        raise ValueError(f"a message of {nbytes} bytes; at most {INLINE_BYTES} fit")
    return message


def payload(buffer: bytearray, message: Message) -> memoryview:
    """The bytes within a message."""
    return memoryview(buffer)[_HEAD.size : _HEAD.size + message.nbytes]
