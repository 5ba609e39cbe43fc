"""Options are checked where they enter: right ones survive a round trip, wrong ones are refused in words."""

from __future__ import annotations

import dataclasses
import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies.config import (
    KNOBS,
    AllGatherConfig,
    CalibrationConfig,
    DebugConfig,
    PinnedPlan,
    ReduceScatterConfig,
    TideConfig,
    TopologyConfig,
    parse_topology,
)
from tide_strategies.errors import TideConfigError, TideError


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_TOPOLOGY", raising=False)
    monkeypatch.delenv("TIDE_PLAN", raising=False)


def leaves(obj: Any = None, path: str = "") -> dict[str, Any]:
    """Every option by its dotted name, with its default."""
    out: dict[str, Any] = {}
    obj = TideConfig() if obj is None else obj
    for f in dataclasses.fields(obj):
        value = getattr(obj, f.name)
        if dataclasses.is_dataclass(value):
            out.update(leaves(value, f"{path}{f.name}."))
        else:
            out[f"{path}{f.name}"] = value
    return out


# Option -> (values that are accepted, values that are refused).
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "enabled": ([True, False], [None, 1, "true"]),
    "strict": ([True, False], [0, "yes"]),
    "plan": (["auto", "tide", "stock"], ["Tide", "", None, True]),
    "topology": (
        ["auto", "2x4", " 2 X 4 ", {"nodes": 2, "gpus_per_node": 4}],
        [
            "2",
            "2x",
            "0x4",
            "2x4x1",
            "-1x2",
            "2x" + "9" * 5000,
            4,
            None,
            {"nodes": 2},
            {"nodes": "2", "gpus_per_node": 4},
        ],
    ),
    "timeout_s": ([1, 0.5, 86400.0], [0, -1.0, float("inf"), float("nan"), "300", True, None, 1e300, 10**400]),
    "all_gather.multicast": (["auto", True, False], ["on", 1, None]),
    "all_gather.memory_budget": ([None, 1, 2**40], [0, -5, 1.5, "4GiB", True]),
    "all_gather.slots": ([1, 2, 64], [0, -1, 2.0, "auto", True]),
    "all_gather.cache": (["off", "turnaround", "microbatch"], ["on", True]),
    "reduce_scatter.mode": (["in_place", "slot_reuse"], ["inplace", None]),
    "reduce_scatter.sum_ctas": (["auto", 1, 8, 1024], [0, "8", 1.5, 1025]),
    "reduce_scatter.landing_ctas": (["auto", 1, 8], [0, False]),
    "reduce_scatter.round_width": (["auto", 1, 8], [-3, None, 10**9]),
    "reduce_scatter.chunk_bytes": (["auto", 4096, 1 << 20], [4095, 0, "64k", 2**30 + 1]),
    "reduce_scatter.passes": (["auto", 1, 8], [0, "two", 65]),
    "rail": (["auto", "nccl_rma", "p2p", "local"], ["nccl", ""]),
    "calibration.cache": (["auto", "off", "/some/file.json"], [None, True, 3]),
    "calibration.budget_s": ([0.1, 2], [0, -1, float("nan"), "2s"]),
    "debug.poison_slots": ([True, False], [1, "on"]),
    "debug.autopsy": (["", "stopped"], [None, 1]),
    "debug.trace": (["", "traced"], [None, True]),
}


@pytest.mark.parametrize("option", ["all_gather.cache", "calibration.cache"])
def test_off_is_what_yaml_makes_of_it(option: str) -> None:
    """YAML 1.1 reads a bare ``off`` as false."""
    assert leaves(TideConfig.from_any({option: False}))[option] == "off"


def test_every_option_is_covered_here() -> None:
    assert VALUES.keys() == leaves().keys()


