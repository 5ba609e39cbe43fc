"""How a TIDE group communicates when its ranks are CPU processes: at once, in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tide_strategies.fsdp2.eligibility import REDUCIBLE
from tide_strategies.runtime.group import GroupCollectives


class CpuPath:
    """One group's collectives over shared memory."""

    #: A landing is shared by the ranks, so it cannot take the gradients of one of them.
    keeps_gradients = False

    def __init__(self, collectives: GroupCollectives) -> None:
        self.collectives = collectives

    def all_gather(self, group: Any, shards: Sequence[torch.Tensor], versions: tuple[int, ...] | None) -> None:
        """Write the shards into the shared landing. No event: the data is there when :meth:`wait` returns."""
        self.collectives.issue([s.data_ptr() for s in shards], versions)

    def reuse(self) -> None:
        """Use the landing as it is."""
        self.collectives.reuse()

    def wait(self) -> None:
        """Wait for the other ranks' shards."""
        self.collectives.complete()

    def vacate(self) -> None:
        """Give the landing up."""
        self.collectives.vacate()

    def keep_gradients(self, params: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Leave them where they are."""
        return gradients

    def network_after_rail(self) -> None:
        """It does: one thread does one thing after the other."""

    def gradients_ready(self) -> None:
        """They are, by now."""

    def reduce_scatter(
        self,
        params: tuple[int, ...],
        gradients: Sequence[torch.Tensor],
        output: torch.Tensor,
        divisor: float,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Reduce the gradients into the packed shard ``output``."""
        self.collectives.reduce_scatter(
            params,
            REDUCIBLE[gradients[0].dtype],
            REDUCIBLE[output.dtype],
            [g.data_ptr() for g in gradients],
            output.data_ptr(),
            divisor,
        )
        let_go()

    def gradients_read(self) -> None:
        """They have been, when the output is there."""
