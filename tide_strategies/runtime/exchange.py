"""All-gather of small payloads through a torch process group: bytes in, bytes out, nothing unpickled."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies.errors import TidePeerError, TideTimeoutError

#: All-gathers one payload per rank of a group, in rank order.
Exchange = Callable[[bytes], list[bytes]]


def process_group_exchange(group: dist.ProcessGroup, timeout_s: float, what: str) -> Exchange:
    """An exchange over ``group`` whose every call ends within ``timeout_s`` seconds.

    Raises (the exchange, when called):
        TideTimeoutError: not every rank took part in time.
        TidePeerError: a rank has gone.
    """
    size = dist.get_world_size(group)
    device = _device(group)

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(tensor) for _ in range(size)]
        work = dist.all_gather(out, tensor, group=group, async_op=True)
        assert work is not None
        work.wait(timeout=datetime.timedelta(seconds=timeout_s))
        return out

    def exchange(payload: bytes) -> list[bytes]:
        try:
            with torch.inference_mode(False), torch.no_grad():
                lengths = [int(t) for t in gather(torch.tensor([len(payload)], dtype=torch.int64, device=device))]
                padded = payload.ljust(max(*lengths, 1), b"\0")
                parts = gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device))
                return [bytes(t[:n].tolist()) for t, n in zip(parts, lengths, strict=True)]
        except RuntimeError as e:
            if "timed out" in str(e).lower() or "timeout" in str(e).lower():
                raise TideTimeoutError(
                    f"TIDE: not every rank reached {what} within timeout_s={timeout_s:g}. Every rank must apply TIDE "
                    f"to the same model and run it; a rank may also be stuck or dead. ({e})"
                ) from e
            raise TidePeerError(f"TIDE: a rank has gone during {what}: {e}") from e

    return exchange


def exchange_json(exchange: Exchange, value: Any) -> list[Any]:
    """Exchange one JSON value per rank."""
    return [json.loads(b) for b in exchange(json.dumps(value).encode())]


def _device(group: dist.ProcessGroup) -> torch.device:
    devices = {d.type for d in getattr(group, "_device_types", [])}
    if not devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device(sorted(devices)[0], torch.accelerator.current_device_index())
