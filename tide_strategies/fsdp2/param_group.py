"""Subclasses that FSDP2's own objects are turned into: the TIDE group and parameter, and the measured stock group.

An installation swaps ``__class__`` of single instances, so models without TIDE in the same process are untouched, and
removing TIDE is swapping back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_strategies.errors import TideError
from tide_strategies.fsdp2.access import unsharded_dtype
from tide_strategies.fsdp2.ahead import GatherAhead
from tide_strategies.fsdp2.capture import refuse_capture
from tide_strategies.fsdp2.exposed import ExposedMeter, around
from tide_strategies.fsdp2.path import Path
from tide_strategies.fsdp2.reduce import dispatch, rebind
from tide_strategies.fsdp2.steps import unwatch, watch
from tide_strategies.layout import GroupLayout
from tide_strategies.runtime.group import Tally
from tide_strategies.runtime.slots import Window

_TrainingState = module.TrainingState
_log = logging.getLogger("tide_strategies")


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# Decorators that torch itself puts on the methods replaced here; absent from the older versions.
_eager_only = getattr(common, "_dynamo_disable", _unchanged)
_without_functorch = getattr(module, "_disable_functorch_if_active", _unchanged)


def _span(name: str, group: Any) -> contextlib.AbstractContextManager[Any]:
    """A span in a profile; nothing where none is being made, since a span costs the host several microseconds."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(f"{name} ({group._module_fqn})")
    return contextlib.nullcontext()


_post_backward = _eager_only(rebind(FSDPParamGroup.post_backward, foreach_reduce=dispatch))


def _nothing() -> None:
    pass


class GroupBinding:
    """What TIDE knows of one parameter group: how it communicates (None under stock) and the tallies of its calls."""

    def __init__(self, path: Path | None = None, cache: str = "off", ahead: GatherAhead | None = None) -> None:
        self.path, self.cache, self.ahead = path, cache, ahead
        #: Called before a reduction through ``path`` is given out.
        self.before_reduction: Callable[[], None] = _nothing
        #: Which of the forward invocations it is whose backward runs; None if unknown.
        self.invocation: int | None = None
        self.all_gathers = path.collectives.all_gathers if path else Tally()
        self.reduce_scatters = path.collectives.reduce_scatters if path else Tally()
        #: Whether gradients have been kept from a backward without synchronisation since the last reduction.
        self.accumulated = False
        #: Version counters of the unsharded parameters when they were put on the modules.
        self.unsharded: list[int] = []
        self.edit_noted = False
        #: The landing's parameters are done with, and it is kept for the gradients until they have been reduced.
        self.held = False
        #: On GPUs: of the installation, once all of its groups are known.
        self.meter: ExposedMeter | None = None

    def finalized(self) -> None:
        """The group is through with a backward."""
        if self.meter is not None:
            self.meter.finalized()

    def let_go(self) -> None:
        """Vacate a landing that was held for gradients, after what precedes on the current stream."""
        if self.held:
            self.held = False
            assert self.path is not None
            self.path.vacate()


class TideParam(FSDPParam):
    """An FSDPParam whose unsharded data is a landing: never allocated, never freed, only vacated by its group."""

    _tide_shard_dtype: torch.dtype
    _tide_generation: int

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the landing is adopted at installation."""

    def alloc_all_gather_outputs(self) -> None:
        """Nothing: the landing is always allocated."""

    def free_unsharded_param(self) -> None:
        """Nothing: the group vacates the landing as a whole."""

    def free_all_gather_outputs(self) -> None:
        """Nothing, likewise (torch 2.15)."""

    def reset_sharded_param(self) -> None:
        """As torch; called when other tensors take the shards' place (``load_state_dict(assign=True)``, ``.to()``)."""
        super().reset_sharded_param()
        self._tide_generation += 1


