"""Replays of the real schedules: they end under any delay, move the right bytes, and meet measurements."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import (
    Await,
    Copy,
    Counter,
    Item,
    Notify,
    Record,
    Ref,
    Schedule,
    Space,
    WaitEvent,
)
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.planner import stages
from tide_strategies.planner.knobs import unmeasured
from tide_strategies.planner.predict import (
    even_layout,
    nodes_all_gather,
    nodes_reduce_scatter,
    one_node_all_gather,
    one_node_reduce_scatter,
)
from tide_strategies.planner.rates import CPU_PAIR, H200_PAIR, PAPER
from tide_strategies.planner.replay import Machine, SimulationError, one_call, replay
from tide_strategies.planner.sizing import solve
from tide_strategies.topology import Topology

MIB = 2**20
#: (collective, MiB of shard or output) -> ms on two H200 (docs/benchmarks.md).
H200_MEASURED = {
    ("all-gather", 32): 0.154,
    ("all-gather", 128): 0.367,
    ("all-gather with cast", 32): 0.143,
    ("all-gather with cast", 128): 0.477,
    ("reduce-scatter", 32): 0.094,
    ("reduce-scatter", 128): 0.264,
}
shapes = st.builds(ParamShape, st.integers(0, 11), st.integers(0, 4), st.sampled_from([2, 4]))
layouts = st.builds(GroupLayout, st.lists(shapes, max_size=4).map(tuple), st.integers(1, 5))


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 1e-3]))
def test_schedules_of_any_layout_end_under_any_delay(layout, seed, apart, delay) -> None:
    n = layout.ranks
    topology = Topology(1, n)
    machine = Machine(rates=PAPER, topology=topology, sum_ctas=4)
    gathers = [all_gather(layout, topology, r, [Item.F32] * len(layout.params), shared_landing=apart) for r in range(n)]
    found = replay(machine, one_call(gathers, [("cast", "copy", "completion")]), seed=seed, delay_s=delay)
    again = replay(machine, one_call(gathers, [("cast", "copy", "completion")]), seed=seed, delay_s=delay)
    assert found.seconds == again.seconds, "a seed repeats"
    sums = [
        reduce_scatter(layout, topology, r, grad=Item.BF16, output=Item.F32, chunk_bytes=16, interleave=not apart)
        for r in range(n)
    ]
    streams = [("push",), ("sum",)] if apart else [("main",)]
    assert replay(machine, one_call(sums, streams), seed=seed, delay_s=delay).seconds >= PAPER.call_s


def test_a_wait_that_nobody_ends_is_named() -> None:
    stuck = Schedule("stuck", 0, 1, {"main": (Await(Counter("landed"), 0, 1),)}, {(Counter("landed"), 0): 1})
    with pytest.raises(SimulationError, match=r"rank 0, stream 'main' of stuck, awaits landed\[0\] of rank 0 at 1"):
        replay(Machine(rates=PAPER, topology=Topology(1, 1)), one_call([stuck], [("main",)]))


def test_long_rows_of_waits_that_are_over_are_no_recursion() -> None:
    ops = (Record("passed"), *[WaitEvent("passed")] * 5000)
    schedule = Schedule("patient", 0, 1, {"main": ops}, {})
    machine = Machine(rates=PAPER, topology=Topology(1, 1))
    assert replay(machine, one_call([schedule], [("main",)])).seconds == PAPER.call_s


def test_a_second_call_waits_for_the_first() -> None:
    """Counters carry totals over calls: two calls move twice the bytes and take longer than one."""
    machine = Machine(rates=PAPER, topology=Topology(1, 4), sum_ctas=4)
    once, twice = (
        one_node_reduce_scatter(machine, even_layout(4, 2**20, 2), chunk_bytes=2**16, calls=c) for c in (1, 2)
    )
    assert twice.seconds > 1.5 * once.seconds
    assert twice.moved["out", 0] == pytest.approx(2 * once.moved["out", 0])


def test_reading_from_a_peer_costs_its_memory_more_than_writing_to_it() -> None:
    """The direction of traffic (section 2.4): where memory is what limits, a pull takes longer than a push."""
    rates = replace(H200_PAIR, memory=100e9)
    machine = Machine(rates=rates, topology=Topology(1, 2))
    own, peer = Ref(Space.INPUT, 0), Ref(Space.LANDING, 0, 0, 1)
    times = []
    for src, dst in ((own, peer), (Ref(Space.INPUT, 0, 0, 1), Ref(Space.LANDING, 0))):
        copy = Copy(src, dst, 10**9, Item.RAW1, Item.RAW1)
        schedules = [Schedule("one", r, 2, {"main": (copy,) if r == 0 else ()}, {}) for r in range(2)]
        times.append(replay(machine, one_call(schedules, [("main",)])).seconds)
    assert times[0] == pytest.approx(0.01, rel=1e-2)
    assert times[1] == pytest.approx(0.022, rel=1e-2)


@pytest.mark.parametrize(("what", "mib"), H200_MEASURED)
def test_collectives_between_two_h200_are_within_15_percent_of_measured(what: str, mib: int) -> None:
    """With the knobs that the runtime, and so the benchmark, takes where nothing has been measured."""
    topology = Topology(1, 2)
    output = even_layout(2, mib * MIB // 4, 30)
    knobs = unmeasured("cuda", topology, [output])
    assert (knobs.sum_ctas, knobs.chunk_bytes) == {32: (56, 8 * MIB), 128: (52, 15 * MIB)}[mib], "docs/simulator.md"
    machine = Machine(rates=H200_PAIR, topology=topology, sum_ctas=knobs.sum_ctas)
    if what == "reduce-scatter":
        found = one_node_reduce_scatter(machine, output, chunk_bytes=knobs.chunk_bytes)
    else:
        found = one_node_all_gather(machine, even_layout(2, mib * MIB // 2, 30), cast=what.endswith("cast"))
    measured, predicted = H200_MEASURED[what, mib], found.seconds * 1e3
    assert predicted == pytest.approx(measured, rel=0.15)
    page = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    assert f"\n| {what} | {mib} | {measured:.3f} | {predicted:.3f} | {predicted / measured - 1:+.0%} |\n" in page


def test_a_wait_that_is_over_takes_its_time_on_a_gpu_once_for_all_signals_together() -> None:
    """Whatever is given to a stream between two copies is one batch of the driver's."""
    told, copy = Counter("told"), Copy(Ref(Space.INPUT), Ref(Space.OUTPUT), 0, Item.RAW1, Item.RAW1)
    waits = (Notify(told, 0), Await(told, 0, 0), Await(told, 0, 0), Notify(told, 0), Await(told, 0, 0))
    machine = Machine(rates=replace(PAPER, wait_s=1e-3, start_s=0.0), topology=Topology(1, 1))
    for ops, stops in (((copy,), 0), (waits, 1), ((*waits, copy, *waits), 2), ((Notify(told, 0), copy), 0)):
        schedule = Schedule("waits", 0, 1, {"main": ops}, {(told, 0): 2})
        found = replay(machine, one_call([schedule], [("main",)])).seconds
        assert found == pytest.approx(PAPER.call_s + stops * 1e-3)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(2, 1), (2, 2), (3, 2), (5, 1), (4, 2)]),
    st.lists(shapes, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-3]),
    st.booleans(),
)
def test_schedules_across_nodes_end_under_any_delay(form, params, seed, delay, slot_reuse) -> None:
    topology = Topology(*form)
    layout = GroupLayout(tuple(params), topology.ranks)
    machine = Machine(rates=PAPER, topology=topology, sum_ctas=4, landing_ctas=4)
    assert nodes_all_gather(machine, layout, seed=seed, delay_s=delay).seconds > 0
    found = nodes_reduce_scatter(
        machine, layout, round_width=2, slot_reuse=slot_reuse, chunk_bytes=64, seed=seed, delay_s=delay
    )
    assert found.seconds >= PAPER.call_s


