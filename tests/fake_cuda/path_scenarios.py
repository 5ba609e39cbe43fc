"""Training steps through FSDP2's GPU path, with streams, events and memory of the fake driver in the place of torch's.

What torch enqueues (casts, compute, gradients, an optimizer) are copies here. Memory that torch's allocator could hand
out again is overwritten as soon as the compute stream is past the event that torch waits for.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from types import SimpleNamespace

import numpy as np
import torch
from fakes import FakeKernels, MessageRail
from nodes_scenarios import bf16
from ranks import launch, values
from stage import COPY, MIB, RAW, array, fake, memory, play, program, raises, scenario, until

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Item, Space
from tide_strategies.fsdp2.cuda_path import CudaLanding, CudaPath, CudaStreams
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda.engine import CudaEngine
from tide_strategies.runtime.cuda.group import CudaGroup, needed_device_memory
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

#: Parameters of a group; the last of them does not divide evenly.
SHAPES = [(16, 24), (8, 8), (13, 5)]
GROUPS, STEPS, CHUNK = 3, 2, 256


class Stream:
    def __init__(self, device=None, priority=0):
        self.native = cuda.Stream(device.index, priority)
        self.cuda_stream = self.native.handle

    def wait_event(self, event):
        event.order_before(self)

    def wait_stream(self, other):
        cuda.order(other.cuda_stream, self.cuda_stream)


class Event:
    """A stream on which nothing runs: it is past whatever was recorded."""

    def __init__(self):
        self.native = None

    def record(self, stream=None):
        self.native = self.native or cuda.Stream(Torch.device.index, -1)
        cuda.order((stream or Torch.current).cuda_stream, self.native.handle)

    def order_before(self, stream):
        if self.native is not None:
            cuda.order(self.native.handle, stream.cuda_stream)


class Buffer:
    """As much of a tensor as the path uses: bytes of device memory."""

    def __init__(self, owner, at, items, dtype=torch.bfloat16):
        self.owner, self.at, self.items, self.dtype, self.shape = owner, at, items, dtype, (items,)

    def data_ptr(self):
        return self.owner.address + self.at

    def numel(self):
        return self.items

    def __getitem__(self, part):
        return Buffer(self.owner, self.at, part.stop, self.dtype)

    def view(self, shape):
        assert math.prod(shape) == self.items
        return self

    def numbers(self, dtype=None):
        dtype = dtype or {torch.bfloat16: np.uint16, torch.float32: np.float32}[self.dtype]
        return array(self.owner, dtype, self.at, self.items)


class Torch:
    """The part of torch that the path calls."""

    device = torch.device("cuda", 0)
    current: Stream
    control: cuda.Control
    copies: list = []  # noqa: RUF012 - programs of a process

    @classmethod
    def install(cls, device):
        cls.device = torch.device("cuda", device)
        cls.control = cuda.Control(device, 1, 0, 1, memory(device=device), [None])
        cls.current = Stream(cls.device)
        torch._foreach_copy_ = cls.foreach_copy
        torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, cls.stream
        torch.cuda.current_stream = lambda device=None: cls.current
        torch.cuda.set_stream = lambda stream: setattr(cls, "current", stream)

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream):
        before, cls.current = cls.current, stream
        yield
        cls.current = before

    @classmethod
    def foreach_copy(cls, targets, sources):
        ops, bases = [], []
        for target, source in zip(targets, sources, strict=True):
            assert target.items == source.items
            assert source.dtype is target.dtype, "torch is not asked to cast"
            if source.items:
                n = len(bases)
                ops.append([COPY, n, 0, n + 1, 0, 1, source.items * source.dtype.itemsize, 0, 0, RAW, RAW])
                bases += [source.data_ptr(), target.data_ptr()]
        copies = program(ops, n_bases=len(bases))
        copies.begin(cls.control, bases, [], 0, 1.0).enqueue(0, cls.current.cuda_stream)
        cls.copies.append(copies)


class NotedKernels(FakeKernels):
    """Notes for which casts it has been asked for a kernel: (source, result, whether for aligned addresses)."""

    def __init__(self):
        super().__init__()
        self.casts = []

    def sum(self, staged, pointers, grad, output, aligned):
        if staged == 0:
            self.casts.append((grad, output, aligned))
        return super().sum(staged, pointers, grad, output, aligned)


class Trainer:
    """One rank: groups, what FSDP2 does with them in a step, and what it found in the landings."""

    def __init__(self, rank, exchange, topology, slot_reuse, masters=None, connect=None):
        self.rank, self.n, device = rank, topology.ranks, rank % 2
        Torch.install(device)
        self.pool, self.end = memory(4 * MIB, device), 0
        self.dtype = torch.bfloat16 if masters is None else torch.float32
        self.layout = GroupLayout(tuple(ParamShape(*s, 2) for s in SHAPES), self.n)
        needed = needed_device_memory([self.layout], topology, rank, CHUNK, slot_reuse)
        rail = None if connect is None else connect(exchange, rank, topology, device, 10.0, CallBook(topology, 3))
        common = {"slots": 3, "memory": needed, "timeout_s": 10.0, "rail": rail}
        self.engine = CudaEngine(exchange, rank, topology, device, **common)
        if isinstance(rail, MessageRail):
            rail.reach(self.engine)
        ring = SlotRing(lambda: self.engine.add_slot(self.layout.landing_bytes, "ring"), 2)
        streams, self.paths, self.landings = CudaStreams(Torch.device), [], []
        kernels = self.kernels = NotedKernels()
        for i in range(GROUPS):
            items = [Item.RAW2 if masters is None else Item.F32] * len(SHAPES)
            common = {"shard_items": items, "slot_reuse": slot_reuse}
            group = CudaGroup(self.engine, f"group {i}", self.layout, ring, CHUNK, kernels, 4, **common)
            window = group.landing.window
            whole = [Buffer(window, self.layout.landing_base(p), self.layout.shard_items(p) * self.n) for p in range(3)]
            group.prepare_all_gather()
            self.paths.append(CudaPath(group, streams, CudaLanding(whole if slot_reuse else None)))
            self.landings.append(whole)
        self.compute, self.scatter = Torch.current, Stream(Torch.device)
        copy_in, gather = Stream(Torch.device), Stream(Torch.device)
        context = SimpleNamespace(get_all_gather_streams=lambda *_: (copy_in, gather))
        #: As GatherAhead: the next all-gather before a network phase.
        self.ahead, self.pending = topology.nodes > 1 and not slot_reuse, set()
        self.pause = lambda where: None
        self.group = SimpleNamespace(comm_ctx=context, unshard_async_op=False, _training_state=None)
        self.shards = [[self.buffer(self.layout.shard_items(p), self.dtype) for p in range(3)] for _ in range(GROUPS)]
        self.garbage = [self.buffer(r * k) for r, k in SHAPES]
        self.seen, self.outputs, self.states = [], [], []

    def buffer(self, items, dtype=torch.bfloat16):
        """Memory that is used once."""
        at, self.end = self.end, self.end + -(-items * dtype.itemsize // 256) * 256
        assert self.end <= self.pool.bytes
        return Buffer(self.pool, at, items, dtype)

    def filled(self, numbers, dtype=torch.bfloat16):
        buffer = self.buffer(numbers.size, dtype)
        buffer.numbers()[:] = bf16(numbers.ravel()) if dtype is torch.bfloat16 else numbers.ravel()
        return buffer

    def padded(self, numbers, p):
        out = np.zeros(self.layout.shard_items(p) * self.n)
        out[: numbers.size] = numbers.ravel()
        return out

    def look(self, i, step):
        """Compute: reads the group's parameters."""
        into = [self.buffer(r * k) for r, k in SHAPES]
        Torch.foreach_copy(into, [whole[: t.items] for whole, t in zip(self.landings[i], into, strict=True)])
        self.seen.append((i, step, into))

    def gather(self, i):
        """Unless that has been done."""
        if i not in self.pending:
            self.pending.add(i)
            self.paths[i].all_gather(self.group, self.shards[i], None)

    def wait(self, i):
        self.pending.remove(i)
        self.paths[i].wait()

    def forward(self, step):
        for i, shards in enumerate(self.shards):  # the optimizer's work
            own = [self.padded(x, p).reshape(self.n, -1)[self.rank] for p, x in enumerate(parameters(i, step))]
            Torch.foreach_copy(shards, [self.filled(x, self.dtype) for x in own])
        for stream in self.group.comm_ctx.get_all_gather_streams():  # as FSDP2's root does
            stream.wait_stream(self.compute)
        for i, path in enumerate(self.paths):
            self.gather(i)
            self.wait(i)
            self.look(i, step)
            path.vacate()

    def backward(self, step):
        self.gather(GROUPS - 1)
        for i in reversed(range(GROUPS)):
            self.wait(i)
            if i:  # backward prefetch
                self.gather(i - 1)
            self.look(i, step)
            self.post_backward(i, step)
        while self.states:
            self.reclaim()
        self.compute.wait_stream(self.scatter)

    def post_backward(self, i, step):
        path = self.paths[i]
        grads = [self.buffer(r * k) for r, k in SHAPES]
        Torch.foreach_copy(grads, [self.filled(x) for x in gradients(i, step, self.rank)])
        if not path.keeps_gradients:
            path.vacate()
        if self.ahead and i >= 2:
            self.pause("before the gather")
            self.gather(i - 2)
            path.network_after_rail()
            self.pause("before the reduction")
        if self.states:  # FSDP2 keeps the inputs of one reduction
            self.reclaim()
        kept = path.keep_gradients((0, 1, 2), grads) if path.keeps_gradients else grads
        if path.keeps_gradients:  # their memory is the allocator's again
            Torch.foreach_copy(grads, self.garbage)
        output = self.buffer(self.layout.output_items, torch.float32)
        self.outputs.append((i, step, output))
        path.gradients_ready()
        self.scatter.wait_stream(self.compute)
        with torch.cuda.stream(self.scatter):
            path.reduce_scatter((0, 1, 2), kept, output, 2.0, path.vacate if path.keeps_gradients else lambda: None)
            event = Event()
            event.record(self.scatter)
        self.states.append((path.gradients_read() or event, grads))

    def reclaim(self):
        event, grads = self.states.pop(0)
        self.compute.wait_event(event)
        Torch.foreach_copy(grads, self.garbage)

    def check(self):
        until(lambda: self.engine.control.outstanding() == 0, 40)
        assert fake.fake_idle(Torch.device.index, 20_000)
        self.engine.watchdog.check()
        for i, step, into in self.seen:
            for got, want in zip(into, parameters(i, step), strict=True):
                assert np.array_equal(got.numbers(), bf16(want.ravel())), ("parameters", i, step)
        for i, step, output in self.outputs:
            for p in range(3):
                total = sum(self.padded(gradients(i, step, r)[p], p) for r in range(self.n))
                want = total.reshape(self.n, -1)[self.rank].astype(np.float32) / 2
                at = self.layout.output_offset(p)
                assert np.array_equal(output.numbers(np.float32)[at : at + want.size], want), ("sums", i, step, p)
        self.engine.close()


