"""Persistent buffers (of a BatchNorm, say) under ``cpu_ram_efficient_loading``.

Accelerate builds the sharded model on the meta device there and fills it with rank 0's state dict, of which it takes
every entry for a sharded parameter; a buffer ends in "'Tensor' object has no attribute 'device_mesh'". Buffers outside
the state dict it carries over by itself, so the others are made such for as long as it works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn


@contextmanager
def buffers_outside_the_state_dict(model: nn.Module) -> Iterator[None]:
    """Keep the persistent buffers of ``model`` out of its state dict; at the end they have rank 0's values again.

    A collective call: on every rank the same buffers, over all ranks of the job.
    """
    held = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    for module, name in held:
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name in held:
            module._non_persistent_buffers_set.discard(name)
    for buffer in {id(b): b for m, n in held if (b := m._buffers[n]) is not None}.values():
        dist.broadcast(buffer, src=0)
