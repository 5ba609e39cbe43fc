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
from commands import Output, run

from tide_strategies.cli.main import COMMANDS
from tide_strategies.cli.tables import WIDTH, gib, table


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


def test_no_file_of_a_rank_holds_an_autopsy_up(tmp_path: Path, capsys: Output) -> None:
    os.mkfifo(tmp_path / "tide-a.json")
    (tmp_path / "tide-b.json").mkdir()
    (tmp_path / "tide-c.json").touch()
    os.truncate(tmp_path / "tide-c.json", 3 << 30)
    assert run("autopsy", str(tmp_path)) == 1
    said = capsys.readouterr().err
    for words in ("tide-a.json: no regular file", "tide-b.json: IsADirectoryError", "tide-c.json: no regular file, or"):
        assert words in said


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
