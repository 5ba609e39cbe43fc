"""Knobs follow from rates, and rates from probes: a simulated machine whose rates are known gives them back."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies._native import cuda
from tide_strategies.collectives.plan import refusals
from tide_strategies.collectives.schedule import Space
from tide_strategies.errors import TideConfigError
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import probes
from tide_strategies.planner.knobs import Knobs, choose, unmeasured
from tide_strategies.planner.rates import CPU_PAIR, GB, H200_PAIR, MIB, PAPER, Rates, bounds
from tide_strategies.planner.replay import Machine, one_call, replay
from tide_strategies.planner.sizing import MAX_CTAS, passes_of, solve
from tide_strategies.runtime.encode import encode
from tide_strategies.topology import Topology


def layout(ranks: int, rows: int, itemsize: int = 2) -> GroupLayout:
    return GroupLayout((ParamShape(rows * ranks, 1024, itemsize),), ranks)


def simulated(rates: Rates, topology: Topology, *, one_thread: bool) -> dict[tuple[str, int], float]:
    """Seconds of every probe on a machine with these rates; landings with one thread block, or all there are."""
    by_rank = [probes.probes(topology, r, one_thread=one_thread) for r in range(topology.ranks)]
    out = {}
    for same in zip(*by_rank, strict=True):
        blocks = MAX_CTAS if same[0].name == "fabric" else 1
        machine = Machine(rates=rates, topology=topology, one_memory=one_thread, landing_ctas=blocks)
        found = replay(machine, one_call([p.schedule for p in same], [("main",)]))
        out[same[0].name, same[0].size] = found.seconds
    return out


@pytest.mark.parametrize("form", [(1, 2), (1, 3), (2, 2), (3, 1)])
def test_probes_of_a_machine_give_its_rates_back(form: tuple[int, int]) -> None:
    """No probe waits for ever, on any rank, and what was put in comes out. Memory is wide, or it would be the limit."""
    topology = Topology(*form)
    own = replace(
        CPU_PAIR,
        push=7 * GB,
        local=7 * GB,
        memory=1000 * GB,
        sum_per_cta=13 * GB,
        land_per_cta=3 * GB,
        land_cap=3 * GB,
        rail=2 * GB,
        signal_s=11e-6,
        rail_signal_s=70e-6,
    )
    found = probes.rates_of(simulated(own, topology, one_thread=True), topology, CPU_PAIR, "x", one_thread=True)
    exact = {"rel": 1e-6}
    assert found.push == found.local == pytest.approx(own.push, **exact)
    assert found.sum_per_cta == pytest.approx(own.sum_per_cta, **exact)
    assert found.call_s == pytest.approx(own.call_s, **exact)
    assert found.signal_s == pytest.approx(own.signal_s, **exact)
    # Tiny copies are one batch in the simulator: their bytes are all that they take beside one start.
    assert found.start_s == pytest.approx((own.start_s + 64 * 16 / own.local) / 64, **exact)
    if form[0] > 1:
        assert found.rail == pytest.approx(own.rail, **exact)
        assert found.land_per_cta == found.land_cap == pytest.approx(own.land_per_cta, **exact)
        # A round: a credit's way and a put's, each after what starts it.
        assert found.round_wait_s == pytest.approx(2 * own.rail_signal_s, rel=0.1)
        assert found.rail_signal_s == found.round_wait_s / 2
    else:
        assert (found.rail, found.round_wait_s) == (CPU_PAIR.rail, CPU_PAIR.round_wait_s)


def test_probes_of_gpus_give_their_rates_back() -> None:
    topology = Topology(1, 4)
    own = replace(H200_PAIR, push=300 * GB, intake=300 * GB, sum_per_cta=40 * GB, signal_s=3e-6)
    seconds = simulated(own, topology, one_thread=False)
    assert not any(name in ("chunk", "rail") for name, _ in seconds)
    found = probes.rates_of(seconds, topology, H200_PAIR, "x", one_thread=False)
    assert found.push == found.intake == pytest.approx(own.push, rel=1e-6)
    assert found.sum_per_cta == pytest.approx(own.sum_per_cta, rel=1e-6)
    # A wait that is over, and the start of the copy behind it; the first one is waited for.
    assert found.wait_s == pytest.approx(own.wait_s + own.start_s - found.start_s, rel=0.05)
    assert (found.call_s, found.chunk_cap) == (H200_PAIR.call_s, H200_PAIR.chunk_cap)
    assert probes.rates_of(seconds, topology, H200_PAIR, "x", one_thread=False, ctas=8).sum_per_cta == pytest.approx(
        own.sum_per_cta / 8, rel=1e-6
    )


@pytest.mark.parametrize("form", [(2, 1), (2, 2), (3, 2)])
def test_probes_of_gpu_nodes_give_rates_of_rails_and_landings_back(form: tuple[int, int]) -> None:
    """One thread block's landing, and what the fabric allows, are told apart: memory is wide, or it would be that."""
    topology = Topology(*form)
    own = replace(H200_PAIR, memory=1e15, land_per_cta=9 * GB, land_cap=70 * GB, rail=11 * GB, rail_signal_s=40e-6)
    seconds = simulated(own, topology, one_thread=False)
    found = probes.rates_of(seconds, topology, H200_PAIR, "x", one_thread=False)
    assert found.rail == pytest.approx(own.rail, rel=1e-6)
    assert found.land_per_cta == pytest.approx(own.land_per_cta, rel=1e-6)
    assert found.land_cap == pytest.approx(own.land_cap, rel=1e-6)
    assert found.round_wait_s == pytest.approx(2 * own.rail_signal_s, rel=0.1)
    halved = probes.rates_of(seconds, topology, H200_PAIR, "x", one_thread=False, landing_ctas=2)
    assert (halved.land_per_cta, halved.land_cap) == (found.land_per_cta / 2, found.land_cap)


