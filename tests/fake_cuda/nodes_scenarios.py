"""Virtual nodes: ranks are processes that share device memory, and run the GPU's collectives beside the CPU's."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import tempfile
import time

import numpy as np
from fakes import FakeKernels, MessageRail
from ranks import launch, values
from stage import array, calls, fake, memory, play, scenario, until

from tide_strategies._native import cuda
from tide_strategies.cli.main import main
from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.schedule import Item
from tide_strategies.errors import TideMismatchError, TidePeerError, TideTimeoutError
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime import autopsy
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda import watchdog
from tide_strategies.runtime.cuda.engine import CudaEngine
from tide_strategies.runtime.cuda.group import CudaGroup, needed_device_memory
from tide_strategies.runtime.engine import Engine
from tide_strategies.runtime.group import GroupCollectives, needed_memory
from tide_strategies.runtime.slots import SlotRing
from tide_strategies.topology import Topology

#: Rows that divide evenly and not, fewer rows than ranks, odd bytes, nothing at all, and a row of many elements.
SIZES = [(48, 8), (13, 5), (3, 7), (17, 1), (0, 4), (40, 33), (7, 400)]
#: What the reductions of a turn are divided by: by multiplying with an exact reciprocal, really, and not at all.
DIVISORS = (4.0, 3.0, 1.0)
STREAMS = ("cast", "rail", "place", "completion", "readiness", "push", "sum", "network")


def layouts(ranks):
    return [GroupLayout(tuple(ParamShape(*s, 2) for s in sizes), ranks) for sizes in (SIZES, SIZES[:2])]


class Rank:
    """One rank's engine, groups and streams, and the order in which a training step uses them."""

    def __init__(
        self,
        rank,
        exchange,
        topology,
        device,
        *,
        chunk_bytes,
        slot_reuse=False,
        timeout_s=30.0,
        connect=None,
        multicast=False,
        plan=None,
        host_ranks=0,
        board=None,
    ):
        self.rank, self.topology, self.device = rank, topology, device
        shapes = layouts(topology.ranks)
        args = exchange, rank, topology, device, timeout_s, CallBook(topology, 2)
        self.rail = None if connect is None else connect(*args)
        self.engine = CudaEngine(
            exchange,
            rank,
            topology,
            device,
            slots=2,
            memory=needed_device_memory(
                shapes, topology, rank, chunk_bytes, slot_reuse, plan=plan, multicast=multicast
            ),
            timeout_s=timeout_s,
            rail=self.rail,
            multicast=multicast,
            host_ranks=host_ranks,
            board=board,
        )
        if isinstance(self.rail, MessageRail):
            self.rail.reach(self.engine)
        ring = SlotRing(lambda: self.engine.add_slot(max(x.landing_bytes for x in shapes), "ring"), 2)
        ctas = 1 + rank % 3, 1 + rank // 2  # of sums and landings: no count changes a bit
        modes = {"landing_ctas": ctas[1], "slot_reuse": slot_reuse, "plan": plan}
        common = chunk_bytes, FakeKernels(device), ctas[0]
        self.groups = [CudaGroup(self.engine, f"group {i}", x, ring, *common, **modes) for i, x in enumerate(shapes)]
        self.streams = {name: cuda.Stream(device, -1) for name in STREAMS}
        self.alone = cuda.Control(device, 1, 0, 1, memory(device=device), [None])
        self.keep = []

    def stream(self, name):
        return self.streams[name].handle

    def placed(self, arrays):
        """Addresses of copies in device memory, which is kept until everything has run."""
        source = memory(sum(a.nbytes + 16 for a in arrays) + 16, self.device)
        at, addresses = 0, []
        for a in arrays:
            array(source, np.uint16, at, a.size)[:] = a.ravel()
            addresses.append(source.address + at)
            at += -(-a.nbytes // 16) * 16
        self.keep.append(source)
        return addresses

    def gather(self, group, shards):
        slot = group.occupy()
        group.open(slot, self.placed(shards))
        group.send(self.stream("cast"), self.stream("place"), self.stream("rail"))
        for name in ("cast", "place"):
            cuda.order(self.stream(name), self.stream("completion"))
        group.complete(self.stream("completion"))

    def vacate(self, group):
        for name in ("place", "cast"):  # nobody uses the landing after what is enqueued by now
            cuda.order(self.stream("readiness"), self.stream(name))
        group.vacate(self.stream("readiness"))

    def reduce(self, group, gradients, output, out_item, divisor):
        addresses = self.placed(gradients)
        which = tuple(range(len(gradients)))
        streams = [self.stream(name) for name in ("push", "sum", "network")]
        group.reduce_scatter(which, Item.BF16, out_item, addresses, output.address, divisor, streams)

    def finish(self):
        until(lambda: self.engine.control.outstanding() == 0, 40)
        assert fake.fake_idle(self.device, 20_000)
        self.engine.watchdog.check()
        self.keep.clear()


def bf16(x):
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def own_shard(full, layout, p, rank):
    items = layout.shard_items(p)
    padded = np.zeros(items * layout.ranks, np.uint16)
    padded[: full.size] = full.ravel()
    return padded[rank * items : (rank + 1) * items]


def cpu_sums(rank, exchange, topology, gradients, out_item):
    """What the CPU's executor makes of the same gradients: one array of bytes per group and turn."""
    engine = Engine(exchange, rank, topology, slots=2, timeout_s=30.0)
    shapes = layouts(topology.ranks)
    engine.reserve(needed_memory(shapes, topology, rank, 4096))
    ring = SlotRing(lambda: engine.add_slot(max(x.landing_bytes for x in shapes), "ring"), 2)
    out = []
    for i, layout in enumerate(shapes):
        group = GroupCollectives(engine, f"cpu {i}", layout, [Item.RAW2] * len(layout.params), ring, 4096)
        for turn, divisor in enumerate(DIVISORS):
            own = gradients[i][turn]
            result = np.full(layout.output_items * out_item.size, 0xEE, np.uint8)
            group.reduce_scatter(
                *(tuple(range(len(own))), Item.BF16, out_item, [g.ctypes.data for g in own]),
                *(result.ctypes.data, divisor),
            )
            out.append(result)
    exchange(b"done")
    engine.close()
    return out


def _values(rng, ranks):
    """Arrays by group, turn and parameter."""
    return [[[bf16(rng.standard_normal(s)) for s in SIZES[: len(x.params)]] for _ in DIVISORS] for x in layouts(ranks)]


def check_collectives(
    rank, exchange, shape, out_item, slot_reuse, chunk_bytes, connect=None, plan=None, multicast=False
):
    """Run and check all-gathers and reductions on one rank; how many kernels the device has launched."""
    topology = Topology(*shape)
    n = topology.ranks
    full, grads = _values(np.random.default_rng(1), n), _values(np.random.default_rng(100 + rank), n)
    device = rank % 2
    here = Rank(
        rank,
        exchange,
        topology,
        device,
        chunk_bytes=chunk_bytes,
        slot_reuse=slot_reuse,
        connect=connect,
        plan=plan,
        multicast=multicast,
    )
    outputs = [[memory(x.output_items * 4, device) for _ in DIVISORS] for x in layouts(n)]
    for turn, divisor in enumerate(DIVISORS):
        for i, group in enumerate(here.groups):  # both at once, then the reductions behind them
            params = range(len(group.layout.params))
            here.gather(group, [own_shard(full[i][turn][p], group.layout, p, rank) for p in params])
        for i, group in enumerate(here.groups):
            here.reduce(group, grads[i][turn], outputs[i][turn], out_item, divisor)
        here.finish()
        exchange(b"")  # on a device that threads share, what one gives it then another would wait for
        for i, group in enumerate(here.groups):
            for p, want in enumerate(full[i][turn]):
                got = array(group.landing.window, np.uint16, group.layout.landing_base(p), want.size)
                assert np.array_equal(got, want.ravel()), (shape, turn, i, p)
            here.vacate(group)
    here.finish()
    exchange(b"")
    wanted = cpu_sums(rank, exchange, topology, grads, out_item)
    got = [outputs[i][turn] for i in range(len(here.groups)) for turn in range(len(DIVISORS))]
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        assert np.array_equal(array(have, np.uint8, 0, want.size), want), (shape, out_item, number)
    launched = calls("cuLaunchKernel")
    assert connect is not MessageRail or here.rail.used > 0
    here.engine.close()
    return launched


def _check(cases, connect=None):
    for shape, *how in cases:
        plan = how.pop() if isinstance(how[-1], BasePlan) else None
        found = values(launch(shape[0] * shape[1], check_collectives, shape, *how, connect, plan))
        assert all(launches > 0 for launches in found)


@scenario
def collectives_on_every_topology():
    """All-gathers land every shard; reductions give the bytes of the CPU's executor, in both modes and dtypes."""
    _check(
        [
            ((2, 1), Item.F32, False, 4096),
            ((2, 2), Item.BF16, True, 64),
            ((4, 1), Item.F32, True, 64),
            ((4, 1), Item.BF16, False, 4096),
            ((3, 2), Item.F32, True, 96, BasePlan(3, 2, 2, 1, True, 2)),  # two passes, one transfer a round
            ((1, 3), Item.F32, False, 512),
        ]
    )


@scenario
def one_hardware_queue_is_enough_for_nodes():
    """All streams of a rank share a queue that works in order: what a wait needs was given to a queue before it."""
    os.environ["FAKE_CUDA_CONNECTIONS"] = "1"
    _check([((2, 2), Item.F32, True, 64), ((4, 1), Item.BF16, False, 64)])


@scenario
def a_host_that_waits_for_its_device_before_every_launch_gets_through():
    """As it may have to, to load a kernel or to allocate: what a device waits for has been enqueued before."""
    os.environ["FAKE_CUDA_BLOCKING"] = "1"
    _check([((1, 2), Item.F32, False, 512), ((2, 2), Item.F32, True, 512), ((3, 1), Item.BF16, False, 4096)])


@scenario
def nodes_may_be_connected_by_a_rail():
    """One that knows no memory of peers but its own, as between hosts; also where everything is in one queue."""
    _check([((2, 2), Item.F32, True, 64), ((3, 1), Item.BF16, False, 4096)], connect=MessageRail)
    os.environ["FAKE_CUDA_CONNECTIONS"] = "1"
    _check([((2, 2), Item.F32, False, 512)], connect=MessageRail)


#: That a peer is dead is noticed long before a timeout; that it stalls, at the timeout.
TIMEOUT_S = {"killed": 15.0, "stalled": 1.5}


def lost(rank, exchange, how, folder, connect=None, host_ranks=0):
    """Reduce again and again until rank 3 stops; what the watchdog says on this rank, and after how long."""
    autopsy.write_to(folder)
    common = {"chunk_bytes": 256, "timeout_s": TIMEOUT_S[how], "connect": connect, "host_ranks": host_ranks}
    here = Rank(rank, exchange, Topology(2, 2), 0, **common)
    here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
    group, rng = here.groups[0], np.random.default_rng(rank)
    output = memory(group.layout.output_items * 4)
    gradients = [bf16(rng.standard_normal(s)) for s in SIZES]
    for turn in range(400):
        if turn == 2:
            begun = time.monotonic()
            if rank == 3 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 3:
                until(lambda: here.engine.watchdog.stopped, 15)
                here.engine.watchdog._thread.join(10)  # it has written down what it was at
                return "stalled", "", 0.0
        try:
            here.reduce(group, gradients, output, Item.F32, 1.0)
        except (TidePeerError, TideTimeoutError) as error:
            took = time.monotonic() - begun
            until(lambda: here.engine.control.outstanding() == 0, 10)
            return type(error).__name__, str(error), took
        if turn > 2:
            time.sleep(0.05)
        elif connect is None:  # memory waits for the device, with the interpreter's lock, which a rail's threads need
            here.keep.clear()
    return "nothing", "", 0.0


def first_cause(folder):
    """What ``tide autopsy`` makes of what the watchdogs wrote, and the ranks that wrote."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["autopsy", folder, "--json"]) == 0
    told = json.loads(output.getvalue())
    assert not told["refused"]
    (cause,) = told["causes"]
    return cause, sorted(record["rank"] for record in told["records"])


@scenario
def a_killed_rank_ends_the_ranks_of_every_node():
    with tempfile.TemporaryDirectory() as folder:
        results = launch(4, lost, "killed", folder)
        cause, wrote = first_cause(folder)
    assert wrote == [0, 1, 2]
    assert cause.startswith("rank 3 (pid "), cause
    assert ") died. Rank " in cause, cause
    assert " of rank 3: expected " in cause, cause
    assert results[3].exit_code == -signal.SIGKILL
    found = values(results[:3])
    assert {kind for kind, _, _ in found} == {"TidePeerError"}, found
    assert any("rank 3 is dead" in words and "of rank 3: expected" in words for _, words, _ in found), found
    assert all(took < TIMEOUT_S["killed"] for _, _, took in found), found


@scenario
def a_stalled_rank_ends_them_too():
    with tempfile.TemporaryDirectory() as folder:
        found = values(launch(4, lost, "stalled", folder))[:3]
        cause, wrote = first_cause(folder)
    assert wrote == [0, 1, 2, 3]
    assert cause.startswith("rank 3 (pid "), cause
    assert "was in no collective when rank " in cause, cause
    assert "reduce-scatter of " in cause, cause
    assert " of rank 3: expected " in cause, cause
    timeouts = [words for kind, words, _ in found if kind == "TideTimeoutError"]
    assert timeouts, found
    assert {kind for kind, _, _ in found} <= {"TideTimeoutError", "TidePeerError"}, found
    for words in timeouts:  # what holds up a rank's other streams is never to blame
        rank = words.split(": rank ")[1][0]
        assert f"of rank {rank}: expected" not in words, words
    assert all(took < 15 for _, _, took in found), found


def _divergent(rank, exchange, how):
    """The ranks reduce different groups of the same slots; what each of them is told, and by whom."""
    here = Rank(rank, exchange, Topology(1, 2), 0, chunk_bytes=256, timeout_s=20.0)
    here.engine.watchdog._main = 0  # the error rises where a call begins, and nowhere else
    if how == "at once":  # both have noted their call before either looks
        here.engine.order.note = lambda tag, note=here.engine.order.note: note(tag) and None
    for group in here.groups:  # as at installation; from then on their names are known
        group.prepare(tuple(range(len(group.layout.params))), Item.BF16, Item.F32)
    output, group = memory(here.groups[0].layout.output_items * 4), here.groups[rank]
    gradients = [bf16(np.ones(s)) for s in SIZES[: len(group.layout.params)]]
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 15:
            here.reduce(group, gradients, output, Item.F32, 1.0)
            time.sleep(0.02)
    except (TidePeerError, TideMismatchError) as error:
        until(lambda: here.engine.control.outstanding() == 0, 10)
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing", "", 0.0


@scenario
def ranks_that_run_different_groups_are_told():
    for how in ("one after the other", "at once"):
        found = values(launch(2, _divergent, how))
        assert "TideMismatchError" in {kind for kind, _, _ in found} <= {"TideMismatchError", "TidePeerError"}, found
        for _, words, took in found:
            assert "ranks run different collectives: rank" in words, words
            assert "group 0" in words, words
            assert "group 1" in words, words
            assert took < 10, found


def _starved(rank, exchange):
    """Rank 1 never reduces; rank 0 waits for its device in a call that holds the interpreter's lock."""
    watchdog._STARVED_S = 0.5
    here = Rank(rank, exchange, Topology(2, 1), 0, chunk_bytes=256, timeout_s=2.0)
    here.engine.watchdog._main = 0
    if rank == 1:
        until(lambda: here.engine.host.aborted() is not None, 40)
        return ""
    group, which = here.groups[0], tuple(range(len(SIZES)))
    group.prepare(which, Item.BF16, Item.F32)
    here.reduce(group, [bf16(np.ones(s)) for s in SIZES], memory(group.layout.output_items * 4), Item.F32, 1.0)
    assert ctypes.PyDLL(os.environ["TIDE_LIBCUDA"]).fake_idle(0, 30_000), "the streams were let go"
    until(lambda: here.engine.watchdog._failure is not None, 10)
    return str(here.engine.watchdog._failure)


@scenario
def a_call_that_holds_the_interpreters_lock_is_let_go_too():
    words, _ = values(launch(2, _starved))
    assert "rank 0 waited on its device for peers" in words, words


if __name__ == "__main__":
    play(globals())