@pytest.mark.parametrize(("option", "value"), [(k, v) for k, (good, _) in VALUES.items() for v in good])
def test_right_values_arrive_and_survive_a_round_trip(option: str, value: Any) -> None:
    config = TideConfig.from_any({option: value})
    changed = leaves(config)
    if option == "topology" and value != "auto":
        assert config.topology == TopologyConfig(nodes=2, gpus_per_node=4)
        changed = {k: v for k, v in changed.items() if not k.startswith("topology")}
    else:
        assert changed[option] == value
        assert type(changed[option]) is type(value)
    default = leaves()
    assert {k for k in changed if changed[k] != default[k]} <= {option}
    assert TideConfig.from_any(config.to_dict()) == config
    assert TideConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config
    assert TideConfig.from_any(config) == config


@pytest.mark.parametrize(("option", "value"), [(k, v) for k, (_, bad) in VALUES.items() for v in bad])
def test_wrong_values_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any({option: value})
    words = str(refused.value)
    assert option in words
    # What was given; of a topology, the part of it that is missing or wrong.
    given_part = {
        "0x4": "got 0",
        repr({"nodes": 2}): "gpus_per_node",
        repr({"nodes": "2", "gpus_per_node": 4}): "got '2'",
    }
    assert given_part.get(str(value), repr(value)[:40]) in words
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, TideError)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"all_gather.slots": 0}, "'all_gather.slots' must be at least 1; got 0"),
        (
            {"plan": "fast"},
            "'plan' must be 'auto' or 'tide' or 'stock' or a section with default, tide, stock, sum_ctas, "
            "landing_ctas, round_width, chunk_bytes, passes; got 'fast' (str)",
        ),
        ({"enabled": 1}, "'enabled' must be true or false; got 1 (int)"),
        ({"timeout_s": "5"}, "'timeout_s' must be a number; got '5' (str)"),
        ({"all_gather": 3}, "'all_gather' must be a section with multicast, slots, memory_budget, cache; got 3 (int)"),
        ({"reduce_scatter.passes": 1.5}, "'reduce_scatter.passes' must be 'auto' or a whole number; got 1.5 (float)"),
        ({"topology": {"nodes": 2}}, "'topology' needs gpus_per_node as well"),
        ({"topology": "two"}, "topology must be 'auto', a mapping with nodes and gpus_per_node, or text such as '2x4'"),
        ({3: True}, "option names are text; got 3"),
        ({"all_gather": {3: True}}, "unknown TIDE option 'all_gather.3'."),
    ],
)
def test_refusals_say_what_is_allowed(mapping: dict[Any, Any], words: str) -> None:
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any(mapping)
    assert words in str(refused.value)


def _nested(depth: int, inner: Any, layer: Any) -> Any:
    for _ in range(depth):
        inner = layer(inner)
    return inner


_LOOP: dict[str, Any] = {}
_LOOP["all_gather"] = _LOOP


@pytest.mark.parametrize(
    "mapping",
    [
        *(_nested(n, 1, lambda v: {"all_gather": v}) for n in (34, 600, 5000)),
        {"plan": {"tide": _nested(600, 1, lambda v: [v])}},
        {"a." * 600 + "a": 1},
        _nested(300, 1, lambda v: {"a.b": v}),
        _LOOP,
    ],
    ids=["34", "600", "5000", "lists", "dotted", "both", "loop"],
)
def test_sections_within_sections_without_end_are_refused_in_words(mapping: dict[str, Any]) -> None:
    with pytest.raises(TideConfigError, match=r"(more|deeper) than 32 sections") as refused:
        TideConfig.from_any(mapping)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("value", [3, "all_gather.slots=3", [("plan", "auto")], object()])
