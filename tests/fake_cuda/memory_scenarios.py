"""Devices, memory, windows, streams."""

from __future__ import annotations

import errno
import os
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from ranks import threads
from stage import (
    AWAIT,
    COPY,
    MIB,
    RAW,
    ZERO,
    array,
    calls,
    controls,
    fake,
    finish,
    lone_control,
    memory,
    play,
    program,
    raises,
    scenario,
)

from tide_strategies._native import cuda
from tide_strategies.detect import fallback
from tide_strategies.runtime.cuda import memory as device_memory


@scenario
def probe_and_info():
    assert cuda.probe() == {"available": True, "reason": "", "driver_version": 13000, "devices": 2}
    info = cuda.device_info(1)
    assert info["name"] == "Fake GPU 1"
    assert info["compute_capability"] == (9, 0)
    assert info["pci_bus_id"] == "0000:02:00.0"
    assert info["uuid"] == "GPU-" + "-".join("a1" * n for n in (4, 2, 2, 2, 6))
    assert info["granularity"] == 2 * MIB
    assert info["stream_mem_ops"]
    assert info["posix_fd"]
    assert not info["multicast_supported"]
    assert cuda.can_access_peer(0, 1)
    assert cuda.can_access_peer(0, 0)
    for bad in (-1, 2):
        with raises(ValueError, "allowed: 0 to 1"):
            cuda.device_info(bad)
    assert calls("cuDevicePrimaryCtxRetain") == 0, "looking makes no context"


