"""The demo's GPT sharded block by block over all ranks, gathered in bf16 and reduced in fp32."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_strategies.cli.demo_model import GPT


def shard(model: GPT, world: int) -> None:
    """Apply FSDP2 to a model on GPUs."""
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
