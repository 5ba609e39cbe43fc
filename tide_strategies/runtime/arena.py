"""Memory that the ranks of one host share, handed out piece by piece, on every host alike."""

from __future__ import annotations

import mmap
import os
from types import TracebackType

from tide_strategies._native import Arena
from tide_strategies.errors import TideArenaError
from tide_strategies.runtime.bootstrap import Exchange, agree, share_fd


class SharedArena:
    """One rank's view of the arena of its host.

    The arena is an anonymous memory file: it has no name, only this user's processes that were handed its
    descriptor reach it, and it is gone with the last of them, however they end. At its front is a control region
    (counters, call tags, abort record); behind it come the pieces that :meth:`grow` hands out, at the same offsets
    on every rank.

    Attributes:
        native: the native arena, for mappings, windows and calls.
        rank: this rank's place among the arena's ranks.
        size: how many ranks there are, on all hosts together.
        host: the ranks that share this arena.
        counters: how many counters it has.
        host_pids: the process id of every rank.
    """

    def __init__(
        self, native: Arena, exchange: Exchange, rank: int, host: range, size: int, counters: int, pids: list[int]
    ) -> None:
        self._native: Arena | None = native
        self._exchange = exchange
        self.rank = rank
        self.host = host
        self.size = size
        self.counters = counters
        self.host_pids = pids
        self._end = native.control_bytes
        self._parts = {"control": native.control_bytes}

    @classmethod
    def create(
        cls, exchange: Exchange, rank: int, size: int, counters: int, timeout_s: float, host_ranks: int = 0
    ) -> SharedArena:
        """Create an arena on the first rank of each host, attach its other ranks, and let these watch each other.

        Collective among the ranks of all hosts.

        Args:
            exchange: all-gathers a small payload among the ``size`` ranks, in rank order.
            rank: this rank, from 0.
            size: number of ranks, on all hosts together.
            counters: number of counters, each with one cell per writing rank, whichever host that is on.
            timeout_s: bound on passing the descriptor around; ``exchange`` brings its own.
            host_ranks: consecutive ranks of each host; 0 if all are on one host.

        Raises:
            TideArenaError: on every rank alike: the ranks of a host are not on one host, or some rank could not create,
                fetch, map or watch; with the words of each that failed.
        """
        host_ranks = host_ranks or size
        host = range(rank - rank % host_ranks, rank - rank % host_ranks + host_ranks)
        created: list[Arena] = []

        def create_file() -> int:
            created.append(Arena.create(size, rank, counters))
            return created[0].fd

        fd, identities = share_fd(exchange, rank, size, timeout_s, create_file, host_ranks)
        pids = [int(identity["pid"]) for identity in identities]
        native, error = None, None
        try:
            native = created[0] if rank == host[0] else Arena.attach(fd, size, rank, counters)
            for peer in host:
                if peer != rank:
                    native.watch(peer, pids[peer])
        except (OSError, ValueError) as e:
            error = f"{type(e).__name__}: {e}"
        finally:
            if rank != host[0]:
                os.close(fd)  # attach has made its own
        agree(exchange, rank, error, "attaching to the shared arena")
        assert native is not None
        return cls(native, exchange, rank, host, size, counters, pids)

    @property
    def native(self) -> Arena:
        """The native arena.

        Raises:
            TideArenaError: the arena is closed.
        """
        if self._native is None:
            raise TideArenaError("TIDE: the shared arena is closed.")
        return self._native

    def grow(self, nbytes: int, part: str = "other") -> int:
        """Get ``nbytes`` of zeroed memory for all ranks and return its offset. Collective.

        Every rank calls it in the same order with the same arguments. The memory is there when it returns: too
        little is an error here, never a signal later.

        Args:
            nbytes: size; rounded up to whole pages.
            part: the name under which :meth:`bytes_by_part` counts it.

        Raises:
            ValueError: ``nbytes`` is negative.
            TideArenaError: on every rank alike: too little memory (needed and available bytes are named), or the
                ranks asked for different things. The arena is then as large as before.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative; got {nbytes}")
        native, offset = self.native, self._end
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        error = None
        if self.rank == self.host[0]:  # one rank is enough: the others map what is already there
            try:
                native.reserve(offset, size)
            except OSError as e:
                error = f"{size} bytes are needed for {part!r}, {Arena.available_bytes()} are available ({e})"
        wanted = {"bytes": size, "part": part, "offset": offset}
        try:
            what = f"growing the shared arena by {size} bytes"
            asked = agree(self._exchange, self.rank, error, what, wanted, code="TIDE-F021")
            for rank, other in enumerate(asked):
                if other != asked[0]:
                    raise TideArenaError(
                        f"TIDE: ranks grow the shared arena differently: rank 0 {asked[0]}, rank {rank} {other}. "
                        "Every rank must set up the same groups in the same order."
                    )
        except BaseException:
            if self.rank == self.host[0]:
                native.release(offset, size)
            raise
        self._end += size
        self._parts[part] = self._parts.get(part, 0) + size
        return offset

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of shared memory by the name given to :meth:`grow`; ``control`` is the control region.

        The memory exists once for all ranks of the host.
        """
        return dict(self._parts)

    def abort(self, code: int, message: str) -> bool:
        """Make every wait of every rank end with status ``aborted``; true if this rank was the first to say so.

        The first 400 bytes of the message are kept.
        """
        return self.native.abort(code, message.encode("utf-8", "replace"))

    def aborted(self) -> tuple[int, int, str] | None:
        """Rank, code and message of the first abort; None if there was none."""
        record = self.native.aborted()
        return None if record is None else (record[0], record[1], record[2].decode("utf-8", "ignore"))

    def close(self) -> None:
        """Let go of the arena. Mappings, windows, tensors and calls that are still in use keep their memory."""
        self._native = None

    def __enter__(self) -> SharedArena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
