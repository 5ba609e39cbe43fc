"""Multicast and landing on the fake driver; see ``stage.py``. Real hardware is never asked for any of it."""

from __future__ import annotations

import os

import numpy as np
from nodes_scenarios import check_collectives
from ranks import threads
from stage import MIB, array, calls, finish, memory, play, raises, scenario

os.environ["FAKE_CUDA_MULTICAST"] = "1"
for switch in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
    os.environ.pop(switch, None)

from tide_strategies._native import cuda  # noqa: E402
from tide_strategies.collectives.all_gather import all_gather  # noqa: E402
from tide_strategies.collectives.plan import BasePlan  # noqa: E402
from tide_strategies.collectives.schedule import Item, Space  # noqa: E402
from tide_strategies.errors import TideArenaError  # noqa: E402
from tide_strategies.layout import GroupLayout, ParamShape  # noqa: E402
from tide_strategies.runtime.cuda.memory import share_allocation  # noqa: E402
from tide_strategies.runtime.cuda.multicast import (  # noqa: E402
    landing_kernel,
    landing_macros,
    multicast_facts,
    share_multicast,
    why_unicast,
)
from tide_strategies.runtime.encode import encode  # noqa: E402
from tide_strategies.topology import Topology  # noqa: E402

ENTRY_POINTS = ("Create", "AddDevice", "BindMem", "Unbind", "GetGranularity")


def joined(size=2, nbytes=MIB):
    """Each rank's shared memory and multicast object."""

    def work(exchange, rank):
        whole = cuda.Multicast.whole_bytes(rank, size, nbytes)
        shared = share_allocation(exchange, rank, size, 10.0, rank, whole)
        return shared, share_multicast(exchange, rank, size, 10.0, rank, shared)

    made = threads(size, work)
    assert not any(isinstance(m, Exception) for m in made), made
    return made


def touched():
    return sum(calls(f"cuMulticast{name}") for name in ENTRY_POINTS)


@scenario
def nothing_is_made_where_multicast_is_switched_off():
    for name, no, yes in (
        ("NCCL_NVLS_ENABLE", ["0", "0x0", " 0"], ["1", "2", ""]),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", ["1", "true", "yes"], ["0", "", "false", "OFF"]),
        ("NVSHMEM_DISABLE_NVLS", ["1"], ["0"]),
    ):
        for value in no:
            os.environ[name] = value
            assert cuda.multicast_switched_off() == f"{name}={value}"
            words = f"it is switched off ({name}={value})"
            assert cuda.multicast_refusal(0) == words
            for attempt in (
                lambda: cuda.Multicast(0, 2, MIB),
                lambda: cuda.Multicast.whole_bytes(0, 2, MIB),
                lambda: cuda.Multicast.from_fd(0, 0, 2, MIB),
                lambda: landing_kernel(0, Item.F32, Item.F32, False, lambda *a: b"fp32 fp32 store"),
            ):
                with raises(RuntimeError, words):
                    attempt()
        for value in yes:
            os.environ[name] = value
            assert cuda.multicast_switched_off() == ""
            assert cuda.multicast_refusal(0) == ""
        del os.environ[name]
    assert touched() == 0


@scenario
def a_device_without_multicast_refuses():
    del os.environ["FAKE_CUDA_MULTICAST"]
    assert "device 1 is on no NVSwitch with multicast" in cuda.multicast_refusal(1)
    with raises(RuntimeError, "multicast cannot be used: device 0 is on no NVSwitch"):
        cuda.Multicast(0, 2, MIB)
    with raises(ValueError, "device is 7; allowed: 0 to 1"):
        cuda.multicast_refusal(7)
    assert touched() == 0


@scenario
def one_rank_that_refuses_keeps_all_from_it():
    shared = threads(2, lambda exchange, rank: share_allocation(exchange, rank, 2, 10.0, rank, 4 * MIB))

    def work(exchange, rank):  # rank 1 would be on a GPU that rank 0 has
        return share_multicast(exchange, rank, 2, 10.0, 0, shared[0])

    errors = threads(2, work)
    assert all(isinstance(e, TideArenaError) and "several ranks share a GPU" in str(e) for e in errors), errors
    assert touched() == 0


@scenario
def objects_are_made_step_by_step_and_go_again():
    made = joined(nbytes=3 * MIB)
    for rank, (shared, multicast) in enumerate(made):
        assert multicast.device == rank
        assert multicast.bytes == 4 * MIB == shared.own.bytes  # the granule of multicast, not of memory
        assert multicast.address not in (0, *shared.addresses)
    assert (calls("cuMulticastCreate"), calls("cuMulticastAddDevice"), calls("cuMulticastBindMem")) == (1, 2, 2)
    multicast, own = made[0][1], made[0][0].own
    with raises(ValueError, "has memory of this device already"):
        multicast.bind(own)
    fresh = cuda.Multicast(0, 2, MIB)
    with raises(ValueError, "memory must be bound before"):
        fresh.map()
    with raises(ValueError, "the memory is on device 1; this rank's is device 0"):
        fresh.bind(made[1][0].own)
    with raises(ValueError, "the memory has 2097152 bytes; the multicast object 4194304"):
        fresh.bind(cuda.Allocation(0, MIB))
    with raises(RuntimeError, "cuMulticastBindMem failed"):  # not all devices are there yet
        fresh.bind(own)
    with raises(ValueError, "a multicast object joins 2 or more"):
        cuda.Multicast(0, 1, MIB)
    del made, multicast, fresh, own, shared
    assert calls("cuMulticastUnbind") == 2


