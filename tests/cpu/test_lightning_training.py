"""Training through ``Trainer(strategy="tide_fsdp")`` on two processes, against plain single-process PyTorch.

All checks of a namespace share one launch; each is reported as a test of its own.
"""

import contextlib
import copy
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from harness import launch
from lightning_models import (
    WIDTH,
    Block,
    Network,
    Normed,
    assert_close,
    assert_passed,
    full_state,
    loader,
    loss_of,
    module_class,
    on,
    part_loader,
    quiet_import,
    reference,
    run_checks,
    sgd,
    strategy_of,
    trainer_of,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tide_strategies.errors import TideConfigError
from tide_strategies.metrics import METRICS

# ---- against the single-process reference

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


def check_accumulation_with_clipping_by_norm(pl):
    module = module_class(pl)()
    expected = reference(module.network, sgd, epochs=3, accumulate=2, clip_norm=0.5)
    trainer = trainer_of(pl, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, part_loader())
    assert_close(full_state(module.network), expected)
    report = trainer.strategy.tide_report()
    assert {g.name.rpartition(".")[2] for g in report.groups} >= {"0", "1", "2"}, report
    # Three epochs of four micro-batches, two of which are a step.
    assert {g.reduce_scatter.calls for g in report.groups} == {6}, report


def check_synchronising_every_microbatch_with_clipping_by_value(pl):
    module = module_class(pl)()
    expected = reference(module.network, sgd, accumulate=2, clip_value=0.05)
    strategy = strategy_of(pl, sync_every_microbatch=True)
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    trainer_of(pl, strategy, accumulate_grad_batches=2, **clip).fit(module, part_loader())
    assert_close(full_state(module.network), expected)
    assert {g.reduce_scatter.calls for g in strategy.tide_report().groups} == {4}, "one in each micro-batch"


def check_parameters_between_forward_and_backward(pl):
    for reshard in (True, False):
        module, seen = module_class(pl)(), []
        expected = reference(module.network, sgd)
        look = on(pl, on_before_backward=lambda t, m, seen=seen: seen.append(type(m.network.blocks[0].up.weight.data)))
        strategy = strategy_of(pl, reshard_after_forward=reshard)
        trainer_of(pl, strategy, callbacks=[look]).fit(module, part_loader())
        assert [kind is DTensor for kind in seen] == [reshard] * 4
        assert_close(full_state(module.network), expected)


def check_tied_and_frozen_parameters(pl):
    network = Network()
    network.blocks[2].up.weight = network.blocks[0].up.weight
    network.head.requires_grad_(False)
    module = module_class(pl)(network)
    expected = reference(network, sgd)
    trainer_of(pl).fit(module, part_loader())
    assert network.blocks[2].up.weight is network.blocks[0].up.weight
    assert not isinstance(network.blocks[2], FSDPModule)
    assert isinstance(network.blocks[1], FSDPModule)
    assert_close(full_state(network), expected)


def check_processes_that_stand_for_nodes(pl):
    states = {}
    for plan, where in (("stock", ("", "", "")), ("tide", ("2x1", "local", "lane"))):
        module, strategy = module_class(pl)(), strategy_of(pl, plan=plan, topology="2x1", timeout_s=30)
        trainer = trainer_of(pl, strategy, max_epochs=2, gradient_clip_val=0.5)
        trainer.fit(module, part_loader())
        assert {(g.topology, g.rail, g.schedule) for g in trainer.strategy.tide_report().groups} == {where}
        states[plan] = full_state(module.network)
    assert_close(states["tide"], states["stock"], 0.0)  # two addends have but one order
    assert not torch.equal(states["tide"]["head.weight"], Network().state_dict()["head.weight"])


def check_cpu_offload(pl):
    module = module_class(pl)()
    expected = reference(module.network, sgd, clip_norm=0.5)
    trainer_of(pl, "tide_fsdp_offload", gradient_clip_val=0.5).fit(module, part_loader())
    assert_close(full_state(module.network), expected)


def check_sharding_by_the_user(pl):
    class Sharded(module_class(pl)):
        def configure_model(self):
            if not isinstance(self.network.blocks[0], FSDPModule):
                fully_shard(self.network.blocks[0], mesh=self.device_mesh["data_parallel"])

    module = Sharded()
    expected = reference(module.network, sgd)
    trainer_of(pl).fit(module, part_loader())
    assert isinstance(module, FSDPModule)
    assert not isinstance(module.network.blocks[1], FSDPModule)
    assert_close(full_state(module.network), expected)


def check_manual_optimisation(pl):
    """Two optimizers, two backwards per step, and a parameter of the root used after each of them."""

    def step(module, batch, backward, optimizers):
        first, second = optimizers
        backward((loss_of(module.network, batch) * module.gain).sum())
        first.step()
        first.zero_grad()
        second.zero_grad()
        backward((module.gain - loss_of(module.network, batch)).pow(2).sum())
        second.step()
        second.zero_grad()
        first.zero_grad()
        return (module.gain * loss_of(module.network, batch)).sum().detach()

    class Manual(module_class(pl)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.gain = nn.Parameter(torch.ones(1))

        def training_step(self, batch, index):
            return step(self, batch, self.manual_backward, self.optimizers())

        def configure_optimizers(self):
            return torch.optim.SGD(self.network.parameters(), 0.05), torch.optim.SGD([self.gain], 0.05)

    module = Manual()
    alone = copy.deepcopy(module)
    optimizers = alone.configure_optimizers()
    # Averages over ranks of gradients that are not linear in the loss: the reference averages per-rank gradients.
    trainer_of(pl, max_epochs=1).fit(module, part_loader())
    for batch in loader(8):
        halves = [[t[r::2] for t in batch] for r in range(2)]
        first, second = optimizers
        sum((loss_of(alone.network, h) * alone.gain).sum() for h in halves).div(2).backward()
        first.step(), alone.zero_grad()
        sum((alone.gain - loss_of(alone.network, h)).pow(2).sum() for h in halves).div(2).backward()
        second.step(), alone.zero_grad()
    assert_close(full_state(module), alone.state_dict())


# ---- stages, data, state


def check_all_stages_with_one_trainer(pl):
    module, strategy = module_class(pl)(), strategy_of(pl, plan="auto")
    trainer = trainer_of(pl, strategy, num_sanity_val_steps=2)
    trainer.fit(module, part_loader(), loader())
    first = trainer.callback_metrics["val_loss"].item()
    mesh = trainer.strategy.device_mesh
    (validated,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.test(module, loader(), verbose=False)
    assert validated["val_loss"] == pytest.approx(first, rel=1e-5)
    assert tested["test_loss"] == pytest.approx(first, rel=1e-5)
    predictions = torch.cat(trainer.predict(module, loader()))
    gathered = [torch.empty_like(predictions) for _ in range(2)]
    dist.all_gather(gathered, predictions)
    plain = Network()
    plain.load_state_dict(full_state(module.network))
    with torch.no_grad():
        assert_close({"out": torch.stack(gathered, 1).flatten(0, 1)}, {"out": plain(loader().dataset.tensors[0])})
    assert trainer.strategy.device_mesh is mesh
    assert trainer.strategy.tide_report().groups
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, part_loader(), loader())
    assert trainer.callback_metrics["val_loss"].item() < first


def check_ranks_start_from_rank_0_and_see_different_data(pl):
    network = Network(seed=dist.get_rank())
    batches, states = [], []
    module = module_class(pl)(network)
    start = on(pl, on_train_start=lambda t, m: states.append(full_state(m.network)))

    class Watching(type(module)):
        def on_train_batch_start(self, batch, index):
            batches.append(batch[0])

    module.__class__ = Watching
    trainer_of(pl, callbacks=[start], limit_train_batches=1).fit(module, loader())
    assert_close(states[0], Network(seed=0).state_dict(), 0.0)
    apart = strategy_of(pl, sync_module_states=False)
    own = module_class(pl)(Network(seed=dist.get_rank()))
    trainer_of(pl, apart, callbacks=[start], limit_train_batches=1).fit(own, loader())
    # Four of the seven rows are the first rank's, the others the second's own.
    rows = [Network(seed=rank).blocks[0].up.weight.detach() for rank in range(2)]
    assert torch.equal(states[1]["blocks.0.up.weight"], torch.cat([rows[0][:4], rows[1][4:]]))
    gathered = [torch.empty_like(batches[0]) for _ in range(2)]
    dist.all_gather(gathered, batches[0])
    assert not torch.equal(*gathered)


def check_inference_mode_before_training(pl):
    """What Lightning does on GPUs: the sanity check runs in inference mode, before any parameter was gathered."""
    stack = contextlib.ExitStack()
    enter = on(
        pl,
        on_validation_start=lambda t, m: stack.enter_context(torch.inference_mode()),
        on_validation_end=lambda t, m: stack.close(),
    )
    module = module_class(pl)()
    expected = reference(module.network, sgd)
    trainer_of(pl, num_sanity_val_steps=1, callbacks=[enter]).fit(module, part_loader(), loader())
    assert_close(full_state(module.network), expected)


def check_compiled_blocks(pl):
    module = module_class(pl)()
    expected = reference(module.network, sgd)
    for block in module.network.blocks:
        block.compile(backend="eager")
    trainer_of(pl).fit(module, part_loader())
    assert_close(full_state(module.network), expected)


def check_a_failed_run_leaves_a_usable_model(pl):
    def fail(trainer, module):
        raise LookupError("made to fail")

    for moment in ("on_fit_start", "on_before_backward", "on_after_backward"):
        module = module_class(pl)()
        with pytest.raises(LookupError, match="made to fail"):
            trainer_of(pl, callbacks=[on(pl, **{moment: fail})]).fit(module, part_loader())
        assert_close(full_state(module.network), Network().state_dict(), 0.0)
    trainer_of(pl).validate(module, loader(), verbose=False)


# ---- precision


def check_bf16_mixed(pl):
    seen = {}

    class Watching(module_class(pl)):
        def training_step(self, batch, index):
            seen["batch"] = batch[1].dtype
            return super().training_step(batch, index)

    module = Watching(Normed())
    look = module.network.blocks[0].register_forward_pre_hook(lambda m, args: seen.update(block=args[0].dtype))
    weight = module.network.blocks[0].register_forward_hook(lambda m, *_: seen.update(weight=m.up.weight.dtype))
    trainer = trainer_of(pl, precision="bf16-mixed", max_epochs=2)
    trainer.fit(module, part_loader(), loader())
    look.remove(), weight.remove()
    assert seen == {"batch": torch.float32, "block": torch.bfloat16, "weight": torch.bfloat16}, seen
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    norm = module.network.norm
    assert isinstance(norm, FSDPModule)
    assert norm.running_mean.dtype == torch.float32
    assert norm.running_mean.abs().sum() > 0


def check_bf16_mixed_reduces_in_fp32(pl):
    """The bits of stock FSDP2 with the policy written out, which are others than with sums in bf16."""
    bf16, fp32 = torch.bfloat16, torch.float32
    policies = {
        "tide": None,
        "stock": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32),
        "rounded": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16),
    }
    states = {}
    for name, policy in policies.items():
        module, strategy = module_class(pl)(), strategy_of(pl, mp_policy=policy, plan="tide" if not policy else "stock")
        trainer_of(pl, strategy, precision="bf16-mixed").fit(module, part_loader())
        assert {g.path for g in strategy.tide_report().groups} == {"stock" if policy else "tide"}
        states[name] = full_state(module.network)
    assert_close(states["tide"], states["stock"], 0.0)  # two addends have but one order
    assert any(not torch.equal(value, states["rounded"][k]) for k, value in states["stock"].items())
    assert_close(states["tide"], reference(Network(), sgd), 0.05)


