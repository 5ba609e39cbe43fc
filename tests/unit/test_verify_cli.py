"""``tide verify`` from the command line."""

import pytest

from tide_strategies.cli import verify as command
from tide_strategies.cli.main import main
from tide_strategies.verify.base_plans import Counts
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload


def test_base_plans_end_with_the_counts(capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "base_plans", lambda passes: iter([Counts(2, 5, 1), Counts(128, 10, 2)]))
    assert main(["verify", "--base-plans"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "up to  128 nodes: accepted 10 rejected 2" in out[0]
    assert any("at most 107520 flat, 13440 coalesced" in line for line in out)
    assert out[-1] == "accepted 10 rejected 2"


def test_real_geometry_is_verified(capsys) -> None:
    assert main(["verify", "--topology", "2x2", "--preset", "qwen3-30b-a3b", "--calls", "2"]) == 0
    assert "6 workloads, 48 results complete, nothing wrong" in capsys.readouterr().out.splitlines()[-1]


def test_a_violation_ends_with_its_description(capsys, monkeypatch) -> None:
    def fail(self: Workload) -> int:
        raise Violation("race", "rank 1 reads too early")

    monkeypatch.setattr(Workload, "verify", fail)
    assert main(["verify"]) == 1
    assert "race: rank 1 reads too early" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--topology", "8"], ["--topology", "0x8"], ["--preset", "gpt"]])
def test_wrong_usage_is_told(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    assert stop.value.code == 2
    assert "--topology" in capsys.readouterr().err


def test_a_plan_that_is_refused_is_told(capsys) -> None:
    assert main(["verify", "--passes", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
