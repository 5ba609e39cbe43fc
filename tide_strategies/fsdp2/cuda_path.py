"""How a TIDE group communicates on a GPU: enqueued on streams, ordered by events.

Three moments of a landing are kept apart, each with its own event or counter:

* *vacated*: the compute stream is through with the parameters (an event, recorded at reshard). Only then may this
  rank's next cast overwrite them, and only then are peers told, by a stream of its own, that they may.
* *readable*: all peers' shards have arrived (an event on the completion stream), for which compute waits.
* *reusable*: all peers have vacated (a counter that the copies wait for on the device).

Under Slot-Reuse (paper, section 5.3) a landing whose parameters are done with takes the gradients before it is vacated.

Across nodes, each rank's shards are cast into the stage rather than the landing; a stream of the rail's own exchanges
them, and another places what arrives. So they are for multicast, whose one copy writes every landing, the own too.
Where nothing is cast, copy engines bring shards to the own landing beside those that bring them to peers.
Reductions across nodes have a stream of their own for each of their three parts, so that one call's gradients are read
while another's partials are under way (paper, section 5.2).

Every call here is on the host's critical path: events are made once and recorded again, and nothing is asked of torch
twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide_strategies._native import cuda
from tide_strategies.fsdp2.device_trace import DeviceTrace, span
from tide_strategies.fsdp2.eligibility import REDUCIBLE
from tide_strategies.runtime.cuda.engine import DeviceSlot
from tide_strategies.runtime.cuda.group import CudaGroup


class CudaStreams:
    """What all groups of one engine share: streams, and the event of each slot's last use by this rank's compute."""

    def __init__(self, device: torch.device) -> None:
        high = -1
        self.device = device
        self.gather = torch.cuda.Stream(device, priority=high)
        self.completion = torch.cuda.Stream(device, priority=high)
        self.readiness = torch.cuda.Stream(device, priority=high)
        self.push = torch.cuda.Stream(device, priority=high)
        # Of collectives across nodes.
        self.rail = torch.cuda.Stream(device, priority=high)
        self.place = torch.cuda.Stream(device, priority=high)
        self.sum = torch.cuda.Stream(device, priority=high)
        self.network = torch.cuda.Stream(device, priority=high)
        self.vacated: dict[int, torch.cuda.Event] = {}


@dataclass(frozen=True)
class CudaLanding:
    """Views of a group's landing, one per parameter.

    Args:
        gradients: room for each unsharded gradient, where its parameter lies; None under In-Place.
        poison: the whole landing as bytes, to be made NaN when vacated; None to leave it.
    """

    gradients: list[torch.Tensor] | None = None
    poison: torch.Tensor | None = None


class CudaPath:
    """One group's collectives between GPUs of one host.

    Args:
        collectives: the group's calls.
        streams: streams shared by the engine's groups.
        landing: views of the landing.
        trace: notes when streams were busy with what; None notes nothing.
    """

    def __init__(
        self,
        collectives: CudaGroup,
        streams: CudaStreams,
        landing: CudaLanding,
        trace: DeviceTrace | None = None,
    ) -> None:
        self.collectives, self.streams, self._trace = collectives, streams, trace
        self._landing = landing
        self._slot: DeviceSlot | None = None
        self._readable_event, self._ready_event, self._read_event = (torch.cuda.Event() for _ in range(3))
        self._readable, self._ready, self._after_rail = True, False, False

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients go into the landing once the parameters there are done with (Slot-Reuse)."""
        return self._landing.gradients is not None

    def all_gather(self, group: Any, shards: Sequence[torch.Tensor], versions: tuple[int, ...] | None) -> None:
        """Bring the shards, cast if need be, to the own landing and to the peers'."""
        start = time.perf_counter()
        current = torch.cuda.current_stream(self.streams.device)
        _, stream = group.comm_ctx.get_all_gather_streams(group.unshard_async_op, group._training_state)
        if stream == current:  # an explicit unshard: waits for peers must not hold up the program's own stream
            stream = self.streams.gather
            cuda.order(current.cuda_stream, stream.cuda_stream)
        place = self.streams.place if self.collectives.staged else stream
        completion = self.streams.completion
        slot = self._slot = self.collectives.occupy()
        vacated = self.streams.vacated.get(slot.index)
        if vacated is not None:
            place.wait_event(vacated)
        label = f"all-gather of {self.collectives.name!r}"
        sending = [("copy", stream)]
        if place is not stream:
            sending += [("rail", self.streams.rail), ("place", place)]
        with span(self._trace, label, self.collectives.sent_bytes, *sending):
            self.collectives.open(slot, [s.data_ptr() for s in shards], versions)
            own = stream
            if self.collectives.sends_from_shards:
                own = completion
                cuda.order(stream.cuda_stream, own.cuda_stream)
            self.collectives.send(own.cuda_stream, place.cuda_stream, self.streams.rail.cuda_stream)
        cuda.order(place.cuda_stream, completion.cuda_stream)
        with span(self._trace, label, 0, ("completion", completion)):
            self.collectives.complete(completion.cuda_stream)
        self._readable_event.record(completion)
        self._readable = False
        self.collectives.all_gathers.seconds += time.perf_counter() - start

    def reuse(self) -> None:
        """Use the landing as it is: compute has waited for it before."""
        self._slot = self.collectives.occupy()
        self.collectives.reuse(self._slot)
        self._readable = True

    def wait(self) -> None:
        """Make the current stream wait until all shards are in the landing."""
        if not self._readable:
            self.collectives.arrive()
            current = torch.cuda.current_stream(self.streams.device)
            with span(self._trace, f"parameters of {self.collectives.name!r} awaited", 0, ("compute", current)):
                current.wait_event(self._readable_event)

    def vacate(self) -> None:
        """Give the landing up once the current stream is through with it."""
        assert self._slot is not None
        current, readiness = torch.cuda.current_stream(self.streams.device), self.streams.readiness
        event = self.streams.vacated.get(self._slot.index)
        if event is None:
            event = self.streams.vacated[self._slot.index] = torch.cuda.Event()
        if self._landing.poison is None:
            event.record(current)
            readiness.wait_event(event)
        else:
            cuda.order(current.cuda_stream, readiness.cuda_stream)
            with torch.cuda.stream(readiness):
                self._landing.poison.fill_(0xFF)
            event.record(readiness)
            self.collectives.forget()
        self.collectives.vacate(readiness.cuda_stream)
        self._slot = None

    def keep_gradients(self, params: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy gradients of ``params`` into the landing, on the current stream; returns where they are then.

        Gradients whose element type is not the parameters' stay where they are.
        """
        rooms = self._landing.gradients
        assert rooms is not None
        kept = [rooms[p][: g.numel()].view(g.shape) for p, g in zip(params, gradients, strict=True)]
        if any(k.dtype != g.dtype for k, g in zip(kept, gradients, strict=True)):
            return gradients
        self.collectives.forget()
        with torch.no_grad():
            torch._foreach_copy_(kept, list(gradients))
        return kept

    def network_after_rail(self) -> None:
        """Let the next reduction's network phase begin after the rounds of the all-gathers enqueued by now.

        Those never wait for that reduction, as they were enqueued before it on every rank (``docs/protocol.md``).
        """
        self._after_rail = True

    def gradients_ready(self) -> None:
        """Note where the compute stream, which is the current one, is now."""
        if self.collectives.several_nodes:
            self._ready_event.record()
            self._ready = True

    def reduce_scatter(
        self,
        params: tuple[int, ...],
        gradients: Sequence[torch.Tensor],
        output: torch.Tensor,
        divisor: float,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Enqueue the reduction into ``output``; the current stream (FSDP2's reduce-scatter stream) waits for it."""
        start = time.perf_counter()
        streams = self.streams
        current = torch.cuda.current_stream(streams.device)
        several = self.collectives.several_nodes
        reading = (streams.push, streams.sum if several else current)
        writing = streams.network if several else current
        if several:
            # Reads begin when the gradients are there, though the current stream may wait for an earlier network phase.
            if not self._ready:
                self._ready_event.record(current)
            self._ready = False
            for stream in reading:
                stream.wait_event(self._ready_event)
            # The output's memory may have been something else's on the current stream.
            cuda.order(current.cuda_stream, writing.cuda_stream)
            if self._after_rail:
                cuda.order(streams.rail.cuda_stream, writing.cuda_stream)
            self._after_rail = False
        else:
            cuda.order(current.cuda_stream, streams.push.cuda_stream)
        named = dict(zip(("push", "sum", "network"), (*reading, writing) if several else reading, strict=False))
        nbytes = 0 if self._trace is None else sum(g.nbytes for g in gradients)
        with span(self._trace, f"reduce-scatter of {self.collectives.name!r}", nbytes, *named.items()):
            self.collectives.reduce_scatter(
                params,
                REDUCIBLE[gradients[0].dtype],
                REDUCIBLE[output.dtype],
                [g.data_ptr() for g in gradients],
                output.data_ptr(),
                divisor,
                [s.cuda_stream for s in named.values()],
            )
        read = reading[1]  # the current stream, on one node; else one that is not behind an earlier network phase
        cuda.order(streams.push.cuda_stream, read.cuda_stream)
        if several:
            self._read_event.record(read)
            with torch.cuda.stream(read):
                let_go()
        else:
            let_go()
        for stream in (read, writing):
            cuda.order(stream.cuda_stream, current.cuda_stream)
        self.collectives.reduce_scatters.seconds += time.perf_counter() - start

    def gradients_read(self) -> torch.cuda.Event | None:
        """The event after the pushes and sums across nodes, when partials are still under way."""
        return self._read_event if self.collectives.several_nodes else None
