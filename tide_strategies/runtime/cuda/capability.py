"""What this GPU and its driver must have, and what is missing."""

from __future__ import annotations

import functools
import importlib.util

from tide_strategies._native import cuda
from tide_strategies.runtime.cuda.queues import missing_queues

#: CUDA 12.0, as the driver writes it: stream memory operations of this kind.
_MIN_DRIVER = 12000


@functools.cache
def missing_capability(device: int) -> str | None:
    """Why collectives cannot run on this device, in words; None if they can."""
    found = cuda.probe()
    if not found["available"]:
        return str(found["reason"])
    if found["driver_version"] < _MIN_DRIVER:
        return f"the driver has CUDA {found['driver_version'] // 1000}.{found['driver_version'] % 1000 // 10}"
    info = cuda.device_info(device)
    if not info["stream_mem_ops"]:
        return f"{info['name']} has no stream memory operations"
    if not info["posix_fd"]:
        return f"{info['name']} cannot share memory by file descriptor"
    queues = missing_queues()
    if queues is not None:
        return queues
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
