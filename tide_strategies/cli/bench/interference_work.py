"""What each rank does for ``tide bench interference``: a victim on one stream, a collective in a loop on another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tide_strategies.cli.bench.kernels import (
    SLEEP,
    Event,
    KernelActivity,
    is_kernel,
    kernel_activity,
    overlap,
    recorded,
)
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
    """Our collectives, stock's, and raw copies, each measured alone. Collective."""
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
        copies = pairs[0].limit
        ms = median_ms(place, 5, {"copies": copies})["copies"]
        assert ms is not None
        out.append(Noise("raw copies", copies, ms))
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
    turns = {"": None, **{n.name: n for n in beside}}
    samples: dict[str, list[Sample]] = {name: [] for name in turns}
    for repeat in range(-1, repeats):
        for name_of, noise in turns.items():
            sample = _sample(streams, chosen.call, alone_ms, noise)
            if repeat >= 0:
                samples[name_of].append(sample)
    recordings = {
        name_of: recorded(place, partial(_sample, streams, chosen.call, alone_ms, noise))
        for name_of, noise in turns.items()
    }
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
            **_launches(activity, recordings[""], recordings[noise.name]),
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


def _launches(activity: Any, quiet: Any, beside: Any) -> Row:
    """What a recording says of the victim's launches; nothing where there is none."""
    if not (isinstance(activity, KernelActivity) and isinstance(quiet, list) and isinstance(beside, list)):
        return {}
    return launches_of(activity.longest, quiet, beside)


def launches_of(victim: str, quiet: list[Event], beside: list[Event]) -> Row:
    """How long kernels ran beside a launch of the victim on average, and how much slower the others were.

    Args:
        victim: name of its kernel.
        quiet: a recording of it alone, in time's order.
        beside: one of it beside something; launches after that has ended do not count.
    """
    alone = statistics.median(e["dur"] for e in quiet if e["name"] == victim)
    noise = [e for e in beside if e["name"] != victim and SLEEP not in e["name"]]
    kernels = [e for e in noise if is_kernel(e)]
    end = max((e["ts"] + e["dur"] for e in noise), default=0.0)
    met = [(e["dur"], overlap(e, kernels)) for e in beside if e["name"] == victim and e["ts"] + e["dur"] <= end]
    apart = [duration for duration, shared in met if not shared]
    return {
        "kernel_us": statistics.fmean(shared for _, shared in met) if met else None,
        "apart_percent": 100 * (statistics.median(apart) / alone - 1) if apart else None,
    }


def _waves(activity: KernelActivity | str | None, place: Place) -> Row:
    if not isinstance(activity, KernelActivity):
        return {}
    sms = torch.cuda.get_device_properties(place.device).multi_processor_count
    return {"ctas": activity.ctas, "waves": activity.ctas / sms, "kernel": activity.longest}