def parameters(i, step):
    rng = np.random.default_rng([1, i, step])
    return [rng.integers(-99, 100, s).astype(np.float64) for s in SHAPES]


def gradients(i, step, rank):
    rng = np.random.default_rng([2, i, step, rank])
    return [rng.integers(-8, 9, s).astype(np.float64) for s in SHAPES]


def _steps(rank, exchange, shape, slot_reuse, masters=None, connect=None):
    trainer = Trainer(rank, exchange, Topology(*shape), slot_reuse, masters, connect)
    for step in range(STEPS):  # the host never waits
        trainer.forward(step)
        trainer.backward(step)
    trainer.check()
    wanted = set() if masters is None else {(Item.F32, Item.BF16, False)}
    assert set(trainer.kernels.casts) == wanted
    return len(trainer.outputs)


def check_steps(cases):
    for shape, *how in cases:
        assert set(values(launch(shape[0] * shape[1], _steps, shape, *how))) == {GROUPS * STEPS}


@scenario
def steps_are_right():
    check_steps([((1, 2), True), ((2, 2), True)])


@scenario
def casts_of_masters_are_part_of_the_all_gather():
    check_steps([((1, 3), False, True), ((2, 2), True, True), ((2, 1), False, True, MessageRail)])


def _moved(rank, exchange):
    SHAPES[2] = (16, 8)  # every length is one of whole vectors
    trainer = Trainer(rank, exchange, Topology(1, 2), False, True)
    shards = trainer.shards[0]
    values = [np.arange(s.items, dtype=np.float32) + rank for s in shards]
    found = []
    room = trainer.buffer(shards[0].items + 1, torch.float32)
    for off in (0, 4):
        shards[0] = Buffer(trainer.pool, room.at + off, shards[0].items, torch.float32)
        for shard, numbers in zip(shards, values, strict=True):
            shard.numbers()[:] = numbers
        trainer.paths[0].all_gather(trainer.group, shards, None)
        trainer.paths[0].wait()
        assert fake.fake_idle(Torch.device.index, 20_000)
        exchange(b"landed")
        for p, whole in enumerate(trainer.landings[0]):
            want = np.concatenate([values[p] - rank + r for r in range(2)])
            assert np.array_equal(whole.numbers(), bf16(want)), (off, p)
        exchange(b"looked")
        trainer.paths[0].vacate()
        found.append(trainer.kernels.casts[-1][2])
    trainer.check()
    return found


