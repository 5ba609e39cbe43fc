"""Forwards of all kinds, registered parameters and state dicts: see peers.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import BF16, full_parameters
from peers import Block, Side, Stack, adam, peer, stack
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

# --- forwards -------------------------------------------------------------------------------------------------


@peer("hooks of modules")
def _(side: Side) -> Any:
    model = stack()
    seen: list[Any] = []

    def note(what: str) -> Callable[..., None]:
        def hook(module: nn.Module, *args: Any) -> None:
            whole = [not isinstance(p, DTensor) for p in module.parameters(recurse=False)]
            seen.append((what, type(module).__name__, whole))

        return hook

    for name in ("blocks.0", "blocks.1", "blocks.1.up", "head", ""):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(note("before"))
        module.register_forward_hook(note("after"))
        module.register_full_backward_pre_hook(note("before backward"))
        module.register_full_backward_hook(note("after backward"))
    model.blocks[2].up.register_forward_hook(lambda module, args, out: out * module.weight.sum())
    results = side.steps(side.ready(model))
    assert len(seen) > 3 * 15
    return seen, results


class Encoder(Stack):
    """A model used through a method of its own as well."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.encode(x))


class Projector(Block):
    """A block with a second way in."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@peer("methods that are a forward")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[1] = Projector()
    stack(model)
    register_fsdp_forward_method(model.blocks[1], "project")
    side.ready(model)
    results = [side.steps(model, count=1)]
    for step in range(2):
        x = model.blocks[1].project(side.data(20 + step))
        (model(x).square().mean() + x.mean()).backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
        model.zero_grad()
    return results


@peer("a block by itself, after and before the root")
def _(side: Side) -> Any:
    model = side.ready(stack())
    results: list[Any] = [side.steps(model, count=1)]
    model.blocks[1](side.data(5)).sum().backward()
    results.append([p.grad.full_tensor() for p in model.blocks[1].parameters()])
    model.zero_grad()
    results.append(side.steps(model, count=1))
    first = side.ready(stack())
    first.blocks[0](side.data(0))
    try:
        first(side.data(0))
    except RuntimeError as e:
        results.append(str(e))
    assert isinstance(results[-1], str)
    if side.tide:
        side.handles.pop().close()  # never installed: stock has refused the program
    return results


@dataclass
class Batch:
    """Inputs and outputs that are not tensors themselves."""

    x: torch.Tensor
    scale: float = 1.0
    names: tuple[str, ...] = ()


class Structured(Block):
    """A block that takes and returns a structure, beside keywords and None."""

    def forward(self, batch: Batch, *, extra: dict[str, Any] | None = None) -> Batch:  # type: ignore[override]
        x = super().forward(batch.x * batch.scale)
        return Batch(x + (extra["bias"] if extra else 0.0), batch.scale, (*batch.names, "block"))


class Structures(nn.Module):
    """Blocks that pass structures on; only the second is given keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = self.blocks[0](Batch(x, 0.5))
        batch = self.blocks[1](batch, extra={"bias": x, "words": "none"})
        assert batch.names == ("block", "block")
        return batch.x


@peer("structures in and out of blocks", since="2.12")
def _(side: Side) -> Any:
    torch.manual_seed(0)
    return side.steps(side.ready(stack(Structures(), mp_policy=MixedPrecisionPolicy(**BF16))))


@peer("policies of input and output dtypes")
def _(side: Side) -> Any:
    results = []
    plain, cast = MixedPrecisionPolicy(), MixedPrecisionPolicy(**BF16, output_dtype=torch.float32)
    no_cast = MixedPrecisionPolicy(**BF16, cast_forward_inputs=False)
    for inner, policy in (
        (cast, cast),
        (plain, MixedPrecisionPolicy(output_dtype=torch.bfloat16)),
        (no_cast, no_cast),
    ):
        torch.manual_seed(0)
        model = Stack()
        for module in (*model.blocks, model.head):
            fully_shard(module, mp_policy=inner)
        fully_shard(model, mp_policy=policy)
        if not policy.cast_forward_inputs:
            model.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        dtypes: list[torch.dtype] = []
        model.register_forward_hook(lambda module, args, out, dtypes=dtypes: dtypes.append(out.dtype))
        results.append((side.steps(side.ready(model)), [str(d) for d in dtypes]))
    return results


@peer("another dtype after sharding")
def _(side: Side) -> Any:
    model = stack().to(torch.bfloat16)
    model.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    return side.steps(side.ready(model))


@peer("forwards that no backward follows")
def _(side: Side) -> Any:
    model = side.ready(stack())
    optimizer = adam(model)
    results = []
    for step in range(3):
        model(side.data(50 + step))  # with a graph that is dropped
        loss = model(side.data(step)).square().mean()
        with torch.no_grad():  # between a forward and its backward
            results.append(model(side.data(60 + step)).sum().item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results, full_parameters(model)


@peer("two models in turns")
def _(side: Side) -> Any:
    models = [side.ready(stack()), side.ready(stack(mp_policy=MixedPrecisionPolicy(**BF16)))]
    optimizers = [adam(m) for m in models]
    losses = []
    for step in range(3):
        x = models[0](side.data(step))
        first = models[1](side.data(step + 5)).float()
        loss = (first - x).square().mean()  # both in one graph
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [full_parameters(m) for m in models]


# --- parameters and state dicts -------------------------------------------------------------------------------


@peer("what is registered after a forward and a backward")
def _(side: Side) -> Any:
    results = []
    for reshard in (True, False):
        model = side.ready(stack(reshard_after_forward=reshard))
        before = dict(model.named_parameters())
        for step in range(2):
            out = model(side.data(step))
            results.append({n: isinstance(p, DTensor) for n, p in model.named_parameters()})
            out.sum().backward()
            after = dict(model.named_parameters())
            assert all(after[n] is before[n] for n in before), "an optimizer made before keeps its parameters"
            assert all(isinstance(p, DTensor) for p in after.values())
    return results


@peer("state dicts share the parameters' memory")
def _(side: Side) -> Any:
    model = side.ready(stack())
    names = list(Stack().state_dict())
    cached = model.state_dict()  # before the first forward, that is, before anything has been installed
    for step in range(2):
        model(side.data(step)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()
        state = model.state_dict()
        assert list(state) == names
        for name, p in model.named_parameters():
            local = p.to_local()
            assert state[name].to_local().data_ptr() == local.data_ptr(), name
            assert torch.equal(cached[name].to_local(), local), "one taken before the training follows it"
    return {n: t.full_tensor() for n, t in cached.items()}


@peer("a state dict in the middle of a step")
def _(side: Side) -> Any:
    results = []
    for reshard in (True, False):
        model = side.ready(stack(reshard_after_forward=reshard))
        for step in range(2):
            loss = model(side.data(step)).square().mean()
            state = model.state_dict()  # reshards what is whole
            assert all(isinstance(t, DTensor) for t in state.values())
            results.append({n: t.full_tensor().clone() for n, t in state.items()})
            loss.backward()
            results.append([p.grad.full_tensor() for p in model.parameters()])
    return results


@peer("a full state dict from one rank and back")
def _(side: Side) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model = side.ready(stack())
    result = side.steps(model, count=2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    assert bool(full) == (side.rank == 0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    assert all(torch.equal(a, result[1][n]) for n, a in full_parameters(model).items())
    return side.steps(model, count=2, first=2)
