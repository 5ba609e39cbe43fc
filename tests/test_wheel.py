"""The wheel, built from the source distribution and installed into an environment that never saw the repository."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAME = "tide_strategies"

pytestmark = pytest.mark.wheel

# Two ranks of a user's program: nothing in it knows where the package came from.
TRAIN = """
import json, os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import tide_strategies
from tide_strategies import apply_tide

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)], nn.Linear(16, 3))
for block in model:
    fully_shard(block)
fully_shard(model)
handle = apply_tide(model, {"timeout_s": 60, "strict": True})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("REPORT " + json.dumps({**handle.report().to_dict(), "file": tide_strategies.__file__}), flush=True)
handle.close()
dist.destroy_process_group()
"""


def run(command: list[Any], cwd: Path, **environment: str) -> str:
    """Run a command outside the repository; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**env, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass
class Installed:
    """The built wheel and the environment that it is installed in."""

    wheel: Path
    environment: Path
    outside: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin/python"

    @property
    def site(self) -> Path:
        return next((self.environment / "lib").glob("python*/site-packages"))

    def eval(self, code: str) -> Any:
        """What ``code`` prints as JSON, in a fresh interpreter of the environment."""
        return json.loads(run([self.python, "-c", code], self.outside).splitlines()[-1])


def build(folder: Path) -> Path:
    """Build a wheel without leaving anything in the repository."""
    wheel = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "-w", folder]
    if all(importlib.util.find_spec(m) for m in ("scikit_build_core", "nanobind")):
        code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
        run([sys.executable, "-c", code, folder], ROOT)
        (source,) = folder.glob("*.tar.gz")
        run([*wheel, "--no-build-isolation", source], folder)
    else:
        run([*wheel, "-C", f"build-dir={folder / 'build'}", ROOT], folder)
    (built,) = folder.glob("*.whl")
    return built


def make_environment(folder: Path, wheel: Path) -> None:
    """An environment with the wheel, which borrows everything else from this one.

    What makes an editable install work (a ``.pth`` file in this environment) is not read in folders that a ``.pth``
    file adds. The borrowing begins after the installation, or pip would find this environment's package.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python"]
    run([*pip, "install", "--no-deps", "--no-index", wheel], folder.parent)
    borrowed = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    assert borrowed
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(borrowed))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    before = {name for name in ("build", "dist") if (ROOT / name).exists()}
    wheel = build(folder)
    assert {name for name in ("build", "dist") if (ROOT / name).exists()} == before
    make_environment(folder / "environment", wheel)
    outside = folder / "outside"
    outside.mkdir()
    return Installed(wheel, folder / "environment", outside)


def test_the_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    # A module of ours in the namespace package where Hydra looks for plugins, and no __init__ that would own it.
    plugin = "hydra_plugins/tide_strategies_configs.py"
    assert [n for n in names if n.startswith("hydra_plugins")] == [plugin]
    assert {re.sub(r"-[^/]*", "-", n.split("/")[0]) for n in names if n != plugin} == {NAME, f"{NAME}-"}
    held = {n.removeprefix(f"{NAME}/") for n in names}
    sources = {
        p.relative_to(ROOT / NAME).as_posix() for p in (ROOT / NAME).rglob("*.py*") if p.suffix in (".py", ".pyi")
    }
    assert sources <= held
    for folder in ("kernels", "configs"):
        files = {f"{folder}/{p.relative_to(ROOT / folder).as_posix()}" for p in (ROOT / folder).rglob("*.py")}
        assert files
        assert files <= held
    assert {"py.typed", "fsdp2/fingerprints.json", "configs/tide/default.yaml"} <= held
    assert [n for n in held if re.fullmatch(r"_native\..*\.so", n)], "the native core"
    assert not [n for n in held if n.endswith((".cpp", ".h", ".pyc")) or n.startswith(("tests/", "csrc/"))]


def test_the_command_line_runs(installed: Installed) -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    words = run([installed.environment / "bin/tide", "--version"], installed.outside)
    assert words.strip() == f"tide-strategies {version[1]}"
    assert "COMMAND" in run([installed.environment / "bin/tide", "--help"], installed.outside)


def test_everything_comes_from_the_environment(installed: Installed) -> None:
    code = """
import importlib, importlib.util, json
names = ["tide_strategies", "tide_strategies._native", "tide_strategies.kernels", "tide_strategies.configs"]
files = [importlib.import_module(n).__file__ for n in names]
bare = [n for n in ("kernels", "configs", "csrc", "tests") if importlib.util.find_spec(n)]
print(json.dumps([files, bare]))
"""
    files, bare = installed.eval(code)
    assert all(Path(f).is_relative_to(installed.site) for f in files), files
    assert bare == []


def test_torch_finds_the_entry_point_and_calls_it(installed: Installed) -> None:
    code = """
import json, sys
import importlib.metadata as metadata
found = [e for e in metadata.entry_points(group="torch.backends") if e.name == "tide_strategies"]
assert "tide_strategies" not in sys.modules
import torch
where = sys.modules["tide_strategies._autoload"].__file__
print(json.dumps([[e.value for e in found], where]))
"""
    values, where = installed.eval(code)
    assert values == ["tide_strategies._autoload:autoload"]
    assert Path(where).is_relative_to(installed.site)


@pytest.mark.skipif(importlib.util.find_spec("hydra") is None, reason="needs hydra-core")
def test_hydra_finds_the_group_of_the_installed_package(installed: Installed) -> None:
    code = """
import json, hydra
hydra.initialize(version_base=None)
config = hydra.compose(overrides=["+tide=h200", "tide.reduce_scatter.mode=slot_reuse"])
from tide_strategies import TideConfig
print(json.dumps(TideConfig.from_any(config.tide).changed()))
"""
    assert installed.eval(code) == ["all_gather.slots", "reduce_scatter.mode"]


def test_the_installed_torch_is_known_to_the_installed_guards(installed: Installed) -> None:
    code = """
import json
from tide_strategies.fsdp2.guards import FINGERPRINTS, check_torch
result = check_torch()
print(json.dumps([result.code, result.reason, str(FINGERPRINTS)]))
"""
    verdict, reason, where = installed.eval(code)
    assert verdict == "TIDE-OK", reason
    assert Path(where).is_relative_to(installed.site)


def test_training_outside_the_repository_is_accelerated_and_ends_well(installed: Installed) -> None:
    script = installed.outside / "train.py"
    script.write_text(TRAIN)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        processes.append(
            subprocess.Popen(
                [installed.python, script],
                cwd=installed.outside,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=90)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("REPORT ")]
        report = json.loads(line[7:])
        assert report["status"] == "4 of 4 groups accelerated"
        assert all(g["path"] == "tide" and g["reduce_scatter"]["calls"] == 3 for g in report["groups"])
        assert Path(report["file"]).is_relative_to(installed.site)
