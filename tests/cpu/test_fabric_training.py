"""``Fabric(strategy="tide_fsdp")`` on two processes, against plain single-process PyTorch, in both namespaces."""

import importlib
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from harness import launch
from lightning_models import (
    Network,
    assert_close,
    assert_passed,
    full_state,
    in_new_folder,
    loss_of,
    part_loader,
    quiet_import,
    reference,
    run_checks,
    sgd,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tide_strategies.errors import TideConfigError

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


def strategy_of(namespace, **kw):
    kind = "unified" if namespace.__name__ == "lightning.fabric" else "standalone"
    module = importlib.import_module(f"tide_strategies.integrations.lightning.fabric_{kind}")
    return module.TideFSDPFabricStrategy(**kw)


def fabric_of(namespace, strategy="tide_fsdp", **kw):
    fabric = namespace.Fabric(accelerator="cpu", devices=2, strategy=strategy, **kw)
    fabric.launch()
    return fabric


def train(fabric, model, optimizer, *, epochs=1, accumulate=1, clip_norm=None, clip_value=None):
    for _ in range(epochs):
        for i, batch in enumerate(part_loader()):
            last = (i + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss_of(model, batch) / accumulate)
            if last:
                if clip_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=clip_norm)
                if clip_value is not None:
                    fabric.clip_gradients(model, optimizer, clip_val=clip_value)
                optimizer.step()
                optimizer.zero_grad()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def check_joint_setup_with_accumulation_and_clipping_by_norm(namespace, folder):
    network = Network()
    expected = reference(network, sgd, epochs=2, accumulate=2, clip_norm=0.5)
    fabric = fabric_of(namespace)
    model, optimizer = fabric.setup(network, sgd(network.parameters()))
    assert all(isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"])
    train(fabric, model, optimizer, epochs=2, accumulate=2, clip_norm=0.5)
    assert_close(full_state(network), expected)
    assert len(fabric.strategy.tide_report().groups) == 4


def check_separate_setup_with_clipping_by_value(namespace, folder):
    network = Network(seed=dist.get_rank())  # ranks start apart; rank 0's values count
    expected = reference(Network(seed=0), sgd, clip_value=0.05)
    fabric = fabric_of(namespace, strategy_of(namespace, plan="auto"))
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    train(fabric, model, optimizer, clip_value=0.05)
    assert_close(full_state(network), expected)


def check_synchronisation_survives_a_disabled_block(namespace, folder):
    fabric = fabric_of(namespace)
    network = Network()
    model = fabric.setup_module(network)
    batch = next(iter(part_loader()))
    with fabric.no_backward_sync(model, enabled=False):
        fabric.backward(loss_of(model, batch))
    model.zero_grad()
    fabric.backward(loss_of(model, batch))
    assert all(p.grad is not None for p in network.parameters())
    norm = fabric.clip_gradients(model, sgd(model.parameters()), max_norm=0.1)
    norms = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(norms, norm)
    assert norms[0] == norms[1] > 0


def check_bf16_mixed(namespace, folder):
    fabric = fabric_of(namespace, precision="bf16-mixed")
    network = Network()
    model, optimizer = fabric.setup(network, sgd(network.parameters()))
    train(fabric, model, optimizer)
    assert {p.dtype for p in network.blocks.parameters()} == {torch.float32}
    assert_close(full_state(network), reference(Network(), sgd), 0.05)


def check_meta_device(namespace, folder):
    fabric = fabric_of(namespace)
    with fabric.init_module(empty_init=True):
        network = Network()
    assert network.head.weight.is_meta
    network.reset_parameters = lambda: network.scale.data.fill_(1.0)  # its own parameter needs it as well
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    train(fabric, model, optimizer)
    for value in full_state(network).values():
        assert torch.isfinite(value).all()


def check_checkpoints(namespace, folder):
    for kind in ("full", "sharded"):
        for optimizer_of in (adamw, lambda p: torch.optim.SGD(p, lr=0.05)):
            path = folder / f"{kind}-{optimizer_of.__name__}.ckpt"
            fabric = fabric_of(namespace, strategy_of(namespace, state_dict_type=kind))
            network = Network()
            model, optimizer = fabric.setup(network, optimizer_of(network.parameters()))
            train(fabric, model, optimizer)
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 4})
            saved = full_state(network)
            train(fabric, model, optimizer)

            other = Network(seed=1)
            model, optimizer = fabric.setup(other, optimizer_of(other.parameters()))
            state = {"model": model, "optimizer": optimizer, "step": 0}
            assert fabric.load(path, state) == {}
            assert state["step"] == 4
            assert_close(full_state(other), saved, 0.0)
            train(fabric, model, optimizer)
            assert_close(full_state(other), full_state(network), 0.0)
    plain = Network()
    plain.load_state_dict(torch.load(folder / "full-adamw.ckpt", weights_only=True)["model"])


def check_mistakes(namespace, folder):
    with pytest.raises(TideConfigError, match="replicate_size=3 does not divide the 2 processes"):
        fabric_of(namespace, strategy_of(namespace, replicate_size=3))
    with pytest.raises(ValueError, match="precision='64-true'"):  # Fabric's own check comes first
        fabric_of(namespace, precision="64-true")
    fabric = fabric_of(namespace)
    network = Network()
    optimizer = adamw(network.parameters())
    loss_of(network, next(iter(part_loader()))).backward()
    optimizer.step()
    with pytest.raises(TideConfigError, match="AdamW has state already"):
        fabric.setup(network, optimizer)
    with pytest.raises(TideConfigError, match="with exactly one model that"):
        fabric.load(folder / "x.ckpt", {"model": Network()})
    assert isinstance(network, FSDPModule)


CHECKS = {name: f for name, f in sorted(globals().items()) if name.startswith("check_")}


def run_all(rank, world, arg):
    name, checks, root = arg
    namespace = quiet_import(name)
    return run_checks([in_new_folder(CHECKS[name], root) for name in checks], namespace)


@pytest.fixture(scope="module", params=["lightning.fabric", "lightning_fabric"])
def outcomes(request, tmp_path_factory):
    pytest.importorskip(request.param)
    root = str(tmp_path_factory.mktemp("fabric"))
    return launch(2, run_all, (request.param, tuple(CHECKS), root), timeout=180, pg_timeout=30)


@pytest.mark.parametrize("name", CHECKS)
def test_fabric(name, outcomes):
    assert_passed(outcomes, name)
