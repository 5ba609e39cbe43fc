"""The landing kernel through the NVSwitch is compiled for every architecture, and holds the right instruction.

What it computes is tested on the host (``tests/fake_cuda/multicast_scenarios.py``): it is never run on a GPU here.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tide_strategies._native import cuda
from tide_strategies.collectives.schedule import Item
from tide_strategies.kernels.compile import KernelUnavailableError
from tide_strategies.runtime.cuda.multicast import landing_macros
from tide_strategies.runtime.cuda.nvrtc import compile_cuda

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "csrc/cuda/multimem_landing.cu"
VARIANTS = list(itertools.product((Item.F32, Item.BF16), (Item.F32, Item.BF16), (False, True)))
INSTRUCTIONS = {
    Item.F32: "multimem.ld_reduce.relaxed.sys.global.add.v4.f32",
    Item.BF16: "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
}


def compiled(architecture: str, macros: tuple[str, ...] = (), ptx: bool = False) -> bytes:
    try:
        return compile_cuda(SOURCE.read_text(), architecture, macros, ptx=ptx)
    except KernelUnavailableError as e:
        if "kernels in CUDA need NVRTC" in str(e) or "NVRTC cannot be loaded" in str(e):
            pytest.skip(str(e))
        raise


def test_the_build_carries_the_source() -> None:
    assert cuda.landing_source() == SOURCE.read_text()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_it_compiles_to_machine_code(architecture: str) -> None:
    """Older architectures lack the instruction: the kernel traps there, and nobody launches it."""
    assert compiled(architecture, landing_macros(Item.BF16, Item.BF16, True)).startswith(b"\x7fELF")


@pytest.mark.parametrize(("partial", "output", "accumulate"), VARIANTS)
def test_every_variant_loads_through_the_switch(partial: Item, output: Item, accumulate: bool) -> None:
    text = compiled("sm_90", landing_macros(partial, output, accumulate), ptx=True).decode()
    assert ".target sm_90\n" in text
    loads = set(re.findall(r"multimem\.[\w:.]+", text))
    assert loads == {INSTRUCTIONS[partial]}
    # One rounding an operation: nothing is fused, and each of the sum's values is multiplied or divided once.
    assert "fma" not in text
    assert "mul.rn.f32" in text
    assert set(re.findall(r"\bdiv\.[\w.]+", text)) == {"div.rn.f32"}
    assert ("add.rn.f32" in text) is accumulate
    assert text.count(".param .u64") + text.count(".param .u32") + text.count(".param .f32") == 11
    whole = partial is output is Item.F32
    assert ("st.v4.f32" in text) is whole, "16 bytes at a time"
    assert ("ld.v4.f32" in text) is (whole and accumulate)


def test_without_the_instruction_it_traps() -> None:
    text = compiled("sm_80", ptx=True).decode()
    assert "multimem.ld_reduce" not in text
    assert "trap;" in text


def test_what_does_not_compile_says_why() -> None:
    compiled("sm_90")  # NVRTC is here
    with pytest.raises(KernelUnavailableError, match=r"could not compile a kernel for sm_90: tide.cu\(1\): error"):
        compile_cuda("nonsense", "sm_90")
    with pytest.raises(KernelUnavailableError, match=r"for sm_1: .*invalid value for --gpu-architecture"):
        compile_cuda("", "sm_1")


def test_it_compiles_with_nvcc_too(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90a", "120")]
    command = [nvcc, "-std=c++17", "-Werror=all-warnings", *targets, "-c", "-o", tmp_path / "landing.o", SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
