"""What rails do on the fake NCCL and the fake driver. ``TIDE_FAKE_NCCL`` names the library that a scenario loads.

A scenario runs in a fresh process: ``python scenarios.py NAME``. Ranks are threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "fake_cuda"))
for switch in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
    os.environ.pop(switch, None)

from ranks import threads  # noqa: E402
from stage import MIB, array, fake, play, raises, scenario, until  # noqa: E402

from tide_strategies._native import cuda, nccl  # noqa: E402
from tide_strategies.collectives.schedule import Space  # noqa: E402
from tide_strategies.errors import TideArenaError, TidePeerError, TideTimeoutError  # noqa: E402
from tide_strategies.runtime.cuda import nccl_rail  # noqa: E402
from tide_strategies.runtime.cuda.nccl_domains import NcclDomains, missing_nccl  # noqa: E402
from tide_strategies.runtime.cuda.nccl_rail import NcclRail  # noqa: E402
from tide_strategies.topology import Topology  # noqa: E402

SIGNALS = 6
PLACE = (Space.STAGE, 1)


def load():
    """What importing torch does: from then on the library is in the process."""
    library = ctypes.CDLL(os.environ["TIDE_FAKE_NCCL"])
    library.fake_nccl_calls.restype = ctypes.c_uint64
    library.fake_nccl_open.restype = ctypes.c_uint64
    library.fake_nccl_last_config.restype = ctypes.c_char_p
    return library


def connected(nodes=2, local=1, nbytes=MIB, timeout_s=10.0):
    topology = Topology(nodes, local)

    def work(exchange, rank):
        domains = NcclDomains(exchange, rank, topology, rank % 2, timeout_s, signals=SIGNALS)
        arena, rail = domains.arena(nbytes), NcclRail(domains, {3: "counter 'arrived'"}.get)
        rail.register(*PLACE, arena.memory)
        return domains, arena, rail

    made = threads(topology.ranks, work)
    assert not any(isinstance(m, Exception) for m in made), made
    return made


def finish():
    for device in range(2):
        assert fake.fake_idle(device, 10_000), "streams are still busy"


@scenario
def the_library_is_found_once_it_is_loaded():
    assert missing_nccl() == "no NCCL is loaded in this process (a torch with CUDA brings it when it is imported)"
    with raises(RuntimeError, "no NCCL is loaded"):
        nccl.unique_id()
    load()
    found = nccl.probe()
    assert found == {
        "available": True,
        "reason": "",
        "version": "2.31.2",
        "path": os.environ["TIDE_FAKE_NCCL"],
    }
    assert missing_nccl() is None
    assert len(nccl.unique_id()) == 128
    assert nccl.unique_id() != nccl.unique_id()


@scenario
def two_copies_are_refused():
    load()
    ctypes.CDLL(os.environ["TIDE_OTHER_NCCL"])
    assert "several copies of NCCL are in this process" in str(missing_nccl())


@scenario
def of_two_copies_the_one_that_everybody_calls_is_used():
    """As with a preloaded one, beside which torch loads its own by path."""
    ctypes.CDLL(os.environ["TIDE_OTHER_NCCL"])
    ctypes.CDLL(os.environ["TIDE_FAKE_NCCL"], ctypes.RTLD_GLOBAL)
    assert missing_nccl() is None
    assert nccl.probe()["path"] == os.environ["TIDE_FAKE_NCCL"]


@scenario
def an_old_library_is_told_from_a_maimed_one():
    """FAKE_NCCL_VERSION is 22809, as torch 2.11 brings it; then an old one that claims to be new."""
    load()
    reason = str(missing_nccl())
    assert reason.startswith("NCCL 2.28.9 is loaded (/"), reason
    assert "need 2.31.2: install nvidia-nccl-cu13 2.31.2 or newer, or preload its libnccl.so.2" in reason
    assert nccl.probe()["version"] == "2.28.9"
    os.environ["FAKE_NCCL_VERSION"] = "23102"
    assert "has no ncclPutSignal" in str(missing_nccl())
    with raises(RuntimeError, "has no ncclPutSignal"):
        nccl.Memory(0, MIB)
    errors = threads(2, lambda exchange, rank: NcclDomains(exchange, rank, Topology(2, 1), rank, 5.0))
    for error in errors:
        assert isinstance(error, TideArenaError)
        assert error.code == "TIDE-F029"
        assert str(error).count("has no ncclPutSignal") == 2, "both ranks say it"


@scenario
def communicators_are_scoped_to_what_they_connect():
    library = load()
    made = connected(nodes=2, local=2)
    for rank, (domains, arena, rail) in enumerate(made):
        assert (domains.main.ranks, domains.main.rank, domains.main.contexts) == (4, rank, 0)
        assert not domains.main.host_rma
        assert len(domains.rails) == 2
        for comm in domains.rails:
            assert (comm.ranks, comm.rank, comm.contexts) == (2, rank // 2, 4)
            assert comm.host_rma
        rail.check()
        assert arena.bytes == 2 * MIB  # whole granules
        assert [arena.peer_address(r) for r in range(4)] == [a.address for _, a, _ in made]
    assert library.fake_nccl_last_config() == b"contexts=4 channels=1 blocking=1"
    assert library.fake_nccl_calls(b"ncclCommWindowRegister") == 8, "each arena in both domains"
    rails = [rail for _, _, rail in made]
    threads(4, lambda _, rank: rails[rank].close())
    rails[0].close()  # again
    del made, domains, arena, rail
    rails.clear()
    assert library.fake_nccl_open() == 0


@scenario
def a_put_is_there_when_its_signal_is():
    load()
    made = connected(nbytes=4 * MIB)
    send = [cuda.Stream(r, 0) for r in range(2)]
    receive = [cuda.Stream(r, 0) for r in range(2)]
    source, offset, seen = 64, 2 * MIB + 3, 3 * MIB + 512 * 1024
    # One way at a time: what a rank puts after a wait of its own, on whichever stream, comes after it.
    for turn, nbytes in enumerate([16, 1, 0, 4096 + 3, MIB]):
        for sender in (0, 1):
            (_, sent, there), (_, arena, here) = made[sender], made[1 - sender]
            value, stream = 10 * turn + sender + 1, receive[1 - sender].handle
            array(sent, np.uint8)[source : source + nbytes] = value
            here.take(sender, turn, 1, stream)
            # Behind the wait: to a place of its own, what has come by then.
            here.put(1 - sender, arena.address + offset, min(nbytes, 16), *PLACE, seen, 5, stream)
            assert here.outstanding() == 1, "nobody has put anything yet"
            there.put(1 - sender, sent.address + source, nbytes, *PLACE, offset, turn, send[sender].handle)
            finish()
            memory = array(arena, np.uint8)
            assert (memory[offset : offset + nbytes] == value).all()
            assert (memory[seen : seen + min(nbytes, 16)] == value).all()
            assert (memory[:source] == 0).all()
            here.check()
            assert here.outstanding() == 0
    # Notifications count alike, several at once, and a wait takes as many as it says.
    for _ in range(3):
        made[0][2].notify(1, 0, send[0].handle)
    made[1][2].take(0, 0, 2, receive[1].handle)
    made[1][2].take(0, 0, 1, receive[1].handle)
    finish()
    made[1][2].take(0, 0, 1, receive[1].handle)
    time.sleep(0.05)
    assert made[1][2].outstanding() == 1
    made[0][2].notify(1, 0, send[0].handle)
    finish()
    threads(2, lambda _, rank: made[rank][2].close())


@scenario
def a_wait_holds_up_its_own_kind_of_collective_alone():
    """Counter 1 is of reductions here, and so is the inbox; the others are of all-gathers."""
    load()
    topology, inbox = Topology(2, 1), (Space.INBOX, 0)

    def work(exchange, rank):
        domains = NcclDomains(exchange, rank, topology, rank, 5.0, signals=SIGNALS)
        rail, memory = NcclRail(domains, reduces=lambda counter: counter == 1), domains.arena(MIB).memory
        rail.register(*inbox, memory)
        stage = cuda.Mapping(cuda.Allocation(rank, MIB), rank)
        rail.register(*PLACE, stage)
        return rail, memory, stage

    made = threads(2, work)
    first, second = cuda.Stream(0, 0), cuda.Stream(0, 0)
    rail, memory, stage = made[0]
    array(stage, np.uint8)[:16] = 3
    rail.take(1, 1, 1, first.handle)
    rail.put(1, stage.address, 16, *PLACE, 64, 0, second.handle)
    until(lambda: (array(made[1][2], np.uint8)[64:80] == 3).all())
    array(memory, np.uint8)[:16] = 4
    rail.put(1, memory.address, 16, *inbox, 64, 1, second.handle)  # behind the wait, though on another stream
    time.sleep(0.05)
    landed = array(made[1][1], np.uint8)[64:80]
    assert (landed == 0).all()
    with raises(ValueError, "registered with the rail's own communicator"):
        rail.put(1, stage.address, 16, *inbox, 0, 1, second.handle)
    third = cuda.Stream(1, 0)
    made[1][0].notify(0, 1, third.handle)
    finish()
    assert (landed == 4).all()


@scenario
def memory_of_the_driver_can_be_registered_too():
    load()
    topology = Topology(2, 1)
    sizes = [MIB, 2 * MIB + 1]

    def work(exchange, rank):
        domains = NcclDomains(exchange, rank, topology, rank, 5.0, signals=SIGNALS)
        rail, memory = NcclRail(domains), cuda.Mapping(cuda.Allocation(rank, 4 * MIB), rank)
        rail.register(*PLACE, memory)
        apart = cuda.Mapping(cuda.Allocation(rank, sizes[rank]), rank)
        with raises(TideArenaError, "agreeing on NCCL failed. rank 1: it registers 4194304 bytes, rank 0 registers 2"):
            rail.register(Space.LANDING, 0, apart)
        return rail, memory

    made = threads(2, work)
    stream = cuda.Stream(0, 0)
    array(made[0][1], np.uint8)[:100] = 7
    made[0][0].put(1, made[0][1].address, 100, *PLACE, MIB, 2, stream.handle)
    finish()
    assert (array(made[1][1], np.uint8)[MIB : MIB + 100] == 7).all()
    threads(2, lambda _, rank: made[rank][0].close())


@scenario
def what_cannot_be_is_refused_before_nccl_sees_it():
    library = load()
    made = connected()
    rail, own, at = made[0][2], cuda.Stream(0, 0), made[0][1].address
    stream = own.handle
    for call, text in (
        (lambda: rail.put(2, at, 16, *PLACE, 0, 0, stream), "rank 2 is not on the rail of rank 0, which joins [0, 1]"),
        (lambda: rail.put(1, at, 16, *PLACE, 0, 0, 0), "is a default stream"),
        (lambda: rail.put(1, at, 16, *PLACE, 2 * MIB, 0, stream), "offset is 2097152; allowed: 0 to 2097136"),
        (lambda: rail.put(1, at + 2 * MIB - 8, 16, *PLACE, 0, 0, stream), "are not within memory that is registered"),
        (lambda: rail.put(1, at - 1, 16, *PLACE, 0, 0, stream), "are not within memory that is registered"),
        (lambda: rail.put(1, at, 16, Space.STAGE, 0, 0, 0, stream), "stage 0 is not registered with the rail"),
        (lambda: rail.put(1, at, -1, *PLACE, 0, 0, stream), "bytes is -1"),
        (lambda: rail.put(1, at, 16, *PLACE, 0, SIGNALS, stream), "signal is 6; allowed: 0 to 5"),
        (lambda: rail.take(1, 0, 0, stream), "count is 0; allowed: 1 to"),
        (lambda: rail._rmas[0].wait([], 0, stream), "a wait needs at least one signal"),
        (lambda: rail._rmas[0].wait([(1, 1, 0, 4)], 0, stream), "context is 4; allowed: 0 to 3"),
        (lambda: nccl.Rma(made[0][0].main, 1.0), "the communicator has no RMA contexts"),
        (lambda: nccl.Communicator.join(0, b"short", 2, 0, 0, 1, 1, True, 1.0), "an id has 128 bytes; got 5"),
        (lambda: nccl.Window(made[1][0].main, made[0][1].memory, 1.0), "the memory is on device 0"),
        (lambda: nccl.Rma(made[0][0].rails[0], 0.0), "timeout_s must be a positive number"),
    ):
        with raises(ValueError, text):
            call()
    assert library.fake_nccl_calls(b"ncclPutSignal") == library.fake_nccl_calls(b"ncclWaitSignal") == 0


@scenario
def what_nccl_refuses_is_told_in_its_words():
    library = load()
    made = connected()
    rail, own, at = made[0][2], cuda.Stream(0, 0), made[0][1].address
    library.fake_nccl_fail(b"ncclPutSignal", 5, 0)
    text = (
        "TIDE: rank 0 could not put 16 bytes to rank 1 on the rail: ncclPutSignal failed: invalid usage (5): the fake "
        "library refused. All ranks stop"
    )
    with raises(TidePeerError, text):
        rail.put(1, at, 16, *PLACE, 0, 0, own.handle)
    library.fake_nccl_fail(b"ncclWaitSignal", 4, 0)
    with raises(TidePeerError, "rank 0 could not wait for rank 1 on the rail: ncclWaitSignal failed: invalid argument"):
        rail.take(1, 0, 1, own.handle)
    assert rail.outstanding() == 0
    rail.stop()
    with raises(TidePeerError, "could not signal rank 1 on the rail: ncclSignal: the communicator was closed"):
        rail.notify(1, 0, own.handle)


@scenario
def a_step_that_fails_on_one_rank_fails_on_all():
    library = load()
    topology = Topology(2, 1)
    for call, what in (
        ("ncclGetUniqueId", "naming the communicator"),
        ("ncclCommInitRankConfig", "connecting all ranks through NCCL"),
        ("ncclCommSplit", "connecting the rails through NCCL"),
        ("ncclCommQueryProperties", "connecting all ranks through NCCL"),
        ("ncclMemAlloc", "bytes of device memory"),
        ("ncclCommWindowRegister", "registering memory with NCCL"),
    ):
        library.fake_nccl_fail(call.encode(), 1, 0)

        def work(exchange, rank):
            domains = NcclDomains(exchange, rank, topology, rank, 2.0)
            return NcclRail(domains), domains.arena(MIB)

        errors = threads(2, work)
        for error in errors:
            assert isinstance(error, TideArenaError), (call, error)
            assert error.code == "TIDE-F029"
            assert what in str(error), (call, str(error))
            assert f"{call}" in str(error)
            assert "unhandled cuda error (1): the fake library refused" in str(error)


@scenario
def no_step_outlasts_its_bound():
    library = load()
    topology = Topology(2, 1)
    for call, what in (
        ("ncclCommInitRankConfig", "connecting all ranks"),
        ("ncclCommSplit", "connecting the rails"),
        ("ncclCommWindowRegister", "registering memory"),
    ):
        library.fake_nccl_stick(call.encode(), 1)
        aborts = library.fake_nccl_calls(b"ncclCommAbort")
        started = time.monotonic()

        def work(exchange, rank):
            domains = NcclDomains(exchange, rank, topology, rank, 0.3)
            return NcclRail(domains), domains.arena(MIB)

        errors = threads(2, work)
        assert time.monotonic() - started < 5
        for error in errors:
            assert isinstance(error, TideArenaError)
            assert f"{what} through NCCL failed" in str(error) or "registering memory with NCCL failed" in str(error)
            assert f"{call} was not through in time: not every rank took part" in str(error)
        assert library.fake_nccl_calls(b"ncclCommAbort") >= aborts + 2
        library.fake_nccl_stick(call.encode(), 0)


@scenario
def a_put_that_nccl_does_not_return_from_is_found_and_ended():
    """It has nobody to wait for, so no deadline of its own; who watches sees it, and stops the rank."""
    library = load()
    rail, arena = (made := connected(timeout_s=0.3))[0][2], made[0][1]
    stream = cuda.Stream(0, 0)
    library.fake_nccl_stick(b"ncclPutSignal", 1)
    errors = []

    def put():
        try:
            rail.put(1, arena.address, 16, *PLACE, 0, 0, stream.handle)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=put)
    thread.start()
    started = time.monotonic()
    with raises(
        TideTimeoutError, "timeout_s=0.3: NCCL does not return from a call of rank 0 on the rail (NCCL_DEBUG=INFO"
    ):
        while time.monotonic() - started < 10:
            rail.check()
            time.sleep(0.02)
    assert time.monotonic() - started > 0.25
    assert thread.is_alive()
    rail.stop()
    thread.join(10)
    assert [type(e) for e in errors] == [TidePeerError], errors
    assert "could not put 16 bytes to rank 1 on the rail: ncclPutSignal" in str(errors[0])


@scenario
def a_wait_in_vain_is_found_and_named():
    load()
    made = connected(timeout_s=0.3)
    stream, other = cuda.Stream(0, 0), cuda.Stream(1, 0)
    rail = made[0][2]
    rail.take(1, 3, 2, stream.handle)
    rail.check()  # hardly begun
    assert rail.outstanding() == 1
    started = time.monotonic()
    expected = (
        "TIDE: no progress within timeout_s=0.3: rank 0 awaits 2 signal(s) of counter 'arrived' of rank 1 on the rail. "
        "If that rank only needs longer"
    )
    with raises(TideTimeoutError, expected):
        while time.monotonic() - started < 10:
            rail.check()
            time.sleep(0.02)
    assert 0.25 < time.monotonic() - started < 10
    # A wait that its stream has not reached is nobody's fault: it does not count.
    rail.take(1, 0, 1, stream.handle)
    time.sleep(0.4)
    assert [w["tag"] for w in rail._rmas[0].overdue(0.3)] == [3]
    # Late is late, but not lost.
    for counter in (3, 3, 0):
        made[1][2].notify(0, counter, other.handle)
    until(lambda: rail.outstanding() == 0)
    rail.check()


@scenario
def a_rank_that_stops_with_a_blocked_stream_ends():
    """The exit code is what the test looks at: nothing else could end the wait."""
    library = load()
    made = connected()
    nccl_rail.LAST_RESORT_S = 0.3
    stream = cuda.Stream(0, 0)
    made[1][2].stop()  # nothing is blocked there: it may live on
    made[0][2].take(1, 0, 1, stream.handle)
    until(lambda: made[0][2].outstanding() == 1)
    made[0][2].stop()
    made[0][2].stop()
    made[0][2].close()
    assert library.fake_nccl_calls(b"ncclCommAbort") == 6
    time.sleep(20)


@scenario
def hosts_without_what_it_takes_are_told_so():
    load()
    topology = Topology(2, 1)
    for name, value, text in (
        ("FAKE_NCCL_NO_WINDOW", "1", "gave no window to a communicator of 2 ranks: its GPUs cannot all reach"),
        ("FAKE_NCCL_NO_RMA", "1", "NCCL has no host RMA between the 2 ranks of the rail: across hosts it needs RDMA"),
        ("FAKE_NCCL_HOSTS", "2", "its ranks are on 2 hosts without an RDMA network"),
    ):
        os.environ[name] = value
        if name == "FAKE_NCCL_HOSTS":
            os.environ["FAKE_NCCL_NO_WINDOW"] = "1"

        def work(exchange, rank):
            domains = NcclDomains(exchange, rank, topology, rank, 5.0)
            rail = NcclRail(domains)
            rail.register(*PLACE, domains.arena(MIB).memory)

        for error in threads(2, work):
            assert text in str(error), error
        for n in ("FAKE_NCCL_NO_WINDOW", name):
            os.environ.pop(n, None)
    # Another version on another rank.
    version = iter(["2.31.2", "2.32.3"])
    real = nccl.probe
    probes = {}

    def probe():
        mine = probes.setdefault(threading.get_ident(), None) or next(version)
        probes[threading.get_ident()] = mine
        return {**real(), "version": mine}

    nccl.probe = probe
    for error in threads(2, lambda exchange, rank: NcclDomains(exchange, rank, topology, rank, 5.0)):
        assert isinstance(error, TideArenaError)
        assert "rank 0 has NCCL 2.3" in str(error)


@scenario
def nccl_makes_no_multicast_object_that_nobody_wants():
    library = load()
    topology = Topology(2, 1)

    def attempt(**options):
        return threads(2, lambda exchange, rank: NcclDomains(exchange, rank, topology, rank, 5.0, **options))

    def refused(reason, **options):
        before = library.fake_nccl_calls(b"ncclCommInitRankConfig")
        for error in attempt(**options):
            assert isinstance(error, TideArenaError)
            assert f"multicast is switched off ({reason}), but NCCL would use it: set NCCL_NVLS_ENABLE=0" in str(error)
        assert library.fake_nccl_calls(b"ncclCommInitRankConfig") == before

    refused("the configuration has multicast: off", multicast=False)
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    refused("TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    refused("TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    assert not any(isinstance(d, Exception) for d in attempt(multicast=False))
    # The variable came too late: NCCL had read it. Seen before any window is registered.
    os.environ["FAKE_NCCL_MULTIMEM"] = "1"
    for error in attempt():
        assert "this process's NCCL read its settings before and would use it" in str(error)
    assert library.fake_nccl_calls(b"ncclCommWindowRegister") == 0
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        del os.environ[name]
    assert all(d.main.multimem for d in attempt())


if __name__ == "__main__":
    play(globals())