def test_only_mappings_and_configs_are_options(value: Any) -> None:
    with pytest.raises(TideConfigError, match="must be a mapping or a TideConfig"):
        TideConfig.from_any(value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("strct", "'strict'"),
        ("all_gathr.slots", "'all_gather'"),
        ("all_gather.slot", "'all_gather.slots'"),
        ("reduce_scatter.chunk_byte", "'reduce_scatter.chunk_bytes'"),
        ("debug.poison_slot", "'debug.poison_slots'"),
        ("topology.node", "'topology.nodes'"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(key: str, suggestion: str) -> None:
    for mapping in ({key: 1}, {key.split(".")[0]: {key.split(".")[1]: 1}} if "." in key else {key: 1}):
        with pytest.raises(TideConfigError, match=f"did you mean {suggestion}\\?"):
            TideConfig.from_any(mapping)


def test_an_option_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any({"zzz": 1})
    assert "did you mean" not in str(refused.value)
    assert "unknown TIDE option 'zzz'. Known here: enabled, strict, plan" in str(refused.value)


def test_nested_and_dotted_forms_mean_the_same_and_mix() -> None:
    want = TideConfig(
        strict=True,
        topology=TopologyConfig(nodes=1, gpus_per_node=2),
        all_gather=AllGatherConfig(slots=3, cache="off"),
        reduce_scatter=ReduceScatterConfig(chunk_bytes=8192),
        calibration=CalibrationConfig(budget_s=0.5),
        debug=DebugConfig(trace="traced"),
    )
    nested = {
        "strict": True,
        "topology": {"nodes": 1, "gpus_per_node": 2},
        "all_gather": {"slots": 3, "cache": "off"},
        "reduce_scatter": {"chunk_bytes": 8192},
        "calibration": {"budget_s": 0.5},
        "debug": {"trace": "traced"},
    }
    dotted = {
        "strict": True,
        "topology.nodes": 1,
        "topology.gpus_per_node": 2,
        "all_gather.slots": 3,
        "all_gather.cache": "off",
        "reduce_scatter.chunk_bytes": 8192,
        "calibration.budget_s": 0.5,
        "debug.trace": "traced",
    }
    mixed = {"all_gather.slots": 3, **nested, "all_gather": {"cache": "off"}}
    sections = {
        "all_gather": want.all_gather,
        "topology": "1x2",
        **{k: v for k, v in dotted.items() if "gather" not in k},
    }
    del sections["topology.nodes"], sections["topology.gpus_per_node"]
    for given_form in (nested, dotted, mixed, sections):
        assert TideConfig.from_any(given_form) == want
    assert want != TideConfig()
    assert TideConfig.from_any(None) == TideConfig.from_any({}) == TideConfig()


@pytest.mark.parametrize(
    "mapping",
    [
        {"topology": "2x2", "topology.nodes": 2},
        {"topology.nodes": 2, "topology": "2x2"},
        {"debug": True, "debug.trace": "traced"},
        {"debug.trace": "traced", "debug": True},
    ],
)
def test_a_value_and_a_section_of_one_name_contradict_each_other(mapping: dict[str, Any]) -> None:
    with pytest.raises(TideConfigError, match="both as a value and as a section"):
        TideConfig.from_any(mapping)


def test_the_callers_mapping_is_left_alone() -> None:
    mapping = {"all_gather": {"slots": 3}, "all_gather.cache": "off"}
    before = json.dumps(mapping)
    TideConfig.from_any(mapping)
    assert json.dumps(mapping) == before


def test_omegaconf_nodes_are_mappings_like_any_other() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    base = omegaconf.OmegaConf.create(TideConfig().to_dict())
    assert TideConfig.from_any(base) == TideConfig()
    override = omegaconf.OmegaConf.from_dotlist(["all_gather.slots=4", "timeout_s=12.5", "topology=1x2", "strict=true"])
    merged = TideConfig.from_any(omegaconf.OmegaConf.merge(base, override))
    assert (merged.all_gather.slots, merged.timeout_s, merged.strict) == (4, 12.5, True)
    assert merged.topology == TopologyConfig(nodes=1, gpus_per_node=2)
    interpolated = omegaconf.OmegaConf.create({"n": 5, "tide": {"all_gather": {"slots": "${n}"}}})
    assert TideConfig.from_any(interpolated.tide).all_gather.slots == 5
    with pytest.raises(TideConfigError, match=r"did you mean 'all_gather\.slots'"):
        TideConfig.from_any(omegaconf.OmegaConf.create({"all_gather": {"slot": 1}}))


def test_configs_cannot_be_changed_behind_the_checks() -> None:
    config = TideConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_s = -1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.all_gather.slots = 0  # type: ignore[misc]
    with pytest.raises(TideConfigError, match="timeout_s"):
        dataclasses.replace(config, timeout_s=-1.0)
    with pytest.raises(TideConfigError, match="'all_gather' must be a section"):
        TideConfig(all_gather=DebugConfig())  # type: ignore[arg-type]


# --- topology from the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize("given_form", [None, {}, {"topology": "auto"}, TideConfig(), {"strict": False}])
def test_the_environment_overrides_auto_at_every_door(monkeypatch: pytest.MonkeyPatch, given_form: Any) -> None:
    monkeypatch.setenv("TIDE_TOPOLOGY", "1x2")
    assert TideConfig.from_any(given_form).topology == TopologyConfig(nodes=1, gpus_per_node=2)


def test_a_topology_stated_in_the_options_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_TOPOLOGY", "1x2")
    want = TopologyConfig(nodes=1, gpus_per_node=4)
    for given_form in (
        {"topology": "1x4"},
        {"topology.nodes": 1, "topology.gpus_per_node": 4},
        TideConfig(topology=want),
    ):
        assert TideConfig.from_any(given_form).topology == want


@pytest.mark.parametrize("text", ["", "auto"])
def test_an_environment_that_says_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TIDE_TOPOLOGY", text)
    assert TideConfig.from_any(None) == TideConfig()


def test_a_wrong_environment_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_TOPOLOGY", "two by four")
    with pytest.raises(TideConfigError, match=r"TIDE_TOPOLOGY.*'two by four'"):
        TideConfig.from_any(None)


@given(st.integers(1, 10**9 - 1), st.integers(1, 10**9 - 1), st.sampled_from(["x", "X", " x "]))
def test_topology_text_is_read_as_written(nodes: int, ranks: int, by: str) -> None:
    assert parse_topology(f"{nodes}{by}{ranks}") == TopologyConfig(nodes=nodes, gpus_per_node=ranks)


@given(st.text(max_size=12))
def test_any_topology_text_is_read_or_refused(text: str) -> None:
    try:
        topology = parse_topology(text)
    except TideConfigError:
        return
    assert parse_topology(f"{topology.nodes}x{topology.gpus_per_node}") == topology


# --- anything at all ------------------------------------------------------------------------------------------

NAMES = sorted({part for name in leaves() for part in (name, *name.split("."))} | {"nodes", "gpus_per_node"})
keys = st.one_of(
    st.sampled_from(NAMES),
    st.text(string.ascii_lowercase + "._", max_size=8),
    st.integers(),
    st.none(),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 10_000),
    st.floats(),
    st.floats(0.1, 100.0),
    st.text(max_size=6),
    st.sampled_from(["auto", "tide", "stock", "off", "turnaround", "in_place", "local", "1x2", "0x1"]),
    st.lists(st.integers(), max_size=2),
    st.binary(max_size=3),
)
values = st.recursive(plain, lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=8)
likely = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from(good + bad[:1] * (i % 4 == 0)) for i, (name, (good, bad)) in enumerate(VALUES.items())
    },
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(likely, st.dictionaries(keys, values, max_size=4)))
def test_any_mapping_gives_a_config_that_survives_a_round_trip_or_a_refusal(mapping: dict[Any, Any]) -> None:
    try:
        config = TideConfig.from_any(mapping)
    except TideConfigError:
        return
    assert TideConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(TideConfig.from_any(config.to_dict()))