@scenario
def a_shard_that_moves_is_cast_by_a_kernel_that_can_read_it():
    assert values(launch(2, _moved)) == [[True, False]] * 2


def _on_the_default_stream(rank, exchange):
    trainer = Trainer(rank, exchange, Topology(1, 2), False)
    Torch.current = SimpleNamespace(cuda_stream=0)
    output = trainer.buffer(trainer.layout.output_items, torch.float32)
    grads = [trainer.filled(x) for x in gradients(0, 0, rank)]
    collectives, push = trainer.paths[0].collectives, Stream(Torch.device)
    addresses, streams = [g.data_ptr() for g in grads], (push.cuda_stream, Torch.current.cuda_stream)
    with raises(ValueError, "stream 'sum' of a collective is given CUDA's default stream"):
        collectives.reduce_scatter((0, 1, 2), Item.BF16, Item.F32, addresses, output.data_ptr(), 2.0, streams)
    trainer.check()
    return True


@scenario
def nothing_is_left_out_for_being_on_the_default_stream():
    """A sum that is not enqueued is waited for by the next call of every peer."""
    assert all(values(launch(2, _on_the_default_stream)))


@scenario
def steps_on_one_hardware_queue():
    """With a rail as well: NCCL, too, lets what it is given happen in that order."""
    os.environ["FAKE_CUDA_CONNECTIONS"] = "1"
    check_steps([((1, 2), False), ((2, 2), False, None, MessageRail)])


