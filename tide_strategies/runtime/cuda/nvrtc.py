"""Compiling CUDA source for the GPU at hand, with NVRTC.

A wheel is built where there is often no CUDA toolkit, for GPUs that the builder does not know; NVRTC and its bindings
(``cuda-bindings``) come with every CUDA build of torch. So kernels in CUDA travel as text and are compiled on first
use, as Triton's are.
"""

from __future__ import annotations

import functools
from typing import Any

from tide_strategies.kernels.compile import KernelUnavailableError


@functools.cache
def compile_cuda(source: str, architecture: str, macros: tuple[str, ...] = (), *, ptx: bool = False) -> bytes:
    """Machine code (a cubin) of ``source`` for one architecture.

    Args:
        source: CUDA C++ that includes nothing.
        architecture: such as ``"sm_90"``.
        macros: names to define.
        ptx: give PTX instead, for ``architecture`` with ``compute_`` in the place of ``sm_``; it ends with a null.

    Raises:
        KernelUnavailableError: there is no NVRTC here, it does not know the architecture, or the source does not
            compile, with the compiler's own words.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise KernelUnavailableError(
            f"kernels in CUDA need NVRTC ({e}): pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from e
    flag = architecture.replace("sm_", "compute_") if ptx else architecture
    options = [b"--std=c++17", f"--gpu-architecture={flag}".encode(), *(f"-D{m}".encode() for m in macros)]
    try:
        program = _call(nvrtc, "CreateProgram", source.encode(), b"tide.cu", 0, [], [])
    except RuntimeError as e:  # what the bindings raise if they find no library
        raise KernelUnavailableError(f"NVRTC cannot be loaded: {e}") from e
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_call(nvrtc, "GetProgramLogSize", program))
            _call(nvrtc, "GetProgramLog", program, log)
            words = bytes(log).decode(errors="replace").strip("\0 \n")
            raise KernelUnavailableError(
                f"NVRTC could not compile a kernel for {flag}: {words or 'it gives no reason'}"
            )
        what = "PTX" if ptx else "CUBIN"
        image = bytearray(_call(nvrtc, f"Get{what}Size", program))
        _call(nvrtc, f"Get{what}", program, image)
        return bytes(image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(nvrtc: Any, name: str, *arguments: Any) -> Any:
    status, *values = getattr(nvrtc, f"nvrtc{name}")(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelUnavailableError(f"nvrtc{name} failed: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if values else None
