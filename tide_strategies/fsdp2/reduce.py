"""The reduce-scatter's place in FSDP2: torch's own ``post_backward`` and ``foreach_reduce``, minus the packing.

Torch's functions are not copied but re-bound: the same code object with one global name replaced. In ``post_backward``
that name is ``foreach_reduce``, which becomes :func:`dispatch`. In ``foreach_reduce`` it is
``foreach_reduce_scatter_copy_in`` (the packing of gradients into one fp32 buffer), which becomes a no-op, while the
collective object that torch passes along becomes ours and reads the gradients where they are. So everything else of
torch's (HSDP's all-reduce, hooks, divide factors, accumulation into ``.grad``) is torch's own code in every version.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from tide_strategies.detect import Verdict, fallback
from tide_strategies.fsdp2.capture import refuse_capture
from tide_strategies.fsdp2.eligibility import REDUCIBLE
from tide_strategies.fsdp2.path import Path


def rebind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same function with other values for some of the global names that it uses.

    Raises:
        AttributeError: if the function does not use one of the names.
    """
    raw = inspect.unwrap(function)
    for name in names:
        if name not in raw.__code__.co_names:
            raise AttributeError(f"{raw.__qualname__} does not use the name {name!r}")
    out = types.FunctionType(
        raw.__code__, {**raw.__globals__, **names}, raw.__name__, raw.__defaults__, raw.__closure__
    )
    out.__kwdefaults__ = raw.__kwdefaults__
    return out


_torch_foreach_reduce = collectives.foreach_reduce
_signature = inspect.signature(_torch_foreach_reduce)
_foreach_reduce_unpacked = torch.no_grad()(
    rebind(_torch_foreach_reduce, foreach_reduce_scatter_copy_in=lambda *_: None)
)


def dispatch(*args: Any, **kwargs: Any) -> Any:
    """What a TIDE (or measured) group calls in the place of torch's ``foreach_reduce``; same arguments and result."""
    arguments = _signature.bind(*args, **kwargs).arguments
    params, gradients = arguments["fsdp_params"], arguments["unsharded_grads"]
    group = params[0]._tide_group
    if group.path is None:
        return _stock(group.reduce_scatters, args, kwargs)
    refuse_capture(gradients[0].device, params[0]._param_fqn)
    reduce_dtype = arguments["reduce_dtype"]
    direct = list(gradients)
    if group.accumulated and reduce_dtype is not None:
        # Kept gradients have the reduction's dtype, new ones the parameters', and which of them a rank has depends on
        # what it used in the backwards before: the one element type that all ranks can agree on is the reduction's.
        direct = [g.to(reduce_dtype) for g in direct]
    verdict = _call_verdict(direct, reduce_dtype)
    if verdict is not None:
        group.reduce_scatters.stock_calls += 1
        group.reduce_scatters.stock_reason = f"{verdict.code} {verdict.reason}"
        return _stock(group.reduce_scatters, args, kwargs)
    group.before_reduction()
    which = tuple(p._tide_index for p in params)
    if group.held:
        direct = list(group.path.keep_gradients(which, direct))
        # Torch's own list: with it goes the last reference to the gradients where autograd left them.
        gradients.clear()
        arguments["unsharded_grads"] = list(direct)
    arguments["reduce_scatter_comm"] = DirectReduceScatter(
        group, which, [g.contiguous() for g in direct], arguments["gradient_divide_factor"]
    )
    group.path.gradients_ready()
    result = _foreach_reduce_unpacked(**arguments)
    # The event that gradients are kept for: torch's comes after the output is there.
    read = group.path.gradients_read()
    return result if read is None else (result[0], read, *result[2:])


def _stock(tally: Any, args: Any, kwargs: Any) -> Any:
    start = time.perf_counter()
    result = _torch_foreach_reduce(*args, **kwargs)
    tally.calls += 1
    tally.seconds += time.perf_counter() - start
    return result


def _call_verdict(gradients: list[torch.Tensor], reduce_dtype: torch.dtype | None) -> Verdict | None:
    """Why this call must run as stock, or None. Alike on all ranks, as dtypes are once accumulation is allowed for."""
    dtypes = {g.dtype for g in gradients}
    if len(dtypes) > 1:
        return fallback("TIDE-F030")
    dtype = dtypes.pop()
    if dtype not in REDUCIBLE:
        return fallback("TIDE-F031", dtype)
    if (reduce_dtype or dtype) not in REDUCIBLE:
        return fallback("TIDE-F014", reduce_dtype)
    return None


class Binding(Protocol):
    """What a collective needs of its group's binding (``param_group.GroupBinding``)."""

    path: Path | None

    def let_go(self) -> None:
        """Vacate a landing that was held for gradients."""


class DirectReduceScatter:
    """FSDP2's ``ReduceScatter`` protocol for one call: takes the gradients as they are, writes the packed shard.

    Torch asks for two buffers: first the packed input, which nobody fills or reads here and which is therefore empty,
    then the output. The gradients live until torch lets go of this object's input, as a packed input would.
    """

    def __init__(
        self,
        binding: Binding,
        params: tuple[int, ...],
        gradients: list[torch.Tensor],
        divide_factor: float | None,
    ) -> None:
        self._binding, self._params, self._gradients = binding, params, gradients
        self._divide_factor = divide_factor
        self._input: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The packed input (empty), then the output of ``size`` items."""
        if self._input is None:
            self._input = torch.empty(0, dtype=dtype, device=device)
            return self._input
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce over ``group``; ``op`` is SUM, AVG, or PREMUL_SUM with the inverse of FSDP2's divide factor."""
        if op == dist.ReduceOp.AVG:
            divisor = float(group.size())
        elif op == dist.ReduceOp.SUM:
            divisor = 1.0
        else:
            assert self._divide_factor is not None
            divisor = float(self._divide_factor)
        assert self._binding.path is not None
        self._binding.path.reduce_scatter(self._params, self._gradients, output_tensor, divisor, self._binding.let_go)
        # On a GPU they have only been enqueued by now. Torch keeps the input until the stream is past the collective.
        assert self._input is not None
        self._input._tide_gradients = self._gradients  # type: ignore[attr-defined]
        self._gradients = []
