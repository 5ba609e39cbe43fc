"""The stand-ins for CUDA's driver and for NCCL, compiled when a test wants them."""

from __future__ import annotations

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


def compile_driver(folder: Path, *options: str) -> Path:
    return compile_library(folder / "libcuda.so.1", sorted((TESTS / "fake_cuda").glob("*.cpp")), *options)


def compile_nccl(folder: Path, *options: str) -> Path:
    # Found by that name, as the real one is.
    options = ("-Wl,-soname,libnccl.so.2", *options)
    return compile_library(folder / "libnccl.so.2", sorted((TESTS / "fake_nccl").glob("*.cpp")), *options)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("fake_cuda_old"), "-DFAKE_CUDA_OLD")


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory):
    return compile_nccl(tmp_path_factory.mktemp("fake_nccl"))


@pytest.fixture(scope="session")
def old_nccl(tmp_path_factory):
    return compile_nccl(tmp_path_factory.mktemp("fake_nccl_old"), "-DFAKE_NCCL_OLD")
