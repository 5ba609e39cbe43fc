"""The CUDA transport, on a fake driver (``conftest.py``): each scenario of ``tests/fake_cuda`` by itself."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "fake_cuda"
SCENARIOS = [
    (path.stem, node.name)
    for path in sorted(FAKE.glob("*_scenarios.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(d, ast.Name) and d.id == "scenario" for d in node.decorator_list)
]


def python(*arguments: str, timeout: float = 120, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def probe(**env: str) -> str:
    return python("-c", "from tide_strategies._native import cuda; print(cuda.probe())", **env)


@pytest.fixture(scope="module")
def played(driver):
    """Runs all scenarios of a file when the first one is wanted: exit code and words of each."""

    @functools.cache
    def of(file):
        names = [name for stem, name in SCENARIOS if stem == file]
        return json.loads(python(str(FAKE / f"{file}.py"), "--each", *names, timeout=280, TIDE_LIBCUDA=str(driver)))

    return of


@pytest.mark.parametrize(("file", "scenario"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_scenario(played, file, scenario):
    code, words = played(file)[scenario]
    assert code == 0, words


@pytest.mark.parametrize(
    ("file", "scenario"),
    [("program_scenarios", "copies_of_every_kind"), ("memory_scenarios", "remapping_waits_for_the_device")],
)
def test_drivers_before_cuda_13_serve_too(old_driver, file, scenario):
    python(str(FAKE / f"{file}.py"), scenario, TIDE_LIBCUDA=str(old_driver))


@pytest.mark.parametrize("connections", ["1", "8"])
def test_streams_may_share_hardware_queues(driver, connections):
    name = "one_hardware_queue_for_all_streams_is_enough"
    scenarios = str(FAKE / "program_scenarios.py")
    python(scenarios, name, TIDE_LIBCUDA=str(driver), FAKE_CUDA_CONNECTIONS=connections)


def test_without_a_driver_the_reason_is_given(tmp_path):
    missing = probe(TIDE_LIBCUDA=str(tmp_path / "none.so"))
    assert "'available': False" in missing
    assert "TIDE_LIBCUDA cannot be loaded" in missing
    (tmp_path / "empty.cpp").write_text("int nothing;")
    if shutil.which("g++"):
        library = tmp_path / "empty.so"
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "empty.cpp"], check=True)
        assert "the CUDA driver has no cuInit: it is too old" in probe(TIDE_LIBCUDA=str(library))
    # What needs the driver says the same instead of crashing.
    code = "from tide_strategies._native import cuda\ntry: cuda.Allocation(0, 1)\nexcept RuntimeError as e: print(e)"
    assert "TIDE_LIBCUDA cannot be loaded" in python("-c", code, TIDE_LIBCUDA=str(tmp_path / "none.so"))


def test_a_machine_without_devices_is_told_from_one_without_a_driver(driver):
    found = probe(TIDE_LIBCUDA=str(driver), FAKE_CUDA_DEVICES="0")
    assert "'available': False" in found
    assert "no CUDA-capable device" in found
    assert "'driver_version': 13000" in found
