"""What each rank writes when it stops, for ``tide autopsy`` to read: whom it awaited, where, and what it saw.

Off unless a folder is named, by the option ``debug.autopsy`` or the environment variable ``TIDE_AUTOPSY``. Writing
never raises and never waits for anybody: the rank is about to raise the error itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

FOLDER_ENV = "TIDE_AUTOPSY"
FORMAT = 1

_folder = ""


def write_to(folder: str) -> None:
    """Name the folder; empty leaves it to the environment."""
    global _folder
    _folder = folder


def record(
    *,
    rank: int,
    pids: Sequence[int],
    kind: str,
    message: str,
    waits: Sequence[dict[str, Any]],
) -> None:
    """Write what this rank was at when it stopped.

    Args:
        rank: this rank in its group. pids: process id of every rank of the group, which tells groups apart. kind:
        "timeout", "peer_dead", "mismatch", "aborted" (another rank stopped first) or "error". message: the error in
        words. waits: for each wait: ``call`` and ``counter`` in words, ``writer``, ``expected``, ``seen``,
        ``peer_call``; empty if
            the rank was not within a collective.
    """
    folder = _folder or os.environ.get(FOLDER_ENV, "")
    if not folder:
        return
    facts = {
        "format": FORMAT,
        "rank": rank,
        "global_rank": os.environ.get("RANK", ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pids": list(pids),
        "time": time.time(),
        "kind": kind,
        "message": message,
        "waits": list(waits),
    }
    with contextlib.suppress(OSError, ValueError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        name = f"tide-{socket.gethostname()}-{os.getpid()}-{rank}-{time.time_ns()}.json"
        fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(facts, file)
