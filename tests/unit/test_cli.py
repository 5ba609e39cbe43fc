"""The command line: starts fast, fits a terminal, gives JSON to machines, and never a traceback to a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tide_strategies import _native
from tide_strategies.cli import checks, doctor
from tide_strategies.cli.main import COMMANDS, main
from tide_strategies.cli.plan import arena_of_gpu_ranks
from tide_strategies.cli.tables import WIDTH, gib, table
from tide_strategies.errors import TideConfigError
from tide_strategies.planner import architectures, memory
from tide_strategies.planner.calibrate import fingerprint
from tide_strategies.planner.groups import Group, Model
from tide_strategies.planner.knobs import Knobs
from tide_strategies.planner.rates import PAPER
from tide_strategies.runtime.calls import CallBook
from tide_strategies.topology import Topology

Output = pytest.CaptureFixture[str]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as e:
        return int(e.code or 0)


# --- all commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits(command: str, capsys: Output) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert command in text
    assert max(len(line) for line in text.splitlines()) <= 130


@pytest.mark.parametrize("arguments", [["plan", "wan2.2-14b", "--json"], ["timeline"], ["explain", "TIDE-F003"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    code = (
        f"import sys; from tide_strategies.cli.main import main; main({arguments!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "llama-3.1-7b"], "did you mean 'llama-3.1-70b'?"),
        (
            ["plan", "llama-3.1-70b", "--rates", "fast"],
            "--rates is paper, h200-pair, cpu-pair, calibrated, or a JSON file",
        ),
        (["plan", "llama-3.1-70b", "--topology", "2x"], "topology must be"),
        (["plan", "no_such_module:build"], "cannot build a model from 'no_such_module:build': ModuleNotFoundError"),
        (["explain", "resnet"], "MODEL is package.module:function or a code"),
        (["explain", "a:b", "--set", "slots"], "--set takes OPTION=VALUE"),
        (["explain", "a:b", "--set", "all_gather.slot=3"], "did you mean 'all_gather.slots'?"),
        (["explain", "a:b", "--set", "a." * 600 + "a=1"], "nested deeper than 32 sections"),
        (["explain", "a:b", "--set", "plan=" + '{"a":' * 600 + "1" + "}" * 600], "nested deeper than 32 sections"),
        (["explain", "a:b", "--set", "plan=" + "[" * 10**5], "'plan' must be 'auto' or 'tide' or 'stock'"),
        (["timeline", "--from", "/no/such/file"], "cannot read a trace"),
        (["timeline", "--mib", "-1"], "--mib must be from 0.0009765625 to 1048576; got -1.0"),
        (["timeline", "--mib", "1e-9"], "--mib must be from"),
        (["timeline", "--params", "0"], "--params must be from 1 to 10000; got 0"),
        (["timeline", "--delay-us", "nan"], "--delay-us must be from 0 to 1000000000; got nan"),
        (["plan", "nothing"], "no preset and no file 'nothing'. Presets: llama-3.1-70b"),
        (["plan", "./none.json"], "no file './none.json': MODEL is a preset, a config.json or its folder"),
        (["plan", "wan2.2-14b", "--slots", "4097"], "'all_gather.slots' must be at most 4096; got 4097"),
        (["explain", "a:b", "--set", "all_gather.slots=" + "9" * 30], "'all_gather.slots' must be at most 4096"),
        (["explain", "a:b", "--ranks", "36865"], "--ranks must be at most 36864; got 36865"),
        (["explain", "TIDE-F999"], "no code 'TIDE-F999'; codes are TIDE-F001 to TIDE-F103"),
        (["timeline", "--svg", "/no/such/folder/x.svg"], "cannot write"),
        (["autopsy", "/no/such/folder"], "no folder"),
    ],
)
def test_what_is_wrong_is_said_on_stderr_with_exit_code_1(arguments: list[str], words: str, capsys: Output) -> None:
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "wan2.2-14b", "--gpus", "two"], "--gpus: must be a whole number from 1 to 10^9; got 'two'"),
        (["explain", "a:b", "--ranks", "9" * 5000], "--ranks: must be a whole number from 1 to 10^9; got '9999"),
        (["verify", "--topology", "x"], "--topology: 'x' is no topology of one node or more, such as 8x8"),
        (["verify", "--topology", "0x2"], "'0x2' is no topology of one node or more"),
        (["verify", "--preset", "wan2.2-14b"], "--preset says nothing without --topology"),
        (["verify", "--faults", "--passes", "2"], "--passes says nothing without --topology or --base-plans"),
        (["verify", "--base-plans", "--slot-reuse"], "--slot-reuse says nothing without --topology"),
    ],
)
def test_wrong_usage_is_said_on_stderr_with_exit_code_2(arguments: list[str], words: str, capsys: Output) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "FILE"],
        ["plan", "wan2.2-14b", "--rates", "FILE"],
        ["timeline", "--rates", "FILE"],
        ["timeline", "--from", "FILE"],
        ["explain", "a:b", "--config", "FILE"],
        ["explain", "a:b", "--config", "FILE.yaml"],
        ["autopsy", "FILE"],
        ["timeline", "--measured", "FILE"],
    ],
    ids=" ".join,
)
def test_whatever_a_file_is_it_holds_nobody_up_and_ends_in_words(
    arguments: list[str], tmp_path: Path, capsys: Output
) -> None:
    """Pipes, folders, links to nowhere, files beyond all bounds, no text, numbers and nests without end."""
    name = tmp_path / ("options.yaml" if "FILE.yaml" in arguments else "file.json")
    words = [str(name) if a.startswith("FILE") else a for a in arguments]

    def sparse() -> None:
        name.touch()
        os.truncate(name, 3 << 30)

    makes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: os.mkfifo(name),
        name.mkdir,
        lambda: name.symlink_to(tmp_path / "nowhere"),
        sparse,
        lambda: name.write_bytes(b"\xff\xfe\x00"),
        lambda: name.write_text("9" * 10**4),
        lambda: name.write_text('{"a": ' * 10**4),
        lambda: name.write_text("[NaN, 1e999, -1]"),
        lambda: name.write_text(""),
    ]
    for make in makes:
        make()
        assert run(*words) == 1
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.startswith(f"tide {words[0]}: ")
        assert len(said) < 700
        if name.is_dir():
            name.rmdir()
        else:
            name.unlink(missing_ok=True)


@pytest.mark.parametrize("depth", [600, 5000])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_an_options_file_of_sections_without_end_is_refused(
    suffix: str, depth: int, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / f"options{suffix}"
    file.write_text('{"a": ' * depth + "1" + "}" * depth)
    assert run("explain", "a:b", "--config", str(file)) == 1
    said = capsys.readouterr().err
    assert "nested deeper than 32 sections" in said or f"cannot read options from {file}: RecursionError" in said


def test_tables_fit_and_wrap_their_last_column() -> None:
    text = table(["a", "long"], [("x", "word " * 60), ("y", "z")])
    lines = text.splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= WIDTH
    assert [gib(n) for n in (5, 2**20, 3 * 2**30)] == ["5 B", "1.00 MiB", "3.00 GiB"]


# --- plan -----------------------------------------------------------------------------------------------------


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


# --- explain --------------------------------------------------------------------------------------------------


def test_explain_builds_a_model_and_tells_each_groups_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    (tmp_path / "explained.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)])\n"
        "    model[2].half()\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("explain", "explained:build", "--precision", "32-true", "--json", "--ranks", "16") == 0
    found = json.loads(capsys.readouterr().out)
    codes = {g["name"]: g["code"] for g in found["groups"]}
    assert codes == {"0": "TIDE-OK", "1": "TIDE-OK", "2": "TIDE-F006", "3": "TIDE-OK"} | (
        {"(root)": codes["(root)"]} if "(root)" in codes else {}
    )
    assert run("explain", "explained:build", "--precision", "32-true", "--strict") == 1
    text = capsys.readouterr().out
    assert "TIDE-F006 (1 groups, the first is 2)" in text
    assert "Remedy: use bfloat16 or float32 parameters" in text
    options = tmp_path / "options.json"
    options.write_text('{"plan": "stock"}')
    assert run("explain", "explained:build", "--config", str(options), "--json") == 0
    assert {g["code"] for g in json.loads(capsys.readouterr().out)["groups"]} >= {"TIDE-F022"}
    assert run("plan", "explained:build", "--gpus", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] == 8 * (64 * 64 + 64)


def test_explain_judges_for_the_ranks_of_the_job_and_not_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """A GPU sums at most 256 parameters of a group at once; CPU ranks any number."""
    (tmp_path / "many.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Module()\n"
        "    model.weights = nn.ParameterList(torch.empty(32) for _ in range(300))\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def codes(*arguments: str) -> tuple[str, set[str]]:
        assert run("explain", "many:build", "--json", *arguments) == 0
        found = json.loads(capsys.readouterr().out)
        return found["device"], {g["code"] for g in found["groups"]}

    # A GPU that this machine may have is not asked.
    asked = mock.Mock(side_effect=AssertionError)
    with mock.patch("tide_strategies.runtime.cuda.capability.missing_capability", asked):
        assert codes() == ("cuda", {"TIDE-F017"})
    assert codes("--device", "cpu") == ("cpu", {"TIDE-OK"})
    assert run("explain", "many:build", "--strict") == 1
    assert "many:build over 8 GPU ranks: 0 of 1 groups accelerated" in capsys.readouterr().out


def test_explain_tells_about_a_code(capsys: Output) -> None:
    assert run("explain", "tide-f012", "--json") == 0
    assert json.loads(capsys.readouterr().out)["code"] == "TIDE-F012"


# --- timeline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("topology", ["1x4", "3x2"])
def test_a_timeline_is_text_a_picture_and_a_trace_that_can_be_read_back(
    collective: str, topology: str, tmp_path: Path, capsys: Output
) -> None:
    svg, trace = tmp_path / "t.svg", tmp_path / "t.json"
    arguments = ["timeline", collective, "--topology", topology, "--mib", "4", "--svg", str(svg), "--trace", str(trace)]
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert "#" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"M", "X"} == {e["ph"] for e in events}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    assert run("timeline", "--from", str(trace)) == 0
    assert "#" in capsys.readouterr().out


def test_a_profile_is_drawn_from_its_tide_ranges(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "profile.json"
    events = [
        {"ph": "X", "name": "TIDE::all_gather (blocks.0)", "pid": 7, "tid": 1, "ts": 1000.0, "dur": 5},
        {"ph": "X", "name": "TIDE::all_gather_wait (blocks.0)", "pid": 7, "tid": 1, "ts": 1010.0, "dur": 5},
        {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 1, "ts": 0, "dur": 5},
        {"ph": "X", "name": "TIDE::broken", "ts": "soon"},
        3,
    ]
    file.write_text(json.dumps({"traceEvents": events}))
    assert run("timeline", "--from", str(file)) == 0
    text = capsys.readouterr().out
    assert "0.015 ms" in text
    assert "." in text
    file.write_text(json.dumps({"traceEvents": events[2:3]}))
    assert run("timeline", "--from", str(file)) == 1
    assert "no range of TIDE" in capsys.readouterr().err


# --- doctor ---------------------------------------------------------------------------------------------------


def test_the_doctor_finds_cpu_ranks_well_here(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_TOPOLOGY", raising=False)
    assert run("doctor", "--json") in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"] is True
    assert {c["area"] for c in found["checks"]} >= {"software", "CPU ranks", "GPU ranks", "several nodes", "job"}
    assert all(c["status"] in ("ok", "note", "warn", "fail") for c in found["checks"])
    run("doctor")
    text = capsys.readouterr().out
    assert "CPU ranks of one host: yes." in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TIDE_TOPOLOGY": "2x"}, "TIDE_TOPOLOGY"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, "launcher"),
        ({"WORLD_SIZE": "many"}, "launcher"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}, "order of ranks"),
    ],
)
def test_a_job_that_cannot_run_is_a_failure_with_a_remedy(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert run("doctor", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    failed = [c for c in found["checks"] if c["status"] == "fail" and c["area"] == "job"]
    assert [c["name"] for c in failed] == [name]
    assert all(c["remedy"] for c in failed)


def _gpu(missing: str | None, peers: bool = True, switches: dict[str, str] | None = None) -> list[checks.Check]:
    info = {"name": "GPU", "compute_capability": (9, 0), "total_memory": 2**37, "async_engines": 3}
    cuda = mock.Mock()
    cuda.probe.return_value = {"available": True, "reason": "", "driver_version": 13000, "devices": 2}
    cuda.device_info.return_value = {**info, "multicast_supported": True}
    cuda.can_access_peer.return_value = peers
    cuda.multicast_switched_off.side_effect = _native.cuda.multicast_switched_off
    cuda.multicast_refusal.side_effect = lambda device: (
        f"it is switched off ({off})" if (off := _native.cuda.multicast_switched_off()) else ""
    )
    with (
        mock.patch("tide_strategies._native.cuda", cuda),
        mock.patch("tide_strategies.runtime.cuda.capability.missing_capability", return_value=missing),
        mock.patch.dict("os.environ", {"NCCL_NVLS_ENABLE": "0"} if switches is None else switches),
    ):
        return list(checks._gpu())


@pytest.mark.parametrize(
    ("missing", "peers", "able", "words"),
    [
        (None, True, True, ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS is not set; it must be 32", True, False, "set CUDA_DEVICE_MAX_CONNECTIONS=32"),
        ("triton is not installed", True, False, "pip install triton"),
        ("the driver has CUDA 11.8", True, False, "CUDA 12 or newer"),
        (None, False, False, "(CUDA_VISIBLE_DEVICES): groups over these stay stock (TIDE-F020)"),
    ],
)
def test_gpus_that_cannot_say_why_and_what_helps(missing: str | None, peers: bool, able: bool, words: str) -> None:
    found = _gpu(missing, peers)
    assert doctor.summary(found)["gpu"] is able
    assert doctor.summary(found)["here"] is able, "a GPU that cannot is not made up for by the CPU"
    assert any(words in c.remedy for c in found)
    assert any("switched off (NCCL_NVLS_ENABLE=0)" in c.found for c in found)


@pytest.mark.parametrize(
    ("switches", "status", "words", "remedy"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, "note", "nothing forbids it", ""),
        ({"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}, "note", "switched off (NCCL_NVLS_ENABLE=0)", ""),
        # NCCL itself does not look at torch's variable.
        (
            {"NCCL_NVLS_ENABLE": "2", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
            "warn",
            "switched off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)",
            "set NCCL_NVLS_ENABLE=0 as well",
        ),
    ],
)
def test_multicast_and_its_switches_are_told(switches: dict[str, str], status: str, words: str, remedy: str) -> None:
    with mock.patch.dict("os.environ"):
        for name in checks.MULTICAST_SWITCHES:
            checks.os.environ.pop(name, None)
        (found,) = (c for c in _gpu(None, switches=switches) if c.name == "NVSwitch multicast")
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True)
    assert bool(found.remedy) is bool(remedy)


@pytest.mark.parametrize(
    ("probe", "environment", "installed", "words", "remedies"),
    [
        ({"available": True, "version": "2.31.2", "path": "/x/libnccl.so.2"}, {}, None, "2.31.2 (/x/", [""]),
        ({"available": False, "path": "/x", "reason": "NCCL 2.28.9 is loaded"}, {}, None, "2.28.9 is", ["pip install"]),
        ({"available": False, "path": ""}, {}, "2.31.2", "2.31.2 is installed, and not loaded", ["pip install"]),
        ({"available": False, "path": ""}, {}, None, "not installed", [""]),
        (
            {"available": True, "version": "2.32.3", "path": "/x"},
            {"NCCL_CUMEM_ENABLE": "0"},
            None,
            "switched off by NCCL_CUMEM_ENABLE=0",
            ["", "unset NCCL_CUMEM_ENABLE"],
        ),
    ],
)
def test_the_nccl_of_the_process_is_looked_at(
    probe: dict[str, Any], environment: dict[str, str], installed: str | None, words: str, remedies: list[str]
) -> None:
    nccl = mock.Mock(NEEDED="2.31.2")
    nccl.probe.return_value = probe
    with (
        mock.patch("tide_strategies._native.nccl", nccl),
        mock.patch.dict("os.environ", environment),
        mock.patch.object(checks, "installed", return_value=installed),
    ):
        found = [c for c in checks._nodes() if c.name.startswith("NCCL")]
    assert any(words in c.found for c in found), found
    for check, remedy in zip(found, remedies, strict=True):
        assert remedy in check.remedy
        assert bool(check.remedy) is bool(remedy)


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Any:
        raise RuntimeError("no")
        yield

    with mock.patch.object(checks, "_CHECKS", [("job", broken)]):
        (finding,) = checks.everything()
    assert finding.status == "warn"
    assert "RuntimeError: no" in finding.found


def test_facts_of_another_machine_have_another_name() -> None:
    assert fingerprint({"a": "1"}) != fingerprint({"a": "2"})


# --- the peak of a step ---------------------------------------------------------------------------------------


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
