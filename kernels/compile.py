"""Compile the kernels ahead of time, check each once, and hand out what a native launch needs.

Works with Triton 3.4 to 3.9. How many hidden pointers follow the visible arguments differs between releases (3.4 has
one, global scratch; 3.5 and later have two, global and profile scratch), so it is counted in the PTX, not assumed.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from tide_strategies.errors import TideError
from tide_strategies.kernels.tiles import LEADING_ARGUMENTS, POINTER_COUNTS, SumShape, default_shape, pointer_count

#: Triton's names of the dtypes, by the names that callers use.
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "f32": "fp32", "float32": "fp32"}
_ITEM_BYTES = {"bf16": 2, "fp32": 4}
#: Global scratch and profile scratch.
_MAX_HIDDEN = 2


class KernelUnavailableError(TideError, RuntimeError):
    """No sum kernel can be had here (no Triton, no NVIDIA GPU, or its compiler failed): use stock collectives."""


@dataclass(frozen=True, slots=True)
class SumSpec:
    """Everything that selects one compiled kernel: ``pointers`` is one of ``POINTER_COUNTS``."""

    staged: int
    pointers: int
    grad_dtype: str
    out_dtype: str
    aligned: bool

    def __post_init__(self) -> None:
        if self.staged < 0:
            raise ValueError(f"staged must be 0 or more; got {self.staged}")
        if self.pointers not in POINTER_COUNTS:
            raise ValueError(f"pointers must be one of {POINTER_COUNTS}; got {self.pointers}")
        for name, value in (("grad_dtype", self.grad_dtype), ("out_dtype", self.out_dtype)):
            if value not in _ITEM_BYTES:
                raise ValueError(f"{name} must be one of {sorted(_ITEM_BYTES)}; got {value!r}")


@dataclass(frozen=True, slots=True)
class LandSpec:
    """Everything that selects one compiled kernel of landing (``kernels.land``)."""

    sources: int
    pointers: int
    out_dtype: str
    accumulate: bool
    aligned: bool

    def __post_init__(self) -> None:
        if self.sources < 1:
            raise ValueError(f"sources must be 1 or more; got {self.sources}")
        if self.pointers not in POINTER_COUNTS:
            raise ValueError(f"pointers must be one of {POINTER_COUNTS}; got {self.pointers}")
        if self.out_dtype not in _ITEM_BYTES:
            raise ValueError(f"out_dtype must be one of {sorted(_ITEM_BYTES)}; got {self.out_dtype!r}")


Spec = SumSpec | LandSpec


@dataclass(frozen=True, slots=True)
class SumKernel:
    """A loaded kernel, for ``cuLaunchKernel``: ``function``, any grid (G, 1, 1), ``threads`` and ``shared_bytes``.

    The arguments are those of ``kernels.sum``, ``pointers`` addresses and ``extra_null_pointers`` NULLs.
    """

    function: int
    """CUfunction, of the device's primary context; its limit of dynamic shared memory is set already."""
    threads: int
    """Threads of a block, in x."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    tile: int
    """Most elements that one row of the tile table may count."""
    pointers: int
    extra_null_pointers: int
    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes that a thread spills; not 0 means a shape that does not suit."""
    shape: SumShape
    spec: Spec
    owner: Any = field(repr=False, compare=False)
    """Keeps the module loaded: ``function`` is valid as long as this object lives."""


_lock = threading.Lock()
_kernels: dict[tuple[Spec, SumShape | None, int], SumKernel] = {}


def compile_sum(
    staged: int,
    pointers: int,
    grad_dtype: str,
    out_dtype: str,
    aligned: bool,
    device: int,
    *,
    shape: SumShape | None = None,
) -> SumKernel:
    """The kernel for ``staged`` staged sources and up to ``pointers`` gradients; compiled and checked on first use.

    The first call for a kernel compiles it (or finds it in Triton's cache), launches it once through Triton's own
    launcher on a small input and waits for the bytes, so call it at set-up, not in a step or under graph capture.
    Later calls only look it up. The kernel stays loaded until the process ends.

    Args:
        pointers: gradients of a call at most; rounded up to one of ``POINTER_COUNTS``.
        grad_dtype, out_dtype: ``"bf16"`` or ``"fp32"`` (or torch's names of them).
        aligned: promises that every source and every output of a tile begins at a multiple of 16 bytes.
        shape: tuned elsewhere; by default chosen from the number of sources and the device's shared memory.

    Raises:
        KernelUnavailableError: if Triton is missing or interprets, the device is not an NVIDIA GPU, compilation or
            loading fails, or the trial launch does not give the promised bytes.
        ValueError: if an argument is out of range.
    """
    return _kernel(
        SumSpec(staged, pointer_count(pointers), _dtype(grad_dtype), _dtype(out_dtype), aligned), shape, device
    )


