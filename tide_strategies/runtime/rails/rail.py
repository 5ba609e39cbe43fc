"""What an engine asks of the rail between its nodes."""

from __future__ import annotations

from typing import Protocol

from tide_strategies._native import Arena


class Rail(Protocol):
    """Puts and notifications to the ranks on the same rail, and theirs to this rank. Nothing here waits for a peer."""

    def open(self, address: int, nbytes: int) -> None:
        """Let peers put into one more region; the same ones in the same order on all ranks.

        Before the start, or by all ranks before any of them puts into it.
        """

    def start(self, arena: Arena, railed: int) -> None:
        """Begin to send and receive.

        Args:
            arena: of this host; what peers notify is added to their cells there.
            railed: counter that tells how many puts to a peer have been read at their source, in the peer's cell.
        """

    def notify(self, peer: int, counter: int, seq: int, tag: int) -> None:
        """Add 1 to this rank's cell of ``counter`` as ``peer`` sees it. ``seq`` and ``tag`` name the call."""

    def put(
        self, peer: int, address: int, nbytes: int, region: int, offset: int, counter: int, seq: int, tag: int
    ) -> None:
        """Send ``nbytes`` from ``address`` to byte ``offset`` of the peer's ``region``, then notify."""

    def words(self, peer: int) -> str | None:
        """Why ``peer`` will send nothing more, if so: a predicate whose subject is the rank."""

    def abort(self) -> None:
        """Tell the peers what the arena's abort record says: their hosts stop too. Bounded in time."""

    def close(self) -> None:
        """Send what is left and end. Bounded in time, whatever the peers do. Idempotent."""
