"""``TideEMA``: a callback that keeps an exponential moving average of a sharded model, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.averaging import ShardAverage, gather_on_rank0
from tide_strategies.integrations.lightning.base import TideStrategyBase
from tide_strategies.integrations.lightning.checkpoint import AVERAGE_KEY
from tide_strategies.integrations.lightning.options import check_flag

# The class that mixes this in brings the Callback of its namespace.
_Host: Any = object


class Ema(_Host):
    """Averages the trainable parameters after optimizer steps, and evaluates with the averages.

    Validation, test and prediction run with the averages in place of the parameters; training goes on with the
    parameters, and they are what the module holds after ``fit``. Checkpoints carry both: ``state_dict`` the parameters
    and ``tide_ema`` the averages, in either kind of checkpoint.

    Args:
        decay: weight of the past at each update, between 0 and 1.
        update_every_n_steps: optimizer steps between two updates.
        update_starting_at_step: optimizer steps before the first update, which copies the parameters.
        float32: keep the averages of half-precision parameters in fp32; in bf16 small updates round to nothing.
        average_buffers: average floating-point buffers too; each rank averages its own.

    Raises:
        TideConfigError: for a value that is not allowed; at the start, if the strategy is not a TIDE strategy.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        float32: bool = True,
        average_buffers: bool = False,
    ) -> None:
        if type(decay) not in (float, int) or not 0 <= decay <= 1:
            raise TideConfigError(f"decay must be a number from 0 to 1, such as 0.999; got {decay!r}")
        _check_whole("update_every_n_steps", update_every_n_steps, 1)
        _check_whole("update_starting_at_step", update_starting_at_step, 0)
        check_flag("float32", float32)
        check_flag("average_buffers", average_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.float32 = float32
        self.average_buffers = average_buffers
        self._average: ShardAverage | None = None
        self._last_update: int | None = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The module holds the averages inside the block, and its own values after it.

        Raises:
            TideConfigError: if there is no average yet.
        """
        average = self._average
        if average is None:
            raise TideConfigError(
                f"TideEMA has no average yet: it begins after optimizer step {self.update_starting_at_step}, or with a "
                f"checkpoint that holds one"
            )
        if average.applied:
            yield
            return
        average.apply()
        try:
            yield
        finally:
            average.restore()

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
        step = trainer.global_step
        if self._last_update is None:
            due = step > self.update_starting_at_step
        else:
            due = step - self._last_update >= self.update_every_n_steps
        if due:
            self._average = self._average or self._new(pl_module)
            self._average.update()
            self._last_update = step

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

    def _new(self, module: nn.Module) -> ShardAverage:
        return ShardAverage(module, self.decay, float32=self.float32, buffers=self.average_buffers)


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise TideConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