@scenario
def an_all_gather_stores_each_shard_once():
    """The schedule of a shared landing, with the multicast address as the landing."""
    layout = GroupLayout((ParamShape(5, 3, 4), ParamShape(2, 8, 2)), 2)
    topology = Topology(1, 2)
    made = joined(nbytes=layout.landing_bytes)
    cells = cuda.Control.control_bytes(2, 4)
    kept = [cuda.Allocation(rank, cells) for rank in range(2)]
    seen = [[cuda.Mapping(kept[r], rank) for r in range(2)] for rank in range(2)]  # by whose device
    before = calls("copies")
    expected = np.zeros(layout.landing_bytes, np.uint8)
    shards, running = [], []
    controls = [
        cuda.Control(r, 2, r, 4, seen[r][r], [None if p == r else seen[r][p] for p in range(2)]) for r in range(2)
    ]
    for rank, control in enumerate(controls):
        items = [Item.of_size(p.itemsize) for p in layout.params]
        schedule = all_gather(layout, topology, rank, items, shared_landing=True)
        encoded = encode(schedule, len(layout.params), cuda.Program)
        inputs = []
        for p, shape in enumerate(layout.params):
            shard = memory(MIB, rank)
            nbytes = layout.valid_items(p, rank) * shape.itemsize
            array(shard, np.uint8)[:nbytes] = np.arange(nbytes) + 100 * rank + 50 * p + 1
            at = layout.landing_offset(p, rank)
            expected[at : at + nbytes] = array(shard, np.uint8)[:nbytes]
            inputs.append(shard.address)
            shards.append(shard)
        landing = [made[rank][1].address]
        others = [landing[0] for space, _, _ in encoded.bases if space is Space.LANDING]
        call = encoded.program.begin(control, [*inputs, *others], list(range(len(encoded.counters))), 1, 1.0)
        streams = {name: cuda.Stream(rank, 0) for name in ("copy", "completion")}
        for name, stream in streams.items():
            call.enqueue(encoded.streams[name], stream.handle)
        running.append((encoded, call, streams))
    for rank in range(2):
        finish(rank)
    for shared, _ in made:
        landed = array(shared.mappings[made.index((shared, _))], np.uint8)[: layout.landing_bytes]
        assert np.array_equal(landed, expected)
    copies = sum(1 for r in range(2) for p in range(2) if layout.valid_items(p, r))
    assert calls("copies") - before <= copies, "one copy a shard, whatever the number of ranks"


def bf16(values):
    """float32 -> bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@scenario
def a_landing_adds_what_all_devices_hold():
    """The kernel's own source, compiled for the host, in all variants: offsets, odd counts, scale, accumulation."""
    made = joined(nbytes=MIB)
    random = np.random.default_rng(0)
    # Output offset, elements, address, source offset: odd everything, empty, one element, more pieces than threads.
    rows = [
        (3, 1000, 0, 5),
        (1004, 1, 1, 0),
        (1006, 0, 0, 0),
        (1008, 4096, 0, 2048),
        (5105, 7, 1, 9),
        (5112, 8, 0, 6400),
    ]
    # A row that must not be read at either end of the table.
    kept = memory()
    table = array(kept, np.int64)
    table[: 4 * (len(rows) + 2)] = np.array([(0, 9000, 0, 0), *rows, (0, 9000, 0, 0)]).ravel()
    for partial in (Item.F32, Item.BF16):
        for output in (Item.F32, Item.BF16):
            for accumulate in (False, True):
                for divisor in (3.0, 4.0):  # divided by; multiplied with the reciprocal
                    _land(made, table, rows, partial, output, accumulate, divisor, random)


def _land(made, table, rows, partial, output, accumulate, divisor, random):
    names = {Item.F32: "fp32", Item.BF16: "bf16"}
    asked = []

    def compiler(source, architecture, macros):
        asked.append((source == cuda.landing_source(), architecture, macros))
        return f"{names[partial]} {names[output]} {'accumulate' if accumulate else 'store'}".encode()

    kernel = landing_kernel(0, partial, output, accumulate, compiler)
    assert asked == [(True, "sm_90", landing_macros(partial, output, accumulate))]
    values = [random.standard_normal(16384).astype(np.float32) * 2.0 ** random.integers(-6, 7, 16384) for _ in made]
    values = [v.astype(np.float32) for v in values]
    held = values if partial is Item.F32 else [bf16(v) for v in values]
    for rank, (shared, _) in enumerate(made):
        array(shared.mappings[rank], held[rank].dtype)[: held[rank].size] = held[rank]
    sums = held[0] + held[1] if partial is Item.F32 else widened(bf16(widened(held[0]) + widened(held[1])))
    old = random.standard_normal(8192).astype(np.float32)
    old = old if output is Item.F32 else bf16(old)
    kept = memory()
    got = array(kept, old.dtype)
    got[: old.size] = old
    expected = old.copy()
    second = 64  # where the second address begins
    for out, count, address, offset in rows:
        start = offset + (second if address else 0)
        add = sums[start : start + count] / np.float32(divisor)
        if accumulate:
            add = (old if output is Item.F32 else widened(old))[out : out + count] + add
        expected[out : out + count] = add if output is Item.F32 else bf16(add)
    base = made[0][1].address
    stream = cuda.Stream(0, 0)
    addresses = [base, base + second * partial.size, 0, 0]
    kernel.module.launch(
        table.ctypes.data, 1, len(rows), got.ctypes.data, divisor, addresses, 4, kernel.threads, stream.handle
    )
    finish(0)
    assert np.array_equal(got[: old.size], expected), (partial, output, accumulate, divisor)


