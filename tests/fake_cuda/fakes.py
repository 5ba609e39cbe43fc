"""Stand-ins for what is neither the driver's nor ours: kernels, and a rail as little is known of as of NCCL's."""

from __future__ import annotations

from types import SimpleNamespace

from stage import AWAIT, COPY, NOTIFY, RAW, fake, program

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Item
from tide_strategies.kernels.tiles import pointer_count
from tide_strategies.runtime.cuda.memory import _map_from, share_allocation
from tide_strategies.runtime.cuda.multicast import landing_kernel


class FakeKernels:
    """Kernels of the fake driver, in the place of Triton's and of what NVRTC compiles."""

    def __init__(self, device=0):
        self.device = device

    def sum(self, staged, pointers, grad, output, aligned):
        dtypes = [0 if item is Item.F32 else 1 for item in (grad, output)]
        count = pointer_count(pointers)
        return self._kernel(fake.fake_sum_function(staged, *dtypes, count, 2), count)

    def land(self, sources, pointers, output, accumulate, aligned):
        count = pointer_count(pointers)
        return self._kernel(fake.fake_land_function(sources, output is Item.BF16, bool(accumulate), count, 2), count)

    def land_multicast(self, output, accumulate):
        image = f"fp32 {'bf16' if output is Item.BF16 else 'fp32'} {'accumulate' if accumulate else 'store'}".encode()
        return landing_kernel(self.device, Item.F32, output, accumulate, lambda *_: image)

    def _kernel(self, function, pointers):
        return SimpleNamespace(
            function=function, threads=128, shared_bytes=0, tile=128, pointers=pointers, extra_null_pointers=2
        )


class MessageRail:
    """A rail that is told nothing but what NCCL's host RMA is: bytes, an offset, a signal; and takes signals in.

    Made of mailboxes in memory of its own: signals of (receiver, counter, sender) are totals in a control's cells. It
    reaches what is registered on all ranks, which the engine does not.
    """

    fetches = False

    def __init__(self, exchange, rank, topology, device, timeout_s, book):
        counters = book.counters
        self.exchange, self.rank, self.device, self.registered = exchange, rank, device, {}
        n = self.ranks = topology.ranks
        self.cells = share_allocation(exchange, rank, n, 30.0, device, cuda.Control.control_bytes(n, counters))
        peers = [None if r == rank else m for r, m in enumerate(self.cells.mappings)]
        self.control = cuda.Control(device, n, rank, counters, self.cells.mappings[rank], peers)
        exchange(b"cleared")
        self.sent, self.used = [], 0

    def register(self, space, index, memory):
        self.registered[space, index] = [memory.address]  # of this rank

    def reach(self, engine):
        for key, places in self.registered.items():
            own = engine._memory[key].own
            assert engine.address(*key, self.rank) == places[0]
            away = [r for r in range(self.ranks) if r not in engine.topology.node_ranks(self.rank)]
            assert not any(engine.address(*key, r) for r in away), "the engine maps memory of other nodes"
            args = self.exchange, self.rank, self.ranks, 30.0, self.device, own, self.ranks
            self.registered[key] = [_map_from(*args, r) for r in range(self.ranks)]

    def put(self, peer, source, nbytes, space, index, offset, counter, stream):
        there = self.registered[space, index][peer].address + offset
        ops = [[COPY, 0, 0, 1, 0, 1, nbytes, 0, 0, RAW, RAW]]
        self._run(program(ops, n_bases=2), [source, there], [], stream)
        self.notify(peer, counter, stream)

    def notify(self, peer, counter, stream):
        self.used += 1
        tell = program([[NOTIFY, 0, 1, peer]], n_counters=1, advance=[(0, self.rank, 1)])
        self._run(tell, [], [counter], stream)

    def take(self, writer, counter, count, stream, parts=()):
        wait_for = program([[AWAIT, 0, writer, count]], n_counters=1, advance=[(0, writer, count)])
        self._run(wait_for, [], [counter], stream)

    def arrive(self, arrivals):
        assert not arrivals, "there is nothing to wait for on the host"

    def pinned_by_part(self):
        return {}

    def check(self):
        assert not self.control.overdue(60.0)

    def stop(self, why=""):
        self.control.release()

    def close(self):
        assert self.control.outstanding() == 0

    def _run(self, made, bases, counters, stream):
        made.begin(self.control, bases, counters, 1, 1.0).enqueue(0, stream)
        self.sent.append(made)