def check_true_half_precision(pl):
    """Parameters in half precision: bfloat16 on TIDE, float16 as stock FSDP2."""
    for precision, dtype, code, tolerance in (
        ("bf16-true", torch.bfloat16, "TIDE-OK", 0.1),
        ("16-true", torch.float16, "TIDE-F006", 0.02),
    ):
        module, strategy = module_class(pl)(), strategy_of(pl)
        trainer_of(pl, strategy, precision=precision).fit(module, converted(part_loader(), dtype))
        assert {p.dtype for p in module.parameters()} == {dtype}
        assert {g.code for g in strategy.tide_report().groups} == {code}
        assert_close(full_state(module.network), reference(Network(), sgd), tolerance)


def converted(source, dtype):
    dataset = torch.utils.data.TensorDataset(*(t.to(dtype) for t in source.dataset.tensors))
    return torch.utils.data.DataLoader(dataset, batch_size=4, sampler=source.sampler)


def check_sync_batchnorm_is_applied(pl):
    module = module_class(pl)(Normed())
    # torch's SyncBatchNorm trains on GPUs only; evaluation runs anywhere.
    trainer_of(pl, sync_batchnorm=True).validate(module, loader(), verbose=False)
    assert isinstance(module.network.norm, nn.SyncBatchNorm)


