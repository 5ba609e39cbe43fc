"""What a kept calibration depends on: another driver, topology of GPUs or NCCL variable is another machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tide_strategies._native import cuda
from tide_strategies.config import TideConfig
from tide_strategies.fsdp2 import calibration, facts
from tide_strategies.planner import calibrate
from tide_strategies.planner.rates import CPU_PAIR
from tide_strategies.runtime.cuda import nccl_domains

CONFIG = TideConfig()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Two GPUs that a test can change."""
    found: dict[str, Any] = {"reach": True, "version": tmp_path / "version"}
    found["version"].write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10\nGCC version: ...\n")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 0))
    monkeypatch.setattr(cuda, "probe", lambda: {"driver_version": 12080})
    monkeypatch.setattr(cuda, "can_access_peer", lambda a, b: found["reach"])
    monkeypatch.setattr(facts.dist, "get_backend", lambda ranks: "nccl")
    monkeypatch.setattr(facts.kernel_driver, "__defaults__", (found["version"],))
    for name in list(facts.os.environ):
        if name.startswith("NCCL_"):
            monkeypatch.delenv(name)
    return found


def _facts() -> dict[str, str]:
    return facts.facts_of(SimpleNamespace(size=lambda: 2), torch.device("cuda"), CONFIG)  # type: ignore[arg-type]


def test_another_driver_topology_or_variable_is_measured_anew(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, where, known = _facts(), tmp_path / "kept", calibrate.Known(CPU_PAIR)
    assert first["kernel driver"] == "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10"
    assert (first["peers"], first["environment"]) == ("-1 1-", "")
    assert calibrate.store(where, first, known) == ""
    assert calibrate.load(where, _facts())[0] == known, "nothing has changed"
    machine["version"].write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    assert _facts()["driver"] == first["driver"], "the same CUDA version"
    assert calibrate.load(where, _facts()) == (calibrate.Known(), "")
    machine["version"].unlink()
    assert _facts()["kernel driver"] == ""
    machine["version"].write_text(first["kernel driver"])
    assert calibrate.load(where, _facts())[0] == known
    machine["reach"] = False
    assert _facts()["peers"] == "-0 0-"
    assert calibrate.load(where, _facts())[0] == calibrate.Known()
    machine["reach"] = True
    with monkeypatch.context() as patched:
        patched.setattr(nccl_domains, "missing_nccl", lambda: None)
        assert (first["rails"], _facts()["rails"]) == (nccl_domains.nccl.probe()["reason"], "NCCL")
        assert calibrate.load(where, _facts())[0] == calibrate.Known()
    for name in ("NCCL_ALGO", "NCCL_P2P_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert _facts()["environment"] == f"{name}=1"
            assert calibrate.load(where, _facts())[0] == calibrate.Known()
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    assert calibrate.load(where, _facts())[0] == known, "what NCCL says changes no time"


def test_ranks_that_differ_know_nothing(tmp_path: Path) -> None:
    own = {"device": "cuda", "kernel driver": "570"}
    calibrate.store(tmp_path, own, calibrate.Known(CPU_PAIR))

    def beside(other: dict[str, str]) -> Any:
        return lambda payload: [payload, json.dumps({**json.loads(payload), "facts": other}).encode()]

    assert calibration._known(beside(own), 0, own, tmp_path) == (calibrate.Known(CPU_PAIR), True)
    for other in ({**own, "kernel driver": "580"}, {"device": "cuda"}, {**own, "more": ""}):
        assert calibration._known(beside(other), 0, own, tmp_path) == (calibrate.Known(), False)
