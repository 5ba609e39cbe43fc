"""How a TIDE group communicates on a GPU: enqueued on streams, ordered by events.

Three moments of a landing are kept apart, each with its own event or counter:

* *vacated*: the compute stream is through with the parameters (an event, recorded at reshard). Only then may this
  rank's next cast overwrite them, and only then are peers told, by a stream of its own, that they may.
* *readable*: all peers' shards have arrived (an event on the completion stream), for which compute waits.
* *reusable*: all peers have vacated (a counter that the copies wait for on the device).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from tide_strategies.fsdp2.eligibility import REDUCIBLE
from tide_strategies.runtime.cuda.engine import DeviceSlot
from tide_strategies.runtime.cuda.group import CudaGroup


class CudaStreams:
    """The streams that all groups of one engine share."""

    def __init__(self, device: torch.device) -> None:
        high = -1
        self.gather = torch.cuda.Stream(device, priority=high)
        self.completion = torch.cuda.Stream(device, priority=high)
        self.readiness = torch.cuda.Stream(device, priority=high)
        self.push = torch.cuda.Stream(device, priority=high)


class CudaPath:
    """One group's collectives between GPUs of one host.

    Args:
        collectives: the group's calls.
        streams: streams shared by the engine's groups.
        vacated: event of each slot's last use by this rank's compute, shared by the engine's groups.
        own: views of this rank's padded shards within the landing, one per parameter.
    """

    def __init__(
        self,
        collectives: CudaGroup,
        streams: CudaStreams,
        vacated: dict[int, torch.cuda.Event],
        own: list[torch.Tensor],
    ) -> None:
        self.collectives, self.streams = collectives, streams
        self._vacated, self._own = vacated, own
        self._slot: DeviceSlot | None = None
        self._readable: torch.cuda.Event | None = None

    def all_gather(self, group: Any, shards: Sequence[torch.Tensor], versions: tuple[int, ...] | None) -> None:
        """Cast the shards into the own landing and send them to the peers' landings."""
        start = time.perf_counter()
        current = torch.cuda.current_stream()
        _, stream = group.comm_ctx.get_all_gather_streams(group.unshard_async_op, group._training_state)
        if stream == current:  # an explicit unshard: waits for peers must not hold up the program's own stream
            stream = self.streams.gather
            stream.wait_stream(current)
        slot = self._slot = self.collectives.occupy()
        vacated = self._vacated.get(slot.index)
        if vacated is not None:
            stream.wait_event(vacated)
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(self._own, list(shards))
        self.collectives.send(slot, stream.cuda_stream, versions)
        completion = self.streams.completion
        completion.wait_stream(stream)
        self.collectives.complete(completion.cuda_stream)
        self._readable = completion.record_event()
        self.collectives.all_gathers.seconds += time.perf_counter() - start

    def reuse(self, group: Any) -> None:
        """Use the landing as it is: compute has waited for it before."""
        self._slot = self.collectives.occupy()
        self.collectives.reuse(self._slot)
        self._readable = None

    def wait(self, group: Any) -> None:
        """Make the current stream wait until all shards are in the landing."""
        if self._readable is not None:
            torch.cuda.current_stream().wait_event(self._readable)

    def vacate(self, group: Any) -> None:
        """Give the landing up once the current stream is through with it."""
        assert self._slot is not None
        event = torch.cuda.current_stream().record_event()
        self._vacated[self._slot.index] = event
        self.streams.readiness.wait_event(event)
        self.collectives.vacate(self.streams.readiness.cuda_stream)
        self._slot = None

    def reduce_scatter(
        self, params: tuple[int, ...], gradients: Sequence[torch.Tensor], output: torch.Tensor, divisor: float
    ) -> None:
        """Enqueue the reduction into ``output`` on the current stream (FSDP2's reduce-scatter stream)."""
        start = time.perf_counter()
        current, push = torch.cuda.current_stream(), self.streams.push
        push.wait_stream(current)
        self.collectives.reduce_scatter(
            params,
            REDUCIBLE[gradients[0].dtype],
            REDUCIBLE[output.dtype],
            [g.data_ptr() for g in gradients],
            output.data_ptr(),
            divisor,
            (push.cuda_stream, current.cuda_stream),
        )
        current.wait_stream(push)  # the gradients have been read once this stream is past here
        self.collectives.reduce_scatters.seconds += time.perf_counter() - start