@pytest.mark.parametrize("form", [(1, 2), (1, 8), (4, 2), (2, 1)])
def test_probes_fit_their_memory_and_every_executor(form: tuple[int, int]) -> None:
    topology = Topology(*form)
    for one_thread in (True, False):
        large = probes.bulk_bytes(topology, one_thread=one_thread)
        every = probes.probes(topology, 0, one_thread=one_thread)
        memory = probes.memory(every)
        assert memory[Space.STAGING, 0] * topology.local_ranks <= (1 << 29 if one_thread else 1 << 32)
        assert [n for (space, _), n in memory.items() if space is not Space.STAGING] == [large] * 2 * (form[0] > 1)
        for probe in every:
            encode(probe.schedule, 1)
            if not one_thread:
                encode(probe.schedule, 1, cuda.Program)
        assert all(p.size <= large for p in every if p.name in ("push", "sum", "rail", "land"))


def test_times_that_are_missing_or_impossible_are_said() -> None:
    topology = Topology(1, 2)
    seconds = simulated(CPU_PAIR, topology, one_thread=True)
    for name in ("push", "wait"):
        with pytest.raises(ValueError, match=r"a line needs|no times of the probe"):
            probes.rates_of({k: t for k, t in seconds.items() if k[0] != name}, topology, CPU_PAIR, "", one_thread=True)
    noisy = {k: 1e-3 if k[0] in ("push", "sum") else t for k, t in seconds.items()}  # one size as fast as four times it
    found = probes.rates_of(noisy, topology, CPU_PAIR, "", one_thread=True)
    assert found.push == pytest.approx(8 * MIB / 1e-3)
    assert found.sum_per_cta == pytest.approx(4 * 8 * MIB / 1e-3)
    flat = dict.fromkeys(seconds, 0.0)  # a clock that stands still
    assert probes.rates_of(flat, topology, CPU_PAIR, "", one_thread=True).push <= 1e18


def test_the_smallest_chunk_that_is_not_clearly_slower_is_taken() -> None:
    seconds = simulated(CPU_PAIR, Topology(1, 2), one_thread=True)
    chunks = {size: 1.0 for name, size in seconds if name == "chunk"}
    sizes = sorted(chunks)
    chunks.update({sizes[0]: 2.0, sizes[1]: 1.02, sizes[-1]: 1.5})
    found = probes.rates_of(
        {**seconds, **{("chunk", s): t for s, t in chunks.items()}}, Topology(1, 2), CPU_PAIR, "", one_thread=True
    )
    assert found.chunk_cap == sizes[1]
    assert choose(found, Topology(1, 2), [layout(2, 4096)], "cpu").chunk_bytes == sizes[1]


def test_built_in_rates_give_the_chunks_and_blocks_that_were_measured_to_be_good() -> None:
    assert unmeasured("cpu", Topology(1, 2), [layout(2, 256)]).chunk_bytes == 512 * 1024
    # Small chunks: twice what keeps pace with pushes. 15 MiB: 28 * 40.0 us / (40.0 - 2 * 8.9 us), in fours.
    for ranks, ctas in ((2, 56), (3, 40), (4, 32), (8, 24)):
        assert unmeasured("cuda", Topology(1, ranks), [layout(ranks, 64)]).sum_ctas == ctas
    assert unmeasured("cuda", Topology(1, 2), [layout(2, 32768)]).sum_ctas == 52
    assert unmeasured("cuda", Topology(1, 2), [layout(2, 4096)]).chunk_bytes == 8 * MIB, "the host enqueues meanwhile"
    # 64 MiB contributions: sqrt((2.4 + 6.5 us) * 64 MiB * 393 GB/s) = 14.6 MiB; of 4 GiB what staging is bounded by.
    assert unmeasured("cuda", Topology(1, 2), [layout(2, 32768)]).chunk_bytes == 15 * MIB
    assert unmeasured("cuda", Topology(1, 2), [layout(2, 1 << 21)]).chunk_bytes == 32 * MIB


