"""What scenarios on the fake driver have in common. ``TIDE_LIBCUDA`` names the driver's library.

A scenario runs in a process of its own: ``python FILE NAME``. Device memory is host memory, so numpy can look at it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager

import numpy as np
import pytest

from tide_strategies._native import cuda

COPY, SUM, ZERO, NOTIFY, AWAIT = range(5)
FP32, BF16, RAW = range(3)
ACCUMULATE, SCALED = 1, 2
OTHERS = -2
MIB = 1 << 20

fake = ctypes.CDLL(os.environ["TIDE_LIBCUDA"])
fake.fake_calls.restype = ctypes.c_uint64
fake.fake_used_memory.restype = ctypes.c_uint64
fake.fake_pinned_memory.restype = ctypes.c_uint64
fake.fake_sum_function.restype = ctypes.c_uint64
fake.fake_land_function.restype = ctypes.c_uint64


def calls(name):
    return fake.fake_calls(name.encode())


@contextmanager
def raises(kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        yield


def array(view, dtype, offset=0, count=None):
    """The memory behind a Mapping or Window."""
    count = (view.bytes - offset) // np.dtype(dtype).itemsize if count is None else count
    kind = ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)
    return np.frombuffer(kind.from_address(view.address + offset), dtype)


def memory(nbytes=MIB, device=0):
    return cuda.Mapping(cuda.Allocation(device, nbytes), device)


def program(ops, sources=(), streams=None, n_bases=0, n_counters=0, advance=(), readers=()):
    words = b"".join(struct.pack("<12q", *op, *[0] * (12 - len(op))) for op in ops)
    pairs = b"".join(struct.pack("<2q", *s) for s in sources)
    streams = [(0, len(ops))] if streams is None else streams
    return cuda.Program(words, pairs, streams, n_bases, n_counters, list(advance), list(readers))


def controls(ranks=2, counters=4):
    """One control per rank, in one process on one device; every rank's memory is mapped once."""
    own = [memory(cuda.Control.control_bytes(ranks, counters)) for _ in range(ranks)]
    made = [
        cuda.Control(0, ranks, r, counters, own[r], [None if p == r else own[p] for p in range(ranks)])
        for r in range(ranks)
    ]
    return made, own


def lone_control():
    return cuda.Control(0, 1, 0, 1, memory(), [None])


def cell(own, ranks, counter, writer):
    return int(array(own, np.uint32)[(counter * ranks + writer) * 4])


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.002)


def finish(device=0):
    assert fake.fake_idle(device, 10_000), "streams are still busy"


def run(prog, control, bases, counters=(), divisor=1.0, stream=None):
    stream = stream or cuda.Stream(0, 0)
    call = prog.begin(control, bases, list(counters), 7, divisor)
    call.enqueue(0, stream.handle)
    finish()
    return call


def scenario(function):
    """Marks what the tests run by name."""
    return function


def play(names):
    """Run the scenario that the command line names; after ``--each`` all of them, and print how each ended.

    Those are processes forked from one that has imported everything, which takes longer than many a scenario.
    """
    wanted = sys.argv[1:]
    if wanted[0] != "--each":
        names[wanted[0]]()
        return
    print(json.dumps({name: _forked(names[name]) for name in wanted[1:]}))


def _forked(work):
    """What ``work`` wrote if it failed, and its exit code."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read() if code else ""
