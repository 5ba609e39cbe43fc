"""What each rank does for ``tide bench interference``: a victim on one stream, a collective in a loop on another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tide_strategies.cli.bench.kernels import KernelActivity, kernel_activity
from tide_strategies.cli.bench.pairs import Pair
from tide_strategies.cli.bench.pairs_cuda import pair
from tide_strategies.cli.bench.ranks import Place, Row, meet
from tide_strategies.cli.bench.timing import HEAD_START_CYCLES, median_ms, slowest_rank
from tide_strategies.cli.bench.victims import victim

#: Calls of the victim in a row behind one time.
_CALLS = 20
#: How much longer the collectives of a sample take, by their own times alone, than the victims do by theirs.
_MARGIN = 2.0


@dataclass(frozen=True)
class Noise:
    """A collective to run beside something: its name, a call, and milliseconds of a call alone."""

    name: str
    call: Callable[[], None]
    ms: float


@dataclass(frozen=True)
class Sample:
    """Milliseconds of a call of the victim, of the noise meanwhile (0: none ended), and whether that outlasted it."""

    victim_ms: float
    noise_ms: float
    outlasted: bool


class Streams:
    """One stream for the victim, one for the collectives."""

    def __init__(self, device: torch.device) -> None:
        self.victim, self.noise = torch.cuda.Stream(device), torch.cuda.Stream(device)


def noises(place: Place, stream: torch.cuda.Stream, collectives: dict[str, Any]) -> tuple[list[Noise], list[Pair]]:
    """Our collectives and stock's, each measured alone. Collective."""
    out, pairs = [], []
    with torch.cuda.stream(stream):
        for collective in ("all_gather", "reduce_scatter"):
            made = pair(place, collective, **collectives)
            pairs.append(made)
            times = median_ms(place, 5, {"ours": made.ours, "stock": made.stock})
            words = collective.replace("_", "-")
            for who, call in (("ours", made.ours), ("stock", made.stock)):
                ms = times[who]
                if call is not None and ms is not None:
                    out.append(Noise(f"{who} {words}", call, ms))
    return out, pairs


def victim_rows(
    place: Place, name: str, one_wave: tuple[int, int, int] | None, collectives: dict[str, Any], repeats: int
) -> Iterator[Row]:
    """Rows of one victim: beside each collective."""
    streams = Streams(place.device)
    with torch.cuda.stream(streams.victim):
        chosen = victim(name, place.device, one_wave)
        alone_ms = median_ms(place, 5, {"victim": chosen.call})["victim"]
        activity = kernel_activity(place, chosen.call)
    assert alone_ms is not None
    beside, pairs = noises(place, streams.noise, collectives)
    samples: dict[str, list[Sample]] = {"": [], **{n.name: [] for n in beside}}
    for repeat in range(-1, repeats):
        for noise in (None, *beside):
            sample = _sample(streams, chosen.call, alone_ms, noise)
            if repeat >= 0:
                samples[noise.name if noise else ""].append(sample)
    quiet = _median_of_slowest([s.victim_ms for s in samples[""]])
    for noise in beside:
        own = samples[noise.name]
        busy = _median_of_slowest([s.victim_ms for s in own])
        missed = slowest_rank(torch.tensor([float(not s.outlasted) for s in own], dtype=torch.float64))
        yield {
            "victim": name,
            "beside": noise.name,
            "ranks": place.ranks,
            "shape": chosen.words,
            "alone_ms": quiet,
            "beside_ms": busy,
            "slowdown_percent": 100 * (busy / quiet - 1),
            "collective_ms": noise.ms,
            "collective_beside_ms": _median_of_slowest([s.noise_ms for s in own]) or None,
            "covered_percent": 100 * (1 - missed.mean().item()),
            "notes": pairs[0].notes,
            **_waves(activity, place),
        }
    for made in pairs:
        made.close()


def _sample(streams: Streams, call: Callable[[], None], call_ms: float, noise: Noise | None) -> Sample:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def victims() -> None:
        call()
        begin.record()
        for _ in range(_CALLS):
            call()
        end.record()

    rounds = run_beside(streams, victims, (_CALLS + 1) * call_ms, noise)
    ends = [begin.elapsed_time(event) for event in rounds]
    lasted = begin.elapsed_time(end)
    within = sum(0 <= t <= lasted for t in ends)
    return Sample(lasted / _CALLS, lasted / within if within else 0.0, bool(ends) and ends[-1] >= lasted)


def run_beside(
    streams: Streams, victims: Callable[[], None], victims_ms: float, noise: Noise | None
) -> list[torch.cuda.Event]:
    """Enqueue ``victims`` on their stream and the noise on its own, and wait for both. Collective.

    Victims come first, behind a gate, so that a host held up by a full queue of noise never holds them up. How many
    calls of the noise follow depends on times on which the ranks agree: all ranks make the same.

    Returns:
        An event at the end of each call of the noise.
    """
    torch.cuda.synchronize()
    meet()
    with torch.cuda.stream(streams.noise):
        torch.cuda._sleep(HEAD_START_CYCLES)
        if noise is not None:
            noise.call()  # the ranks meet on their devices
    streams.victim.wait_stream(streams.noise)
    with torch.cuda.stream(streams.victim):
        victims()
    rounds = []
    if noise is not None:
        with torch.cuda.stream(streams.noise):
            for _ in range(1 + int(_MARGIN * victims_ms / noise.ms)):
                noise.call()
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                rounds.append(event)
    torch.cuda.synchronize()
    return rounds


def _median_of_slowest(samples: list[float]) -> float:
    return statistics.median(slowest_rank(torch.tensor(samples, dtype=torch.float64)).tolist())


def _waves(activity: KernelActivity | str | None, place: Place) -> Row:
    if not isinstance(activity, KernelActivity):
        return {}
    sms = torch.cuda.get_device_properties(place.device).multi_processor_count
    return {"ctas": activity.ctas, "waves": activity.ctas / sms, "kernel": activity.longest}