class TideParamGroup(FSDPParamGroup):
    """An FSDPParamGroup whose all-gather lands in place and whose reduce-scatter reads gradients in place."""

    _tide: GroupBinding
    fsdp_params: list[TideParam]  # type: ignore[assignment]

    @_without_functorch
    def unshard(self, async_op: bool = False) -> None:
        """Issue the all-gather unless it is pending, done, or unwanted (torch's own three conditions)."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self._training_state == _TrainingState.PRE_BACKWARD:
            return
        refuse_capture(self.device, self._module_fqn or "(root)")
        shards = []
        for param in self.fsdp_params:
            shard = param._sharded_param_data
            if shard.dtype is not param._tide_shard_dtype:
                raise TideError(
                    f"parameter {param._param_fqn!r} has become {shard.dtype} after TIDE was installed for "
                    f"{param._tide_shard_dtype}; close the handle before changing dtypes and apply TIDE again"
                )
            shards.append(shard)
        if self._tide.ahead is not None:
            self._tide.ahead.make_room(self)
        versions = self._versions()
        with _span("TIDE::all_gather", self):
            if self._may_reuse() and self._path.collectives.reusable(versions):
                self._path.reuse()
            else:
                self._path.all_gather(self, shards, versions)
        self._all_gather_result = collectives.AllGatherResult(self._all_gather_output, None, None, [], [], [])

    @_without_functorch
    def wait_for_unshard(self) -> None:
        """Finish the pending all-gather, if any, and put the unsharded parameters on the modules."""
        if self._all_gather_result is None:
            return
        if self._training_state == _TrainingState.FORWARD:
            self._release_stock_neighbour()
        with _span("TIDE::all_gather_wait", self), around(self._tide.meter):
            self._path.wait()
        for param in self.fsdp_params:
            param.init_unsharded_param()
        self._to_unsharded()
        self._gathered()
        self._tide.unsharded = self._unsharded_versions()

    def post_backward(self, *unused: Any) -> None:
        """As torch, with :func:`dispatch` for ``foreach_reduce``."""
        # FSDP2 calls this for every group in every backward, used or not, so all ranks note the same.
        self._tide.accumulated |= not self.reduce_grads
        with around(self._tide.meter):
            _post_backward(self, *unused)
        self._tide.let_go()  # if there was nothing to reduce, or stock collectives did
        self._tide.invocation = None
        if self.reduce_grads:
            self._tide.accumulated = False

    def _backward_prefetch(self) -> None:
        """As torch; notes which invocation it is that torch takes from its notes here."""
        self._tide.invocation = self._post_forward_indices[-1] if self._post_forward_indices else None
        super()._backward_prefetch()

    def finalize_backward(self) -> None:
        """As torch, after giving back a landing that was gathered into but never waited for (a wrong prefetch)."""
        self._drop_pending()
        with around(self._tide.meter):
            super().finalize_backward()
        self._tide.finalized()

    def _reset_iter_state(self) -> None:
        self._drop_pending()
        super()._reset_iter_state()

    def _to_sharded(self) -> None:
        was_unsharded = self.is_unsharded
        edited = was_unsharded and self._unsharded_versions() != self._tide.unsharded
        super()._to_sharded()
        if edited:
            self._note_edit()
        if was_unsharded:
            self._tide.held = self._takes_gradients()
            if not self._tide.held:
                self._path.vacate()

    @property
    def _path(self) -> Path:
        assert self._tide.path is not None
        return self._tide.path

    def _takes_gradients(self) -> bool:
        """Whether this reshard is the one between a backward and the reduction of its gradients."""
        return self._training_state == _TrainingState.POST_BACKWARD and self.reduce_grads and self._path.keeps_gradients

    def _versions(self) -> tuple[int, ...] | None:
        """Numbers that change when any shard's values do; None if they cannot be known (inference tensors)."""
        versions: list[int] = []
        try:
            for param in self.fsdp_params:
                # An optimizer updates the DTensor, whose version counter is not that of the local shard in it; fused
                # optimizers count up neither, so the generation counts their steps.
                versions += (param._sharded_param_data._version, param.sharded_param._version, param._tide_generation)
        except RuntimeError:  # inference tensors have no version counter
            return None
        return tuple(versions)

    def _unsharded_versions(self) -> list[int]:
        """Numbers that change when an unsharded parameter is edited in place."""
        try:
            return [param._unsharded_param._version for param in self.fsdp_params]
        except RuntimeError:  # inference tensors have no version counter
            return []

    def _note_edit(self) -> None:
        """An edited landing no longer holds what the shards would be gathered to."""
        self._path.collectives.forget()
        if not self._tide.edit_noted:
            self._tide.edit_noted = True
            shared = (
                " The ranks of a host share them, so each sees the others' edits." if self.device.type == "cpu" else ""
            )
            _log.warning(
                "TIDE: parameters of %r were edited in place while unsharded; as in FSDP2, reshard undoes that.%s",
                self._module_fqn or "(root)",
                shared,
            )

    def _may_reuse(self) -> bool:
        """Whether parameters can be trusted not to have been edited behind their version counters."""
        if self._tide.cache == "turnaround":  # between a forward and its backward nobody edits through .data
            return self._training_state == _TrainingState.PRE_BACKWARD
        return self._tide.cache == "microbatch"

    def _drop_pending(self) -> None:
        if self._all_gather_result is not None:
            self._path.wait()
            self._path.vacate()
            self._gathered()

    def _gathered(self) -> None:
        """The all-gather is no longer pending."""
        self._all_gather_result = None
        if self._tide.ahead is not None:
            self._tide.ahead.settled(self)

    def _release_stock_neighbour(self) -> None:
        """Free the flat buffer that the previous group keeps if it is a stock one."""
        state = self.comm_ctx.all_gather_state
        if state is None:
            return
        release = getattr(self.comm_ctx, "release_all_gather_state_for_comm_reuse", None)
        if release is not None:  # torch 2.15
            release()
        else:
            self._wait_all_gather_streams_on_event(state.event)
            self.comm_ctx.all_gather_state = None


