"""Words for a collective that could not finish, and the exception that carries them."""

from __future__ import annotations

from tide_strategies import _native
from tide_strategies.errors import TideMismatchError, TidePeerError, TideTimeoutError

#: How the words of every failed wait end.
STOP = "All ranks stop rather than go on with incomplete data."
#: What to do about a wait that was too long.
PATIENCE = "If that rank only needs longer (a slow data loader, a checkpoint), raise timeout_s."


def mismatch(who: str) -> TideMismatchError:
    """The error of ranks that run different collectives: ``who`` is in which, a sentence."""
    return TideMismatchError(
        f"TIDE: ranks run different collectives: {who}. Every rank must run the same modules in the same order. {STOP}"
    )


def failure(
    outcome: _native.Outcome,
    *,
    rank: int,
    call: str,
    counter: str,
    peer_call: str,
    timeout_s: float,
    aborted: tuple[int, int, bytes] | None,
    gone: str | None = None,
) -> TidePeerError | TideMismatchError:
    """The exception for an outcome that is not "ok".

    Args:
        outcome: what the executor returned.
        rank: this rank.
        call: this rank's call in words, for example "all-gather of 'blocks.3'".
        counter: the counter awaited, in words.
        peer_call: what the awaited peer was last seen in, in words.
        timeout_s: the configured bound.
        aborted: the arena's abort record, if a peer left one.
        gone: why the awaited peer, on another host, sends nothing more, if that is known.
    """
    waiting = (
        f"rank {rank} in {call} (operation {outcome.op}) awaits {counter} of rank {outcome.writer}: "
        f"expected {outcome.expected}, seen {outcome.seen}"
    )
    if outcome.op < 0:
        waiting = f"rank {rank} at the beginning of {call}"
    if outcome.status == "aborted" and aborted is not None:
        return TidePeerError(
            f"TIDE: rank {aborted[0]} stopped first: {aborted[2].decode(errors='replace')} [here: {waiting}] {STOP}"
        )
    if outcome.status == "mismatch":
        return mismatch(f"rank {rank} is in {call} while rank {outcome.writer} is in {peer_call}")
    if outcome.status == "peer_dead":
        return TidePeerError(
            f"TIDE: rank {outcome.writer} {gone or 'is dead'}: {waiting}; it was last in {peer_call}. {STOP}"
        )
    return TideTimeoutError(
        f"TIDE: no progress within timeout_s={timeout_s:g}: {waiting}; that rank was last in {peer_call}. "
        f"{PATIENCE} {STOP}"
    )
