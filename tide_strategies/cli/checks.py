"""What ``tide doctor`` looks at: each check says what it found, whether that is in the way, and what helps."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tide_strategies.cli.tables import gib
from tide_strategies.config import TOPOLOGY_ENV, parse_topology
from tide_strategies.errors import TideConfigError
from tide_strategies.planner.calibrate import folder

Status = Literal["ok", "note", "warn", "fail"]

#: Switches that keep multicast objects from being made.
MULTICAST_SWITCHES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
#: Switches without which NCCL's windows and host RMA do not work.
WINDOW_SWITCHES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_WIN_ENABLE": "0", "NCCL_NUM_RMA_CTX": "0"}
#: Shared memory below this will not hold the arena of any model worth sharding.
_LITTLE_MEMORY = 256 * 2**20
_FEW_FILES = 256


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Args:
        area: "software", "CPU ranks", "GPU ranks", "several nodes", "job" or "environment".
        name: what was looked at.
        status: "fail" is in the way of TIDE for the area, "warn" may be, "note" only informs.
        found: in words.
        remedy: what to do, if anything.
    """

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def everything() -> list[Check]:
    """All checks, in the order of the report. None raises: what cannot be looked at is a finding too."""
    out: list[Check] = []
    for area, check in _CHECKS:
        try:
            out += check()
        except Exception as e:  # the doctor must outlive every patient
            out.append(Check(area, check.__name__.strip("_"), "warn", f"could not be checked: {type(e).__name__}: {e}"))
    return out


def _software() -> Iterator[Check]:
    version = importlib.metadata.version("tide-strategies")
    yield Check("software", "tide-strategies", "ok", f"{version}, Python {platform.python_version()}")
    from tide_strategies.fsdp2.guards import check_torch

    guard = check_torch()
    status: Status = "ok" if guard.supported else "fail"
    found = f"{guard.version}" if guard.supported else f"{guard.version}: {guard.code} {guard.reason}"
    yield Check("software", "torch", "warn" if guard.supported and guard.warning else status, found, guard.remedy)
    for name in ("lightning", "accelerate", "transformers", "triton"):
        yield Check("software", name, "note", installed(name) or "not installed")


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> Iterator[Check]:
    if sys.platform != "linux":
        yield Check("CPU ranks", "system", "fail", sys.platform, "use Linux")
        return
    from tide_strategies import _native

    yield Check("CPU ranks", "native core", "ok", f"arithmetic: {_native.kernel_variant()}")
    available = _native.Arena.available_bytes()
    little = available < _LITTLE_MEMORY
    yield Check(
        "CPU ranks",
        "memory for the arena",
        "warn" if little else "ok",
        f"{gib(available)} (the least of free memory, cgroup limits and ulimit -f)",
        "free memory, or raise the container's limit or ulimit -f" if little else "",
    )
    arena = _native.Arena.create(2, 0, 4)
    arena.watch(1, os.getpid())
    yield Check("CPU ranks", "memory file, process descriptors", "ok", "work")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 < files < _FEW_FILES
    yield Check("CPU ranks", "open files", "warn" if few else "ok", f"limit {files}", "raise ulimit -n" if few else "")
    yield _dev_shm()


