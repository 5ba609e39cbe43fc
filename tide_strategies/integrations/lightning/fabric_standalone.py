"""The strategy for ``lightning_fabric.Fabric``."""

from __future__ import annotations

from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

from tide_strategies.integrations.lightning.fabric import FabricStrategy


class TideFSDPFabricStrategy(FabricStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 with TIDE collectives for ``lightning_fabric``; options: :class:`FabricStrategy`."""
