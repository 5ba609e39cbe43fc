"""The ``torch.backends`` entry point: cheap, silent, switchable, and never in the way of the host library."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
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


def test_import_torch_imports_nothing_else_of_ours(entry_point_path):
    code = "import torch, sys; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'tide_strategies'))"
    assert run(code, entry_point_path) == ["tide_strategies", "tide_strategies._autoload"]


def test_costs_well_under_a_millisecond(entry_point_path):
    code = """
import torch, time, sys
from tide_strategies import _autoload
def once():
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _autoload._PostImportFinder)]
    start = time.perf_counter(); _autoload.autoload(); return time.perf_counter() - start
print(min(once() for _ in range(20)))
"""
    (seconds,) = run(code, entry_point_path)
    assert float(seconds) < 5e-4


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
