"""What the moving averages for ``Trainer`` and for ``Fabric`` have in common: options, and when to update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.averaging import ShardAverage
from tide_strategies.integrations.lightning.options import check_flag


class MovingAverage:
    """Averages the trainable parameters of one sharded model after optimizer steps.

    Args:
        decay: weight of the past at each update, between 0 and 1.
        update_every_n_steps: optimizer steps between two updates.
        update_starting_at_step: optimizer steps before the first update, which copies the parameters.
        float32: keep the averages of half-precision parameters in fp32; in bf16 small updates round to nothing.
        average_buffers: average floating-point buffers too; each rank averages its own.

    Raises:
        TideConfigError: for a value that is not allowed.
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
                f"{type(self).__name__} has no average yet: it begins after optimizer step "
                f"{self.update_starting_at_step}, or with a checkpoint that holds one"
            )
        if average.applied:
            yield
            return
        average.apply()
        try:
            yield
        finally:
            average.restore()

    def _stepped(self, module: nn.Module, step: int) -> None:
        """Update if that is due after ``step`` optimizer steps in all."""
        if self._last_update is None:
            due = step > self.update_starting_at_step
        else:
            due = step - self._last_update >= self.update_every_n_steps
        if due:
            self._average = self._average or self._new(module)
            self._average.update()
            self._last_update = step

    def _new(self, module: nn.Module) -> ShardAverage:
        return ShardAverage(module, self.decay, float32=self.float32, buffers=self.average_buffers)


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise TideConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
