"""The strategy for ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy

from tide_strategies.integrations.lightning.ema import Ema
from tide_strategies.integrations.lightning.monitor import Monitor
from tide_strategies.integrations.lightning.trainer import TrainerStrategy


class TideFSDPStrategy(TrainerStrategy, ModelParallelStrategy):
    """FSDP2 with TIDE collectives for ``lightning.pytorch``; options: :class:`TrainerStrategy`."""


class TideMonitor(Monitor, Callback):
    """TIDE's numbers for the loggers of ``lightning.pytorch``: :class:`Monitor`."""


class TideEMA(Ema, Callback):
    """Moving average of the parameters for ``lightning.pytorch``: :class:`Ema`."""
