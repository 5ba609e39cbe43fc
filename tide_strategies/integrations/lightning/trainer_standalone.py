"""The strategy for ``pytorch_lightning.Trainer``."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies.model_parallel import ModelParallelStrategy

from tide_strategies.integrations.lightning.ema import Ema
from tide_strategies.integrations.lightning.monitor import Monitor
from tide_strategies.integrations.lightning.trainer import TrainerStrategy


class TideFSDPStrategy(TrainerStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 with TIDE collectives for ``pytorch_lightning``; options: :class:`TrainerStrategy`."""


class TideMonitor(Monitor, Callback):
    """TIDE's numbers for the loggers of ``pytorch_lightning``: :class:`Monitor`."""


class TideEMA(Ema, Callback):
    """Moving average of the parameters for ``pytorch_lightning``: :class:`Ema`."""
