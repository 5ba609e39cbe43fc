"""Schedules across nodes on the native executor: every rank a thread, real numbers, several calls in a row."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tide_strategies._native import Arena
from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import NODE, SELF, Item, Schedule, Space
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.encode import encode
from tide_strategies.topology import Topology

TIMEOUT_S = 20.0
SHAPES = [(2, 1), (2, 2), (3, 2), (5, 1), (3, 3), (4, 2), (10, 1)]


class World:
    """All ranks of a topology in this process: an arena each, and memory that everybody reaches."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        first = Arena.create(topology.ranks, 0, 512)
        self.arenas = [first, *(Arena.attach(first.fd, topology.ranks, r, 512) for r in range(1, topology.ranks))]
        self.memory: dict[tuple, np.ndarray] = {}
        self.counters: dict[tuple[str, int, int], int] = {}

    def buffer(self, rank: int, space: Space, index: int, nbytes: int) -> np.ndarray:
        return self.memory.setdefault((rank, space, index), np.full(max(nbytes, 1), 0xFF, np.uint8))

    def run(
        self, calls: list[list[tuple[Schedule, list[np.ndarray], int, np.ndarray | None]]], divisor: float = 1.0
    ) -> None:
        """Run each rank's calls (schedule, inputs, landing slot, output) in a thread of its own."""
        for rank, own in enumerate(calls):
            for schedule, _, _, _ in own:
                for (space, index), nbytes in schedule.memory.items():
                    self.buffer(rank, space, index, nbytes)
        prepared = [[self.prepare(rank, *call) for call in own] for rank, own in enumerate(calls)]
        failures: list[str] = []

        def thread(rank: int) -> None:
            for n, (program, bases, counters) in enumerate(prepared[rank]):
                outcome = program.replay(self.arenas[rank], bases, counters, n + 1, divisor, TIMEOUT_S)
                if outcome.status != "ok":
                    failures.append(f"rank {rank}, call {n}: {outcome.status} at {outcome.op}")
                    return

        threads = [threading.Thread(target=thread, args=(r,)) for r in range(self.topology.ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []

    def prepare(self, rank: int, schedule: Schedule, inputs: list[np.ndarray], slot: int, output: np.ndarray | None):
        encoded = encode(schedule, len(inputs))
        first = rank - self.topology.local_of(rank)

        def address(space: Space, index: int, at: int) -> int:
            owner = {SELF: rank, NODE: first}.get(at, at)
            if space is Space.OUTPUT:
                assert output is not None
                return output.ctypes.data
            if space is Space.LANDING:  # one for all ranks of a node, as in shared memory
                return self.memory[owner - self.topology.local_of(owner), space, slot].ctypes.data
            return self.memory[owner, space, index].ctypes.data

        bases = [a.ctypes.data for a in inputs] + [address(*base) for base in encoded.bases]
        keys = [(c.name, c.index, slot if c.name in ("vacated", "opened") else 0) for c in encoded.counters]
        return encoded.program, bases, [self.counters.setdefault(k, len(self.counters)) for k in keys]


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("knobs", [(1, False, 1), (2, True, 1), (2, False, 3)], ids=["k1", "small outbox", "passes"])
def test_reduce_scatter_gives_exact_sums(shape, knobs) -> None:
    topology, (rounds, slot_reuse, passes) = Topology(*shape), knobs
    n, world = topology.ranks, World(topology)
    layout = GroupLayout((ParamShape(3 * n - 1, 7, 2), ParamShape(2, 3, 2), ParamShape(2 * n, 5, 2)), n)
    plan = BasePlan(*shape, shape[1], rounds, slot_reuse, passes)
    lane = shape[1] == 1 and passes == 3  # no plan: the lane's own collective
    rng = np.random.default_rng(0)
    grads = rng.integers(-8, 9, (4, n, sum(s.rows * s.row_items for s in layout.params)))
    calls, outputs = [], np.full((4, n, layout.output_items), np.nan, np.float32)
    for rank in range(n):
        own = []
        for c in range(4):
            schedule = reduce_scatter(
                *(layout, topology, rank),
                **{"grad": Item.BF16, "output": Item.F32, "chunk_bytes": 96, "bank": c % 2},
                plan=None if lane else plan,
            )
            at, inputs = 0, []
            for s in layout.params:
                inputs.append(to_bf16(grads[c, rank, at : at + s.rows * s.row_items]))
                at += s.rows * s.row_items
            own.append((schedule, inputs, 0, outputs[c, rank]))
        calls.append(own)
    world.run(calls)
    for c in range(4):
        total = grads[c].sum(axis=0)
        for rank in range(n):
            at = 0
            for p, s in enumerate(layout.params):
                begin, items = rank * layout.shard_items(p), layout.valid_items(p, rank)
                want = np.zeros(layout.shard_items(p), np.float32)
                want[:items] = total[at + begin : at + begin + items]
                got = outputs[c, rank, layout.output_offset(p) :][: layout.shard_items(p)]
                assert got.tobytes() == want.tobytes()
                at += s.rows * s.row_items


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_all_gather_gives_every_rank_every_shard(shape) -> None:
    topology = Topology(*shape)
    n, world = topology.ranks, World(topology)
    layout = GroupLayout((ParamShape(3 * n - 1, 7, 2), ParamShape(2, 3, 2), ParamShape(2 * n, 5, 4)), n)
    whole = [np.arange(4 * s.rows * s.row_items).reshape(4, -1) % 251 for s in layout.params]
    calls = []
    for node in range(topology.nodes):
        for slot in range(4):  # a slot per call: all landings can be looked at in the end
            world.buffer(topology.rank(node, 0), Space.LANDING, slot, layout.landing_bytes)
    for rank in range(n):
        own = []
        for c in range(4):
            inputs = []
            for p in range(3):
                begin = rank * layout.shard_items(p)
                inputs.append(whole[p][c, begin : begin + layout.valid_items(p, rank)].astype(np.float32))
            schedule = all_gather(layout, topology, rank, [Item.F32] * 3)  # cast to bf16, but for the last
            own.append((schedule, inputs, c, None))
        calls.append(own)
    world.run(calls)
    for node in range(topology.nodes):
        for c in range(4):
            landing = world.memory[topology.rank(node, 0), Space.LANDING, c]
            for p, s in enumerate(layout.params):
                want = whole[p][c].astype(np.float32)
                want = to_bf16(want) if s.itemsize == 2 else want
                assert landing[layout.landing_base(p) :][: want.nbytes].tobytes() == want.tobytes()
