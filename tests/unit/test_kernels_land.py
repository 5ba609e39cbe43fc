"""The landing kernel without a GPU: its bytes under Triton's interpreter, and the code that it compiles to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tide_strategies.kernels.compile import LandSpec, build, compile_land, hidden_pointers
from tide_strategies.kernels.reference import DTYPES, make_land_trial, same_bytes
from tide_strategies.kernels.tiles import LAND_HEAD_WORDS, LAND_SOURCE_WORDS, SumShape

TILE = 256
#: name -> (partials of a tile, places, output dtype, accumulate, aligned, tiles, grid, special values), and a factor
#: and whether it divides, if sums are not divided by 3.
CASES: dict[str, tuple[Any, ...]] = {
    "one partial": (1, 1, "fp32", False, True, 7, 1, False),
    "one more partial": (1, 3, "fp32", True, True, 7, 2, False),
    "two nodes": (2, 4, "fp32", False, True, 7, 2, False),
    "eight nodes, and then some": (8, 16, "fp32", True, True, 14, 3, False),
    "unaligned": (3, 4, "fp32", True, False, 7, 2, False),
    "multiplied": (3, 4, "fp32", True, True, 7, 2, False, 0.25, False),
    "to bf16": (2, 3, "bf16", False, True, 7, 2, False),
    "NaN, infinities, signed zeros and subnormals": (3, 3, "fp32", True, False, 7, 2, True),
}

INTERPRET = f"""
import json, sys, torch
from tide_strategies.kernels.land import land_tiles
from tide_strategies.kernels.reference import make_land_trial, same_bytes
from tide_strategies.kernels.tiles import pointer_count

SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38])

def run(sources, places, out, accumulate, aligned, tiles, grid, special, factor=3.0, divides=True):
    scaling = dict(factor=factor, divides=divides)
    trial = make_land_trial(sources, places, {TILE}, out, accumulate, aligned, "cpu", tiles=tiles, seed=1, **scaling)
    if special:
        random = torch.Generator().manual_seed(2)
        for values in trial.gradients:
            chosen = torch.rand(values.shape, generator=random) < 0.3
            values[chosen] = SPECIAL[torch.randint(0, len(SPECIAL), values.shape, generator=random)[chosen]]
    pointers = pointer_count(places)
    def launch(t):
        # Two launches: the second starts in the middle of the table.
        half = tiles // 2
        for first, count in ((0, half), (half, tiles - half)):
            land_tiles[(grid,)](*t.arguments(first, count, pointers),
                SOURCES=sources, POINTERS=pointers, TILE={TILE}, ALIGNED=aligned, ACCUMULATE=accumulate)
    if out == "fp32":
        return trial.passes(launch)
    # The interpreter cuts fp32 down to bf16 instead of rounding (the compiled code is looked at for that).
    exact = trial.output.float()
    trial.write(exact)
    launch(trial)
    return same_bytes(trial.output, (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16())

print(json.dumps({{name: run(*case) for name, case in json.loads(sys.argv[1]).items()}}))
"""


def test_the_interpreted_kernel_gives_the_promised_bytes() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRET, json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy (2.4 or later)")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(CASES, True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_the_reference_divides_with_one_rounding(out: str, accumulate: bool) -> None:
    trial = make_land_trial(1, 1, TILE, out, accumulate, True, "cpu", tiles=1)
    (partial,), (at, count, _, start) = trial.gradients, trial.tiles[0].tolist()
    old = trial.output.float()[at : at + count] if accumulate else torch.zeros(count)
    for factor, divides, divisor in ((3.0, True, 3), (4.0, True, 4), (0.25, False, 4), (1.0, False, 1)):
        output = trial.output.clone()
        replace(trial, factor=factor, divides=divides).write(output)
        # Rounding a quotient of 53 bits once more, to 24, gives the nearest of 24: 53 is at least 2 * 24 + 2.
        want = old + (partial[start:][:count].double() / divisor).float()
        assert same_bytes(output[at : at + count], want.to(DTYPES[out])), (factor, divides)


def test_trials_tell_another_order_apart() -> None:
    trial = make_land_trial(3, 3, TILE, "fp32", True, True, "cpu")

    def backwards(t: Any) -> None:
        for row in t.tiles.tolist():
            out, count, *places = row
            partials = [t.gradients[p][at:][:count] for p, at in zip(places[::2], places[1::2], strict=True)]
            t.output[out : out + count] += ((partials[2] + partials[1]) + partials[0]) / t.factor

    assert not trial.passes(backwards)
    multiplied = replace(trial, factor=1 / 3, divides=False)
    assert not trial.passes(lambda t: multiplied.write(t.output)), "3 has no exact reciprocal"
    assert not trial.passes(lambda t: None), "sums must be there"


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_compiled_kernel_moves_whole_vectors_and_contracts_nothing(
    accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sources, shape = 3, SumShape(4096, 16, 1)
    compiled = build(LandSpec(sources, 8, "fp32", accumulate, True), shape, GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    assert hidden_pointers(compiled, 8) <= 2
    assert not re.search(r"\bfma|\.ftz|\.nc\b", ptx), "nothing contracted, flushed, or read through a stale cache"
    per_thread = 4096 // 512
    assert len(re.findall(r"\badd(\.rn)?\.f32\b", ptx)) == (sources - 1 + accumulate) * per_thread
    assert len(re.findall(r"\bmul(\.rn)?\.f32\b", ptx)) == per_thread
    assert re.findall(r"\bdiv\.\S+", ptx) == ["div.rn.f32"] * per_thread, "where it divides: rounded as IEEE says"
    # Full tiles move 16 bytes at a time; the last one of a landing goes element by element.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= sources * per_thread // 4
    assert "st.global.v4" in ptx
    assert (
        LAND_HEAD_WORDS + sources * LAND_SOURCE_WORDS
        == make_land_trial(sources, 3, 64, "fp32", accumulate, True, "cpu").tiles.shape[1]
    )


def test_what_cannot_be_landed_is_refused() -> None:
    with pytest.raises(ValueError, match="sources must be 1 or more; got 0"):
        compile_land(0, 4, "fp32", False, True, 0)
    with pytest.raises(ValueError, match="dtypes are"):
        compile_land(1, 4, "fp16", False, True, 0)
