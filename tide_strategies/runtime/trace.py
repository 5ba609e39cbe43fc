"""The measured timeline: when each call of a rank began and ended, for ``tide timeline --measured`` to draw.

Off unless a folder is named, by the option ``debug.trace`` or the environment variable ``TIDE_TRACE``. One file a rank
and engine, of bounded size, one line a call; what is written is data, never executed. Lines are kept back and written
many at a time, and what cannot be written is left out: a trace is no reason for a training to stop.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_strategies.runtime.exchange import Exchange  # which imports torch

FOLDER_ENV = "TIDE_TRACE"
FORMAT = 1
#: A file's size at most; calls after that are counted and left out.
MAX_BYTES = 64 << 20
#: How often ranks meet to compare their clocks, and lines that are kept back.
_MEETINGS, _BUFFERED = 9, 256

_open: weakref.WeakSet[Trace] = weakref.WeakSet()


def begin(folder: str, exchange: Exchange, rank: int) -> Trace | None:
    """A trace of this rank in ``folder`` (empty: where ``TIDE_TRACE`` says); None if no folder is named.

    Collective where a folder is named: ranks note when they meet, from which a reader aligns the clocks of hosts.

    Args:
        folder: made if missing, for the user alone.
        exchange: all-gathers a small payload among the ranks.
        rank: among all ranks of the job.
    """
    folder = folder or os.environ.get(FOLDER_ENV, "")
    if not folder:
        return None
    meetings, group = [], exchange(secrets.token_hex(8).encode())[0].decode()
    for _ in range(_MEETINGS):
        exchange(b"")
        meetings.append(time.perf_counter())
    return Trace(Path(folder), rank, group, meetings)


class Trace:
    """One file. Times are those of ``time.perf_counter``: the monotonic clock, which all processes of a host share.

    Args:
        folder: where.
        rank: among all ranks of the job.
        group: names the ranks that met.
        meetings: times at which all ranks met, one by one.
        max_bytes: of the file.
    """

    def __init__(self, folder: Path, rank: int, group: str, meetings: list[float], max_bytes: int = MAX_BYTES) -> None:
        self._left, self._lines, self._missing = max_bytes, list[str](), 0
        self._late: Callable[[bool], None] = lambda wait: None
        self._file: Any = None
        header = {
            "format": FORMAT,
            "rank": rank,
            "host": f"{socket.gethostname()} {_boot()}",
            "pid": os.getpid(),
            "group": group,
            "meetings": meetings,
        }
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"tide-{socket.gethostname()}-{os.getpid()}-{rank}-{time.time_ns()}.jsonl"
            self._file = os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
        self._line(header)
        self._flush()
        _open.add(self)

    def add(self, stream: str, call: str, start: float, end: float, waited: float = 0.0, nbytes: int = 0) -> None:
        """Note a call, or a part of one.

        Args:
            stream: what runs one thing after another: a stream of the device, or the part of a call.
            call: what it does, in words.
            start, end: seconds of ``time.perf_counter``.
            waited: seconds of these that it spent waiting for peers.
            nbytes: bytes that it moved.
        """
        self._line([stream, call, round(start, 7), round(end - start, 7), round(waited, 7), nbytes])
        if len(self._lines) >= _BUFFERED:
            self._flush()

    def on_close(self, late: Callable[[bool], None]) -> None:
        """Call ``late`` before closing, for calls whose end is not known yet; with whether it may wait for them."""
        self._late = late

    def close(self) -> None:
        """Write what is left."""
        if self._file is None:
            return
        self._late(True)
        if self._missing:
            self._lines.append(json.dumps({"missing": self._missing}) + "\n")
        self._flush()
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None

    def _line(self, value: Any) -> None:
        line = json.dumps(value) + "\n"
        # The last line, which says how many are missing, always has room.
        if self._file is None or len(line) + 64 > self._left:
            self._missing += 1
            return
        self._left -= len(line)
        self._lines.append(line)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is not None:
            try:
                self._file.write("".join(lines))
                self._file.flush()
            except OSError:
                self._file = None


def _boot() -> str:
    """A name of this boot of the host: whoever has the same shares its clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@atexit.register
def _close_all() -> None:
    for trace in list(_open):
        trace.close()