def test_the_stage_model_is_near_the_replay() -> None:
    """Two descriptions of one thing: beyond 64 ranks only the first is affordable."""
    topology = Topology(4, 8)
    for mib in (32, 128):
        layout = even_layout(32, mib * MIB // 4, 16)
        sizing = solve(PAPER, topology, mib * MIB)
        machine = Machine(rates=PAPER, topology=topology, sum_ctas=sizing.sum_ctas, landing_ctas=sizing.landing_ctas)
        replayed = nodes_reduce_scatter(machine, layout, round_width=sizing.round_width).seconds
        assert stages.reduce_scatter(PAPER, topology, mib * MIB, sizing).seconds == pytest.approx(replayed, rel=0.08)
        gathered = nodes_all_gather(machine, even_layout(32, mib * MIB // 2, 30)).seconds
        assert stages.all_gather(PAPER, topology, mib * MIB).seconds == pytest.approx(gathered, rel=0.03)


def test_six_nodes_as_in_section_4() -> None:
    """A reduce-scatter of 32 MiB on six nodes takes 4.81 ms with four thread blocks for the sum, 4.60 with eight."""
    topology = Topology(6, 8)
    for ctas, measured_ms in ((4, 4.81), (8, 4.60)):
        machine = Machine(rates=PAPER, topology=topology, sum_ctas=ctas, landing_ctas=4)
        found = nodes_reduce_scatter(machine, even_layout(48, 32 * MIB // 4, 16), round_width=4)
        assert found.seconds * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_the_bytes_of_an_all_gather_cross_every_link_once() -> None:
    layout = even_layout(4, 3 * 2**20, 5)
    for multicast in (True, False):
        machine = Machine(rates=PAPER if multicast else H200_PAIR, topology=Topology(1, 4))
        found = one_node_all_gather(machine, layout, cast=False)
        shard = sum(layout.shard_bytes(p) for p in range(5))
        assert found.moved["in", 0] == pytest.approx(shard * (4 if multicast else 3))
        assert found.moved["out", 0] == pytest.approx(shard * (1 if multicast else 3))


@pytest.mark.parametrize("one_memory", [True, False])
def test_one_rank_a_node_is_predicted_as_the_lane_that_runs(one_memory: bool) -> None:
    """A lane sends bf16 gradients over the rail, where two levels would send fp32 partials."""
    rates = replace(CPU_PAIR if one_memory else H200_PAIR, rail=1e9)
    machine = Machine(rates=rates, topology=Topology(4, 1), one_memory=one_memory)
    layout = even_layout(4, MIB, 3)
    shard = sum(layout.shard_bytes(p) for p in range(3))
    gathered = nodes_all_gather(machine, layout)
    assert gathered.moved["rail out", 0] == pytest.approx(3 * shard, rel=1e-6)
    reduced = nodes_reduce_scatter(machine, layout, round_width=4)
    assert reduced.moved["rail out", 0] == pytest.approx(3 * shard, rel=1e-6)
    assert reduced.seconds >= 3 * shard / 1e9
    if one_memory:  # nothing is staged: the own shard into the landing, and what lands lies there
        assert gathered.moved["local", 0] == pytest.approx(shard, rel=1e-6)
