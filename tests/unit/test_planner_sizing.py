"""The sizing equations give the paper's own numbers, and refuse what makes no sense."""

import math

import pytest

from tide_strategies.errors import TideConfigError
from tide_strategies.planner.rates import H200_PAIR, PAPER, Rates
from tide_strategies.planner.sizing import (
    live_bound,
    rounds_of,
    solve,
    staging_bound,
)
from tide_strategies.topology import Topology

MIB = 2**20


@pytest.mark.parametrize("output", [32 * MIB, 128 * MIB])
def test_eight_nodes_at_the_papers_rates_get_the_papers_plan(output: int) -> None:
    plan = solve(PAPER, Topology(8, 8), output)
    assert (plan.round_width, plan.sum_ctas, plan.landing_ctas) == (4, 4, 4)
    assert (plan.rounds, plan.waves) == (2, 1)
    assert plan.wire_s == pytest.approx(7 * output / 47.5e9)


def test_rounds_stay_narrow_where_waits_cost_little() -> None:
    """The wire takes 1.4 s here: two transfers a round wait for 4% of it, under the tenth that widens."""
    assert solve(PAPER, Topology(65, 8), 2**30).round_width == 2
    assert solve(PAPER, Topology(65, 8), 2**28).round_width == 4


def test_gradients_of_four_bytes_need_more_blocks_to_sum() -> None:
    assert solve(PAPER, Topology(8, 8), MIB, grad_itemsize=4).sum_ctas == math.ceil(1.5 * 9 * 47.5 / 99)


def test_one_node_has_no_rail_to_size_for() -> None:
    plan = solve(H200_PAIR, Topology(1, 2), 32 * MIB)
    assert (plan.rounds, plan.landing_ctas, plan.wire_s) == (0, 0, 0.0)
    # One bf16 contribution comes at 395 GB/s, so 790 GB/s of output; each output byte is 2 bytes read, wrote or both.
    assert plan.sum_ctas == 4 * math.ceil(2 * 790 / 58 / 4) == 28


def test_the_papers_bounds_at_64_nodes() -> None:
    shard = 3 * MIB
    group = 64 * 8 * shard
    assert rounds_of(64, 4, 8).generations == 2
    for mode, staging, live in (("in_place", 0.594, 3.72), ("slot_reuse", 0.164, 2.29)):
        assert round(staging_bound(64, 2 * shard, mode=mode) / group, 3) == staging
        assert round(live_bound(64, shard, mode=mode) / group, 2) == live


@pytest.mark.parametrize("bad", [{"output_bytes": 0}, {"passes": 0}, {"grad_itemsize": 8}])
def test_the_solver_refuses_nonsense(bad: dict[str, int]) -> None:
    with pytest.raises(TideConfigError, match="the solver needs"):
        solve(PAPER, Topology(8, 8), **{"output_bytes": MIB, **bad})  # type: ignore[arg-type]
    with pytest.raises(TideConfigError, match="at least 1"):
        rounds_of(8, 0, 8)
    with pytest.raises(TideConfigError, match="two nodes or more"):
        rounds_of(1, 4, 8)


def test_rates_survive_a_round_trip_and_refuse_the_rest() -> None:
    assert Rates.from_dict(PAPER.to_dict()) == PAPER
    good = PAPER.to_dict()
    for data in (
        None,
        [],
        {},
        {**good, "more": 1},
        {k: v for k, v in good.items() if k != "rail"},
        {**good, "rail": 0},
        {**good, "rail": float("nan")},
        {**good, "rail": float("inf")},
        {**good, "rail": True},
        {**good, "rail": "fast"},
        {**good, "call_s": -1},
        {**good, "multicast": 1},
        {**good, "name": None},
        {**good, "chunk_cap": 4095},
        {**good, "chunk_cap": 2**31},
    ):
        with pytest.raises(TideConfigError, match="rate"):
            Rates.from_dict(data)
