"""Hosts of GPUs that begin different collectives of equal size, which no counter tells; and boards that fail.

The rail is one that knows nothing of calls, as NCCL's.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from dataclasses import dataclass

import numpy as np
from fakes import FakeKernels, MessageRail
from nodes_scenarios import Rank, bf16, first_cause
from ranks import launch, values
from stage import memory, play, scenario

from tide_strategies.collectives.schedule import Item
from tide_strategies.errors import TideMismatchError, TidePeerError
from tide_strategies.runtime import autopsy
from tide_strategies.runtime.cuda import host_order, watchdog
from tide_strategies.runtime.cuda.group import CudaGroup
from tide_strategies.topology import Topology

INTERVAL_S = 0.1
#: Published and read, one after the other, and found by the watchdog; and what a busy machine takes for that.
FOUND_S = 2 * INTERVAL_S + watchdog._POLL_S + 3.0
#: Of the last comparison, and of the end of a thread that does not come back.
host_order._LAST_S, host_order._END_S = 1.0, 0.3
#: Turns of two reductions each, and the one that host 1 does the other way round.
TURNS, SWAPPED = 8, 3
#: More turns than what is found takes.
LONG = 200


@dataclass
class Folder:
    """A board of files."""

    path: str
    interval_s: float = INTERVAL_S

    def publish(self, key, value):
        with open(os.path.join(self.path, f"{key}.new"), "wb") as f:
            f.write(value)
        os.replace(f.name, os.path.join(self.path, key))

    def read(self, key):
        try:
            with open(os.path.join(self.path, key), "rb") as f:
                return f.read()
        except FileNotFoundError:
            return None


class Raises(Folder):
    def read(self, key):
        raise RuntimeError("Connection was likely closed")


class Hangs(Folder):
    def publish(self, key, value):
        threading.Event().wait()


class Said(logging.Handler):
    """What the log says of this rank's calls."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("tide_strategies").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


class Training:
    """One rank that reduces two groups of equal size in every turn, "left" and "right"."""

    def __init__(self, rank, exchange, shape, board, connect=MessageRail):
        self.host, self.exchange = rank // shape[1], exchange
        common = {"timeout_s": 20.0, "connect": connect, "host_ranks": shape[1], "board": board}
        self.here = Rank(rank, exchange, Topology(*shape), rank % 2, chunk_bytes=256, **common)
        self.here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
        layout, ring = self.here.groups[1].layout, self.here.groups[1]._home
        made = (layout, ring, 256, FakeKernels(rank % 2), 1)
        self.groups = [CudaGroup(self.here.engine, name, *made) for name in ("left", "right")]
        for group in self.groups:
            group.prepare(tuple(range(len(layout.params))), Item.BF16, Item.F32)
        self.gradients = self.here.placed([bf16(np.ones((s.rows, s.row_items))) for s in layout.params])
        self.streams = [self.here.stream(name) for name in ("push", "sum", "network")]
        self.output = memory(layout.output_items * 4, rank % 2)
        exchange(b"begin")

    def turn(self, swapped):
        for group in self.groups[:: -1 if swapped else 1]:
            which = tuple(range(len(self.gradients)))
            group.reduce_scatter(which, Item.BF16, Item.F32, self.gradients, self.output.address, 1.0, self.streams)

    def run(self, swapped=-1, turns=TURNS):
        """Train; the error's name and words, and how long after the swapped turn it came."""
        begun = time.monotonic()
        try:
            for number in range(turns):
                if number == swapped:
                    begun = time.monotonic()
                self.turn(number == swapped and self.host == 1)
                time.sleep(0.03)
                self.here.engine.watchdog.check()
            self.here.finish()
            self.exchange(b"finished")
            self.here.engine.close()
        except (TideMismatchError, TidePeerError) as error:
            took = time.monotonic() - begun
            self.here.engine.watchdog._thread.join(10)  # it has let streams go, and written down what it was at
            return type(error).__name__, str(error), took
        return "nothing", "", time.monotonic() - begun


def _all(rank, exchange, shape, folder):
    """One engine after the other: what each rank saw, by what happened."""
    found, said = {}, Said()

    def board_of(kind, name, *how):
        path = os.path.join(folder, name)
        os.makedirs(path, exist_ok=True)
        return kind(path, *how)

    training = Training(rank, exchange, shape, board_of(Folder, "alike"))
    found["alike"] = training.run()
    order = training.here.engine.host_order
    found["compared"] = None if order is None else (order._compared, order._calls.begun)
    if shape[1] == 1:
        for kind in (Raises, Hangs):
            training = Training(rank, exchange, shape, board_of(kind, kind.__name__))
            found[kind.__name__] = training.run()
        # All of it is over before the first words are published.
        found["at the end"] = Training(rank, exchange, shape, board_of(Folder, "end", 60.0)).run(TURNS - 1)
    found["log"], said.lines = said.lines, []
    autopsy.write_to(os.path.join(folder, "autopsy"))
    found["swapped"] = Training(rank, exchange, shape, board_of(Folder, "swapped")).run(SWAPPED, LONG)
    found["said of swapped"] = said.lines
    exchange(b"ended")
    return found


def _check_swapped(outcomes, shape, first_call, bound_s):
    """Each host's first rank names both sides; the others of the host are told by it."""
    for rank, (kind, words, took) in enumerate(outcomes):
        host, lead = rank // shape[1], rank % shape[1] == 0
        assert kind == "TideMismatchError" if lead else kind == "TidePeerError", outcomes
        mine, theirs = host * shape[1], (1 - host) * shape[1]
        sides = ["left", "right"] if host == 0 else ["right", "left"]
        own, other = (f"reduce-scatter of '{side}'" for side in sides)
        assert f"ranks run different collectives: rank {mine} began call {first_call}, {own}" in words, words
        assert f", while rank {theirs}, on another host, began {other}" in words, words
        assert lead or f"rank {mine} stopped first: " in words, words
        assert took < bound_s, outcomes


@scenario
def hosts_that_run_different_collectives_are_told():
    """With one rank a host and two; and what is not told is so said, without holding anything up."""
    for shape in ((2, 1), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            ranks = values(launch(shape[0] * shape[1], _all, shape, folder))
            cause, wrote = first_cause(os.path.join(folder, "autopsy"))
        assert wrote == list(range(shape[0] * shape[1]))
        assert f" began call {2 * SWAPPED + 1}, reduce-scatter of '" in cause, cause
        for rank, found in enumerate(ranks):
            assert found["alike"][0] == "nothing", found
            leads = rank % shape[1] == 0
            assert found["compared"] == ((2 * TURNS, 2 * TURNS) if leads else None), found
            assert found["said of swapped"] == [], found
        _check_swapped([f["swapped"] for f in ranks], shape, 2 * SWAPPED + 1, FOUND_S)
        if shape[1] > 1:
            continue
        _check_swapped([f["at the end"] for f in ranks], shape, 2 * TURNS - 1, FOUND_S + host_order._LAST_S)
        for rank, found in enumerate(ranks):
            for kind in ("Raises", "Hangs"):
                assert found[kind][0] == "nothing", found
                assert found[kind][2] < TURNS * 0.03 + host_order._LAST_S + host_order._END_S + 3.0, found
            raises, hangs = found["log"]
            for line in (raises, hangs):
                assert f"rank {rank} cannot compare its calls with those of rank {1 - rank}, on another host" in line, (
                    line
                )
            assert "(RuntimeError: Connection was likely closed)" in raises, raises
            assert f"beyond call 0 of {2 * TURNS} (the store does not answer)" in hangs, hangs


if __name__ == "__main__":
    play(globals())
