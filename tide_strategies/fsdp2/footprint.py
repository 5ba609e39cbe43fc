"""What a training step holds at its peak, from a dry run: the model's own step on tensors that have no memory.

The step runs once, unsharded, under torch's fake tensors, and every storage that it makes is followed from its first
operation to its end. FSDP2 comes in through the gradients: those of a group live until all of them are there, are then
reduced to a shard, and under TIDE stay for the next group's backward, since peers may still read them. Parameters are
left out of it: they are shards and arena, which ``planner/memory.py`` knows to the byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tide_strategies.errors import TideConfigError

#: Computes the loss of one step of one rank.
Step = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank at the peaks of a step, beside parameters and optimizer states.

    Args:
        forward: when the forward ends: what it keeps for the backward, inputs, outputs.
        tide: at the highest point of the step, with gradients in flight and in shards.
        stock: the same under stock FSDP2, whose gradients in flight are packed in the dtype of the reduction.
        optimizer: sharded gradients, and what the optimizer needs beside its states, when it steps.
    """

    forward: int
    tide: int
    stock: int
    optimizer: int


def dry_run(
    build: Callable[[], tuple[nn.Module, Step]],
    groups: Mapping[str, int],
    ranks: int,
    *,
    dtype: torch.dtype | None = None,
    reduce_itemsize: int = 4,
    device: str = "cpu",
) -> Footprint:
    """Run one step without memory.

    Args:
        build: makes the model, and the function that computes its loss on one rank's batch; called on ``device``.
        groups: FSDP2 parameter group of each parameter, by name.
        ranks: that each group is sharded over.
        dtype: that parameters are gathered in (mixed precision); None for their own.
        reduce_itemsize: bytes of an item of the reduction.
        device: "cpu" or "cuda"; none has to exist.

    Raises:
        TideConfigError: the step fails, or its loss is no number that has a gradient.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), torch.device(device):
            model, step = build()
            masters = {name: p.dtype.itemsize for name, p in model.named_parameters()}
            if dtype is not None:
                _cast(model, dtype)
            with _Live() as live:
                flight = _Flight(live, model, groups, masters, ranks, reduce_itemsize)
                loss = step(model)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise TideConfigError(
                        f"the step must return its loss, one number that has a gradient; it gave {type(loss).__name__}"
                    )
                forward = live.now
                loss.backward()
                flight.end()
    except TideConfigError:
        raise
    except Exception as e:  # the user's own code: whatever it raises is told in its words
        raise TideConfigError(f"the step cannot be run dry: {type(e).__name__}: {e}") from e
    return Footprint(forward, flight.peaks["tide"], flight.peaks["stock"], flight.sharded + flight.largest_shard)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters as FSDP2 gathers them under mixed precision, and inputs as it casts them; buffers stay."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_floating_point() and parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            module.register_parameter(name, cast.get(parameter, parameter))

    def floating(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(floating, args), tree_map(floating, kwargs)

    model.register_forward_pre_hook(inputs, with_kwargs=True)


class _Live(TorchDispatchMode):
    """Bytes of all storages made since it was entered that still exist. ``watch`` is told whenever there are more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.watch: Callable[[], None] = lambda: None
        self._known: dict[int, weakref.ref[Any]] = {}

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the storages of these tensors out."""
        for tensor in tensors:
            self._note(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return out

    def _note(self, tensor: torch.Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and self._known[key]() is not None:
            return
        self.now += nbytes

        def gone(_: Any) -> None:
            self.now -= nbytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.watch()


class _Flight:
    """Gradients from autograd to their shards, group by group."""

    def __init__(
        self,
        live: _Live,
        model: nn.Module,
        groups: Mapping[str, int],
        masters: Mapping[str, int],
        ranks: int,
        reduce_itemsize: int,
    ) -> None:
        self.live, self.ranks, self.reduce_itemsize, self.masters = live, ranks, reduce_itemsize, masters
        self.sharded = self.largest_shard = 0
        self.peaks = {"tide": 0, "stock": 0}
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._previous: list[torch.Tensor] = []
        self._packed = 0
        live.know([*model.parameters(), *model.buffers()])
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        missing = [name for name in trained if name not in groups]
        if missing:
            raise TideConfigError(f"parameters of no group: {', '.join(missing[:3])}")
        self._members = {g: {n for n in trained if groups[n] == g} for g in set(groups.values())}
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(self._arrival(name, groups[name]))
        live.watch = self._look

    def _look(self) -> None:
        """Note a peak, if it is one. Stock has packed gradients where TIDE keeps those of the group before."""
        held = sum(g.untyped_storage().nbytes() for g in self._previous)
        self._peak("tide", 0)
        self._peak("stock", self._packed - held)

    def _peak(self, which: str, more: int) -> None:
        self.peaks[which] = max(self.peaks[which], self.live.now + self.sharded + more)

    def _arrival(self, name: str, group: int) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            here = self._pending.setdefault(group, {})
            here[name], parameter.grad = parameter.grad, None
            if here.keys() == self._members[group]:
                self._reduce(self._pending.pop(group))

        return arrived

    def _reduce(self, gradients: dict[str, torch.Tensor]) -> None:
        """One group's gradients become shards; the group before lets its own go."""
        items = {name: self._shard_items(g) for name, g in gradients.items()}
        total = sum(items.values())
        self._previous, self._packed = [], 0
        self.sharded += total * self.reduce_itemsize  # the reduction's output
        self._peak("tide", 0)
        self._packed = total * self.ranks * self.reduce_itemsize
        self._peak("stock", self._packed)  # while they are being packed
        self._previous = list(gradients.values())
        # It is the shard where it has the shard's dtype; otherwise it is cast to that, and let go.
        self.sharded -= sum(n * (self.reduce_itemsize - self.masters[name]) for name, n in items.items())
        self.largest_shard = max(self.largest_shard, *(n * self.masters[name] for name, n in items.items()))

    def _shard_items(self, gradient: torch.Tensor) -> int:
        rows = gradient.shape[0] if gradient.dim() else 1
        row_items = gradient.numel() // max(rows, 1)
        return -(-rows // self.ranks) * row_items

    def end(self) -> None:
        """The backward is over: groups some of whose parameters were not used are reduced as well."""
        for gradients in self._pending.values():
            self._reduce(gradients)
        self._pending.clear()
        self._previous.clear()
