"""torch.cuda as the benchmarks use it, without a GPU: streams and events that only note what they are given.

What is enqueued runs at once, on the CPU. Good for the host's side (which calls, in which order, what becomes of the
numbers), not for anything that a device does.
"""

from __future__ import annotations

import contextlib
import time
import types

import torch

SMS = 132


class Event:
    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Stream:
    made = 0

    def __init__(self, device=None, priority=0):
        Stream.made += 1
        self.cuda_stream = 1000 + Stream.made

    def wait_stream(self, other):
        assert isinstance(other, Stream)


def order(before, after):
    """As ``_native.cuda.order``."""
    assert before != after
    assert min(before, after) >= 1000, "streams by their handles"


_current = [Stream()]


@contextlib.contextmanager
def _use(stream):
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def install() -> None:
    """Put the stand-ins into ``torch.cuda`` of this process, for good."""
    nothing = types.SimpleNamespace(multi_processor_count=SMS)
    stand_ins = {
        "Event": Event,
        "Stream": Stream,
        "stream": _use,
        "current_stream": lambda device=None: _current[-1],
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "get_device_properties": lambda device: nothing,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 3 * 2**30,
        "mem_get_info": lambda: (2**30, 8 * 2**30),
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)


class CudaEngine:
    """Stands in for ``runtime.cuda.engine.CudaEngine``."""

    def __init__(self, exchange, rank, topology, device, *, slots, memory, timeout_s):
        assert exchange(bytes([rank])) == [bytes([r]) for r in range(topology.ranks)]

    def add_slot(self, nbytes, part):
        return object()

    def close(self):
        pass


class CudaGroup:
    """Stands in for ``runtime.cuda.group.CudaGroup``; insists on its order of calls."""

    log: list[str] = []  # noqa: RUF012 - one log of the process

    def __init__(self, engine, name, layout, home, chunk_bytes, kernels, sum_ctas, *, shard_items):
        assert len(shard_items) == len(layout.params)
        self.name, self.layout, self._next = name, layout, "occupy"
        self.sends_from_shards = all(
            item.size == p.itemsize for item, p in zip(shard_items, layout.params, strict=True)
        )

    def occupy(self):
        self._step("occupy", "open")
        return object()

    def open(self, slot, shards):
        assert len(shards) == len(self.layout.params)
        self._step("open", "send")

    def send(self, own, copy):
        assert (own != copy) == self.sends_from_shards
        self._step("send", "complete", copy)

    def complete(self, stream):
        self._step("complete", "vacate", stream)

    def vacate(self, stream):
        self._step("vacate", "occupy", stream)

    def reduce_scatter(self, params, grad, output, gradients, output_address, divisor, streams):
        assert len(gradients) == len(params)
        assert len(set(streams)) == 2
        self.log.append("reduce_scatter")

    def _step(self, name, then, stream=1000):
        assert self._next == name
        assert stream >= 1000, "a stream by its handle"
        self._next = then
        self.log.append(f"{self.name} {name}")
