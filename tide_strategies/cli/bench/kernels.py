"""The SM time of a collective: which kernels a call runs on the GPU, as CUPTI records them (``torch.profiler``)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_strategies.cli.bench.ranks import Place, meet


@dataclass(frozen=True)
class KernelActivity:
    """Kernels of one call on rank 0's GPU.

    Args:
        kernels: launches.
        kernel_us: microseconds that they ran, added up.
        ctas: thread blocks of the largest launch.
        sm_us: microseconds times SMs: each kernel's time by the SMs that its thread blocks can lie on.
        longest: name of the kernel that ran longest in all.
        copies: copies and fills by the copy engines (or by the driver's own kernels, which CUPTI lists as copies).
    """

    kernels: float
    kernel_us: float
    ctas: int
    sm_us: float
    longest: str
    copies: float


def kernel_activity(place: Place, call: Callable[[], None], calls: int = 10) -> KernelActivity | str | None:
    """What ``call`` launches; in words why it cannot be known; None on ranks other than 0. Collective."""
    import torch

    profiler, reason = None, "the profiler did not start"
    if place.rank == 0:
        try:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            profiler = torch.profiler.profile(activities=activities)
            profiler.start()
        except Exception as e:  # CUPTI missing, in use, or not allowed: the other columns stand without it
            profiler, reason = None, f"the profiler failed to start: {type(e).__name__}: {e}"
    torch.cuda.synchronize()
    meet()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    meet()
    if place.rank != 0:
        return None
    if profiler is None:
        return reason
    try:
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        sms = torch.cuda.get_device_properties(place.device).multi_processor_count
        return activity_of(events, calls, sms)
    except Exception as e:
        return f"the profiler failed: {type(e).__name__}: {e}"


def activity_of(events: Sequence[dict[str, Any]], calls: int, sms: int) -> KernelActivity | str:
    """Add up a trace's GPU events of ``calls`` calls on a GPU with ``sms`` SMs; in words if it has none."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") in ("gpu_memcpy", "gpu_memset")]
    if not kernels and not copies:
        return "the profiler recorded no GPU activity"
    by_name: dict[str, float] = {}
    for event in kernels:
        by_name[event["name"]] = by_name.get(event["name"], 0.0) + event["dur"]
    return KernelActivity(
        kernels=len(kernels) / calls,
        kernel_us=sum(by_name.values()) / calls,
        ctas=max((thread_blocks(e) for e in kernels), default=0),
        sm_us=sum(e["dur"] * min(thread_blocks(e), sms) for e in kernels) / calls,
        longest=max(by_name, key=lambda n: by_name[n], default=""),
        copies=len(copies) / calls,
    )


def thread_blocks(kernel: dict[str, Any]) -> int:
    """Thread blocks of a launch."""
    blocks = 1
    for extent in kernel.get("args", {}).get("grid", [1]):
        blocks *= int(extent)
    return blocks