def _dev_shm() -> Check:
    """TIDE's own arena is not there; data loaders' workers are, and a full one ends them with a bus error."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as e:
        return Check("CPU ranks", "/dev/shm", "note", f"not there ({e.strerror}); TIDE does without")
    room = found.f_bavail * found.f_frsize
    small = room < _LITTLE_MEMORY
    return Check(
        "CPU ranks",
        "/dev/shm",
        "warn" if small else "note",
        f"{gib(room)} free; TIDE does without, data loader workers do not",
        "docker run --shm-size=1g, or num_workers=0" if small else "",
    )


def _gpu() -> Iterator[Check]:
    from tide_strategies._native import cuda

    probe = cuda.probe()
    if not probe["available"] or not probe["devices"]:
        yield Check("GPU ranks", "driver", "note", str(probe["reason"] or "no device"))
        return
    version = probe["driver_version"]
    yield Check("GPU ranks", "driver", "ok", f"CUDA {version // 1000}.{version % 1000 // 10}")
    from tide_strategies.runtime.cuda.capability import missing_capability

    for device in range(probe["devices"]):
        info = cuda.device_info(device)
        missing = missing_capability(device)
        major, minor = info["compute_capability"]
        found = f"{info['name']}, sm_{major}{minor}, {gib(info['total_memory'])}, {info['async_engines']} copy engines"
        if missing is None:
            yield Check("GPU ranks", f"device {device}", "ok", found)
        else:
            yield Check("GPU ranks", f"device {device}", "fail", f"{found}: {missing}", _gpu_remedy(missing))
    yield from _peers(cuda, probe["devices"])


def _gpu_remedy(missing: str) -> str:
    if "CUDA_DEVICE_MAX_CONNECTIONS" in missing:
        return "set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment of the job, before it starts"
    if "triton" in missing:
        return "pip install triton"
    return "use a GPU and driver with CUDA 12 or newer (TIDE-F016)"


def _peers(cuda: Any, devices: int) -> Iterator[Check]:
    apart = [(a, b) for a in range(devices) for b in range(devices) if a != b and not cuda.can_access_peer(a, b)]
    if apart:
        yield Check(
            "GPU ranks",
            "peer access",
            "fail",
            f"device {apart[0][0]} cannot reach device {apart[0][1]} (and {len(apart) - 1} pairs more)",
            "use GPUs of one NVLink or PCIe domain (CUDA_VISIBLE_DEVICES): groups over these stay stock (TIDE-F020)",
        )
    elif devices > 1:
        yield Check("GPU ranks", "peer access", "ok", f"all {devices} devices reach each other")
    if any(cuda.device_info(d)["multicast_supported"] for d in range(devices)):
        yield _multicast(cuda, devices)


def _multicast(cuda: Any, devices: int) -> Check:
    refusals = {str(refusal): d for d in range(devices) if (refusal := cuda.multicast_refusal(d))}
    if not refusals:
        return Check("GPU ranks", "NVSwitch multicast", "note", "hardware has it, and nothing forbids it")
    words = f"hardware has it, but {', '.join(refusals)}"
    # NCCL looks at its own variable alone.
    if cuda.multicast_switched_off() and os.environ.get("NCCL_NVLS_ENABLE") != "0":
        remedy = "set NCCL_NVLS_ENABLE=0 as well: NCCL would use it, so TIDE uses no windows of NCCL's"
        return Check("GPU ranks", "NVSwitch multicast", "warn", words, remedy)
    return Check("GPU ranks", "NVSwitch multicast", "note", words)


def _nodes() -> Iterator[Check]:
    yield _nccl()
    off = [f"{k}={os.environ[k]}" for k, v in WINDOW_SWITCHES.items() if os.environ.get(k) == v]
    if off:
        words = f"switched off by {', '.join(off)}"
        yield Check("several nodes", "NCCL windows", "warn", words, f"unset {off[0].split('=')[0]} for rail: nccl_rma")
    cards = Path("/sys/class/infiniband")
    names = sorted(p.name for p in cards.iterdir()) if cards.is_dir() else []
    found = (
        ", ".join(names)
        or "none: NCCL's host RMA serves GPUs of one host only; GPUs of several are connected by messages (TIDE-F032)"
    )
    yield Check("several nodes", "RDMA devices", "note", found)


def _nccl() -> Check:
    """The library that this process has, once torch is in it; else what is installed."""
    from tide_strategies._native import nccl

    remedy = f"pip install 'nvidia-nccl-cu13>={nccl.NEEDED}'; without it, nodes are connected by messages (TIDE-F032)"
    loaded = nccl.probe()
    if loaded["available"]:
        return Check("several nodes", "NCCL", "note", f"{loaded['version']} ({loaded['path']}): windows and host RMA")
    if loaded["path"]:
        return Check("several nodes", "NCCL", "note", str(loaded["reason"]), remedy)
    version = installed("nvidia-nccl-cu13") or installed("nvidia-nccl-cu12")
    if version is None:
        return Check("several nodes", "NCCL", "note", "not installed")
    return Check("several nodes", "NCCL", "note", f"{version} is installed, and not loaded here", remedy)


def _job() -> Iterator[Check]:
    env = os.environ
    numbers = {k: env[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK") if k in env}
    if "WORLD_SIZE" not in numbers:
        yield Check("job", "launcher", "note", "not within a job (no WORLD_SIZE)")
    elif not all(v.isdecimal() for v in numbers.values()):
        yield Check("job", "launcher", "fail", f"not numbers: {numbers}", "start the job with torchrun")
    else:
        yield from _ranks({k: int(v) for k, v in numbers.items()})
    yield from _topology(env)


def _ranks(numbers: Mapping[str, int]) -> Iterator[Check]:
    world, local = numbers["WORLD_SIZE"], numbers.get("LOCAL_WORLD_SIZE", 0)
    if numbers.get("RANK", 0) >= world:
        words = f"RANK is {numbers['RANK']} of {world} ranks, which are numbered from 0"
        yield Check("job", "launcher", "fail", words, "start the job with torchrun")
        return
    if not local:
        yield Check("job", "launcher", "note", f"{world} ranks; LOCAL_WORLD_SIZE is not set")
        return
    if world % local:
        yield Check("job", "launcher", "fail", f"{world} ranks do not divide by {local} a node", "use equal nodes")
        return
    yield Check("job", "launcher", "ok", f"{world // local} node(s) with {local} ranks")
    rank, place = numbers.get("RANK"), numbers.get("LOCAL_RANK")
    if rank is not None and place is not None and rank % local != place:
        words = f"rank {rank} is local rank {place}, not {rank % local}: ranks are not in node order"
        yield Check("job", "order of ranks", "fail", words, "number ranks node by node, as torchrun does")


def _topology(env: Mapping[str, str]) -> Iterator[Check]:
    stated = env.get(TOPOLOGY_ENV)
    if not stated:
        return
    try:
        found = "auto" if stated == "auto" else parse_topology(stated)
    except TideConfigError as e:
        yield Check("job", TOPOLOGY_ENV, "fail", str(e), "write it as 2x4, or unset it")
        return
    yield Check("job", TOPOLOGY_ENV, "note", str(found))


def _calibration() -> Iterator[Check]:
    """What plan: auto has kept. Whether it fits this machine is decided by its fingerprint when a job starts."""
    where = folder("auto")
    if where is None:
        yield Check("job", "calibrations", "note", "this user has no home: every job measures anew")
        return
    kept = len(list(where.glob("*.json"))) if where.is_dir() else 0
    above = next(p for p in (where, *where.parents) if p.exists())
    writable = os.access(above, os.W_OK)
    yield Check(
        "job",
        "calibrations",
        "note" if writable else "warn",
        f"{kept} kept in {where}" if writable else f"{above} cannot be written: every job measures anew",
        "" if writable else "set calibration.cache to a folder of yours",
    )


def _environment() -> Iterator[Check]:
    env = os.environ
    for name, words in (
        ("CUDA_DEVICE_MAX_CONNECTIONS", "hardware queues; GPU ranks need 32"),
        ("TIDE_PLAN", "what plan: auto means"),
        ("TIDE_AUTOLOAD", "0: import torch does not announce TIDE to Lightning"),
        ("TIDE_ALLOW_UNKNOWN_TORCH", "1: an unknown torch is tried all the same"),
        ("TIDE_AUTOPSY", "folder for what each rank writes when it stops"),
        ("TIDE_TRACE", "folder for when each call of each rank began and ended"),
        *((name, f"{value}: no multicast") for name, value in MULTICAST_SWITCHES.items()),
        ("NCCL_RUNTIME_CONNECT", "0: NCCL connects all ranks at once, which takes memory"),
    ):
        if name in env:
            yield Check("environment", name, "note", f"{env[name]} ({words})")


_CHECKS: list[tuple[str, Callable[[], Iterator[Check]]]] = [
    ("software", _software),
    ("CPU ranks", _cpu),
    ("GPU ranks", _gpu),
    ("several nodes", _nodes),
    ("job", _job),
    ("job", _calibration),
    ("environment", _environment),
]
