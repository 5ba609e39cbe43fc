"""The event engine: shares of resources, weights, and order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_strategies.planner.events import Simulation


def ends(flows, capacity) -> list[float]:
    """When each (start, bytes, uses) ends."""
    simulation = Simulation(capacity.__getitem__)
    out = [0.0] * len(flows)

    def begin(i: int) -> None:
        simulation.flow(flows[i][1], flows[i][2], lambda: out.__setitem__(i, simulation.now))

    for i, (start, _, _) in enumerate(flows):
        simulation.after(start, lambda i=i: begin(i))
    simulation.run()
    return out


def test_one_flow_moves_at_the_rate_of_its_tightest_resource() -> None:
    assert ends([(1.0, 100, {"a": 1, "b": 1})], {"a": 50, "b": 20}) == [pytest.approx(6.0)]


def test_two_flows_share_and_the_second_speeds_up_when_the_first_is_through() -> None:
    # Half each until 100 bytes of both are through at 20 s, then the rest of the second alone.
    assert ends([(0, 100, {"a": 1}), (0, 150, {"a": 1})], {"a": 10}) == [pytest.approx(20), pytest.approx(25)]


def test_a_flow_that_comes_later_slows_the_first() -> None:
    assert ends([(0, 100, {"a": 1}), (5, 100, {"a": 1})], {"a": 10}) == [pytest.approx(15), pytest.approx(20)]


def test_a_weight_takes_more_of_a_resource() -> None:
    assert ends([(0, 100, {"a": 2})], {"a": 10}) == [pytest.approx(20)]


def test_nothing_to_move_takes_no_time() -> None:
    assert ends([(3, 0, {"a": 1})], {"a": 10}) == [3]


flow = st.tuples(st.floats(0, 10), st.integers(0, 10**12), st.sampled_from([{"a": 1}, {"b": 1}, {"a": 1, "b": 2}]))


@given(st.lists(flow, min_size=1, max_size=12))
def test_no_resource_moves_faster_than_it_can_and_every_flow_ends(flows) -> None:
    capacity = {"a": 1e9, "b": 3e9}
    simulation = Simulation(capacity.__getitem__)
    done = []
    for start, nbytes, uses in flows:
        simulation.after(start, lambda n=nbytes, u=uses: simulation.flow(n, u, lambda: done.append(1)))
    total = simulation.run()
    assert len(done) == len(flows)
    for resource, moved in simulation.busy().items():
        wanted = sum(n * u.get(resource, 0) for _, n, u in flows)
        assert moved == pytest.approx(wanted, rel=1e-6, abs=10)
        assert moved <= capacity[resource] * total * (1 + 1e-9) + 10