# --- a pinned plan --------------------------------------------------------------------------------------------


def test_a_pinned_plan_survives_a_round_trip_and_names_groups() -> None:
    given_form = {"plan": {"default": "stock", "tide": ["blocks.*", "head"], "stock": ["blocks.3"]}}
    config = TideConfig.from_any(given_form)
    assert config.plan == PinnedPlan(default="stock", tide=("blocks.*", "head"), stock=("blocks.3",))
    assert TideConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config
    assert isinstance(config.plan, PinnedPlan)
    paths = {name: config.plan.path(name) for name in ("blocks.0", "blocks.3", "head", "(root)")}
    assert paths == {"blocks.0": "tide", "blocks.3": "stock", "head": "tide", "(root)": "stock"}
    assert TideConfig.from_any({"plan": {}}).plan == PinnedPlan()


def test_a_pinned_plan_comes_from_omegaconf_too() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = TideConfig.from_any(omegaconf.OmegaConf.create({"plan": {"stock": ["a", "b"]}}))
    assert config.plan == PinnedPlan(stock=("a", "b"))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"default": "auto"}, "'plan.default' must be 'tide' or 'stock'"),
        ({"stock": "lm_head"}, "'plan.stock' must be a list of texts"),
        ({"stock": [1]}, "'plan.stock' must be a list of texts"),
        ({"tides": []}, "unknown TIDE option 'plan.tides'; did you mean 'plan.tide'?"),
    ],
)
def test_a_wrong_pinned_plan_is_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any({"plan": plan})
    assert words in str(refused.value)


