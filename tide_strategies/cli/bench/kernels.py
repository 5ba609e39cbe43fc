"""What a GPU does during a benchmark's calls, as CUPTI records it (``torch.profiler``): kernels, copies, and gaps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_strategies.cli.bench.ranks import Place, meet
from tide_strategies.cli.bench.timing import HEAD_START_CYCLES

#: An event of a trace, times in microseconds.
Event = dict[str, Any]
#: Kernel of ``torch.cuda._sleep``: keeps a GPU waiting, or marks a place in a stream.
SLEEP = "spin_kernel"


@dataclass(frozen=True)
class KernelActivity:
    """Kernels and copies of one call on rank 0's GPU.

    Args:
        kernels: launches.
        kernel_us: microseconds that they ran, added up.
        ctas: thread blocks of the largest launch.
        sm_us: microseconds times SMs: each kernel's time by the SMs that its thread blocks can lie on.
        longest: name of the kernel that ran longest in all.
        copies: copies and fills by the copy engines (or by the driver's own kernels, which CUPTI lists as copies).
        copy_us: microseconds in which any of them ran.
        idle_us: microseconds in which the GPU ran neither kernels nor copies: latencies of signals, waits and starts.
    """

    kernels: float
    kernel_us: float
    ctas: int
    sm_us: float
    longest: str
    copies: float
    copy_us: float
    idle_us: float


def recorded(place: Place, work: Callable[[], object]) -> list[Event] | str | None:
    """What rank 0's GPU does during ``work``, which all ranks run and wait for; in time's order. Collective.

    In words why it cannot be known; None on ranks other than 0.
    """
    import torch

    profiler, reason = None, "the profiler did not start"
    if place.rank == 0:
        try:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
        except Exception as e:  # CUPTI missing, in use, or not allowed: the other columns stand without it
            profiler, reason = None, f"the profiler failed to start: {type(e).__name__}: {e}"
    torch.cuda.synchronize()
    meet()
    work()
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
    except Exception as e:
        return f"the profiler failed: {type(e).__name__}: {e}"
    found = [e for e in events if is_kernel(e) or is_copy(e)]
    return sorted(found, key=lambda e: e["ts"]) or "the profiler recorded no GPU activity"


def kernel_activity(place: Place, call: Callable[[], None], calls: int = 10) -> KernelActivity | str | None:
    """What ``call`` launches, of several in a row; in words or None as :func:`recorded`. Collective."""
    import torch

    def work() -> None:
        torch.cuda._sleep(HEAD_START_CYCLES)  # no call waits for the host
        for _ in range(calls + 1):
            call()

    events = recorded(place, work)
    if not isinstance(events, list):
        return events
    sms = torch.cuda.get_device_properties(place.device).multi_processor_count
    return activity_of(events, calls, sms)


def activity_of(events: Sequence[Event], calls: int, sms: int) -> KernelActivity:
    """Add up what a GPU with ``sms`` SMs did in ``calls`` calls, which one more precedes: there the ranks meet."""
    own = [e for e in events if SLEEP not in e["name"]]
    first, own = own[: len(own) // (calls + 1)], own[len(own) // (calls + 1) :]
    kernels = [e for e in own if is_kernel(e)]
    copies = [e for e in own if is_copy(e)]
    by_name: dict[str, float] = {}
    for event in kernels:
        by_name[event["name"]] = by_name.get(event["name"], 0.0) + event["dur"]
    begin, end = max(map(_end, first), default=0.0), max(map(_end, own), default=0.0)
    return KernelActivity(
        kernels=len(kernels) / calls,
        kernel_us=sum(by_name.values()) / calls,
        ctas=max((thread_blocks(e) for e in kernels), default=0),
        sm_us=sum(e["dur"] * min(thread_blocks(e), sms) for e in kernels) / calls,
        longest=max(by_name, key=lambda n: by_name[n], default=""),
        copies=len(copies) / calls,
        copy_us=busy(copies) / calls,
        idle_us=(end - begin - busy(own)) / calls,
    )


def is_kernel(event: Event) -> bool:
    """Whether a kernel ran."""
    return event.get("cat") == "kernel"


def is_copy(event: Event) -> bool:
    """Whether memory was copied or filled."""
    return event.get("cat") in ("gpu_memcpy", "gpu_memset")


def busy(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events, given in the order of their beginnings, was under way."""
    total, until = 0.0, float("-inf")
    for event in events:
        total += max(0.0, _end(event) - max(until, event["ts"]))
        until = max(until, _end(event))
    return total


def overlap(event: Event, others: Iterable[Event]) -> float:
    """Microseconds of ``event`` in which any of ``others``, in the order of their beginnings, was under way."""
    begin, end = event["ts"], _end(event)
    inside = ((max(begin, o["ts"]), min(end, _end(o))) for o in others if o["ts"] < end and _end(o) > begin)
    return busy({"ts": low, "dur": high - low} for low, high in inside)


def thread_blocks(kernel: Event) -> int:
    """Thread blocks of a launch."""
    blocks = 1
    for extent in kernel.get("args", {}).get("grid", [1]):
        blocks *= int(extent)
    return blocks


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
