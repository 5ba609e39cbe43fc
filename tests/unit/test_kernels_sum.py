"""The sum kernel without a GPU: its bytes under Triton's interpreter, and the code that it compiles to."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tide_strategies.kernels.compile import (
    KernelUnavailableError,
    SumSpec,
    build,
    compile_sum,
    hidden_pointers,
    ptx_parameters,
)
from tide_strategies.kernels.reference import DTYPES, make_trial, reference, same_bytes
from tide_strategies.kernels.tiles import POINTER_COUNTS, TILE_WORDS, SumShape, TileWord, default_shape, pointer_count

TILE = 256
#: name -> (staged, gradients, gradient dtype, output dtype, aligned, tiles, grid, stages, special values), and a factor
#: and whether it divides, if sums are not divided by 3.
CASES: dict[str, tuple[Any, ...]] = {
    "one staged source": (1, 1, "bf16", "fp32", True, 7, 1, 1, False),
    "nothing staged": (0, 3, "bf16", "fp32", True, 7, 2, 1, False),
    "seven staged sources": (7, 4, "bf16", "fp32", True, 14, 3, 3, False),
    "unaligned offsets": (3, 4, "bf16", "fp32", False, 7, 2, 1, False),
    "unaligned offsets, fp32 to bf16": (3, 4, "fp32", "bf16", False, 7, 2, 1, False),
    "multiplied": (3, 4, "bf16", "fp32", True, 7, 2, 2, False, 0.25, False),
    "fp32 to fp32": (3, 4, "fp32", "fp32", True, 7, 2, 2, False),
    "bf16 to bf16": (3, 4, "bf16", "bf16", True, 7, 2, 2, False),
    "many gradients": (1, 50, "bf16", "fp32", True, 60, 4, 2, False),
    "256 gradients": (1, 256, "fp32", "fp32", False, 40, 4, 1, False),
    "more programs than tiles": (2, 2, "bf16", "fp32", True, 3, 8, 1, False),
    "NaN, infinities, signed zeros and subnormals": (3, 2, "bf16", "fp32", False, 7, 2, 1, True),
    "NaN, infinities, signed zeros, subnormals, multiplied": (3, 2, "bf16", "fp32", False, 7, 2, 1, True, 0.5, False),
    "NaN, infinities, signed zeros and subnormals to bf16": (3, 2, "fp32", "bf16", True, 7, 2, 1, True),
}

INTERPRET = f"""
import json, sys, torch
from tide_strategies.kernels.reference import make_trial, same_bytes
from tide_strategies.kernels.sum import sum_tiles
from tide_strategies.kernels.tiles import pointer_count

SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38])