def compile_land(
    sources: int,
    pointers: int,
    out_dtype: str,
    accumulate: bool,
    aligned: bool,
    device: int,
    *,
    shape: SumShape | None = None,
) -> SumKernel:
    """The kernel that lands ``sources`` fp32 partials in ``out_dtype``; compiled and checked on first use.

    As :func:`compile_sum`. ``pointers``: addresses of a call at most; ``accumulate``: adds to what the output holds;
    ``aligned``: promises that all partials and outputs begin at multiples of 16 bytes.
    """
    return _kernel(LandSpec(sources, pointer_count(pointers), _dtype(out_dtype), accumulate, aligned), shape, device)


def _kernel(spec: Spec, shape: SumShape | None, device: int) -> SumKernel:
    with _lock:
        key = (spec, shape, device)
        if key not in _kernels:
            _kernels[key] = _load(spec, shape, device)
        return _kernels[key]


def build(spec: Spec, shape: SumShape, target: Any) -> Any:
    """Compile for a ``triton.backends.compiler.GPUTarget``; no device is needed. Returns Triton's compiled kernel.

    Nothing is specialised on values (Triton's launcher would compile anew for 1 or for multiples of 16): one kernel
    serves every call.
    """
    _require_triton()
    import triton
    from triton.compiler import ASTSource

    if isinstance(spec, SumSpec):
        from tide_strategies.kernels.sum import sum_tiles as function
    else:
        from tide_strategies.kernels.land import land_tiles as function

    signature: dict[str, Any] = {
        "tiles": "*i64",
        "first_tile": "i32",
        "n_tiles": "i32",
        "staging": "*" + _staged_dtype(spec),
        "output": "*" + spec.out_dtype,
        "factor": "fp32",
        "divides": "i32",
        "addresses": ("i64",) * spec.pointers,
    }
    constants = _constants(spec, shape)
    signature.update(dict.fromkeys(constants, "constexpr"))
    # Without fusion the compiler emits .rn operations, which nothing downstream may contract.
    options = {"num_warps": shape.warps, "num_ctas": 1, "enable_fp_fusion": False}
    return triton.compile(ASTSource(function, signature, constants), target=target, options=options)


def hidden_pointers(compiled: Any, pointers: int) -> int:
    """How many NULL pointers a launch appends after ``pointers`` addresses, read from the kernel's PTX.

    Raises:
        KernelUnavailableError: if the parameters are not those of this ABI, or scratch memory is wanted.
    """
    parameters = ptx_parameters(compiled.asm["ptx"])
    visible = ["ptr", "b32", "b32", "ptr", "ptr", "f32", "b32", *["b64"] * pointers]
    hidden = parameters[len(visible) :]
    if parameters[: len(visible)] != visible or len(hidden) > _MAX_HIDDEN or set(hidden) - {"ptr"}:
        raise KernelUnavailableError(
            f"this Triton gave the sum kernel parameters {_summary(parameters)}, expected {_summary(visible)} and at "
            f"most {_MAX_HIDDEN} hidden pointers; use a Triton from 3.4 to 3.9"
        )
    for name in ("global_scratch_size", "profile_scratch_size"):
        if size := getattr(compiled.metadata, name, 0):
            raise KernelUnavailableError(f"the sum kernel was compiled to need {size} bytes of scratch ({name})")
    return len(hidden)


def ptx_parameters(ptx: str) -> list[str]:
    """Kinds of the entry's parameters in order: ``ptr``, ``b32``, ``f32``, ``b64``. PTX knows no signs here."""
    match = re.search(r"\.visible \.entry \w+\((.*?)\)\s*[.{]", ptx, re.DOTALL)
    if match is None:
        return []
    kinds = []
    for line in match[1].split(","):
        word = re.search(r"\.param\s+\.([a-z]\d+)(\s+\.ptr)?", line)
        kind = word[1] if word else "?"
        kinds.append("ptr" if word and word[2] else re.sub(r"^[us]", "b", kind))
    return kinds


def _summary(kinds: list[str]) -> str:
    return " ".join(kinds[:LEADING_ARGUMENTS]) + f" and {len(kinds) - LEADING_ARGUMENTS} more"


def _dtype(name: str) -> str:
    if name not in _DTYPES:
        raise ValueError(f"dtypes are {sorted(_DTYPES)}; got {name!r}")
    return _DTYPES[name]


