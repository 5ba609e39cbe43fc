"""``tide autopsy DIR``: from what each rank wrote when it stopped, the first cause."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_strategies.cli.tables import table, wrapped
from tide_strategies.errors import TideConfigError
from tide_strategies.planner.reading import read_bytes

_ABOUT = """\
Set TIDE_AUTOPSY=DIR in the environment of the job (or the option debug.autopsy). When the job stops because a rank
stalled, died or strayed, each rank writes one small file there, and this command says who held up whom, and what the
first of them was missing. The folder may hold files of one job only.
"""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Wait:
    """One wait of a rank: in ``call``, for ``counter`` of rank ``writer`` to reach ``expected``."""

    call: str
    counter: str
    writer: int
    expected: int
    seen: int
    peer_call: str


@dataclass(frozen=True)
class Record:
    """What one rank of a group wrote."""

    rank: int
    host: str
    pid: int
    pids: tuple[int, ...]
    time: float
    kind: str
    message: str
    waits: tuple[Wait, ...]

    @property
    def peers(self) -> list[Wait]:
        """Its waits for other ranks. On a GPU several streams wait at once, some of them for the rank's own others."""
        return [w for w in self.waits if w.writer != self.rank]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tide autopsy``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _ABOUT
    parser.add_argument("folder", type=Path, metavar="DIR", help="what TIDE_AUTOPSY named")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Read, judge, print; 1 if there is nothing to judge."""
    records, refused = read(arguments.folder)
    if not records:
        raise TideConfigError(
            f"no rank wrote anything into {arguments.folder} that can be read"
            + (f" ({'; '.join(refused[:3])})" if refused else "; set TIDE_AUTOPSY to it before the job starts")
        )
    causes = [first_cause(group) for group in by_group(records)]
    if arguments.json:
        print(json.dumps({"causes": causes, "records": [asdict(r) for r in records], "refused": refused}, indent=1))
        return 0
    for cause in causes:
        print(wrapped(f"First cause: {cause}"))
    rows = [(r.rank, r.host, r.pid, r.kind, _doing(r)) for r in sorted(records, key=lambda r: (r.pids, r.rank))]
    print()
    print(table(["rank", "host", "pid", "stopped by", "was"], rows))
    for words in refused:
        print(wrapped(f"not read: {words}"))
    return 0


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The first record of each rank in ``folder``, and what could not be read, in words.

    Raises:
        TideConfigError: no such folder.
    """
    if not folder.is_dir():
        raise TideConfigError(f"no folder {folder}")
    first_of: dict[tuple[tuple[int, ...], int], Record] = {}
    refused = []
    for file in sorted(folder.glob("tide-*.json")):
        try:
            record = _parse(json.loads(read_bytes(file, _MAX_BYTES)))
        except TideConfigError as e:
            refused.append(f"{file.name}: {e}")
            continue
        except (OSError, ValueError, RecursionError) as e:
            refused.append(f"{file.name}: {type(e).__name__}: {e}")
            continue
        key = (record.pids, record.rank)
        if key not in first_of or record.time < first_of[key].time:  # what a rank said first is nearest to the cause
            first_of[key] = record
    return list(first_of.values()), refused


def by_group(records: Sequence[Record]) -> list[list[Record]]:
    """Records of each group of ranks that share memory, the group that stopped first in front."""
    groups: dict[tuple[str, tuple[int, ...]], list[Record]] = {}
    for r in records:
        groups.setdefault((r.host, r.pids), []).append(r)
    return sorted(groups.values(), key=lambda g: min(r.time for r in g))


def first_cause(records: Sequence[Record]) -> str:
    """Who held up the ranks of one group, and what was missing."""
    known = {r.rank: r for r in records}
    first = min(records, key=lambda r: (r.kind == "aborted", r.time))
    if first.kind in ("mismatch", "error") or (first.kind == "timeout" and not first.waits):
        return f"rank {first.rank}: {first.message}"
    if first.kind == "peer_dead" and first.peers:
        wait = next((w for w in first.peers if w.writer not in known), first.peers[0])  # the dead write nothing
        return f"rank {wait.writer} (pid {_pid(first, wait.writer)}) died. Rank {first.rank} in {_missing(wait)}"
    return _along_the_waits(first, known)


def _along_the_waits(first: Record, known: dict[int, Record]) -> str:
    """Follow who awaits whom, nearest first, until a rank that awaits nobody; if there is none, it is a circle."""
    met, ahead = {first.rank}, deque([first])
    while ahead:
        current = ahead.popleft()
        for wait in current.peers:
            after = known.get(wait.writer)
            if after is None:
                return (
                    f"rank {wait.writer} (pid {_pid(current, wait.writer)}) wrote nothing: it was killed, or is stuck "
                    f"outside TIDE. Rank {current.rank} in {_missing(wait)}"
                )
            if not after.peers:
                return (
                    f"rank {wait.writer} (pid {after.pid}) was in no collective when rank {first.rank} lost patience: "
                    f"its own code held it up. Rank {current.rank} in {_missing(wait)}"
                )
            if wait.writer not in met:
                met.add(wait.writer)
                ahead.append(after)
    return _circle(first, known) if first.peers else f"rank {first.rank}: {first.message}"


def _circle(first: Record, known: dict[int, Record]) -> str:
    """Along the first wait of each rank until a rank that has been met before; every rank awaits one that wrote."""
    path, current = [first.rank], first
    while True:
        wait = current.peers[0]
        path.append(wait.writer)
        if wait.writer in path[:-1]:
            break
        current = known[wait.writer]
    return (
        f"ranks await each other ({' <- '.join(map(str, path))}): they do not run the same collectives in the same "
        f"order. Rank {current.rank} in {_missing(wait)}"
    )


def _missing(wait: Wait) -> str:
    last = f" (last seen in {wait.peer_call})" if wait.peer_call else ""
    return (
        f"{wait.call} awaited {wait.counter} of rank {wait.writer}{last}: expected {wait.expected}, seen {wait.seen}."
    )


def _doing(record: Record) -> str:
    if not record.peers:
        return "in no collective" if record.kind == "aborted" else record.message
    wait = record.peers[0]
    return f"in {wait.call}, awaiting {wait.counter} of rank {wait.writer} ({wait.seen} of {wait.expected})"


def _pid(record: Record, rank: int) -> object:
    return record.pids[rank] if 0 <= rank < len(record.pids) else "unknown"


def _parse(data: Any) -> Record:
    """A record from what was read.

    Raises:
        ValueError: it has another form.
    """
    if not isinstance(data, dict) or data.get("format") != 1:
        raise ValueError("not a record of this version")
    waits, pids = data.get("waits"), data.get("pids")
    if not isinstance(waits, list) or not isinstance(pids, list):
        raise ValueError("no list of waits or pids")
    return Record(
        rank=_typed(data, "rank", int),
        host=_typed(data, "host", str),
        pid=_typed(data, "pid", int),
        pids=tuple(p for p in pids if type(p) is int),
        time=float(_typed(data, "time", (int, float))),
        kind=_typed(data, "kind", str),
        message=_typed(data, "message", str),
        waits=tuple(_wait(w) for w in waits),
    )


def _wait(data: Any) -> Wait:
    if not isinstance(data, dict):
        raise ValueError("a wait is a mapping")
    words = {key: _typed(data, key, str) for key in ("call", "counter", "peer_call")}
    numbers = {key: _typed(data, key, int) for key in ("writer", "expected", "seen")}
    return Wait(**words, **numbers)


def _typed(data: dict[str, Any], key: str, kind: Any) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}")
    return value
