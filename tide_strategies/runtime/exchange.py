"""All-gather of small payloads through a torch process group: bytes in, bytes out, nothing unpickled."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tide_strategies.errors import TideMismatchError, TidePeerError, TideTimeoutError
from tide_strategies.runtime.teardown import install_exit_teardown

#: All-gathers one payload per rank of a group, in rank order.
Exchange = Callable[[bytes], list[bytes]]

#: Longest payload that a peer is believed to mean.
MAX_BYTES = 1 << 28


def process_group_exchange(group: dist.ProcessGroup, timeout_s: float, what: str) -> Exchange:
    """An exchange over ``group`` whose every call ends within ``timeout_s`` seconds.

    Raises (the exchange, when called):
        TideTimeoutError: not every rank took part in time.
        TidePeerError: a rank has gone.
        TideMismatchError: a rank did something else instead.
    """
    size = dist.get_world_size(group)
    device = _device(group)

    def gather(tensor: torch.Tensor, deadline: float) -> list[torch.Tensor]:
        out = [torch.empty_like(tensor) for _ in range(size)]
        work = dist.all_gather(out, tensor, group=group, async_op=True)
        assert work is not None
        left = max(deadline - time.monotonic(), 0.001)  # zero would mean no bound
        work.wait(timeout=datetime.timedelta(seconds=left))
        return out

    def exchange(payload: bytes) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        try:
            with torch.inference_mode(False), torch.no_grad():
                own = torch.tensor([len(payload)], dtype=torch.int64, device=device)
                lengths = [int(t) for t in gather(own, deadline)]
                for rank, length in enumerate(lengths):
                    if not 0 <= length <= MAX_BYTES:
                        raise TideMismatchError(
                            f"TIDE: rank {dist.get_process_group_ranks(group)[rank]} does something else than {what}. "
                            f"Every rank must apply TIDE to the same model, in the same place."
                        )
                padded = payload.ljust(max(*lengths, 1), b"\0")
                parts = gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device), deadline)
                return [bytes(t[:n].tolist()) for t, n in zip(parts, lengths, strict=True)]
        except TideMismatchError:
            raise
        except RuntimeError as e:
            if "timed out" in str(e).lower() or "timeout" in str(e).lower():
                install_exit_teardown()  # what is left in flight must not hold up the end of the program
                raise TideTimeoutError(
                    f"TIDE: not every rank reached {what} within timeout_s={timeout_s:g}. Every rank must apply TIDE "
                    f"to the same model and run it; a rank may also be stuck or dead. ({e})"
                ) from e
            raise TidePeerError(f"TIDE: a rank has gone during {what}: {e}") from e

    return exchange


def exchange_json(exchange: Exchange, value: Any) -> list[Any]:
    """Exchange one JSON value per rank.

    Raises:
        TideMismatchError: a rank sent something that is not JSON.
    """
    out = []
    for rank, payload in enumerate(exchange(json.dumps(value).encode())):
        try:
            out.append(json.loads(payload))
        except (ValueError, RecursionError) as e:
            raise TideMismatchError(
                f"TIDE: rank {rank} of the group sent something that is no TIDE message ({type(e).__name__}: {e}): "
                f"{payload[:60]!r}. Every rank must run the same version of TIDE."
            ) from e
    return out


def _device(group: dist.ProcessGroup) -> torch.device:
    devices = {d.type for d in getattr(group, "_device_types", [])}
    if not devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device(sorted(devices)[0], torch.accelerator.current_device_index())
