"""The runner of PyTorch's own FSDP2 tests, on a checkout that holds a few tests written here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[1] / "tools/run_torch_fsdp2_tests.py"

TESTS = """
import os
import unittest

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import run_tests


class TestTraining(FSDPTest):
    world_size = 2

    def test_trains(self):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(5, 5)), nn.Linear(5, 3)))
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        self.assertEqual(model[1].bias.grad.full_tensor(), torch.full((3,), 4.0))


class TestOthers(unittest.TestCase):
    def test_skips(self):
        self.skipTest("wanted")

    def test_fails(self):
        raise ValueError("always")

    def test_fails_with_tide(self):
        if "TIDE_PEER_OFF" not in os.environ:
            raise ValueError("only with TIDE")

    def test_counts(self):
        self.count()

    def count(self):
        with CommDebugMode():
            raise AssertionError("left out")


if __name__ == "__main__":
    run_tests()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "pytorch/test/distributed/_composable/fsdp"
    folder.mkdir(parents=True)
    (folder / "test_fully_shard_training.py").write_text(TESTS)
    (folder / "test_fully_shard_of_tomorrow.py").touch()
    (tmp_path / "pytorch/version.txt").write_text(torch.__version__.split("+")[0] + "a0\n")
    return tmp_path / "pytorch"


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("run_torch_fsdp2_tests", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test is written for ranks on the CPU")
def test_the_table_tells_tides_failures_from_torchs_own(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    done = run("--pytorch", checkout, "--json", tmp_path / "out.json")
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert result["passed"] == ["TestTraining::test_trains"]
    assert result["with_tide"] == ["TestTraining::test_trains"], "both groups ran on TIDE"
    assert result["codes"] == {}
    assert result["skipped"] == ["TestOthers::test_skips"]
    assert result["left_out"] == ["TestOthers::test_counts"]
    assert result["failed"].keys() == {"TestOthers::test_fails", "TestOthers::test_fails_with_tide"}
    assert result["stock_fails"] == ["TestOthers::test_fails"]
    lines = done.stdout.splitlines()
    assert "not run, because this tool does not know them: test_fully_shard_of_tomorrow.py" in lines
    row = next(line for line in lines if line.startswith("test_fully_shard_training.py"))
    assert row.split()[1:] == ["1", "1", "1", "1", "2", "1"]
    file = "test_fully_shard_training.py"
    assert f"FAIL  {file}::TestOthers::test_fails_with_tide: ValueError: only with TIDE" in lines
    assert f"fails without TIDE too  {file}::TestOthers::test_fails" in lines


def test_what_cannot_be_run_is_an_error_with_words(tool: types.ModuleType, checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(tool.Unusable, match="give a checkout of PyTorch: --pytorch PATH"):
        tool.find_tests(None)
    with pytest.raises(tool.Unusable, match="is no checkout of PyTorch: it has no folder test/distributed"):
        tool.find_tests(tmp_path)
    folder = checkout / tool.FOLDER
    with pytest.raises(tool.Unusable, match=r"test_fully_shard_frozen.py needs 2 GPUs, and torch sees 0 here"):
        tool.chosen(["test_fully_shard_frozen.py"], folder, gpus=0)
    with pytest.raises(tool.Unusable, match=r"test_fully_shard_compile.py is not run: traces"):
        tool.chosen(["test_fully_shard_compile.py"], folder, gpus=8)
    with pytest.raises(tool.Unusable, match=r"test_other.py is not run: it is not on the list"):
        tool.chosen(["test_other.py"], folder, gpus=8)
    with pytest.raises(tool.Unusable, match=r"has no test_fully_shard_init.py"):
        tool.chosen(["test_fully_shard_init.py"], folder, gpus=8)
    assert tool.chosen([], folder, gpus=0) == ["test_fully_shard_training.py"]
    (checkout / "version.txt").write_text("2.1.0a0")
    with pytest.raises(tool.Unusable, match=r"the checkout is of torch 2.1.0a0, installed is .* check out the tag v2"):
        tool.find_tests(checkout)


def test_the_command_says_it_on_stderr_with_status_2() -> None:
    done = run("--pytorch", "/nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "/nowhere is no checkout of PyTorch" in done.stderr
    listed = run("--list").stdout
    assert "test_fully_shard_frozen.py: needs 2 GPUs" in listed
    assert "test_fully_shard_memory.py: not run: " in listed
