"""Whether stock FSDP2 runs on the cards that there are: NCCL takes one rank a card, unless it is told to take more."""

from __future__ import annotations

import torch

from tide_strategies.cli.bench.ranks import nccl_shares_cards

WITHOUT_NCCL = "NCCL needs a GPU per rank, or NCCL 2.31.2 in the process: LD_PRELOAD=.../libnccl.so.2"


def stock_runs(ranks: int = 2) -> bool:
    """Whether NCCL serves so many ranks on the cards of this machine."""
    return torch.cuda.device_count() >= ranks or nccl_shares_cards()


def backend(ranks: int = 2) -> str:
    """Of a process group of them: NCCL's where it serves them."""
    return f"cpu:gloo,cuda:{'nccl' if stock_runs(ranks) else 'gloo'}"
