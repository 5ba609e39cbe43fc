"""The demo runs end to end, and its two runs agree to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tide_strategies.cli.demo_model import GPT, Windows, library_text
from tide_strategies.cli.demo_summary import compare, table

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

STEPS = 10  # the fewest that leave two timed steps


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the printed output of one short demo."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-m", "tide_strategies.cli.demo", "--steps", str(STEPS), "--batch", "1"]
    done = subprocess.run(
        [*command, "--output", str(folder), "--limit", "100"], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def load(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_both_runs_end_with_equal_bits(result: tuple[Path, str]) -> None:
    folder, printed = result
    stock, tide = load(folder, "stock.json"), load(folder, "tide.json")
    assert stock["parameter_sha256"] == tide["parameter_sha256"]
    assert [r["losses"] for r in stock["ranks"]] == [r["losses"] for r in tide["ranks"]]
    assert stock["val_loss"] == tide["val_loss"]
    assert "bit-equal in both runs" in printed
    losses = stock["ranks"][0]["losses"]
    assert losses != stock["ranks"][1]["losses"], "both ranks read the same data"
    assert losses[-1] < losses[0]


def test_each_run_used_its_own_collectives(result: tuple[Path, str]) -> None:
    comparison = load(result[0], "comparison.json")
    assert comparison["stock"]["tide_groups"] == 0
    assert comparison["tide"]["tide_groups"] == comparison["tide"]["groups"] == 7


def test_numbers_are_there_and_plausible(result: tuple[Path, str]) -> None:
    folder, printed = result
    comparison = load(folder, "comparison.json")
    for run in (comparison["stock"], comparison["tide"]):
        assert 0 < run["collective_seconds"] < 60
        assert run["exposed_seconds"] == run["collective_seconds"]
        assert run["collective_seconds"] < run["step_seconds"] * 3
        assert run["collective_calls"] >= 14
        assert 200 * 2**20 < run["peak_memory_bytes"] < 16 * 2**30
        assert 0 < run["final_loss"] < 8
    for line in ("step time (median)", "in collectives", "exposed", "peak memory", "loss, last step", "stock / TIDE"):
        assert line in printed
    assert (folder / "table.txt").read_text().strip() in printed
    for record in (load(folder, "stock.json"), load(folder, "tide.json")):
        assert [len(r["step_seconds"]) for r in record["ranks"]] == [STEPS, STEPS]
        assert record["timed_steps"] == 2


def test_picture(result: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib")
    folder, printed = result
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "demo.png" in printed


def test_without_matplotlib_the_picture_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_strategies.cli.demo_summary import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw({}, {}, tmp_path / "demo.png") is False
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo says where to look and what was said."""
    from tide_strategies.cli import demo

    script = tmp_path / "refuses.py"
    script.write_text("import sys; sys.exit(f'not with {sys.argv[1:3]}')\n")
    monkeypatch.setattr(demo, "example_script", lambda: script)
    assert demo.main(["--steps", "4", "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "stock.log" in said.err
    assert "not with ['--plan', 'stock']" in said.err
    assert "Traceback" not in said.out + said.err


def record(losses: list[float], groups: int, digest: str = "a", busy: float = 0.0) -> dict[str, Any]:
    """A made-up run of two equal ranks with five steps, of which three are timed."""
    rank = {
        "collectives": {"calls": 60.0, "seconds": 0.3, "wait_seconds": 0.06, "bytes": 1.0},
        "processor_wait_seconds": busy,
        "peak_pss_bytes": 2**20,
        "peak_rss_bytes": 2**21,
        "step_seconds": [9.0, 0.5, 0.5, 0.5, 9.0],
        "losses": losses,
    }
    report = {"groups": [{"path": "tide" if i < groups else "stock"} for i in range(7)]}
    return {
        "ranks": [rank, rank],
        "report": report,
        "warmup": 1,
        "timed_steps": 3,
        "val_loss": 2.0,
        "parameter_sha256": digest,
    }


def test_summary_counts_only_timed_steps() -> None:
    stock, tide = record([5.0, 4.0, 3.0, 2.0, 1.0], 0), record([5.0, 4.0, 3.0, 2.0, 1.0], 7)
    comparison = compare(stock, tide)
    assert comparison["parameters_bit_equal"]
    assert comparison["losses_equal"]
    assert comparison["tide"]["step_seconds"] == 0.5
    assert comparison["tide"]["collective_seconds"] == pytest.approx(0.1)
    assert comparison["tide"]["wait_seconds"] == pytest.approx(0.02)
    assert comparison["tide"]["outside_seconds"] == pytest.approx(0.4)
    assert comparison["stock"]["wait_seconds"] is None
    assert comparison["tide"]["collective_calls"] == 20
    assert comparison["tide"]["peak_memory_bytes"] == 2 * 2**20


def test_table_admits_what_is_not_as_it_should_be() -> None:
    stock, tide = record([2.0, 1.0], 0, busy=0.6), record([2.0, 1.5], 5, digest="b")
    text = table(compare(stock, tide))
    assert "NOT bit-equal" in text
    assert "TIDE ran 5 of 7 parameter groups" in text
    assert "other threads had the processor for 40 % of the time" in text


def test_text_and_windows_are_the_same_every_time() -> None:
    train, val = library_text()
    assert len(train) == 9 * len(val)
    assert torch.equal(train, library_text()[0])
    first, again, other = Windows(train, 4), Windows(train, 4), Windows(train, 4, seed=1)
    assert all(torch.equal(first[i], again[i]) for i in range(4))
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (129,)
    assert first[0].dtype == torch.int64
    with pytest.raises(ValueError, match="windows of 129"):
        Windows(train[:100], 1)


def test_model_is_causal_and_of_the_size_that_is_told() -> None:
    model = GPT().eval()
    assert sum(p.numel() for p in model.parameters()) == 10_893_312
    x = torch.randint(256, (1, 16))
    changed = x.clone()
    changed[0, 10:] = 0
    with torch.no_grad():
        assert torch.equal(model(x)[:, :10], model(changed)[:, :10])
