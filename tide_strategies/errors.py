"""Errors that a user can meet, each naming what happened, what is allowed and what to do.

``TideError`` is the common base. Configuration mistakes are also ``ValueError`` (and mismatches between
ranks ``RuntimeError``), so code that knows nothing of TIDE catches them by their usual kin.
"""

from __future__ import annotations


class TideError(Exception):
    """Base of every error raised by ``tide_strategies``."""


class TideConfigError(TideError, ValueError):
    """An option is unknown, has the wrong type, or a value that is not allowed."""


class TideFallbackError(TideError, RuntimeError):
    """``strict=True`` and a group (or the whole model) is not eligible for TIDE."""


class TideMismatchError(TideError, RuntimeError):
    """Ranks disagree on the model, the options, or the order of collectives."""


class TideArenaError(TideError, RuntimeError):
    """The shared arena could not be created or reached by every rank.

    Args:
        words: what happened, on which ranks.
        code: the fallback code that fits (``tide_strategies.detect``).
    """

    def __init__(self, words: str, code: str = "TIDE-F020") -> None:
        super().__init__(words)
        self.code = code


class TidePeerError(TideError, RuntimeError):
    """A peer died or reported an error: this rank stops rather than use incomplete data."""


class TideTimeoutError(TidePeerError, TimeoutError):
    """A peer did not reach a point of a collective within ``timeout_s`` seconds."""
