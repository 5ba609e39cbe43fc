"""Hardware queues of a GPU, which CUDA shares out among streams when it starts in a process.

A wait for a peer blocks its queue. With too few of them, a stream that should send what a peer waits for could share
the queue of one that waits.
"""

from __future__ import annotations

import os

import torch

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
#: CUDA's most; its own default is 8.
NEEDED = 32


def request_queues() -> None:
    """Ask for enough queues, if CUDA has not started in this process and nobody has said how many there shall be."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault(VARIABLE, str(NEEDED))


def missing_queues() -> str | None:
    """Why there are too few, in words; None if there are enough."""
    stated = os.environ.get(VARIABLE, "")
    if stated.isdecimal() and int(stated) >= NEEDED:
        return None
    return f"{VARIABLE} is {stated or 'not set'}; it must be {NEEDED} before CUDA starts"
