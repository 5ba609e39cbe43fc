"""``tide doctor``: what it finds on machines of all kinds, and what it says to do."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from commands import Output, run

from tide_strategies import _native
from tide_strategies.cli import checks, doctor
from tide_strategies.planner.calibrate import fingerprint


def test_the_doctor_finds_cpu_ranks_well_here(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_TOPOLOGY", raising=False)
    assert run("doctor", "--json") in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"] is True
    assert {c["area"] for c in found["checks"]} >= {"software", "CPU ranks", "GPU ranks", "several nodes", "job"}
    assert all(c["status"] in ("ok", "note", "warn", "fail") for c in found["checks"])
    run("doctor")
    text = capsys.readouterr().out
    assert "CPU ranks of one host: yes." in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TIDE_TOPOLOGY": "2x"}, "TIDE_TOPOLOGY"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, "launcher"),
        ({"WORLD_SIZE": "many"}, "launcher"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}, "order of ranks"),
    ],
)
def test_a_job_that_cannot_run_is_a_failure_with_a_remedy(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert run("doctor", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    failed = [c for c in found["checks"] if c["status"] == "fail" and c["area"] == "job"]
    assert [c["name"] for c in failed] == [name]
    assert all(c["remedy"] for c in failed)


def _gpu(missing: str | None, peers: bool = True, switches: dict[str, str] | None = None) -> list[checks.Check]:
    info = {"name": "GPU", "compute_capability": (9, 0), "total_memory": 2**37, "async_engines": 3}
    cuda = mock.Mock()
    cuda.probe.return_value = {"available": True, "reason": "", "driver_version": 13000, "devices": 2}
    cuda.device_info.return_value = {**info, "multicast_supported": True}
    cuda.can_access_peer.return_value = peers
    cuda.multicast_switched_off.side_effect = _native.cuda.multicast_switched_off
    cuda.multicast_refusal.side_effect = lambda device: (
        f"it is switched off ({off})" if (off := _native.cuda.multicast_switched_off()) else ""
    )
    with (
        mock.patch("tide_strategies._native.cuda", cuda),
        mock.patch("tide_strategies.runtime.cuda.capability.missing_capability", return_value=missing),
        mock.patch.dict("os.environ", {"NCCL_NVLS_ENABLE": "0"} if switches is None else switches),
    ):
        return list(checks._gpu())


@pytest.mark.parametrize(
    ("missing", "peers", "able", "words"),
    [
        (None, True, True, ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS is not set; it must be 32", True, False, "set CUDA_DEVICE_MAX_CONNECTIONS=32"),
        ("triton is not installed", True, False, "pip install triton"),
        ("the driver has CUDA 11.8", True, False, "CUDA 12 or newer"),
        (None, False, False, "(CUDA_VISIBLE_DEVICES): groups over these stay stock (TIDE-F020)"),
    ],
)
def test_gpus_that_cannot_say_why_and_what_helps(missing: str | None, peers: bool, able: bool, words: str) -> None:
    found = _gpu(missing, peers)
    assert doctor.summary(found)["gpu"] is able
    assert doctor.summary(found)["here"] is able, "a GPU that cannot is not made up for by the CPU"
    assert any(words in c.remedy for c in found)
    assert any("switched off (NCCL_NVLS_ENABLE=0)" in c.found for c in found)


@pytest.mark.parametrize(
    ("switches", "status", "words", "remedy"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, "note", "nothing forbids it", ""),
        ({"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}, "note", "switched off (NCCL_NVLS_ENABLE=0)", ""),
        # NCCL itself does not look at torch's variable.
        (
            {"NCCL_NVLS_ENABLE": "2", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
            "warn",
            "switched off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)",
            "set NCCL_NVLS_ENABLE=0 as well",
        ),
    ],
)
def test_multicast_and_its_switches_are_told(switches: dict[str, str], status: str, words: str, remedy: str) -> None:
    with mock.patch.dict("os.environ"):
        for name in checks.MULTICAST_SWITCHES:
            checks.os.environ.pop(name, None)
        (found,) = (c for c in _gpu(None, switches=switches) if c.name == "NVSwitch multicast")
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True)
    assert bool(found.remedy) is bool(remedy)


@pytest.mark.parametrize(
    ("probe", "environment", "installed", "words", "remedies"),
    [
        ({"available": True, "version": "2.31.2", "path": "/x/libnccl.so.2"}, {}, None, "2.31.2 (/x/", [""]),
        ({"available": False, "path": "/x", "reason": "NCCL 2.28.9 is loaded"}, {}, None, "2.28.9 is", ["pip install"]),
        ({"available": False, "path": ""}, {}, "2.31.2", "2.31.2 is installed, and not loaded", ["pip install"]),
        ({"available": False, "path": ""}, {}, None, "not installed", [""]),
        (
            {"available": True, "version": "2.32.3", "path": "/x"},
            {"NCCL_CUMEM_ENABLE": "0"},
            None,
            "switched off by NCCL_CUMEM_ENABLE=0",
            ["", "unset NCCL_CUMEM_ENABLE"],
        ),
    ],
)
def test_the_nccl_of_the_process_is_looked_at(
    probe: dict[str, Any], environment: dict[str, str], installed: str | None, words: str, remedies: list[str]
) -> None:
    nccl = mock.Mock(NEEDED="2.31.2")
    nccl.probe.return_value = probe
    with (
        mock.patch("tide_strategies._native.nccl", nccl),
        mock.patch.dict("os.environ", environment),
        mock.patch.object(checks, "installed", return_value=installed),
    ):
        found = [c for c in checks._nodes() if c.name.startswith("NCCL")]
    assert any(words in c.found for c in found), found
    for check, remedy in zip(found, remedies, strict=True):
        assert remedy in check.remedy
        assert bool(check.remedy) is bool(remedy)


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Any:
        raise RuntimeError("no")
        yield

    with mock.patch.object(checks, "_CHECKS", [("job", broken)]):
        (finding,) = checks.everything()
    assert finding.status == "warn"
    assert "RuntimeError: no" in finding.found


def test_facts_of_another_machine_have_another_name() -> None:
    assert fingerprint({"a": "1"}) != fingerprint({"a": "2"})
