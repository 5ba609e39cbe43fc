"""What a verified schedule must never do."""

from __future__ import annotations


class Violation(AssertionError):
    """A schedule breaks a rule.

    Args:
        kind: ``race``, ``deadlock``, ``unwritten``, ``result``, ``bounds``, ``signal`` or ``incast``.
        message: who did what.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
