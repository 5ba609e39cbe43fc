"""The memory file, its reservation, and the views of it: mappings, exchangeable windows, poison, tensors."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest
import torch

from tide_strategies._native import Arena, Mapping, Window

PAGE = os.sysconf("SC_PAGESIZE")


def arena_with(pages):
    arena = Arena.create(2, 0, 3)
    arena.reserve(arena.control_bytes, pages * PAGE)
    return arena


def run_python(code, **kw):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False, **kw
    )


def test_attach_sees_the_same_memory_and_has_its_own_descriptor():
    first = arena_with(1)
    second = Arena.attach(first.fd, 2, 1, 3)
    assert second.fd != first.fd
    assert not os.get_inheritable(first.fd)
    assert not os.get_inheritable(second.fd)
    assert (second.bytes, second.ranks, second.rank, second.counters) == (first.bytes, 2, 1, 3)
    a, b = (torch.from_dlpack(Mapping(x, x.control_bytes, PAGE).tensor(0, 4, "int32")) for x in (first, second))
    a.fill_(9)
    assert b.tolist() == [9] * 4


@pytest.mark.parametrize(
    ("ranks", "rank", "counters", "words"),
    [(3, 1, 3, "ranks 2, this rank expects 3"), (2, 1, 4, "counters 3, this rank expects 4"), (2, 2, 3, "rank is 2")],
)
def test_attach_refuses_what_does_not_fit(ranks, rank, counters, words):
    arena = arena_with(0)
    with pytest.raises(ValueError, match=words):
        Arena.attach(arena.fd, ranks, rank, counters)


def test_attach_refuses_other_files():
    with tempfile.TemporaryFile() as f, pytest.raises(ValueError, match="not an arena"):
        Arena.attach(f.fileno(), 2, 1, 3)
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 16)
        with pytest.raises(ValueError, match="sealed"):
            Arena.attach(fd, 2, 1, 3)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ValueError, match="magic"):
            Arena.attach(fd, 2, 1, 3)
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="duplicate") as caught:
        Arena.attach(fd, 2, 1, 3)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("args", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, -1), (10**6, 0, 1)])
def test_create_refuses_nonsense(args):
    with pytest.raises(ValueError, match="allowed"):
        Arena.create(*args)


def test_file_is_private_and_cannot_shrink():
    arena = arena_with(1)
    st = os.fstat(arena.fd)
    assert (st.st_mode & 0o777, st.st_uid) == (0o600, os.geteuid())
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_open_the_file():
    arena = arena_with(1)
    command = ["head", "-c", "8", f"/proc/{os.getpid()}/fd/{arena.fd}"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"TIDEARNA"
    other = subprocess.run(command, capture_output=True, user=65534, group=65534, extra_groups=[], check=False)
    assert other.returncode != 0
    assert other.stdout == b""
    assert b"ermission denied" in other.stderr


def test_reserve_allocates_once_and_release_gives_back():
    arena = arena_with(0)
    start = arena.allocated_bytes
    arena.reserve(arena.control_bytes, 100 * PAGE - 5)
    assert arena.allocated_bytes == start + 100 * PAGE
    arena.reserve(arena.control_bytes + 7, 50 * PAGE)
    assert arena.allocated_bytes == start + 100 * PAGE
    arena.release(arena.control_bytes, 100 * PAGE)
    assert arena.allocated_bytes == start
    arena.reserve(arena.control_bytes, 0)
    with pytest.raises(ValueError, match="negative"):
        arena.reserve(-1, 5)
    with pytest.raises(ValueError, match="control region"):
        arena.release(0, 5 * PAGE)


def test_reserve_beyond_memory_is_an_error_not_a_kill():
    arena = arena_with(0)
    before = arena.allocated_bytes
    for nbytes, codes in ((Arena.available_bytes() * 2, {errno.ENOMEM}), (2**62, {errno.ENOMEM, errno.EFBIG})):
        with pytest.raises(OSError, match="cannot reserve") as caught:
            arena.reserve(arena.control_bytes, nbytes)
        assert caught.value.errno in codes
    assert "are available" in str(caught.value) or caught.value.errno == errno.EFBIG
    assert arena.allocated_bytes == before


def test_reserve_beyond_the_file_size_limit_is_an_error_not_a_signal():
    done = run_python("""
        import errno, resource
        from tide_strategies._native import Arena
        arena = Arena.create(1, 0, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        assert Arena.available_bytes() <= 1 << 20
        try:
            arena.reserve(arena.control_bytes, 4 << 20)
        except OSError as e:
            assert e.errno == errno.EFBIG, e
            print("refused")
        arena.reserve(arena.control_bytes, 1 << 19)
        print("alive")
    """)
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "alive"]), done.stderr


def test_reserve_survives_a_storm_of_signals():
    done = run_python("""
        import signal
        from tide_strategies._native import Arena
        arena = Arena.create(1, 0, 1)
        hits = []
        signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        arena.reserve(arena.control_bytes, 256 << 20)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert arena.allocated_bytes >= 256 << 20
        print("alive")
    """)
    assert (done.returncode, done.stdout.split()) == (0, ["alive"]), done.stderr


def fake_proc(tmp_path, mountinfo, cgroup, meminfo="MemAvailable:  1000 kB\n"):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(mountinfo)
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "meminfo").write_text(meminfo)
    return str(tmp_path)


def test_available_memory_respects_every_cgroup_above(tmp_path):
    mount = tmp_path / "cg"
    leaf = mount / "slice" / "leaf"
    leaf.mkdir(parents=True)
    proc = fake_proc(tmp_path, f"30 20 0:1 / {mount} rw shared:1 - cgroup2 cgroup2 rw\n", "0::/slice/leaf\n")
    assert Arena.available_bytes(proc) == 1000 * 1024
    (leaf / "memory.max").write_text("max\n")
    (leaf / "memory.current").write_text("5\n")
    (leaf.parent / "memory.max").write_text("600000\n")
    (leaf.parent / "memory.current").write_text("500000\n")
    assert Arena.available_bytes(proc) == 100_000
    (leaf.parent / "memory.stat").write_text("anon 1\ninactive_file 300\nactive_file 200\n")
    assert Arena.available_bytes(proc) == 100_400
    (leaf / "memory.max").write_text("3\n")
    assert Arena.available_bytes(proc) == 0


def test_available_memory_reads_version_1_cgroups_inside_a_container(tmp_path):
    mount = tmp_path / "memory"
    mount.mkdir()
    options = "rw,memory"
    proc = fake_proc(
        tmp_path, f"30 20 0:1 /docker/x {mount} rw - cgroup cgroup {options}\n", "4:cpu:/y\n3:memory:/docker/x\n"
    )
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (mount / "memory.usage_in_bytes").write_text("100\n")
    assert Arena.available_bytes(proc) == 1000 * 1024
    (mount / "memory.limit_in_bytes").write_text("1100\n")
    assert Arena.available_bytes(proc) == 1000


def test_mapping_must_be_aligned_and_reserved():
    arena = arena_with(2)
    for offset, nbytes in ((arena.control_bytes + 1, 10), (arena.control_bytes, 3 * PAGE), (-PAGE, 10), (1 << 40, 1)):
        with pytest.raises(ValueError, match=r"multiple|within"):
            Mapping(arena, offset, nbytes)
    with pytest.raises(ValueError, match="bytes must be"):
        Mapping(arena, arena.control_bytes, 0)
    view = Mapping(arena, arena.control_bytes, PAGE + 1)
    assert view.bytes == PAGE + 1
    assert view.address % PAGE == 0


def test_window_keeps_its_address_and_shows_the_other_slot():
    arena = arena_with(6)
    window = Window(3 * PAGE)
    address = window.address
    slots = [arena.control_bytes, arena.control_bytes + 3 * PAGE]
    for i, offset in enumerate(slots):
        torch.from_dlpack(Mapping(arena, offset, 3 * PAGE).tensor(0, 3 * PAGE, "uint8")).fill_(i + 1)
    window.map(arena, slots[0])
    seen = torch.from_dlpack(window.tensor(PAGE, 2 * PAGE, "uint8"))
    assert (seen == 1).all()
    window.map(arena, slots[1])
    assert window.address == address
    assert seen.data_ptr() == address + PAGE
    assert (seen == 2).all()
    with pytest.raises(ValueError, match="within"):
        window.map(arena, slots[1] + PAGE)
    assert (seen == 2).all()


@pytest.mark.parametrize("nbytes", [PAGE, 5 * PAGE, (1 << 20) + PAGE, (70 << 20) + PAGE])
def test_poison_reads_nan_and_never_reaches_the_arena(nbytes):
    arena = arena_with(nbytes // PAGE)
    direct = torch.from_dlpack(Mapping(arena, arena.control_bytes, nbytes).tensor(0, nbytes, "uint8"))
    direct.fill_(5)
    window = Window(nbytes)
    window.map(arena, arena.control_bytes)
    floats = torch.from_dlpack(window.tensor(0, nbytes // 4, "float32"))
    window.poison()
    assert floats.isnan().all()
    assert torch.from_dlpack(window.tensor(0, nbytes // 2, "bfloat16")).isnan().all()
    floats.fill_(1.0)
    assert (direct == 5).all()
    other = Window(PAGE)
    other.poison()
    assert torch.from_dlpack(other.tensor(0, PAGE // 4, "float32")).isnan().all()  # not the ones just written
    window.poison()
    assert floats.isnan().all()
    window.map(arena, arena.control_bytes)
    assert (torch.from_dlpack(window.tensor(0, nbytes, "uint8")) == 5).all()


DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("name", [*DTYPES, "complex64"])
def test_tensor_has_own_storage_at_offset_zero_and_is_writable(name):
    arena = arena_with(1)
    window = Window(PAGE)
    window.map(arena, arena.control_bytes)
    dtype = getattr(torch, name)
    a, b = (torch.from_dlpack(window.tensor(64, 5, name)) for _ in range(2))
    assert (a.dtype, a.shape, a.storage_offset()) == (dtype, (5,), 0)
    assert a.data_ptr() == window.address + 64
    assert a.untyped_storage().nbytes() == 5 * dtype.itemsize
    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    a.fill_(1)
    assert (b == 1).all()
    assert torch.from_dlpack(window.tensor(PAGE, 0, name)).shape == (0,)


def test_tensor_outlives_the_window_and_the_arena():
    arena = arena_with(1)
    window = Window(PAGE)
    window.map(arena, arena.control_bytes)
    tensor = torch.from_dlpack(window.tensor(0, PAGE, "uint8"))
    array = np.from_dlpack(window.tensor(0, PAGE, "uint8"))
    del window, arena
    gc.collect()
    tensor.fill_(3)
    assert (array == 3).all()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((0, 1, "float31"), "no dtype"),
        ((-4, 1, "float32"), "do not lie within"),
        ((0, -1, "float32"), "do not lie within"),
        ((0, PAGE // 4 + 1, "float32"), "do not lie within"),
        ((PAGE, 1, "uint8"), "do not lie within"),
        ((0, 2**62, "float64"), "do not lie within"),
        ((2, 1, "float32"), "multiple"),
    ],
)
def test_tensor_outside_the_window_is_refused(args, words):
    with pytest.raises(ValueError, match=words):
        Window(PAGE).tensor(*args)


def test_unmapped_window_faults_instead_of_reading_something():
    done = run_python("""
        import torch
        from tide_strategies._native import Window
        torch.from_dlpack(Window(4096).tensor(0, 1, "uint8")).item()
    """)
    assert done.returncode == -signal.SIGSEGV


def test_nothing_is_left_behind_by_a_killed_process():
    before = {d: set(os.listdir(d)) for d in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(d)}
    code = """
        import os, signal
        from tide_strategies._native import Arena, Window
        arena = Arena.create(1, 0, 8)
        arena.reserve(arena.control_bytes, 32 << 20)
        window = Window(1 << 20); window.map(arena, arena.control_bytes); window.poison()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(code).returncode == -signal.SIGKILL
    for d, names in before.items():
        assert not {n for n in set(os.listdir(d)) - names if "tide" in n.lower()}
