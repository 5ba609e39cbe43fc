"""What a TIDE group asks of the way it communicates (``cpu_path``, ``cuda_path``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tide_strategies.layout import GroupLayout
from tide_strategies.runtime.group import Tally


class Collectives(Protocol):
    """The part of ``GroupCollectives`` and ``CudaGroup`` that does not depend on how they run."""

    layout: GroupLayout
    all_gathers: Tally
    reduce_scatters: Tally

    @property
    def pinned(self) -> bool:
        """Whether the landing has a slot of its own."""

    @property
    def has_room(self) -> bool:
        """Whether a slot is free for the landing, so that the ring need not grow."""

    def reusable(self, versions: tuple[int, ...] | None) -> bool:
        """Whether the vacated landing still holds the values of shards with these versions."""

    def forget(self) -> None:
        """Make the values in the landing not reusable."""


class Path(Protocol):
    """One group's communication. The order of use is all_gather or reuse, wait, vacate.

    Where it keeps gradients, a landing is vacated only after the reduction that reads them from there.
    """

    @property
    def collectives(self) -> Collectives:
        """The group's collectives."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether :meth:`keep_gradients` is to be called before the landing is vacated (Slot-Reuse)."""

    def all_gather(self, group: Any, shards: Sequence[torch.Tensor], versions: tuple[int, ...] | None) -> None:
        """Start to gather the shards into the landing."""

    def reuse(self) -> None:
        """Use the landing as it is."""

    def wait(self) -> None:
        """Make what follows (on the current stream) see all shards."""

    def vacate(self) -> None:
        """Give the landing up after what precedes (on the current stream)."""

    def keep_gradients(self, params: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Move the gradients of ``params`` into the landing, whose parameters are done with, and say where they are."""

    def network_after_rail(self) -> None:
        """Let the network phase of the group's next reduction begin after what the rail has been given by now."""

    def gradients_ready(self) -> None:
        """Note that the gradients of the next reduction are there after what precedes (on the current stream)."""

    def reduce_scatter(
        self,
        params: tuple[int, ...],
        gradients: Sequence[torch.Tensor],
        output: torch.Tensor,
        divisor: float,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Reduce the gradients of ``params`` into the packed shard ``output``, on the current stream.

        ``let_go`` is called where what follows (on the current stream) comes after the gradients have been read, which
        may be before ``output`` is written.
        """

    def gradients_read(self) -> Any:
        """An event after which the last reduction has read its gradients; None: when its output is there."""