def test_the_environment_decides_what_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_PLAN", "stock")
    assert TideConfig.from_any(None).plan == "stock"
    assert TideConfig.from_any({"plan": "tide"}).plan == "tide"
    monkeypatch.setenv("TIDE_PLAN", "fast")
    with pytest.raises(TideConfigError, match="environment variable TIDE_PLAN"):
        TideConfig.from_any(None)


# ---- knobs of a pinned plan


def test_a_pinned_plan_may_state_every_knob() -> None:
    knobs = {"chunk_bytes": 8192, "sum_ctas": 4, "landing_ctas": 2, "round_width": 3, "passes": 2}
    config = TideConfig.from_any({"plan": {"default": "tide", **knobs}})
    assert config.stated_knobs() == knobs
    assert TideConfig.from_any(json.loads(json.dumps(config.to_dict()))) == config
    assert TideConfig().stated_knobs() == {}
    mixed = TideConfig.from_any({"plan": {"passes": 2}, "reduce_scatter": {"chunk_bytes": 4096, "passes": 2}})
    assert mixed.stated_knobs() == {"chunk_bytes": 4096, "passes": 2}
    assert TideConfig.from_any({"plan.round_width": 2}).stated_knobs() == {"round_width": 2}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"chunk_byte": 4096}, "unknown TIDE option 'plan.chunk_byte'; did you mean 'plan.chunk_bytes'?"),
        ({"chunk_bytes": "64k"}, "'plan.chunk_bytes' must be 'auto' or a whole number; got '64k'"),
        ({"chunk_bytes": 1}, "'plan.chunk_bytes' must be at least 4096; got 1"),
        ({"chunk_bytes": 1 << 40}, f"'plan.chunk_bytes' must be at most {1 << 30}; got {1 << 40}"),
        ({"sum_ctas": 0}, "'plan.sum_ctas' must be at least 1; got 0"),
        ({"sum_ctas": 10**9}, "'plan.sum_ctas' must be at most 1024"),
        ({"round_width": True}, "'plan.round_width' must be 'auto' or a whole number"),
        ({"passes": 1000}, "'plan.passes' must be at most 64; got 1000"),
    ],
)
def test_unknown_and_absurd_knobs_are_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any({"plan": plan})
    assert words in str(refused.value)


def test_a_knob_that_is_stated_twice_must_be_stated_alike() -> None:
    with pytest.raises(TideConfigError, match=r"'reduce_scatter.passes' and 'plan.passes' are 2 and 3: state one"):
        TideConfig.from_any({"plan": {"passes": 3}, "reduce_scatter.passes": 2})


_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["default", "tide", "stock", *KNOBS, "knobs", ""]), _ANYTHING, max_size=4))
def test_any_pinned_plan_is_one_or_a_clear_refusal(plan: dict[str, Any]) -> None:
    try:
        config = TideConfig.from_any({"plan": plan})
    except TideConfigError as e:
        assert "plan" in str(e)  # noqa: PT017
    else:
        assert all(1 <= value <= 1 << 30 for value in config.stated_knobs().values())
