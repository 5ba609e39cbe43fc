"""NCCL's windows and host RMA, on a fake library over the fake driver: each scenario in a fresh process."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tide_strategies.runtime.cuda.nccl_rail import EXIT_CODE

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FILES = [TESTS / "fake_nccl" / name for name in ("scenarios.py", "engine_scenarios.py")]
#: Those that need a library of their own.
SPECIAL = {
    "two_copies_are_refused",
    "of_two_copies_the_one_that_everybody_calls_is_used",
    "an_old_library_is_told_from_a_maimed_one",
    "a_rank_that_stops_with_a_blocked_stream_ends",
}
SCENARIOS = {
    node.name: file
    for file in FILES
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "scenario" for d in node.decorator_list)
}


def run(name: str, driver: Path, library: Path, code: int = 0, **env: str) -> str:
    env = {**os.environ, "TIDE_LIBCUDA": str(driver), "TIDE_FAKE_NCCL": str(library), **env}
    done = subprocess.run([sys.executable, SCENARIOS[name], name], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in SPECIAL])
def test_scenario(driver, fake_nccl, name):
    run(name, driver, fake_nccl)


@pytest.mark.parametrize("name", ["two_copies_are_refused", "of_two_copies_the_one_that_everybody_calls_is_used"])
def test_of_two_copies(driver, fake_nccl, tmp_path, name):
    other = shutil.copy(fake_nccl, tmp_path / "libnccl.so.2")
    run(name, driver, fake_nccl, TIDE_OTHER_NCCL=str(other))


def test_an_old_library_is_told_from_a_maimed_one(driver, old_nccl):
    run("an_old_library_is_told_from_a_maimed_one", driver, old_nccl, FAKE_NCCL_VERSION="22809")


def test_a_rank_that_stops_with_a_blocked_stream_ends(driver, fake_nccl):
    words = run("a_rank_that_stops_with_a_blocked_stream_ends", driver, fake_nccl, code=EXIT_CODE)
    assert "TIDE: rank 0 has stopped, and its GPU still waits for a peer: the process is ended." in words


def test_special_scenarios_exist():
    assert set(SCENARIOS) >= SPECIAL


def nccl_include() -> Path | None:
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = [Path(p) / "include" for p in (found.submodule_search_locations or ())] if found else []
    places += [Path(os.environ[n]) / "include" for n in ("NCCL_HOME",) if n in os.environ]
    return next((p for p in places if (p / "nccl_device.h").is_file()), None)


def test_declarations_are_those_of_nccls_header():
    compiler, include = shutil.which("g++"), nccl_include()
    cuda = next((p for p in (Path("/usr/local/cuda/include"),) if (p / "cuda_runtime.h").is_file()), None)
    if compiler is None or include is None or cuda is None:
        pytest.skip("no NCCL header here (pip install nvidia-nccl-cu13, or set NCCL_HOME), or no CUDA headers")
    source = ROOT / "csrc/cuda/nccl_check_headers.cpp"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-isystem{include}", f"-isystem{cuda}"]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_headers_of_an_older_nccl_are_no_obstacle(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    (tmp_path / "nccl.h").write_text("#define NCCL_VERSION_CODE 22803\n")
    source = ROOT / "csrc/cuda/nccl_check_headers.cpp"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-isystem{tmp_path}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
