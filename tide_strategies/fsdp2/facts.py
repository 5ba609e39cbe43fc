"""What measured times depend on and what can change between two jobs: the facts under which calibrations are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from tide_strategies.config import TideConfig

#: Where the NVIDIA kernel driver says which one it is.
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
#: Variables beside NCCL's own that change how fast GPUs' collectives run.
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_SOCKET_IFNAME",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)
#: NCCL's variables that change nothing but what it says and where its ranks meet.
_NO_SPEED = ("NCCL_DEBUG", "NCCL_COMM_ID")


def facts_of(ranks: dist.ProcessGroup, device: torch.device, config: TideConfig) -> dict[str, str]:
    """Everything that this rank's times depend on, by name; alike on all ranks of a uniform job."""
    facts = {
        "package": metadata.version("tide-strategies"),
        "torch": str(torch.__version__),
        "device": device.type,
        "ranks": str(ranks.size()),
        "backend": str(dist.get_backend(ranks)),
        "topology": str(config.topology),
        "rail": config.rail,
        "all_gather": str(config.all_gather),
        "reduce_scatter": str(config.reduce_scatter),
        "threads": str(torch.get_num_threads()),
        "processors": f"{_processor()} x {len(os.sched_getaffinity(0))}",
    }
    if device.type == "cuda":
        from tide_strategies._native import cuda
        from tide_strategies.runtime.cuda.nccl_domains import missing_nccl

        index, count = torch.cuda.current_device(), torch.cuda.device_count()
        facts["gpu"] = f"{torch.cuda.get_device_name(index)} x {count}"
        facts["driver"] = str(cuda.probe()["driver_version"])  # CUDA's version, which several drivers share
        facts["kernel driver"] = kernel_driver()
        facts["peers"] = peers(count, cuda.can_access_peer)
        facts["nccl"] = str(torch.cuda.nccl.version())
        facts["rails"] = missing_nccl() or "NCCL"  # what rail: auto takes between hosts
        facts["environment"] = environment(os.environ)
    return facts


def kernel_driver(file: Path = _KERNEL_DRIVER) -> str:
    """The NVIDIA kernel driver's own words about its version; empty where there is none."""
    try:
        with open(file, errors="replace") as opened:
            return opened.readline(1000).strip()
    except OSError:
        return ""


def peers(count: int, reaches: Callable[[int, int], bool]) -> str:
    """Which of ``count`` GPUs reach each other's memory: a word for each, "1" where it reaches, "0" where not."""
    rows = ("".join("-" if a == b else str(int(reaches(a, b))) for b in range(count)) for a in range(count))
    return " ".join(rows)


def environment(variables: Mapping[str, str]) -> str:
    """The variables among these that change how fast collectives run, sorted."""
    named = {k: v for k, v in variables.items() if k.startswith("NCCL_") and not k.startswith(_NO_SPEED)}
    named |= {k: variables[k] for k in _VARIABLES if k in variables}
    return " ".join(f"{k}={v}" for k, v in sorted(named.items()))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return "unknown"
