"""``TideEMA``: a callback that keeps an exponential moving average of a sharded model, shard by shard."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.averaging import gather_on_rank0
from tide_strategies.integrations.lightning.average import MovingAverage
from tide_strategies.integrations.lightning.base import TideStrategyBase
from tide_strategies.integrations.lightning.checkpoint import AVERAGE_KEY

# The class that mixes this in brings the Callback of its namespace.
_Host: Any = object


class Ema(MovingAverage, _Host):
    """Averages the trainable parameters after optimizer steps, and evaluates with the averages.

    Validation, test and prediction run with the averages in place of the parameters; training goes on with the
    parameters, and they are what the module holds after ``fit``. Checkpoints carry both: ``state_dict`` the parameters
    and ``tide_ema`` the averages, in either kind of checkpoint.

    Options: :class:`MovingAverage`.

    Raises:
        TideConfigError: for a value that is not allowed; at the start, if the strategy is not a TIDE strategy.
    """

    # ---- hooks of the Trainer

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Check the strategy."""
        if not isinstance(trainer.strategy, TideStrategyBase):
            raise TideConfigError(
                f'TideEMA needs Trainer(strategy="tide_fsdp"); the strategy is {type(trainer.strategy).__name__}. '
                f"Elsewhere use Lightning's own EMAWeightAveraging."
            )

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Another module than before has another average."""
        if self._average is not None and self._average.module is not pl_module:
            self._average, self._last_update = None, None

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update, if there has been an optimizer step and it is time to."""
        self._stepped(pl_module, trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Evaluate with the averages from here on."""
        if self._average is not None and self._average.module is pl_module:
            self._average.apply()

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Go back to the parameters."""
        if self._average is not None:
            self._average.restore()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Do not leave the averages behind."""
        if self._average is not None:
            self._average.restore()

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Add the averages, for the strategy to write; called on every rank."""
        average = self._average
        if average is None:
            return
        whole = trainer.strategy.saves_whole_files
        portable = gather_on_rank0 if whole else dict
        checkpoint[AVERAGE_KEY] = {"last_update": self._last_update, "average": portable(average.state())}
        if average.applied:  # saved in the middle of an evaluation: the model's part holds averages
            current = portable(average.state_before_apply())
            checkpoint["state_dict"].update({k: v for k, v in current.items() if k in checkpoint["state_dict"]})

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Go on with the averages of the checkpoint; called after the strategy has read it."""
        saved = checkpoint.get(AVERAGE_KEY)
        self._average, self._last_update = None, None
        if saved is None:
            rank_zero_warn(
                "TideEMA: the checkpoint holds no average. Evaluation uses its parameters, and training starts a new "
                "average from them."
            )
            return
        self._average, self._last_update = self._new(pl_module), saved["last_update"]
        self._average.load(saved["average"])