@scenario
def steps_of_a_host_that_waits_for_its_device():
    os.environ["FAKE_CUDA_BLOCKING"] = "1"
    check_steps([((1, 2), True), ((2, 1), False)])


def _held(rank, exchange):
    """Rank 0 goes on by itself: first to where the others have yet to gather, then to where they have yet to reduce."""
    trainer = Trainer(rank, exchange, Topology(3, 1), False)
    for path in trainer.paths:  # as at installation: later the host would wait for its device
        path.collectives.prepare((0, 1, 2), Item.BF16, Item.F32)
    inbox = array(trainer.engine.own(Space.INBOX, 0), np.uint8)

    def gathered():
        pairs = zip(trainer.landings[0], parameters(0, 0), strict=True)
        return all(np.array_equal(whole[: p.size].numbers(), bf16(p.ravel())) for whole, p in pairs)

    def pause(where):
        if where == "before the gather":
            before = inbox.copy()
            exchange(b"all are here")
            until(lambda: not gathered())  # the device, too, is past the forward, which had it there
            if rank:
                exchange(b"rank 0 has given out its reduction")
                assert np.array_equal(inbox, before), "a network phase has begun before the all-gather's rounds"
        elif rank:
            until(gathered)
            exchange(b"all have gathered")

    def reduce(i, step, then=trainer.post_backward):
        then(i, step)
        if i == GROUPS - 1 and step == 0 and not rank:
            time.sleep(0.3)  # long enough for the network phase to begin, if it could
            assert not gathered()
            exchange(b"rank 0 has given out its reduction")
            until(gathered)
            assert trainer.engine.control.outstanding(), "the reduction waits for the others"
            exchange(b"all have gathered")

    trainer.pause, trainer.post_backward = pause, reduce
    trainer.forward(0)
    trainer.backward(0)
    trainer.pause = lambda where: None
    trainer.forward(1)
    trainer.backward(1)
    trainer.check()
    return len(trainer.outputs)


@scenario
def an_all_gather_is_through_while_a_network_phase_is_held():
    """Which does not begin before the all-gather's rounds are through, though its stream has nothing else to do."""
    assert values(launch(3, _held)) == [GROUPS * STEPS] * 3


if __name__ == "__main__":
    play(globals())
