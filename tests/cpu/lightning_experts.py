"""Experts in parts, each sharded among the ranks that hold it: a small model, and what Lightning makes of it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning_models import (
    WIDTH,
    assert_close,
    loader,
    loss_of,
    module_class,
    part_loader,
    reference,
    strategy_of,
    trainer_of,
)
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tide_strategies import apply_tide
from tide_strategies.integrations.clipping import clip_grad_norm_
from tide_strategies.integrations.experts import ExpertGroups
from tide_strategies.integrations.lightning import saving
from tide_strategies.integrations.lightning.checkpoint import load_sharded, split_for_ranks
from tide_strategies.integrations.sharding import ShardingOptions, shard_module

EXPERTS = 6  # with two parts three each: uneven over two ranks


class AllToAll(torch.autograd.Function):
    """Block ``i`` goes to rank ``i`` of the group; the gradients go back the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    """Experts ``[first, first + count)``: ``[tokens, width]`` to ``[experts, tokens, width]``."""

    def __init__(self, first, count):
        super().__init__()
        generators = (torch.Generator().manual_seed(first + i) for i in range(count))
        self.weight = nn.Parameter(torch.stack([torch.randn(WIDTH, WIDTH, generator=g) for g in generators]))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class Mixture(nn.Module):
    """Each token through all experts, weighed by a router; ``parts`` is the group between parts, if there are any."""

    def __init__(self, parts=None):
        super().__init__()
        torch.manual_seed(3)
        self.parts, self.count = parts, dist.get_world_size(parts) if parts is not None else 1
        rank = dist.get_rank(parts) if parts is not None else 0
        local = EXPERTS // self.count
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(rank * local, local)

    def forward(self, x):
        if self.parts is None:
            out = self.experts(x)
        else:
            arrived = AllToAll.apply(x.expand(self.count, *x.shape), self.parts)
            done = self.experts(arrived.flatten(0, 1)).unflatten(1, (self.count, len(x)))
            out = AllToAll.apply(done.transpose(0, 1), self.parts).flatten(0, 1)
        return x + torch.einsum("te,etw->tw", self.router(x).softmax(-1), out)


def network(parts=None):
    head = nn.Linear(WIDTH, 1)
    model = nn.Sequential(Mixture(parts), Mixture(parts), head)
    with torch.no_grad():
        head.weight.fill_(0.3), head.bias.zero_()
    return model


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def check_experts_by_option(pl, folder):
    from lightning_ema import ema_of

    class Routed(module_class(pl)):
        def __init__(self):
            super().__init__(nn.Identity(), adam)

        def configure_model(self):
            if isinstance(self.network, nn.Identity):
                self.network = network(self.trainer.strategy.expert_mesh.get_group("expert_parallel"))

    def fit(epochs, parts=2, **kw):
        options = {"expert_policy": {"Experts"}, "expert_parallel_size": parts, "state_dict_type": "sharded"}
        module = Routed()
        trainer = trainer_of(
            pl, strategy_of(pl, **options), max_epochs=epochs, gradient_clip_val=0.5, callbacks=[ema_of(pl)]
        )
        trainer.fit(module, part_loader(), **kw)
        return trainer

    trainer = fit(1)
    trainer.save_checkpoint(folder / "one.ckpt")
    trainer = fit(2)
    trainer.save_checkpoint(folder / "two.ckpt")
    trainer = fit(2, ckpt_path=folder / "one.ckpt")
    trainer.save_checkpoint(folder / "resumed.ckpt")
    # In one part, all experts on both ranks, from the same checkpoint.
    fit(2, parts=1, ckpt_path=folder / "one.ckpt").save_checkpoint(folder / "undivided.ckpt")
    groups = {g.name.rpartition(".")[2]: g for g in trainer.strategy.tide_report().groups}
    assert groups["experts"].code == "TIDE-F010", groups  # two parts on two ranks: nobody shares one
    whole = {name: whole_file(folder, name) for name in ("two", "resumed", "undivided")}
    expected = reference(network(), adam, epochs=2, clip_norm=0.5)
    assert_close(whole["two"]["state_dict"], {f"network.{k}": v for k, v in expected.items()})
    for key in ("state_dict", "tide_ema"):
        assert_close(whole["undivided"][key], whole["two"][key])
    for key in ("state_dict", "tide_ema", "optimizer_0"):
        assert flat(whole["two"][key]).keys() == flat(whole["resumed"][key]).keys()
        for name, value in flat(whole["two"][key]).items():
            other = flat(whole["resumed"][key])[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    assert whole["two"]["tide_ema"]["network.0.experts.weight"].shape == (EXPERTS, WIDTH, WIDTH)


def with_four_ranks(folder):
    """Two parts of two ranks each, without Lightning: the steps that its strategy consists of."""
    groups = ExpertGroups.over("cpu", 4, 2, {"Experts"})
    model = network(groups.mesh.get_group("expert_parallel"))
    device = torch.device("cpu")
    shard_module(model, init_device_mesh("cpu", (4,)), device, ShardingOptions(), MixedPrecisionPolicy(), groups)
    handle = apply_tide(model, {"plan": "tide", "timeout_s": 30})
    optimizer = adam(model.parameters())
    for batch in loader(8):
        mine = [t.chunk(4)[dist.get_rank()] for t in batch]
        loss_of(model, mine).backward()
        clip_grad_norm_(model.parameters(), 0.5, split_further=groups.split_further)
        optimizer.step()
        optimizer.zero_grad()
    paths = {g.name: g.path for g in handle.report().groups}
    assert paths["0.experts"] == paths["1.experts"] == "tide", paths

    def whole():
        state = groups.whole(get_model_state_dict(model))
        return {name: tensor.full_tensor() for name, tensor in state.items()}

    trained = whole()
    assert_close(trained, reference(network(), adam, clip_norm=0.5))
    checkpoint = {
        "state_dict": get_model_state_dict(model),
        "optimizer_states": [get_optimizer_state_dict(model, optimizer)],
    }
    moments = [tensor.to_local().clone() for tensor in optimizer.state[model[0].experts.weight].values() if tensor.ndim]
    writer = saving.ShardedWriter(timedelta(seconds=30))
    writer.write(split_for_ranks(checkpoint, groups), checkpoint, folder / "experts", background=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(1.0)
            for tensor in optimizer.state[parameter].values():
                tensor.zero_()
    writer.wait()
    dist.barrier()
    load_sharded(folder / "experts", model, "state_dict", {"optimizer_0": optimizer}, True, groups)
    assert_close(whole(), trained, 0.0)
    again = [tensor.to_local() for tensor in optimizer.state[model[0].experts.weight].values() if tensor.ndim]
    assert len(again) == 2
    assert all(torch.equal(a, b) for a, b in zip(again, moments, strict=True))
    handle.close()


def whole_file(folder, name):
    """What ``dcp_to_torch_save`` makes of a sharded checkpoint: experts of all parts in one tensor."""
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder / f"{name}.ckpt", folder / f"{name}.pt")
    dist.barrier()
    return torch.load(folder / f"{name}.pt", weights_only=True)


def flat(state, prefix=""):
    if not isinstance(state, (dict, list)):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {n: v for k, value in items for n, v in flat(value, f"{prefix}.{k}").items()}
