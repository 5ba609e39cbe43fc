"""What each rank does for ``tide bench interference``: a victim on one stream, a collective in a loop on another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tide_strategies.cli.bench_kernels import KernelActivity, kernel_activity
from tide_strategies.cli.bench_pairs import Pair
from tide_strategies.cli.bench_pairs_cuda import pair
from tide_strategies.cli.bench_ranks import Place, Row, meet
from tide_strategies.cli.bench_timing import HEAD_START_CYCLES, median_ms, slowest_rank
from tide_strategies.cli.bench_victims import victim

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
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {"": [], **{n.name: [] for n in beside}}
    covered: dict[str, list[float]] = {n.name: [] for n in beside}
    for repeat in range(-1, repeats):
        for noise in (None, *beside):
            ms, outlasted = _sample(streams, chosen.call, alone_ms, noise)
            if repeat >= 0:
                samples[noise.name if noise else ""].append(ms)
                if noise is not None:
                    covered[noise.name].append(float(not outlasted))
    medians = {key: _median_of_slowest(values) for key, values in samples.items()}
    for noise in beside:
        missed = slowest_rank(torch.tensor(covered[noise.name], dtype=torch.float64)).mean().item()
        yield {
            "victim": name,
            "beside": noise.name,
            "ranks": place.ranks,
            "shape": chosen.words,
            "alone_ms": medians[""],
            "beside_ms": medians[noise.name],
            "slowdown_percent": 100 * (medians[noise.name] / medians[""] - 1),
            "collective_ms": noise.ms,
            "covered_percent": 100 * (1 - missed),
            "notes": pairs[0].notes,
            **_waves(activity, place),
        }
    for made in pairs:
        made.close()


def _sample(streams: Streams, call: Callable[[], None], call_ms: float, noise: Noise | None) -> tuple[float, bool]:
    """Milliseconds of a call of the victim, and whether the noise outlasted the victims."""
    begin, end, quiet = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    meet()
    with torch.cuda.stream(streams.noise):
        torch.cuda._sleep(HEAD_START_CYCLES)
        if noise is not None:
            noise.call()  # the ranks meet on their devices
    streams.victim.wait_stream(streams.noise)
    # The numbers of calls follow from times on which the ranks agree: all ranks make the same calls.
    made = 0
    for i in range(-1, _CALLS):
        while noise is not None and made * noise.ms < (i + 2) * call_ms * _MARGIN:
            with torch.cuda.stream(streams.noise):
                noise.call()
            made += 1
        with torch.cuda.stream(streams.victim):
            if i == 0:
                begin.record()
            call()
    end.record(streams.victim)
    quiet.record(streams.noise)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / _CALLS, end.elapsed_time(quiet) >= 0


def _median_of_slowest(samples: list[float]) -> float:
    return statistics.median(slowest_rank(torch.tensor(samples, dtype=torch.float64)).tolist())


def _waves(activity: KernelActivity | str | None, place: Place) -> Row:
    if not isinstance(activity, KernelActivity):
        return {}
    sms = torch.cuda.get_device_properties(place.device).multi_processor_count
    return {"ctas": activity.ctas, "waves": activity.ctas / sms, "kernel": activity.longest}