def run(staged, gradients, grad, out, aligned, tiles, grid, stages, special, factor=3.0, divides=True):
    scaling = dict(factor=factor, divides=divides)
    trial = make_trial(staged, gradients, {TILE}, grad, out, aligned, "cpu", tiles=tiles, seed=1, **scaling)
    if special:
        random = torch.Generator().manual_seed(2)
        for values in (trial.staging, *trial.gradients):
            chosen = torch.rand(values.shape, generator=random) < 0.3
            picks = torch.randint(0, len(SPECIAL), values.shape, generator=random)
            values[chosen] = SPECIAL.to(values.dtype)[picks[chosen]]
    pointers = pointer_count(gradients)
    def launch(t):
        # Two launches: the second starts in the middle of the table.
        half = tiles // 2
        for first, count in ((0, half), (half, tiles - half)):
            sum_tiles[(grid,)](*t.arguments(first, count, pointers),
                STAGED=staged, POINTERS=pointers, TILE={TILE}, STAGES=stages, ALIGNED=aligned)
    if out == "fp32":
        return trial.passes(launch)
    # The interpreter cuts fp32 down to bf16 instead of rounding (the compiled code is looked at for that).
    exact = trial.output.float()
    trial.write(exact)
    launch(trial)
    return same_bytes(trial.output, (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16())

print(json.dumps({{name: run(*case) for name, case in json.loads(sys.argv[1]).items()}}))
"""


@functools.cache
def interpreted() -> dict[str, bool] | str:
    """Whether each case gave the promised bytes, or why the interpreter cannot run."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRET, json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        return "this Triton's interpreter does not work with this numpy (2.4 or later)"
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_interpreted_kernel_gives_the_promised_bytes(case: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    results = interpreted()
    if isinstance(results, str):
        pytest.skip(results)
    assert results[case]


# ---------------------------------------------------------------------------------------------- compiled code


@functools.cache
def compiled(arch: int, shape: SumShape, spec: SumSpec) -> Any:
    from triton.backends.compiler import GPUTarget

    return build(spec, shape, GPUTarget("cuda", arch, 32))


@pytest.fixture(autouse=True)
def _compile_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


ARCHITECTURES = {80: 163, 90: 227, 100: 227, 120: 99}
"""Compute capability -> KiB of shared memory that a block may have."""


@pytest.mark.parametrize("grad", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_aligned_kernels_move_128_bits_at_a_time(arch: int, grad: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    shape = SumShape(tile=4096, warps=8, stages=1)
    ptx = compiled(arch, shape, SumSpec(3, 4, grad, "fp32", True)).asm["ptx"]
    loads = re.findall(r"ld\.global\S*\.v4\.b32", ptx)
    item = {"bf16": 2, "fp32": 4}[grad]
    assert len(loads) == 4 * 4096 * item // 16 // 256, "every load of the four sources, and 256 threads"
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= 4
    # Only the tile table is read otherwise, a word of 64 bits at a time.
    assert len(re.findall(r"ld\.global", ptx)) == len(loads) + TILE_WORDS
    assert not re.search(r"\bfma|\.ftz|\.nc\b", ptx), "nothing contracted, flushed, or read through a stale cache"


@pytest.mark.parametrize("staged", [1, 7])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_default_kernels_copy_asynchronously_16_bytes_at_a_time(arch: int, staged: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    shape = default_shape(staged, 2, True, ARCHITECTURES[arch] * 1024)
    kernel = compiled(arch, shape, SumSpec(staged, 16, "bf16", "fp32", True))
    ptx = kernel.asm["ptx"]
    per_tile = (staged + 1) * shape.tile * 2 // 16 // (32 * shape.warps)
    copies = re.findall(r"cp\.async\.cg\.shared\.global\S* [^;]*0x10", ptx)
    assert shape.stages > 1
    assert len(copies) == per_tile * shape.stages, "a tile in the loop, and the tiles before it"
    assert "st.global.v4" in ptx
    assert kernel.metadata.shared <= ARCHITECTURES[arch] * 1024
    assert not re.search(r"\bfma|\.ftz|\.nc\b", ptx)


@pytest.mark.parametrize("aligned", [True, False])
def test_additions_are_as_many_as_promised_and_rounded_each(aligned: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ptx = compiled(90, SumShape(2048, 8, 1), SumSpec(3, 4, "bf16", "fp32", aligned)).asm["ptx"]
    per_thread = 2048 // 256
    assert len(re.findall(r"\badd(\.rn)?\.f32\b", ptx)) == 3 * per_thread
    assert len(re.findall(r"\bmul(\.rn)?\.f32\b", ptx)) == per_thread
    assert re.findall(r"\bdiv\.\S+", ptx) == ["div.rn.f32"] * per_thread, "where it divides: rounded as IEEE says"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bf16_output_is_rounded_to_nearest_even(arch: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ptx = compiled(arch, SumShape(2048, 8, 1), SumSpec(1, 4, "fp32", "bf16", True)).asm["ptx"]
    narrowings = re.findall(r"\bcvt\.\S*\.f32\b", ptx)
    assert narrowings
    assert set(narrowings) <= {"cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"}


@pytest.mark.parametrize("pointers", POINTER_COUNTS)
def test_the_parameters_are_the_abi(pointers: int) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    kernel = compiled(90, SumShape(1024, 8, 1), SumSpec(1, pointers, "bf16", "bf16", False))
    hidden = hidden_pointers(kernel, pointers)
    visible = ["ptr", "b32", "b32", "ptr", "ptr", "f32", "b32"] + ["b64"] * pointers
    assert ptx_parameters(kernel.asm["ptx"]) == visible + ["ptr"] * hidden
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert hidden == (1 if release < (3, 5) else 2)
    with pytest.raises(KernelUnavailableError, match="expected"):
        hidden_pointers(kernel, pointers + 1)


# ---------------------------------------------------------------------------------------------- around the kernel


def test_the_reference_adds_in_the_promised_order() -> None:
    # 2^25 swallows a 1 that comes alone, and not two that came together.
    big, one = 2.0**25, 1.0
    tiles = torch.tensor([[1, 0, 0, 1, 0, 1]])
    for values, expected in (([one, one, big], big), ([big, one, one], big), ([one, one, 2.0], 4.0)):
        gradients = [torch.zeros(1), torch.tensor(values[2:])]
        output = torch.zeros(1)
        reference(tiles, torch.tensor(values[:2]), output, 0.5, False, gradients, 2)
        left, right = torch.tensor(values[0]) + torch.tensor(values[1]), torch.tensor(values[2])
        assert output.item() == (left + right).item() * 0.5 == expected * 0.5


@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_the_reference_divides_with_one_rounding(out: str) -> None:
    trial = make_trial(0, 1, TILE, "fp32", out, True, "cpu", tiles=1)
    (gradient,), (_, own, _, _, at, count) = trial.gradients, trial.tiles[0].tolist()
    for factor, divides, divisor in ((3.0, True, 3), (4.0, True, 4), (0.25, False, 4), (1.0, False, 1)):
        replace(trial, factor=factor, divides=divides).write(trial.output)
        # Rounding a quotient of 53 bits once more, to 24, gives the nearest of 24: 53 is at least 2 * 24 + 2.
        want = (gradient[own:][:count].double() / divisor).float().to(DTYPES[out])
        assert same_bytes(trial.output[at : at + count], want), (factor, divides)


def test_trials_tell_another_order_apart() -> None:
    trial = make_trial(3, 3, TILE, "fp32", "fp32", True, "cpu")

    def backwards(t: Any) -> None:
        turned = t.tiles.clone()
        turned[:, TileWord.STAGING_OFFSET] += 2 * turned[:, TileWord.STAGING_STRIDE]
        for pointer, own, at, stride, out, count in turned.tolist():
            total = t.gradients[pointer][own : own + count]
            for s in range(3):
                total = total + t.staging[at - s * stride :][:count]
            t.output[out : out + count] = total / t.factor

    assert not trial.passes(backwards)
    multiplied = replace(trial, factor=1 / 3, divides=False)
    assert not trial.passes(lambda t: multiplied.write(t.output)), "3 has no exact reciprocal"
    assert not trial.passes(lambda t: t.output.fill_(0.0)), "gaps must stay"


def test_same_bytes_tells_zeros_apart_and_takes_any_nan() -> None:
    nan, other = torch.tensor([0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32).unbind()
    assert same_bytes(nan.view(1), other.view(1))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_trials_cover_every_gradient_count() -> None:
    for count in POINTER_COUNTS:
        trial = make_trial(1, count, 64, "bf16", "fp32", False, "cpu", tiles=2 * count)
        assert trial.tiles[:, TileWord.POINTER].unique().tolist() == list(range(count))
    assert set(DTYPES) >= {"bf16", "fp32", "bfloat16", "float32"}


def test_pointer_counts_round_up_and_refuse_more_than_the_largest() -> None:
    assert [pointer_count(n) for n in (0, 4, 5, 256)] == [4, 4, 8, 256]
    for bad in (-1, 257):
        with pytest.raises(ValueError, match="gradients"):
            pointer_count(bad)


@pytest.mark.parametrize("shared", [48, 99, 163, 227])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("staged", [0, 1, 3, 7, 15])
def test_default_shapes_fit_shared_memory(staged: int, item: int, shared: int) -> None:
    shape = default_shape(staged, item, True, shared * 1024)
    ring = (shape.stages - 1) * (staged + 1) * shape.tile * item
    assert ring + 16 * 1024 <= shared * 1024
    assert shape.tile % (shape.warps * 32) == 0
    assert default_shape(staged, item, False, shared * 1024).stages == 1


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="tile must be a power of two"):
        SumShape(3000, 8, 1)
    with pytest.raises(ValueError, match="stages"):
        SumShape(4096, 8, 0)
    with pytest.raises(ValueError, match="dtypes are"):
        compile_sum(1, 4, "fp16", "fp32", True, 0)
    with pytest.raises(ValueError, match="staged"):
        compile_sum(-1, 4, "bf16", "fp32", True, 0)


def test_a_missing_triton_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelUnavailableError, match=r"Triton cannot be imported.*install triton"):
        compile_sum(1, 4, "bf16", "fp32", True, 0)


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelUnavailableError, match="TRITON_INTERPRET"):
        compile_sum(1, 4, "bf16", "fp32", True, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_in_words() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(KernelUnavailableError, match="needs a CUDA device"):
        compile_sum(1, 4, "bf16", "fp32", True, 0)


def test_importing_the_package_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys; from tide_strategies.kernels import tiles, compile; "
        "sys.exit(bool({'triton', 'torch'} & sys.modules.keys()))"
    )
    # Without the entry point that torch loads, nothing else could have imported them.
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