@scenario
def collectives_of_nodes_use_it():
    """One copy lands a shard on all GPUs of a node, the switch adds partials; the bytes are those of the CPU."""
    os.environ["FAKE_CUDA_MEMORY"] = str(1 << 30)  # several ranks have one device
    for shape, out_item, slot_reuse, passes in (
        ((1, 2), Item.F32, False, 1),
        ((2, 2), Item.BF16, True, 3),
        ((3, 2), Item.F32, False, 2),
        ((3, 2), Item.BF16, False, 1),  # two waves: added up beside the output
    ):
        ranks, plan = shape[0] * shape[1], None
        if shape[0] > 1:
            plan = BasePlan(*shape, shape[1], 2, slot_reuse, passes)

        def work(exchange, rank, *case, plan=plan):
            return check_collectives(rank, exchange, *case, 512, multicast=True, plan=plan)

        before = touched()
        case = shape, out_item, slot_reuse
        found = threads(ranks, lambda e, r, c=case: work(e, r, *c), timeout_s=60.0)
        assert all(isinstance(launched, int) and launched > 0 for launched in found), found
        assert touched() > before


@scenario
def whether_it_is_used_is_decided_from_what_all_ranks_say():
    def facts(*refusals, uuids="abcd"):
        return [{"refusal": r, "uuid": u} for r, u in zip(refusals, uuids, strict=True)]

    yes, four, two = facts("", "", "", ""), Topology(1, 4), Topology(2, 2)
    assert why_unicast(yes, four, "auto") == why_unicast(yes, four, True) == ""
    assert why_unicast(yes, four, False) == "all_gather.multicast is off"
    assert why_unicast(yes, Topology(4, 1), True) == "a node has one rank"
    assert why_unicast(facts("", "", "no switch", ""), four, True) == "rank 2: no switch"
    assert why_unicast(yes, two, "auto") == "a node has 2 ranks, which gain nothing by it"
    assert why_unicast(yes, two, True) == ""
    assert why_unicast(facts("", "", "", "", uuids="abab"), two, True) == ""  # of different nodes
    assert why_unicast(facts("", "", "", "", uuids="aabb"), two, True) == "several ranks share a GPU"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    said = multicast_facts(1)
    assert (said["refusal"], bool(said["uuid"])) == ("it is switched off (NCCL_NVLS_ENABLE=0)", True)
    assert why_unicast([said] * 4, four, True) == "rank 0: it is switched off (NCCL_NVLS_ENABLE=0)"
    assert touched() == 0


@scenario
def launches_are_checked_before_the_driver_sees_them():
    kernel = landing_kernel(0, Item.F32, Item.F32, False, lambda *a: b"fp32 fp32 store").module
    stream = cuda.Stream(0, 0).handle
    good = {"table": 8, "first": 0, "count": 1, "output": 8, "divisor": 1.0, "addresses": [0] * 4}
    for change, words in (
        ({"ctas": 0}, "ctas is 0; allowed: 1 to"),
        ({"threads": 2000}, "threads is 2000; allowed: 1 to 1024"),
        ({"count": -1}, "count is -1"),
        ({"first": 2**31 - 1}, "count is 1; allowed: 0 to 0"),
        ({"addresses": []}, "addresses is 0"),
        ({"stream": 0}, "is a default stream"),
        ({"divisor": 0.0}, "divisor must be finite and not zero"),
    ):
        with raises(ValueError, words):
            kernel.launch(**{**good, "ctas": 1, "threads": 32, "stream": stream, **change})
    before = calls("cuLaunchKernel")
    kernel.launch(**{**good, "count": 0}, ctas=1, threads=32, stream=stream)
    assert calls("cuLaunchKernel") == before
    with raises(ValueError, "image is empty"):
        cuda.Kernel(0, b"", "x")
    with raises(RuntimeError, "cuModuleLoadData failed"):
        cuda.Kernel(0, b"no such image", "land_multimem")
    with raises(RuntimeError, "cuModuleGetFunction failed"):
        cuda.Kernel(0, b"fp32 fp32 store", "no_such_kernel")
    with raises(ValueError, "partial is raw4"):
        landing_kernel(0, Item.RAW4, Item.F32, False)


if __name__ == "__main__":
    play(globals())
