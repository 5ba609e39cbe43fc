"""What this GPU and its driver must have, and what is missing."""

from __future__ import annotations

import functools
import importlib.util

from tide_strategies._native import cuda


@functools.cache
def missing_capability(device: int) -> str | None:
    """Why collectives cannot run on this device, in words; None if they can."""
    found = cuda.probe()
    if not found["available"]:
        return str(found["reason"])
    info = cuda.device_info(device)
    if not info["stream_mem_ops"]:
        return f"{info['name']} has no stream memory operations"
    if not info["posix_fd"]:
        return f"{info['name']} cannot share memory by file descriptor"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