def _staged_dtype(spec: Spec) -> str:
    return spec.grad_dtype if isinstance(spec, SumSpec) else "fp32"


def _constants(spec: Spec, shape: SumShape) -> dict[str, int | bool]:
    if isinstance(spec, LandSpec):
        return {
            "SOURCES": spec.sources,
            "POINTERS": spec.pointers,
            "TILE": shape.tile,
            "ALIGNED": spec.aligned,
            "ACCUMULATE": spec.accumulate,
        }
    return {
        "STAGED": spec.staged,
        "POINTERS": spec.pointers,
        "TILE": shape.tile,
        "STAGES": shape.stages,
        "ALIGNED": spec.aligned,
    }


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise KernelUnavailableError(f"Triton cannot be imported ({error}); install triton 3.4 to 3.9") from error
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y"):
        raise KernelUnavailableError("TRITON_INTERPRET is set: Triton interprets kernels and compiles none; unset it")


def _shape(spec: Spec, shared_limit: int) -> SumShape:
    if isinstance(spec, SumSpec):
        return default_shape(spec.staged, _ITEM_BYTES[spec.grad_dtype], spec.aligned, shared_limit)
    # What comes over the link waits in registers: many threads, as for unaligned sums.
    return default_shape(spec.sources - 1, _ITEM_BYTES["fp32"], False, shared_limit)


def _load(spec: Spec, shape: SumShape | None, device: int) -> SumKernel:
    """Compile for the device, load the module into its primary context, and try the kernel once."""
    _require_triton()
    import torch
    from triton.runtime import driver

    if not torch.cuda.is_available():
        raise KernelUnavailableError("the sum kernel needs a CUDA device, and torch finds none")
    with torch.cuda.device(device):
        try:
            target = driver.active.get_current_target()
            if target.backend != "cuda":
                raise KernelUnavailableError(f"the sum kernel needs an NVIDIA GPU; Triton's target is {target}")
            shared = driver.active.utils.get_device_properties(device)["max_shared_mem"]
            chosen = shape or _shape(spec, shared)
            compiled = build(spec, chosen, target)
            hidden = hidden_pointers(compiled, spec.pointers)
            # Loads the module and raises the function's limit of shared memory.
            compiled._init_handles()
        except KernelUnavailableError:
            raise
        except Exception as error:  # the compiler, ptxas, the C compiler and the driver all have errors of their own
            raise KernelUnavailableError(
                f"Triton could not compile or load the kernel {spec}: {type(error).__name__}: {error}"
            ) from error
        kernel = SumKernel(
            function=int(compiled.function),
            threads=32 * compiled.metadata.num_warps,
            shared_bytes=int(compiled.metadata.shared),
            tile=chosen.tile,
            pointers=spec.pointers,
            extra_null_pointers=hidden,
            registers=int(compiled.n_regs),
            spills=int(compiled.n_spills),
            shape=chosen,
            spec=spec,
            owner=compiled,
        )
        _try_once(kernel, device)
    return kernel


def launch_with_triton(kernel: SumKernel, trial: Any, grid: int) -> None:
    """Launch a ``kernels.reference.Trial`` through Triton's launcher on the current stream, without waiting.

    The very function that native code launches, with the arguments that Triton would pass.
    """
    constants = _constants(kernel.spec, kernel.shape).values()
    kernel.owner[(grid, 1, 1)](*trial.arguments(0, len(trial.tiles), kernel.pointers), *constants)


def _try_once(kernel: SumKernel, device: int) -> None:
    import torch

    from tide_strategies.kernels.reference import Trial, make_land_trial, make_trial

    spec = kernel.spec
    places = min(5, spec.pointers)
    if isinstance(spec, SumSpec):
        trial = make_trial(spec.staged, places, kernel.tile, spec.grad_dtype, spec.out_dtype, spec.aligned, device)
    else:
        trial = make_land_trial(
            spec.sources, places, kernel.tile, spec.out_dtype, spec.accumulate, spec.aligned, device
        )

    def launch(trial: Trial) -> None:
        launch_with_triton(kernel, trial, grid=3)
        torch.cuda.synchronize(device)

    try:
        passed = trial.passes(launch)
    except Exception as error:
        raise KernelUnavailableError(
            f"the trial launch of the kernel failed: {type(error).__name__}: {error}"
        ) from error
    if not passed:
        raise KernelUnavailableError(f"the kernel {spec} gave wrong sums on {torch.cuda.get_device_name(device)}")
