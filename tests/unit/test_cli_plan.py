"""``tide plan``: what it reads, what it refuses, and the numbers that it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import LLAMA, Output, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tide_strategies import _native
from tide_strategies.cli.plan import arena_of_gpu_ranks
from tide_strategies.errors import TideConfigError
from tide_strategies.planner import architectures, memory
from tide_strategies.planner.groups import Group, Model
from tide_strategies.planner.knobs import Knobs
from tide_strategies.planner.rates import PAPER
from tide_strategies.runtime.calls import CallBook
from tide_strategies.topology import Topology


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-3.1-70b", 70.55, 1), ("qwen3-30b-a3b", 30.53, 0.11), ("wan2.2-14b", 14.3, 1)],
)
def test_presets_have_the_known_numbers_of_parameters(name: str, billions: float, active: float) -> None:
    model = architectures.preset(name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert model.active_share == pytest.approx(active, abs=0.005)


def test_llamas_arena_on_64_gpus_is_the_papers() -> None:
    """Section 7.2: 6.1 GiB. The paper folds the group that stays unsharded into the ring, so it takes no more."""
    model = architectures.preset("llama-3.1-70b")
    folded = [Group(g.name, g.params, True) for g in model.groups]
    arena = memory.arena_across_nodes(folded, Topology(8, 8), mode="in_place", round_width=4)
    assert sum(arena.values()) / 2**30 == pytest.approx(6.1, abs=0.1)


def test_stock_holds_four_times_the_largest_group_and_tide_at_most_its_bound() -> None:
    group = architectures.block("b", [(512 * 64, 1024)], 2)
    model = Model("m", (group,) * 4)
    topology = Topology(64, 8)
    for mode, bound in (("in_place", 3.72), ("slot_reuse", 2.29)):
        arena = memory.arena_across_nodes(model.groups, topology, mode=mode, round_width=4)  # type: ignore[arg-type]
        held = memory.step(model, topology, arena, mode=mode)  # type: ignore[arg-type]
        unsharded = group.layout(512).landing_bytes
        assert held.stock == 4 * unsharded
        assert held.symmetric_private == 3 * unsharded
        granules = 8 * memory.GPU_GRANULE
        assert held.tide <= (bound + 1 / 8 / 64 * 8) * unsharded + granules, "a cast stages M shards, not M - 1"


@pytest.mark.parametrize("topology", ["1x8", "8x8", "1x1"])
def test_plans_are_printed_and_given_as_json(topology: str, capsys: Output) -> None:
    assert run("plan", "wan2.2-14b", "--topology", topology) == 0
    text = capsys.readouterr().out
    assert "Wan2.2" in text
    assert max(map(len, text.splitlines())) <= 100
    assert run("plan", "wan2.2-14b", "--topology", topology, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["arena"]["total"] == sum(plan["arena"]["bytes"].values())
    assert sum(g["groups"] for g in plan["groups"]) == plan["model"]["groups"]
    if topology == "8x8":
        assert (plan["plan"]["round_width"], plan["plan"]["sum_ctas"], plan["plan"]["landing_ctas"]) == (4, 4, 4)


def test_a_plan_from_a_config_file(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for where in (tmp_path, tmp_path / "config.json"):
        assert run("plan", str(where), "--gpus", "2", "--device", "cpu", "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 128 * 64 + 2 * 64
        assert plan["model"]["parameters"] == 3 * layer + 2 * 100 * 64 + 64
        assert plan["model"]["groups"] == 5
        assert plan["groups"][0]["first"] == "embed_tokens"
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({**PAPER.to_dict(), "name": "mine"}))
    assert run("plan", str(tmp_path), "--rates", str(rates)) == 0
    assert "rates: mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "parameters"),
    [
        ({"tie_word_embeddings": True}, -100 * 64),
        ({"model_type": "qwen2"}, 3 * (64 + 32 + 32)),
        ({"model_type": "qwen3", "head_dim": 16}, 3 * 2 * 16),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            3 * (4 * 64 + 3 * 3 * 128 * 64),
        ),
    ],
)
def test_families_differ_as_their_models_do(change: dict[str, Any], parameters: int) -> None:
    base = architectures.from_config(LLAMA, "m").parameters
    assert architectures.from_config({**LLAMA, **change}, "m").parameters - base == parameters


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}), st.just([1])
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted({*LLAMA, "head_dim", "num_experts", "decoder_sparse_step", "mlp_only_layers"})),
    junk,
    st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]),
)
def test_any_value_in_a_config_is_a_model_or_a_clear_refusal(key: str, value: Any, kind: str) -> None:
    config = {**LLAMA, "model_type": kind, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    try:
        model = architectures.from_config({**config, key: value}, "fuzzed")
    except TideConfigError as e:
        assert "fuzzed" in str(e) or key in str(e) or "model config" in str(e)  # noqa: PT017
    else:
        assert model.parameters > 0
        assert 0 < model.active_share <= 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.just(b"[" * 100_000), st.just(b"{}"), st.just(b"null")))
def test_any_file_is_a_model_or_a_clear_refusal(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(TideConfigError):
        architectures.from_file(file)


def test_the_gpu_arena_counts_whole_granules() -> None:
    model = architectures.preset("wan2.2-14b")
    chunk = 18 * 2**20
    for multicast in (False, True):
        arena = arena_of_gpu_ranks(
            model.groups,
            Topology(1, 8),
            knobs=Knobs(chunk_bytes=chunk),
            ring=memory.Ring(),
            mode="in_place",
            multicast=multicast,
        )
        assert all(n % memory.GPU_GRANULE == 0 for n in arena.values())
        assert arena["staging"] == 2 * 7 * chunk
        assert sorted(arena) == sorted(["control", "staging", "ring", "pinned"] + ["stage"] * multicast)
        if multicast:  # the own shards of the largest group are cast into it
            largest = max(
                sum(x.shard_bytes(p) for p in range(len(x.params))) for g in model.groups for x in [g.layout(8)]
            )
            assert arena["stage"] - largest in range(memory.GPU_GRANULE)


@pytest.mark.parametrize(("ranks", "groups", "slots"), [(2, 1, 1), (8, 82, 2), (8, 400, 9)])
def test_control_memory_is_what_the_native_core_asks_for(ranks: int, groups: int, slots: int) -> None:
    """On GPUs from its own function, on CPUs from an arena that is really made."""
    counters = CallBook(Topology(1, ranks), groups + slots).counters
    group = architectures.block("b", [(64, 64)], 2)
    on_gpu = memory.arena_on_gpu([group] * groups, ranks, counters=counters, reserved={}, granule=1)
    assert on_gpu["control"] == _native.cuda.Control.control_bytes(ranks, counters)
    on_cpu = memory.arena_on_cpu([group] * groups, Topology(1, ranks), counters=counters, reserved={})
    assert on_cpu["control"] == _native.Arena.create(ranks, 0, counters).control_bytes


def test_a_budget_without_room_for_a_slot_is_refused() -> None:
    group = architectures.block("b", [(64, 64)], 2)
    with pytest.raises(TideConfigError, match="no room for a slot of 8192"):
        memory.arena_on_cpu([group], Topology(1, 2), counters=4, reserved={}, ring=memory.Ring(memory_budget=8191))


def test_a_model_with_a_step_has_a_peak_on_any_device(capsys: Output) -> None:
    """As the demo is planned; a torch without CUDA runs the step with CPU operators, and says so."""
    for device in ("cpu", "cuda"):
        words = ["tide_strategies.cli.demo_model:planned", "--gpus", "2", "--device", device, "--precision", "32-true"]
        assert run("plan", *words, "--json") == 0
        out = capsys.readouterr()
        plan = json.loads(out.out)
        peak, states = plan["peak"], plan["memory"]["states"] - plan["memory"]["gradients"]
        assert peak["how"] == "dry run"
        assert states + peak["forward"] + plan["arena"]["total"] // 2 < peak["tide"] < 3 * states
        assert ("no CUDA" in out.err) == (device == "cuda" and not torch.backends.cuda.is_built())


def test_stated_activations_bound_the_peak_and_nonsense_is_refused(capsys: Output) -> None:
    assert run("plan", "wan2.2-14b", "--activations-gib", "20", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    memo = plan["memory"]
    assert plan["peak"]["how"] == "bound"
    assert plan["peak"]["tide"] == memo["states"] + memo["tide"] + 20 * 2**30
    assert plan["peak"]["stock"] == memo["states"] + memo["stock"] + 20 * 2**30
    assert run("plan", "wan2.2-14b") == 0
    assert "--activations-gib" in capsys.readouterr().out
    for bad in ("-1", "nan", "1e99"):
        assert run("plan", "wan2.2-14b", "--activations-gib", bad) == 1
        assert "--activations-gib must be" in capsys.readouterr().err
