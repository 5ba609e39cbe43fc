"""``tide verify`` from the command line."""

import json

import pytest
from test_verify_faults import ALWAYS, SOMEWHERE

from tide_strategies.cli import verify as command
from tide_strategies.cli.main import main
from tide_strategies.verify.base_plans import Counts
from tide_strategies.verify.faults import FAULTS
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload

BY_NAME = {fault.name: fault for fault in FAULTS}


def test_base_plans_end_with_the_counts(capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "base_plans", lambda passes: iter([Counts(2, 5, 1), Counts(128, 10, 2)]))
    assert main(["verify", "--base-plans"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "up to  128 nodes: accepted 10 rejected 2" in out[0]
    assert any("at most 107520 flat, 13440 coalesced" in line for line in out)
    assert out[-1] == "accepted 10 rejected 2"
    assert main(["verify", "--base-plans", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["nodes"], found["accepted"], found["rejected"]) == (True, 128, 10, 2)
    assert found["queue_pairs"] == {"whole": 512, "rails": 64, "runtime": 128}
    assert found["barrier_steps"] == {"whole": 16384, "rails": 256, "runtime": 512}
    assert (found["copies"]["flat"], found["copies"]["coalesced"]) == (107520, 13440)


def test_real_geometry_is_verified(capsys) -> None:
    assert main(["verify", "--topology", "2x2", "--preset", "qwen3-30b-a3b", "--calls", "2"]) == 0
    assert "6 workloads, 48 results complete, nothing wrong" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("topology", ["2x2", "4x1", "1x2"])
def test_what_gpus_run_is_verified_too(capsys, topology) -> None:
    """Streams side by side, and a landing per rank or multicast; a part of what a user may choose."""
    words = {"--side-by-side": "side by side, a landing per rank", "--multicast": "side by side, multicast"}
    for options in (["--side-by-side"], ["--side-by-side", "--multicast"]):
        knobs = ["--calls", "1", "--round-width", "1", "--chunk-bytes", str(1 << 20), *options]
        assert main(["verify", "--topology", topology, "--preset", "qwen3-30b-a3b", *knobs]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert "nothing wrong" in last
        assert all(words[options[-1]] in line for line in lines)


def test_what_no_schedule_can_have_is_told(capsys) -> None:
    assert main(["verify", "--topology", "2x2", "--multicast"]) == 2
    assert "give both" in capsys.readouterr().err
    assert main(["verify", "--topology", "2x2", "--chunk-bytes", "7"]) == 1
    assert "chunk_bytes must be a multiple of 16 from 32; got 7" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["verify", "--topology", "2x2", "--round-width", "0"])
    assert end.value.code == 2
    assert "--round-width: must be a whole number from 1" in capsys.readouterr().err


def test_a_part_of_the_sample_is_clean_in_words_and_as_json(capsys, monkeypatch) -> None:
    """All of it: ``test_the_whole_sample_is_clean``."""
    monkeypatch.setattr(command, "_SAMPLE", command._SAMPLE[:1])
    monkeypatch.setattr(command, "_LANES", command._LANES[:1])
    assert main(["verify"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.startswith("clean: ") for line in out] == [True] * (len(out) - 1) + [False]
    assert f"sample: {len(out) - 1} workloads, " in out[-1]
    monkeypatch.setattr(command, "_SAMPLE", ())
    assert main(["verify", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["ok"], found["what"], found["violations"]) == (True, "sample", [])
    assert found["workloads"] == captured.err.count("clean: ") == len(command._sample())
    assert found["results"] > found["workloads"]


@pytest.mark.exhaustive
def test_the_whole_sample_is_clean(capsys) -> None:
    assert main(["verify"]) == 0
    assert "nothing wrong" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.exhaustive
def test_every_fault_is_found_by_the_command(capsys) -> None:
    assert main(["verify", "--faults"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("13 kinds of faults, 45 pairs of a kind and a schedule, ")


def test_which_faults_must_always_be_found_is_what_is_proven() -> None:
    assert BY_NAME.keys() - command._MAY_CHANGE_NOTHING == set(ALWAYS)
    assert set(SOMEWHERE) == command._MAY_CHANGE_NOTHING


def test_faults_are_counted_by_kind_pair_and_place(capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "FAULTS", [BY_NAME["dropped zeroing"], BY_NAME["lost contribution"]])
    assert main(["verify", "--faults"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "reduce-scatter: dropped zeroing: 2 of 2 found", "an all-gather zeroes and adds nothing"
    places = sum(int(line.split(" of ")[-1].split()[0]) for line in out[:-1])
    pairs = "2 kinds of faults, 3 pairs of a kind and a schedule"
    assert out[-1] == f"{pairs}, {places} places: each found wherever it must be"


def test_a_fault_missed_at_one_place_is_a_failure_unless_it_may_change_nothing(capsys, monkeypatch) -> None:
    """A checker that is blind every other time."""
    calls = iter(range(10**6))
    monkeypatch.setattr(command, "found", lambda *a, **k: None if next(calls) % 2 else Violation("race", "seen"))
    names = ("doubled transfer", "wait for too much")
    monkeypatch.setattr(command, "FAULTS", [BY_NAME[n] for n in names])
    assert main(["verify", "--faults", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["ok"], found["kinds"], found["pairs"], found["missed"]) == (False, 2, 8, 4)
    assert [(f["fault"], f["always"]) for f in found["faults"]] == [(names[0], True), (names[1], False)] * 4
    assert found["places"] == sum(f["places"] for f in found["faults"])
    assert "not found where it must be: doubled transfer of the all-gather (4 of 8)" in captured.err
    assert "wait for too much of" not in captured.err
    monkeypatch.setattr(command, "found", lambda *a, **k: None)
    assert main(["verify", "--faults", "--json"]) == 1, "and what is found nowhere is missed, whatever it is"
    assert json.loads(capsys.readouterr().out)["missed"] == 8


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_violation_ends_with_its_description(arguments, capsys, monkeypatch) -> None:
    def fail(self: Workload) -> int:
        raise Violation("race", "rank 1 reads too early")

    monkeypatch.setattr(Workload, "verify", fail)
    assert main(["verify", *arguments]) == 1
    captured = capsys.readouterr()
    assert "race: rank 1 reads too early" in captured.err
    if arguments:
        (wrong,) = json.loads(captured.out)["violations"]
        assert (wrong["kind"], wrong["words"]) == ("race", "race: rank 1 reads too early")


@pytest.mark.parametrize("arguments", [["--topology", "8"], ["--topology", "0x8"], ["--preset", "gpt"]])
def test_wrong_usage_is_told(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    assert stop.value.code == 2
    assert "--topology" in capsys.readouterr().err


def test_a_plan_that_is_refused_is_told(capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "refusals", lambda plan: ("a block is filled too early",))
    assert main(["verify", "--topology", "2x2", "--json"]) == 1
    captured = capsys.readouterr()
    assert "refused: a block is filled too early" in captured.err
    assert json.loads(captured.out)["refused"] == ["a block is filled too early"]
