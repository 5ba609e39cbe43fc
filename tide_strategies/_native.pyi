"""The native core: a shared-memory arena between processes of one host, and the replay of encoded schedules.

Linux only; links neither torch nor CUDA. Bad arguments raise ``ValueError``, refusals of the operating system
``OSError`` with its errno.
"""

import builtins
from collections.abc import Sequence
from typing import Any, Literal

Status = Literal["ok", "timeout", "peer_dead", "aborted", "mismatch"]

def kernel_variants() -> list[str]:
    """The instruction-set variants of the arithmetic that this processor can run, best last; all give the same bits."""

def kernel_variant() -> str:
    """The variant in use."""

def use_kernel_variant(name: str) -> None:
    """Choose a variant for this process (for tests)."""

class Arena:
    """A sealed, private memory file with a control region (header, call tags, counter cells) at its front."""

    @staticmethod
    def create(ranks: int, rank: int, counters: int) -> Arena:
        """Create the file, with ``counters`` counters that have one cell per writer rank."""
    @staticmethod
    def attach(fd: int, ranks: int, rank: int, counters: int) -> Arena:
        """Attach to a file made by :meth:`create`; ``fd`` is duplicated. Anything that does not fit is refused."""
    @staticmethod
    def available_bytes(proc: str = "/proc") -> int:
        """How much may be reserved: the least of MemAvailable, the room in the memory cgroups, and RLIMIT_FSIZE."""
    @property
    def fd(self) -> int:
        """The file descriptor, owned by the arena."""
    @property
    def ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def counters(self) -> int: ...
    @property
    def control_bytes(self) -> int:
        """Size of the control region: the first offset that is free for use."""
    @property
    def bytes(self) -> int:
        """Length of the file."""
    @property
    def allocated_bytes(self) -> int:
        """Memory that the file holds."""
    def reserve(self, offset: int, bytes: int) -> None:
        """Get memory for the range, widened to whole pages; ``OSError`` (ENOMEM, ENOSPC, EFBIG) if there is none.

        Any rank may call it, and repeating it is free. What a failed call got stays until :meth:`release`.
        """
    def release(self, offset: int, bytes: int) -> None:
        """Give the memory of the whole pages in the range back; it reads as zeros afterwards."""
    def watch(self, rank: int, pid: int) -> None:
        """Let waits on ``rank`` notice that process ``pid`` is dead; ``ProcessLookupError`` if it is already."""
    def abort(self, code: int, message: builtins.bytes) -> bool:
        """Record the abort (the first one wins, which the result tells) and end every wait of every rank.

        ``code`` fits 32 bits; 400 bytes of the message are kept.
        """
    def aborted(self) -> tuple[int, int, builtins.bytes] | None:
        """Rank, code and message of the abort, if there was one."""

class Mapping:
    """A shared mapping of a page-aligned, reserved range of the arena; unmapped when dropped."""

    def __init__(self, arena: Arena, offset: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        """See :meth:`Window.tensor`."""

class Window:
    """A range of virtual addresses whose contents can be exchanged. At first, any access faults."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def map(self, arena: Arena, offset: int) -> None:
        """Show the arena's range at ``offset`` (page-aligned, reserved). Addresses and tensors stay."""
    def poison(self) -> None:
        """Show private pages of 0xFF (NaN in every floating-point type); writes to them reach nobody."""
    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        """A writable one-dimensional DLPack object over part of the window, for ``torch.from_dlpack``.

        ``dtype`` is a torch name without ``torch.``. The tensor made from it has its own storage, at offset zero,
        and keeps the window alive. Two threads must not remap and use it at once.
        """

class Outcome:
    """How a replay ended, and if not well, where."""

    @property
    def status(self) -> Status: ...
    @property
    def op(self) -> int:
        """Index of the op that failed; -1 if none did (also if the arena was aborted beforehand)."""
    @property
    def writer(self) -> int:
        """Rank that was awaited; -1 if none."""
    @property
    def counter(self) -> int:
        """Physical counter that was awaited; -1 if none."""
    @property
    def expected(self) -> int:
        """Value awaited, modulo 2**32."""
    @property
    def seen(self) -> int:
        """Value found, modulo 2**32."""
    @property
    def waited_s(self) -> float:
        """Seconds spent waiting, over all awaits."""
    @property
    def peer_seq(self) -> int:
        """The awaited rank's call with this call's number, or else its latest; -1 if it has begun none."""
    @property
    def peer_tag(self) -> int:
        """The tag of that call; -1 if none."""

class Call:
    """One use of a program. It keeps its counters' base values, so its streams may run at different times."""

    @property
    def seq(self) -> int:
        """Number of this call among all of this rank on the arena, from 1."""
    def run(self, stream: int, timeout_s: float) -> Outcome:
        """Run one stream without the GIL. All its waits together end within ``timeout_s`` seconds.

        A signal handler that raises (Ctrl-C) ends it too.
        """

class Program:
    """An encoded schedule. Malformed input raises ``ValueError`` naming the op and the word.

    Args:
        ops: little-endian int64, 12 words per op. Word 0 is the opcode, the rest:

            0 copy: src base, src offset, dst base, dst offset, rows, elements per row, src pitch, dst pitch,
            src dtype, dst dtype (0 fp32, 1 bf16, 2 raw bytes; offsets and pitches in bytes)

            1 sum: dst base, dst offset, elements, src dtype, dst dtype, number of sources, index of the first
            source, flags (1: add to what dst holds; 2: divide by the call's divisor before that). fp32, in source order

            2 zero: dst base, dst offset, bytes

            3 notify: counter, amount, reader rank (-2: every other rank; all the same here, where readers share cells)

            4 await: counter, writer rank, count (relative to the counter's total over all earlier calls)
        sources: pairs of little-endian int64: base, byte offset.
        streams: first op and number of ops per stream.
        n_bases: how many addresses a call brings.
        n_counters: how many counters a call brings.
        advance: counter, writer rank, amount: how far that writer's cell comes in one call.
    """

    def __init__(
        self,
        ops: bytes,
        sources: bytes,
        streams: Sequence[tuple[int, int]],
        n_bases: int,
        n_counters: int,
        advance: Sequence[tuple[int, int, int]],
    ) -> None: ...
    @property
    def n_ops(self) -> int: ...
    @property
    def n_streams(self) -> int: ...
    def begin(self, arena: Arena, bases: Sequence[int], counters: Sequence[int], tag: int, divisor: float) -> Call:
        """Begin a call: note the counters' bases, advance this rank's totals, publish the tag (32 bits).

        All ranks of the arena begin their calls in the same order. A refused call (``ValueError``) changes nothing.
        """
    def replay(
        self,
        arena: Arena,
        bases: Sequence[int],
        counters: Sequence[int],
        tag: int,
        divisor: float,
        timeout_s: float,
    ) -> Outcome:
        """:meth:`begin` and all streams in order, within ``timeout_s`` seconds of waiting altogether."""
