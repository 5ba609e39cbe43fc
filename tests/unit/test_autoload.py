"""The ``torch.backends`` entry point: cheap, silent, switchable, and never in the way of the host library."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import tide_strategies

ROOT = Path(tide_strategies.__file__).parents[1]


@pytest.fixture(scope="module")
def entry_point_path(tmp_path_factory):
    """A search path on which the package's entry point exists, installed or not."""
    path = [str(ROOT)]
    try:
        importlib.metadata.distribution("tide-strategies")
    except importlib.metadata.PackageNotFoundError:
        site = tmp_path_factory.mktemp("site")
        info = site / "tide_strategies-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tide-strategies\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[torch.backends]\ntide_strategies = tide_strategies._autoload:autoload\n"
        )
        path.append(str(site))
    return os.pathsep.join(path)


def run(code, path, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


REGISTERED = ["tide_fsdp", "tide_fsdp_offload", "tide_fsdp_sharded"]


@pytest.fixture
def stand_in(tmp_path, entry_point_path):
    """A search path with a stand-in for a Fabric namespace: the real ones take seconds to import."""
    package = tmp_path / "lightning_fabric"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy, description, **options): self[name] = (strategy, options)\n"
        "STRATEGY_REGISTRY = Registry()\n"
    )
    return os.pathsep.join([str(tmp_path), entry_point_path])


LOOK = "from lightning_fabric.strategies import STRATEGY_REGISTRY as R; print(*sorted(R))"


@pytest.mark.parametrize(
    ("trainer", "fabric", "kind"),
    [("lightning.pytorch", "lightning.fabric", "unified"), ("pytorch_lightning", "lightning_fabric", "standalone")],
)
def test_registries_of_every_namespace_without_an_import_of_ours(trainer, fabric, kind, entry_point_path):
    pytest.importorskip(trainer)
    code = f"""
from {trainer}.strategies import StrategyRegistry as R
print(*sorted(n for n in R if "tide" in n), type(R.get("tide_fsdp")).__module__)
from {fabric}.strategies import STRATEGY_REGISTRY as R
print(*sorted(n for n in R if "tide" in n), type(R.get("tide_fsdp")).__module__)
"""
    package = "tide_strategies.integrations.lightning"
    expected = [*REGISTERED, f"{package}.trainer_{kind}", *REGISTERED, f"{package}.fabric_{kind}"]
    assert run(code, entry_point_path) == expected


def test_the_entry_point_imports_nothing_that_torch_has_not(entry_point_path):
    code = """
import torch, sys
from importlib.metadata import entry_points
before = set(sys.modules)
for entry in entry_points(group="torch.backends", name="tide_strategies"):
    entry.load()()
print(*sorted(set(sys.modules) - before))
"""
    without = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run(code, entry_point_path, **without) == ["tide_strategies", "tide_strategies._autoload"]


def test_costs_less_than_a_millisecond(tmp_path):
    """What every ``import torch`` on the machine pays: our two modules, for the first time, and the call.

    By then torch has imported all else that they need (the test above). The least of several processes: the first one
    compiles, and others may be interrupted.
    """
    code = """
import collections.abc, importlib.abc, importlib.machinery, os, sys, types, typing, time
start = time.perf_counter()
from tide_strategies._autoload import autoload
autoload()
print(time.perf_counter() - start)
"""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    seconds = []
    for _ in range(20):
        seconds.append(float(*run(code, str(ROOT), **compiled)))
        if len(seconds) > 4 and min(seconds) < 1e-3:
            break
    assert min(seconds) < 1e-3