@scenario
def memory_is_rounded_up_and_given_back():
    a = cuda.Allocation(1, 100)
    assert (a.device, a.bytes) == (1, 2 * MIB)
    assert fake.fake_used_memory(1) == 2 * MIB
    m = cuda.Mapping(a, 1)
    assert (m.device, m.bytes) == (1, 2 * MIB)
    array(m, np.uint8)[:] = 3
    tensor = m.tensor(8, 5, "float32")
    assert tensor.__dlpack_device__() == (2, 1)
    del a, m
    assert fake.fake_used_memory(1) == 2 * MIB, "the tensor keeps the memory"
    del tensor
    assert fake.fake_used_memory(1) == 0
    for bad in (0, -1, 2**47):
        with raises(ValueError, "bytes must be between 1 and 2**46"):
            cuda.Allocation(0, bad)
    m = memory()
    with raises(ValueError, "do not lie within"):
        m.tensor(0, m.bytes // 4 + 1, "float32")
    with raises(ValueError, "not a multiple"):
        m.tensor(2, 1, "float32")
    with raises(ValueError, "no dtype"):
        m.tensor(0, 1, "float3")


@scenario
def lack_of_memory_is_said():
    with pytest.raises(OSError, match="has no 1073741824 bytes left") as caught:
        cuda.Allocation(0, 1 << 30)
    assert caught.value.errno == errno.ENOMEM


@scenario
def window_keeps_its_address():
    first, second = cuda.Allocation(0, 4 * MIB), cuda.Allocation(0, 2 * MIB)
    one, two = cuda.Mapping(first, 0), cuda.Mapping(second, 0)
    w = cuda.Window(0, MIB)
    address = w.address
    array(one, np.int32)[:] = 1
    array(two, np.int32)[:] = 2
    w.map(first)
    view = array(w, np.int32)
    assert view[0] == 1
    maps = calls("cuMemMap")
    w.map(first)
    assert calls("cuMemMap") == maps, "mapping what is mapped does nothing"
    w.map(second)
    assert w.address == address
    assert view[0] == 2
    assert view[-1] == 2
    view[5] = 9
    assert array(two, np.int32)[5] == 9
    w.unmap()
    w.unmap()
    w.map(first)
    assert view[5] == 1
    with raises(ValueError, "the allocation has 2097152 bytes; the window 4194304"):
        cuda.Window(0, 3 * MIB).map(second)


@scenario
def remapping_waits_for_the_device():
    (control, _other), own = controls()
    wait = program([[AWAIT, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    first, second = cuda.Allocation(0, MIB), cuda.Allocation(0, MIB)
    w, stream = cuda.Window(0, MIB), cuda.Stream(0, 0)
    w.map(first)
    call = wait.begin(control, [], [0], 0, 1.0)
    call.enqueue(0, stream.handle)
    clear = program([[ZERO, 0, 0, 64]], n_bases=1).begin(control, [w.address], [], 0, 1.0)
    array(w, np.uint8)[:64] = 5
    clear.enqueue(0, stream.handle)
    threading.Timer(0.3, lambda: array(own[0], np.uint32).__setitem__(1 * 4, 1)).start()
    begun = time.monotonic()
    w.map(second)
    assert time.monotonic() - begun > 0.2
    w.map(first)
    assert not array(w, np.uint8)[:64].any(), "the copy before the remap went to the first allocation"


@scenario
def imported_memory_is_shared():
    a = cuda.Allocation(0, 3 * MIB)
    fd = a.export_fd()
    b = cuda.Allocation.from_fd(fd, a.bytes, 1)
    os.close(fd)
    x, y = cuda.Mapping(a, 0), cuda.Mapping(b, 1)
    array(x, np.uint8)[77] = 4
    assert array(y, np.uint8)[77] == 4
    assert (b.device, b.bytes) == (1, 4 * MIB)
    with raises(ValueError, "fd must not be negative"):
        cuda.Allocation.from_fd(-1, MIB, 0)
    with raises(RuntimeError, "cuMemImportFromShareableHandle"):
        cuda.Allocation.from_fd(987, MIB, 0)


@scenario
def streams_and_their_order():
    a, b = cuda.Stream(0, -1000), cuda.Stream(0, 1000)
    assert a.handle != b.handle
    assert a.handle > 2
    control = lone_control()
    m = memory()
    array(m, np.uint8)[:8] = 1
    back = program([[COPY, 0, 0, 0, 64, 1, 8, 0, 0, RAW, RAW]], n_bases=1).begin(control, [m.address], [], 0, 1.0)
    for _ in range(200):  # far more than there are events
        cuda.order(a.handle, b.handle)
        cuda.order(b.handle, a.handle)
        cuda.order(0, a.handle)  # torch's current stream is the legacy one as a rule
        cuda.order(a.handle, 0)
        cuda.order(a.handle, a.handle)
    back.enqueue(0, b.handle)
    finish()
    assert array(m, np.uint8)[64:72].all()
    assert calls("cuEventCreate") < 10
    with raises(ValueError, "no CUDA context is current"):
        cuda.order(0, 2)
    with raises(RuntimeError, "INVALID_HANDLE"):
        cuda.order(12345, a.handle)


@scenario
def default_streams_are_refused():
    call = program([[ZERO, 0, 0, 8]], n_bases=1).begin(lone_control(), [memory().address], [], 0, 1.0)
    for bad in (0, 1, 2):
        with raises(ValueError, "default stream"):
            call.enqueue(0, bad)
    with raises(ValueError, "stream_index is 1"):
        call.enqueue(1, 77)
    with raises(RuntimeError, "CUDA_ERROR_INVALID_HANDLE"):
        call.enqueue(0, 77)


@scenario
def gpus_without_peer_access_keep_stock_collectives_and_are_told_so():
    """The fake driver's devices all reach each other, so that a peer's memory cannot be mapped is put in its place."""
    of_peers = []

    class Allocation:
        def __new__(cls, device, nbytes):
            return cuda.Allocation(device, nbytes)

        @staticmethod
        def from_fd(fd, nbytes, device):
            of_peers.append(cuda.Allocation.from_fd(fd, nbytes, device))
            return of_peers[-1]

    def mapping(source, device):
        if any(source is peer for peer in of_peers):
            raise RuntimeError("cuMemSetAccess: peer access is not supported between these two devices")
        return cuda.Mapping(source, device)

    def share(exchange, rank):
        return device_memory.share_allocation(exchange, rank, 2, 10.0, rank, 2 * MIB)

    with mock.patch.object(device_memory, "cuda", SimpleNamespace(Allocation=Allocation, Mapping=mapping)):
        errors = threads(2, share)
    assert [e.code for e in errors] == ["TIDE-F020"] * 2
    verdict = fallback(errors[0].code, errors[0])
    assert "cannot share memory: TIDE: mapping the device memory of rank 0 failed. rank 1: " in verdict.reason
    assert "peer access is not supported" in verdict.reason
    assert "on GPUs that reach each other" in verdict.remedy


if __name__ == "__main__":
    play(globals())