def check_compiled_network(pl):
    """Everything in the LightningModule compiled at once, in place or as a wrapper."""
    for compiled in (lambda n: n.compile(backend="eager") or n, lambda n: torch.compile(n, backend="aot_eager")):
        network = Network()
        expected = reference(network, sgd)
        trainer = trainer_of(pl)
        trainer.fit(module_class(pl)(compiled(network)), part_loader())
        assert {g.path for g in trainer.strategy.tide_report().groups} == {"tide"}
        assert_close(full_state(network), expected)


# ---- meta device


class Rotary(nn.Module):
    """A meta parameter beside a real buffer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float32, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.gain, 0.5)

    def forward(self, x):
        return x * self.gain + self.table


def check_meta_device(pl):
    class Late(module_class(pl)):
        def configure_model(self):
            if isinstance(self.network, nn.Identity):
                torch.manual_seed(dist.get_rank())
                with torch.device("meta"):
                    self.network = nn.Sequential(Rotary(), Block(), Block(), nn.Linear(WIDTH, 1))
                self.network[2].up.weight = self.network[1].up.weight

    module, states = Late(nn.Identity()), []
    start = on(pl, on_train_start=lambda t, m: states.append(full_state(m.network)))
    trainer_of(pl, callbacks=[start]).fit(module, part_loader())
    state = states[0]
    assert state["0.gain"].tolist() == [0.5] * WIDTH
    assert state["0.table"].tolist() == list(range(WIDTH))
    assert 0 < state["1.up.weight"].abs().max() <= WIDTH**-0.5
    assert module.network[2].up.weight is module.network[1].up.weight
    for value in state.values():
        other = value.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, value)


# ---- numbers for loggers


def check_monitor_gives_loggers_the_numbers_of_a_step(pl):
    import importlib
    import tempfile

    kind = "unified" if pl.__name__ == "lightning.pytorch" else "standalone"
    monitor = importlib.import_module(f"tide_strategies.integrations.lightning.trainer_{kind}").TideMonitor
    seen = []

    class Keep(pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            seen.append((step, metrics))

    module = module_class(pl)()
    logger = Keep(tempfile.mkdtemp())
    trainer = trainer_of(pl, max_epochs=4, logger=logger, callbacks=[monitor()], log_every_n_steps=2)
    trainer.fit(module, loader())
    logged = [(step, m) for step, m in seen if "tide/collectives_ms" in m]
    assert [step for step, _ in logged] == [s for s in range(2, trainer.global_step + 1) if s % 2 == 0]
    for _, metrics in logged:
        assert metrics.keys() == METRICS.keys()
        groups = len(trainer.strategy.tide_report().groups)
        assert (metrics["tide/groups_tide"], metrics["tide/groups_stock"]) == (groups, 0)
        assert metrics["tide/reduce_scatters"] == groups, "one reduction of each group a step, not a total"
        assert metrics["tide/collectives_ms"] >= metrics["tide/wait_ms"] >= 0
        assert metrics["tide/moved_mib"] > 0
    with pytest.raises(TideConfigError, match="TideMonitor needs Trainer"):
        trainer_of(pl, strategy="ddp", callbacks=[monitor()]).fit(module_class(pl)(), loader())


CHECKS = {name: f for name, f in sorted(globals().items()) if name.startswith("check_")}
# The other copy of Lightning runs the same code of ours; what can differ is the host around it.
STANDALONE = ("check_accumulation_with_clipping_by_norm", "check_all_stages_with_one_trainer", "check_bf16_mixed")


def run_all(rank, world, arg):
    namespace, names = arg
    return run_checks([CHECKS[n] for n in names], quiet_import(namespace))


@pytest.fixture(scope="module")
def unified():
    return launch(2, run_all, ("lightning.pytorch", tuple(CHECKS)), timeout=180, pg_timeout=30)


@pytest.fixture(scope="module")
def standalone():
    pytest.importorskip("pytorch_lightning")
    return launch(2, run_all, ("pytorch_lightning", STANDALONE), timeout=180, pg_timeout=30)


@pytest.mark.parametrize("name", CHECKS)
def test_unified(name, unified):
    assert_passed(unified, name)


@pytest.mark.parametrize("name", STANDALONE)
def test_standalone(name, standalone):
    assert_passed(standalone, name)
