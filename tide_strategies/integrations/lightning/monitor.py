"""``TideMonitor``: a callback that gives TIDE's numbers to the Trainer's loggers."""

from __future__ import annotations

from typing import Any

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.lightning.base import TideStrategyBase
from tide_strategies.metrics import StepMetrics

# The class that mixes this in brings the Callback of its namespace.
_Host: Any = object


class Monitor(_Host):
    """Logs ``tide_strategies.metrics.METRICS``, averaged, every ``log_every_n_steps`` of the Trainer.

    Raises:
        TideConfigError: when training starts, if the strategy is not a TIDE strategy.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        if not isinstance(trainer.strategy, TideStrategyBase):
            raise TideConfigError(
                f'TideMonitor needs Trainer(strategy="tide_fsdp"); the strategy is {type(trainer.strategy).__name__}'
            )
        self._metrics = StepMetrics(trainer.strategy.tide_report)
        self._metrics.collect(1)
        self._since = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, if it is time to and there has been a step."""
        steps = trainer.global_step - self._since
        if not trainer.loggers or steps < trainer.log_every_n_steps:
            return
        self._since = trainer.global_step
        metrics = self._metrics.collect(steps)
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=trainer.global_step)