def test_switches(stand_in):
    assert run(f"import torch; {LOOK}", stand_in) == REGISTERED
    assert run(f"import torch; {LOOK}", stand_in, TIDE_AUTOLOAD="0") == []
    assert run(f"import torch; {LOOK}", stand_in, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == []
    assert run(f"import tide_strategies; {LOOK}", stand_in) == REGISTERED
    assert run(f"import tide_strategies; {LOOK}", stand_in, TIDE_AUTOLOAD="0") == []


def test_host_imported_before_us(stand_in):
    assert run(f"import lightning_fabric.strategies, tide_strategies; {LOOK}", stand_in) == REGISTERED


def test_host_whose_own_import_imports_us(stand_in, tmp_path):
    strategies = tmp_path / "lightning_fabric/strategies.py"
    strategies.write_text("import tide_strategies\n" + strategies.read_text() + "import json.tool\n")
    for last in ("this_is_not_there", "wave"):  # whatever is imported next, there or not
        attempt = f"try: import {last}\nexcept ImportError: pass\n"
        assert run(f"import lightning_fabric.strategies\n{attempt}{LOOK}", stand_in) == REGISTERED


def test_loader_of_the_host_is_its_own(stand_in):
    code = """
import tide_strategies, importlib.util, inspect, importlib
assert type(importlib.util.find_spec("lightning_fabric.strategies").loader).__name__ == "SourceFileLoader"
import lightning_fabric.strategies as s
assert type(s.__spec__.loader).__name__ == "SourceFileLoader" and "Registry" in inspect.getsource(s)
importlib.reload(s)
print(*sorted(s.STRATEGY_REGISTRY))
"""
    assert run(code, stand_in) == REGISTERED


@pytest.mark.parametrize("version", ["2.4.1", "2.6.2"])
def test_a_version_that_is_not_supported_is_told_to_who_uses_the_name(stand_in, tmp_path, version):
    (tmp_path / "lightning_fabric/__init__.py").write_text(f"__version__ = {version!r}\n")
    code = """
import warnings
warnings.simplefilter("error")
import tide_strategies
from lightning_fabric.strategies import STRATEGY_REGISTRY
try:
    STRATEGY_REGISTRY["tide_fsdp"][0]()
except Exception as e:
    print(type(e).__name__, e)
"""
    words = " ".join(run(code, stand_in))
    assert words.startswith("TideConfigError TIDE supports lightning_fabric>=2.5,!=2.6.2,!=2.6.3; this is " + version)


def host(tmp_path, monkeypatch, body="VALUE = 1\n"):
    """A made-up host module, hooked; returns the autoload module."""
    from tide_strategies import _autoload

    (tmp_path / "tide_test_host.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_autoload, "_failed", set())
    _autoload.autoload()
    monkeypatch.delitem(sys.modules, "tide_test_host", raising=False)
    return _autoload


def test_failing_hook_warns_once_and_leaves_the_host_intact(tmp_path, monkeypatch):
    autoload = host(tmp_path, monkeypatch)
    monkeypatch.setitem(autoload._HOOKS, "tide_test_host", "no_such_module_of_ours:hook")
    with pytest.warns(RuntimeWarning, match="could not register with tide_test_host") as caught:
        module = importlib.reload(importlib.import_module("tide_test_host"))
    assert module.VALUE == 1
    assert len(caught) == 1


def test_failing_host_keeps_its_own_error(tmp_path, monkeypatch):
    autoload = host(tmp_path, monkeypatch, "raise LookupError('host')\n")
    monkeypatch.setitem(autoload._HOOKS, "tide_test_host", "no_such_module_of_ours:hook")
    with pytest.raises(LookupError, match="host"):
        import tide_test_host  # noqa: F401


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("'1.12.9'", False),
        ("'1.13'", True),
        ("'1.13.0.dev0'", True),  # near enough
        ("'1.14.1'", False),
        ("'2.0.0+local'", True),
        ("None", True),  # it does not say: the hook looks for what it needs
    ],
)
def test_versions(tmp_path, monkeypatch, recwarn, version, supported):
    autoload = host(tmp_path, monkeypatch, f"__version__ = {version}\n")
    hooked = []
    monkeypatch.setattr(autoload, "_calls_of_the_test", hooked.append, raising=False)
    monkeypatch.setitem(autoload._HOOKS, "tide_test_host", "tide_strategies._autoload:_calls_of_the_test")
    monkeypatch.setitem(autoload._SUPPORTED, "tide_test_host", ">=1.13,!=1.14.1")
    monkeypatch.setattr(autoload, "_ON_REQUEST", {"tide_test_host"})
    monkeypatch.setenv("TIDE_CONFIG", "{}")
    module = importlib.reload(importlib.import_module("tide_test_host"))
    assert hooked == ([module, module] if supported else [])
    told = [str(w.message) for w in recwarn]
    assert len(told) == (0 if supported else 1)
    for words in told:
        assert f"TIDE supports tide_test_host>=1.13,!=1.14.1; this is {version[1:-1]}" in words
        assert "Install one of those, or set TIDE_AUTOLOAD=0" in words


def test_a_launcher_that_is_not_asked_for_tide_says_nothing_of_its_version(tmp_path):
    from tide_strategies._autoload import _ask_for_tide

    (tmp_path / "own.yaml").write_text("use_cpu: true\n")
    (tmp_path / "tide.yaml").write_text("use_cpu: true\ntide_config: {}\n")
    assert not _ask_for_tide(["--config_file", str(tmp_path / "own.yaml"), "train.py", "missing.yaml"])
    assert _ask_for_tide(["--config_file", str(tmp_path / "tide.yaml"), "train.py"])
    assert _ask_for_tide([f"--config_file={tmp_path / 'tide.yaml'}"])


def test_supported_versions_are_those_of_the_package():
    """Each host's range is what ``pip install tide-strategies[...]`` asks for."""
    from packaging.requirements import Requirement

    from tide_strategies import _autoload

    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {r.name: r.specifier for e in extras.values() for r in map(Requirement, e)}
    assert {name.partition(".")[0] for name in _autoload._HOOKS} == _autoload._SUPPORTED.keys()
    for host, versions in _autoload._SUPPORTED.items():
        package = "lightning" if "lightning" in host else host  # lightning depends on the two others, of its version
        assert asked[package] == Requirement(package + versions).specifier


@pytest.mark.parametrize("filtered", ["always", "error"])
def test_an_error_of_ours_does_not_stop_an_import(monkeypatch, filtered):
    from tide_strategies import _autoload

    def broken():
        raise LookupError("broken on purpose")

    monkeypatch.setattr(_autoload, "_failed", set())
    monkeypatch.setattr(_autoload, "install_hooks", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(filtered)
        package = importlib.reload(tide_strategies)  # calls it at its end, as ``import torch`` does
        _autoload.autoload()
    assert package.__version__
    words = "TIDE could not install its import hooks (LookupError: broken on purpose)"
    assert [str(w.message) for w in caught] == [words]
