"""A plain FSDP2 script with TIDE, as a user would write it, for ranks on several hosts (``test_rails_hosts.py``)."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tide_strategies import apply_tide


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48)) for _ in range(3)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def train(model: nn.Module, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 48, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return losses, {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}


def main(steps: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build()
    apply_tide(model, {"strict": True, "plan": "tide", "timeout_s": timeout_s})
    losses, parameters = train(model, steps)
    # Who holds a file of the arena: the memory of a host, if it is shared within hosts alone.
    files = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_arena(fd)}
    rails = sorted(t.name for t in threading.enumerate() if t.name.startswith("tide-rail"))
    stock_losses, stock = train(build(), steps)
    apart = max(float((parameters[n] - stock[n]).detach().abs().max()) for n in stock)
    same = losses == stock_losses and all(torch.equal(parameters[n], stock[n]) for n in stock)
    words = (
        f"RANK {dist.get_rank()} ON {socket.gethostname()}: same={same} apart={apart} arenas={sorted(files)} {rails}"
    )
    os.write(1, (words + "\n").encode())  # one write: ranks share the log
    dist.destroy_process_group()  # as scripts end; TIDE is still applied


def _is_arena(fd: str) -> bool:
    try:
        return "tide-arena" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
