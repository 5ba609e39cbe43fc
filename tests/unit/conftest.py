"""The stand-ins for CUDA's driver and for NCCL, compiled when a test wants them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def compile_library(library: Path, sources: list[Path], *options: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build a fake library with")
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", *options]
    done = subprocess.run([*command, "-o", library, *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def once(tmp_path_factory, name: str, pattern: str, *options: str) -> Path:
    """Compile ``pattern`` as library ``name``, once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "-".join([pattern.split("/")[0], *options]).replace("/", "_")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            folder.mkdir(exist_ok=True)
            # The library is found by this name, wherever it lies.
            made = compile_library(folder / "new.so", sorted(TESTS.glob(pattern)), f"-Wl,-soname,{name}", *options)
            made.rename(folder / name)
    return folder / name


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return once(tmp_path_factory, "libcuda.so.1", "fake_cuda/*.cpp")


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory):
    return once(tmp_path_factory, "libcuda.so.1", "fake_cuda/*.cpp", "-DFAKE_CUDA_OLD")


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory):
    return once(tmp_path_factory, "libnccl.so.2", "fake_nccl/*.cpp")


@pytest.fixture(scope="session")
def old_nccl(tmp_path_factory):
    return once(tmp_path_factory, "libnccl.so.2", "fake_nccl/*.cpp", "-DFAKE_NCCL_OLD")
