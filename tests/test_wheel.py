"""The wheel, built from the source distribution and installed into an environment that never saw the repository."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fresh_environment import ROOT, borrowing_environment, build_wheel, run
from run_snippets import Runner, for_ranks
from snippets import Snippet, snippets

NAME = "tide_strategies"

# It builds the native core, which takes a busy machine minutes.
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    before = {name for name in ("build", "dist") if (ROOT / name).exists()}
    wheel = build_wheel(folder)
    assert {name for name in ("build", "dist") if (ROOT / name).exists()} == before
    borrowing_environment(folder / "environment", wheel)
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


@pytest.mark.skipif(find_spec("hydra") is None, reason="needs hydra-core")
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


#: Pages whose Python needs a library that may not be here.
NEEDS = {"docs/accelerate.md": "accelerate", "docs/hydra.md": "hydra"}


def test_python_of_the_pages_runs_on_two_ranks_and_ends_well(installed: Installed) -> None:
    """As written, each page after the other; the stand-ins check that training was accelerated."""
    here = [s for s in snippets() if for_ranks(s) and find_spec(NEEDS.get(s.page, "torch"))]
    assert {"README.md", "docs/plain_pytorch.md"} <= {s.page for s in here}
    runner = Runner(installed.environment, installed.outside / "pages", gpu=False)
    runner.folder.mkdir()
    runner.ranks(here)
    assert [o.where for o in runner.outcomes] == [s.where for s in here]
    assert [o for o in runner.outcomes if o.error] == []


def test_a_snippet_that_fails_is_found(installed: Installed) -> None:
    """The page and the line are named, and what the other snippets of the page did."""
    folder = installed.outside / "wrong"
    folder.mkdir()
    right, wrong = Snippet("docs/x.md", 5, "python", "a = 1\n"), Snippet("docs/x.md", 9, "python", "a\nb\n")
    runner = Runner(installed.environment, folder, gpu=False)
    runner.ranks([right, wrong], processes=1)
    good, bad = runner.outcomes
    assert good.error == ""
    assert 'File "docs/x.md:9", line 10' in bad.error
    assert "NameError: name 'b' is not defined" in bad.error