class MeasuredParamGroup(FSDPParamGroup):
    """A group with stock collectives whose time is counted."""

    _tide: GroupBinding

    def unshard(self, async_op: bool = False) -> None:
        """Torch's own, timed."""
        pending = self._all_gather_result
        start = time.perf_counter()
        super().unshard(async_op)
        if self._all_gather_result is not pending:
            self._tide.all_gathers.calls += 1
            self._tide.all_gathers.seconds += time.perf_counter() - start

    def wait_for_unshard(self) -> None:
        """Torch's own, timed."""
        if self._all_gather_result is None:
            return
        start = time.perf_counter()
        with around(self._tide.meter):
            super().wait_for_unshard()
        self._tide.all_gathers.seconds += time.perf_counter() - start

    def post_backward(self, *unused: Any) -> None:
        """As torch, with :func:`dispatch` for ``foreach_reduce``."""
        with around(self._tide.meter):
            _post_backward(self, *unused)

    def finalize_backward(self) -> None:
        """Torch's own, timed."""
        with around(self._tide.meter):
            super().finalize_backward()
        self._tide.finalized()


def adopt(group: Any, landings: Sequence[torch.Tensor], binding: GroupBinding) -> None:
    """Turn a sharded FSDPParamGroup into a TIDE group whose unsharded parameters are ``landings``, 1-D and padded."""
    for param, landing in zip(group.fsdp_params, landings, strict=True):
        forget_unsharded(param)
        param.__class__ = TideParam
        param._tide_shard_dtype, param._tide_generation = param._sharded_param_data.dtype, 0
        param.all_gather_outputs = [landing]
    _mark(group, binding, TideParamGroup)
    if binding.ahead is not None:
        binding.before_reduction = functools.partial(binding.ahead.before_reduction, group)
    if binding.cache != "off":
        watch(group)


def landing_tensors(group: Any, layout: GroupLayout, window: Window) -> list[torch.Tensor]:
    """Each parameter's part of a landing, padded.

    Every tensor has its own storage at offset 0, since torch views it with an absolute offset, and its own version
    counter, since writing a shard must not look to autograd like an edit of the parameter. None is an inference tensor,
    whatever mode the first forward runs in.
    """
    out = []
    with torch.inference_mode(False):
        for p, param in enumerate(group.fsdp_params):
            dtype, items = unsharded_dtype(param), layout.shard_items(p) * layout.ranks
            if items:
                out.append(torch.from_dlpack(window.tensor(layout.landing_base(p), items, _name(dtype))))
            else:
                out.append(torch.empty(0, dtype=dtype, device=group.device))
    return out


def measure(group: Any, binding: GroupBinding) -> None:
    """Turn an FSDPParamGroup into one whose stock collectives are timed."""
    _mark(group, binding, MeasuredParamGroup)


def restore(group: Any) -> None:
    """Give a group its stock class back. Its parameters must not be in use by a backward to come."""
    if type(group) is TideParamGroup:
        unwatch(group)
        # After a failure the other ranks cannot be told any more, and need not be: they have stopped as well.
        with contextlib.suppress(TideError):
            group._drop_pending()
        with contextlib.suppress(TideError):
            group._to_sharded()
        group._all_gather_result = None
    for param in group.fsdp_params:
        if type(param) is TideParam:
            param.__class__ = FSDPParam  # type: ignore[assignment]
            forget_unsharded(param)
            del param._tide_shard_dtype, param._tide_generation
        del param._tide_group, param._tide_index
    group.__class__ = FSDPParamGroup
    del group._tide


def forget_unsharded(param: Any) -> None:
    """Make FSDP2 build the unsharded parameter anew at the next all-gather."""
    param.all_gather_outputs = []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def _mark(group: Any, binding: GroupBinding, cls: type) -> None:
    for index, param in enumerate(group.fsdp_params):
        param._tide_group, param._tide_index = binding, index
    group._tide = binding
    group.__class__ = cls


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
