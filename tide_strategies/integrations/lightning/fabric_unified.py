"""The strategy for ``lightning.fabric.Fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from tide_strategies.integrations.lightning.fabric import FabricStrategy


class TideFSDPFabricStrategy(FabricStrategy, ModelParallelStrategy):
    """FSDP2 with TIDE collectives for ``lightning.fabric``; options: :class:`FabricStrategy`."""