def test_no_more_is_staged_than_the_largest_group_has() -> None:
    """64 rows of 1024 fp32 gradients, of a group with bf16 parameters; across nodes for both ranks of a node."""
    for device in ("cpu", "cuda"):
        assert unmeasured(device, Topology(1, 2), [layout(2, 3), layout(2, 64)]).chunk_bytes == 64 * 4096
    assert unmeasured("cpu", Topology(2, 2), [layout(4, 16)]).chunk_bytes == 2 * 16 * 4096
    assert unmeasured("cpu", Topology(1, 2), []).chunk_bytes == 4096


def test_passes_are_for_large_calls_whose_landing_no_block_can_hurry() -> None:
    """8 nodes: the landing is capped at 84 GB/s, where its share of the wire time asks for 136. At 32 MiB another pass
    would wait for a quarter of the wire time, at 1 GiB for 2%."""
    topology = Topology(8, 8)
    for mib, passes in ((32, 1), (1024, 2)):
        sizing = solve(PAPER, topology, mib * MIB)
        assert passes_of(PAPER, topology, mib * MIB, sizing) == passes
    knobs = choose(PAPER, topology, [layout(64, 1 << 18)], "cuda")
    assert knobs.passes == 2
    assert (knobs.round_width, knobs.landing_ctas) == (2, 4), "at this size waits cost too little to widen"
    assert choose(PAPER, topology, [layout(64, 1 << 18)], "cpu").passes == 1, "one thread has nothing to overlap"


def test_what_is_stated_stays_and_is_rounded_to_what_pieces_need() -> None:
    stated = {"chunk_bytes": 5000, "sum_ctas": 3, "round_width": 7, "passes": 5}
    knobs = choose(H200_PAIR, Topology(1, 2), [layout(2, 64)], "cuda", stated)
    assert (knobs.chunk_bytes, knobs.sum_ctas, knobs.round_width, knobs.passes) == (5024, 3, 7, 5)
    plan = Knobs(chunk_bytes=4096, round_width=3, passes=2).base_plan(Topology(4, 2))
    assert plan is not None
    assert (plan.round_width, plan.passes, plan.wave_width, plan.generations) == (3, 2, 2, 2)
    for without in (Topology(1, 2), Topology(3, 1)):
        assert Knobs(chunk_bytes=4096).base_plan(without) is None, "one node, or a lane with a plan of its own"


#: What each number of rates may be, its bounds among it.
_NUMBERS = {
    f.name: st.one_of(st.sampled_from(bounds(f.name)[:2]), st.floats(*bounds(f.name)[:2]))
    for f in fields(Rates)
    if f.name not in ("name", "multicast")
}


@pytest.mark.parametrize("name", _NUMBERS)
def test_rates_beyond_their_bounds_are_refused_in_words(name: str) -> None:
    low, high, unit = bounds(name)
    for value in (low, high):
        assert getattr(replace(PAPER, **{name: value}), name) == value
    beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.nan, math.inf, -math.inf, 10**400]
    for value in (*beyond, True, None, "1", [1.0]):
        with pytest.raises(TideConfigError, match=f"rate '{name}' must be a number from .*{unit}; got "):
            replace(PAPER, **{name: value})


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries({n: v for n, v in _NUMBERS.items() if n != "chunk_cap"}),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 4), (64, 8)]),
    st.integers(0, 1 << 22),
    _NUMBERS["chunk_cap"],
    st.sampled_from(["cpu", "cuda"]),
)
def test_whatever_rates_are_stated_the_knobs_can_run(numbers, form, rows, cap, device) -> None:
    """Rates from a file or a cache may be anything that a rate can be: no knob leaves what runtimes take."""
    topology = Topology(*form)
    own = replace(PAPER, **numbers, chunk_cap=cap)
    knobs = choose(own, topology, [layout(topology.ranks, rows)], device)
    assert 4096 <= knobs.chunk_bytes <= max(cap, 4096)
    assert knobs.chunk_bytes % 32 == 0
    assert 1 <= knobs.sum_ctas <= 128
    assert 0 <= knobs.landing_ctas <= 128
    assert 1 <= knobs.round_width <= 4
    assert 1 <= knobs.passes <= 4
    plan = knobs.base_plan(topology)
    assert plan is None or refusals(plan) == ()
    assert not math.isnan(knobs.chunk_bytes)
