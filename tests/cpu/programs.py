"""Run a script on every rank as ``python script.py`` would, without the seconds that importing torch takes.

    for code, said in finish(start(2, script, "--steps", 3)):
        assert code == 0, said

Each rank is forked from the server of :mod:`harness`, which has imported torch and nothing of ours. From there on it is
a program like any other: the script is ``__main__``, an exception that nobody catches is printed and ends it with exit
code 1, and the end is the interpreter's own, with exit handlers and finalisation. What it cannot show is what happens
before torch is imported, or while it is; for that, a program has to be started in earnest.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import become_rank, forking

_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TESTS = Path(__file__).parents[1]


@dataclass
class Program:
    """One rank: its process, and the file that takes what it writes to standard output and standard error."""

    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End it by force, if it has not ended."""
        self.process.kill()

    def end(self, timeout: float | None = None) -> tuple[int, str]:
        """Exit code, and what it wrote; one that still runs after ``timeout`` seconds is killed and shows as -9."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            self.process.join()
        return self.process.exitcode, self.log.read_text(errors="replace")


def start(
    world: int, script: str | Path, *arguments: object, cwd: str | Path | None = None, **environment: str
) -> list[Program]:
    """Start ``script`` on ``world`` ranks with these arguments, and with these variables besides the caller's."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {k: v for k, v in os.environ.items() if k not in _OF_LAUNCHERS}
    shared.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    words = [str(script), *map(str, arguments)]
    programs = []
    for rank in range(world):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
        handle, log = tempfile.mkstemp(prefix=f"rank-{rank}-", suffix=".log")
        os.close(handle)
        # Not a daemon: a program may have processes of its own.
        process = forking().Process(target=_program, args=(words, str(cwd or os.getcwd()), own, rank, log))
        process.start()
        programs.append(Program(process, Path(log)))
    return programs


def finish(programs: list[Program], timeout: float = 90.0) -> list[tuple[int, str]]:
    """Exit code and output of every rank; what still runs after ``timeout`` seconds is killed and shows as -9."""
    deadline = time.monotonic() + timeout
    try:
        return [p.end(max(1.0, deadline - time.monotonic())) for p in programs]
    finally:
        for p in programs:
            p.kill()  # nobody is left if this was interrupted
            p.log.unlink(missing_ok=True)


def _program(words: list[str], cwd: str, environment: dict[str, str], rank: int, log: str) -> None:
    """What the interpreter does for ``python script.py``; never returns."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    become_rank(environment, rank)
    os.chdir(cwd)
    tempfile.tempdir = None  # it belongs to the environment
    sys.argv = words
    sys.path[:] = [str(Path(words[0]).parent.absolute()), *(p for p in sys.path if not _of_the_tests(p))]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    code = _run(words[0], main.__dict__)
    del main
    ctypes.pythonapi.Py_Exit(code)


def _of_the_tests(path: str) -> bool:
    return Path(path).absolute() == Path.cwd() or Path(path).absolute().is_relative_to(_TESTS)


def _run(script: str, names: dict[str, Any]) -> int:
    """Run the script; returns the exit code that its end calls for."""
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), names)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        # As the interpreter: what the exception's frames hold lives on until the end.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
