"""The forecast of the arena is what the runtime allocates, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from harness import launch
from models import BF16, Case, batch, build

from tide_strategies import apply_tide
from tide_strategies.cli.plan import arena_of_cpu_ranks
from tide_strategies.fsdp2 import access
from tide_strategies.fsdp2.describe import planner_groups
from tide_strategies.planner import memory
from tide_strategies.runtime.group import AUTO_CHUNK_BYTES
from tide_strategies.topology import Topology

#: Case -> options. Uneven sizes, groups that stay unsharded, another ring, another chunk, bf16, one group alone.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "uneven": ({"uneven": True}, {}),
    "bf16": ({"policy": BF16}, {"all_gather": {"slots": 3}}),
    "stays": ({"reshard": False}, {"reduce_scatter": {"chunk_bytes": 5000}}),
    "root only": ({"root_only": True}, {"all_gather": {"slots": 1}}),
    "budget": ({}, {"all_gather": {"memory_budget": 40_000}}),
    "many slots": ({"blocks": 3}, {"all_gather": {"slots": 9}, "reduce_scatter": {"chunk_bytes": 1 << 16}}),
}


#: With processes that stand for nodes.
NODES = {
    "nodes": ({}, {"topology": {"nodes": 2, "gpus_per_node": 2}}),
    "lane": ({"policy": BF16}, {"topology": {"nodes": 4, "gpus_per_node": 1}}),
}


def _job(rank: int, world: int, _: Any) -> dict[str, Any]:
    out = {}
    for name, (case, options) in (NODES if world == 4 else CASES).items():
        model = build(Case(name, **case), world)
        tide = apply_tide(model, {"plan": "tide", "timeout_s": 30, **options})
        model(batch(0, rank))
        chunk = options.get("reduce_scatter", {}).get("chunk_bytes", AUTO_CHUNK_BYTES)
        forecast = arena_of_cpu_ranks(
            planner_groups(access.param_groups(model)),
            Topology(*options.get("topology", {"nodes": 1, "gpus_per_node": world}).values()),
            chunk_bytes=chunk,
            ring=memory.Ring(**options.get("all_gather", {})),
        )
        out[name] = (forecast, tide.report().arena_bytes)
        tide.close()
    return out


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(request.param, _job)


@pytest.mark.parametrize("name", CASES)
def test_forecast_equals_what_is_allocated(job: list[dict[str, Any]], name: str) -> None:
    for result in job:
        forecast, allocated = result[name]
        assert forecast == allocated
        assert allocated["staging"] > 0


def test_forecast_equals_what_processes_that_stand_for_nodes_allocate() -> None:
    for result in launch(4, _job):
        for forecast, allocated in result.values():
            assert forecast == allocated
            assert {"outbox", "inbox", "spare"} <= allocated.keys()
        assert "stage" in result["nodes"][1]
        assert not {"stage", "staging"} & result["lane"][1].keys()
