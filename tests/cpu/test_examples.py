"""The examples for plain PyTorch, only shorter: one started as its own text says, the others as programs.py does."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import finish, start

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))
TORCHRUN = ["plain_pytorch.py", "moe_experts.py", "dit_block.py"]


def launch(processes: int, example: str, *arguments: object) -> str:
    """The output of an example's first rank, on that many CPU processes."""
    ended = finish(start(processes, ROOT / "examples" / example, *arguments, cwd=ROOT), timeout=120)
    for code, said in ended:
        assert code == 0, said
    return ended[0][1]


def torchrun(processes: int, example: str, *arguments: object) -> str:
    """The output of an example started as its own text says, on that many CPU processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, f"examples/{example}"]
    done = subprocess.run(
        [sys.executable, *map(str, [*command, *arguments])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> dict[int, str]:
    """Step -> loss, as printed."""
    found = re.findall(r"^step +(\d+)  loss ([\d.]+)", output, re.MULTILINE)
    assert found, output
    return {int(step): loss for step, loss in found}


def test_plain_pytorch_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    small = ["--layers", 2, "--width", 32, "--heads", 2, "--context", 16, "--batch", 1]
    whole = launch(2, "plain_pytorch.py", *small, "--steps", 4, "--plan", "stock")
    half = torchrun(2, "plain_pytorch.py", *small, "--steps", 2, "--checkpoint", tmp_path / "saved")
    rest = launch(2, "plain_pytorch.py", *small, "--steps", 4, "--checkpoint", tmp_path / "saved")
    assert "TIDE: 0 of 3 groups accelerated" in whole
    assert all("TIDE: 3 of 3 groups accelerated" in out for out in (half, rest))
    assert {**losses(half), **losses(rest)} == losses(whole)
    assert sorted(losses(rest)) == [3, 4]


def test_experts_over_subgroups_train_as_experts_over_all_ranks() -> None:
    small = ["--layers", 1, "--width", 32, "--hidden", 32, "--context", 16, "--batch", 1, "--steps", 5]
    all_ranks = launch(4, "moe_experts.py", *small, "--plan", "stock")
    subgroups = launch(4, "moe_experts.py", *small, "--expert-parallel", 2)
    assert "TIDE: 3 of 3 groups accelerated" in subgroups
    # The same sums in another order. A parameter whose gradient is all rounding may be moved by AdamW by up to
    # 5 * lr = 0.005, but then the loss, whose slope there is rounding too, does not see it.
    assert float(losses(all_ranks)[5]) == pytest.approx(float(losses(subgroups)[5]), abs=1e-4)


def test_diffusion_transformer_is_equal_to_stock_with_averaged_weights() -> None:
    small = ["--layers", 2, "--width", 32, "--heads", 2, "--size", 8, "--batch", 2, "--steps", 5]
    stock, tide = (launch(2, "dit_block.py", *small, "--plan", plan) for plan in ("stock", "auto"))
    assert "TIDE: 3 of 3 groups accelerated" in tide
    assert losses(stock) == losses(tide)
    new = [re.findall(r"^averaged weights, new images: loss [\d.]+$", out, re.MULTILINE) for out in (stock, tide)]
    assert len(new[0]) == 1
    assert new[0] == new[1]


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "hydra_sweep.py"])  # Hydra's own --help
def test_help_says_what_each_option_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"lightning_gpt.py": "lightning", "accelerate_finetune.py": "accelerate"}.get(name, "torch")
    if find_spec(needed) is None or (name.startswith(("trans", "accel")) and find_spec("transformers") is None):
        pytest.skip("the library is not installed")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert ended.value.code == 0
    words = capsys.readouterr().out
    assert len(re.findall(r"^  --\w+", words, re.MULTILINE)) >= 5


@pytest.mark.parametrize("name", TORCHRUN)
def test_started_without_torchrun_they_say_how(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert ended.value.code == 2
    assert f"torchrun --standalone --nproc-per-node 2 examples/{name}" in capsys.readouterr().err
