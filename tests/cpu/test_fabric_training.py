"""``Fabric(strategy="tide_fsdp")`` on two processes, against plain single-process PyTorch, in both namespaces."""

import contextlib
import importlib
import threading
from importlib.util import find_spec
from unittest import mock

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
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tide_strategies.errors import TideConfigError, TidePeerError
from tide_strategies.integrations.lightning import TideFabricEMA, saving

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

DECAY = 0.75


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
    groups = fabric.strategy.tide_report().groups
    assert len(groups) == 4
    assert {g.reduce_scatter.calls for g in groups} == {4}, "two steps an epoch, of two micro-batches each"
    # The bits are those of stock FSDP2: two addends have but one order.
    stock = Network()
    plain = fabric_of(namespace, strategy_of(namespace, plan="stock"))
    model, optimizer = plain.setup(stock, sgd(stock.parameters()))
    train(plain, model, optimizer, epochs=2, accumulate=2, clip_norm=0.5)
    assert {g.path for g in groups} == {"tide"}
    assert {g.path for g in plain.strategy.tide_report().groups} == {"stock"}
    assert_close(full_state(network), full_state(stock), 0.0)


def check_compiled_network(namespace, folder):
    network = Network()
    expected = reference(network, sgd)
    fabric = fabric_of(namespace)
    model, optimizer = fabric.setup(torch.compile(network, backend="eager"), sgd(network.parameters()))
    train(fabric, model, optimizer)
    assert isinstance(network, FSDPModule)
    assert {g.path for g in fabric.strategy.tide_report().groups} == {"tide"}
    assert_close(full_state(network), expected)


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
    with pytest.raises(TideConfigError, match=r"has no 'second\.param_groups.*; resume with the model"):
        fabric.load(folder / "sharded-adamw.ckpt", {"model": model, "second": optimizer})
    plain = Network()
    plain.load_state_dict(torch.load(folder / "full-adamw.ckpt", weights_only=True)["model"])


def stepping(fabric, model, optimizer, ema, dense=None, steps=4):
    """Steps after each of which the average is updated, and the one of the whole parameters beside it."""
    for batch in list(part_loader())[:steps]:
        fabric.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        fabric.call("update", model)
        if dense is not None:
            now = full_state(model.module)
            if dense:
                get_ema_multi_avg_fn(DECAY)([dense[k] for k in now], list(now.values()), 0)
            dense.update({k: v for k, v in now.items() if k not in dense})


def averages(ema, network):
    with ema.averaged():
        return full_state(network)


def check_moving_average(namespace, folder):
    dense, resumed = {}, {}
    ema = TideFabricEMA(DECAY)
    fabric = fabric_of(namespace, callbacks=[ema])
    network = Network()
    model, optimizer = fabric.setup(network, adamw(network.parameters()))
    stepping(fabric, model, optimizer, ema, dense)
    before, averaged = full_state(network), averages(ema, network)
    # The same additions element by element; a fused multiply-add may round one of them differently.
    assert_close(averaged, dense, 1e-6)
    assert max((averaged[k] - v).abs().max() for k, v in before.items()) > 1e-3
    assert_close(full_state(network), before, 0.0)
    with ema.averaged():
        fabric.save(folder / "averages.ckpt", {"model": model})
    content = torch.load(folder / "averages.ckpt", weights_only=True, map_location="cpu")
    assert_close(content["model"], averaged, 0.0)

    for kind in ("full", "sharded"):
        ema = TideFabricEMA(DECAY)
        fabric = fabric_of(namespace, strategy_of(namespace, state_dict_type=kind), callbacks=[ema])
        early = TideFabricEMA(DECAY, update_starting_at_step=9)
        network = Network()
        model, optimizer = fabric.setup(network, adamw(network.parameters()))
        stepping(fabric, model, optimizer, ema, steps=2)
        early.update(model)
        fabric.save(folder / kind, {"model": model, "optimizer": optimizer, "ema": ema, "early": early})
        stepping(fabric, model, optimizer, ema)
        resumed[kind] = (full_state(network), averages(ema, network))

        other, again = Network(seed=1), TideFabricEMA(DECAY)
        fabric = fabric_of(namespace, strategy_of(namespace, state_dict_type=kind), callbacks=[again])
        model, optimizer = fabric.setup(other, adamw(other.parameters()))
        state = {"model": model, "optimizer": optimizer, "ema": again, "early": early}
        assert fabric.load(folder / kind, state) == {}
        assert state["ema"] is again
        stepping(fabric, model, optimizer, again)
        assert_close(full_state(other), resumed[kind][0], 0.0)
        assert_close(averages(again, other), resumed[kind][1], 0.0)
        assert (again._steps, again._last_update, early._steps, early._last_update) == (6, 6, 1, None)
    assert_close(resumed["full"][1], resumed["sharded"][1], 0.0)


@contextlib.contextmanager
def writing_waits(event):
    """What would be written reaches the disk only once the event is set."""
    save = saving.save

    def late(*args, **kw):
        assert event.wait(30)
        return save(*args, **kw)

    with mock.patch.object(saving, "save", late):
        yield


def check_saving_in_the_background(namespace, folder):
    fabric = fabric_of(namespace, strategy_of(namespace, state_dict_type="sharded", save_in_background=True))
    network, ema, event = Network(), TideFabricEMA(DECAY), threading.Event()
    model, optimizer = fabric.setup(network, adamw(network.parameters()))
    state = {"model": model, "optimizer": optimizer, "ema": ema, "step": 4}
    train(fabric, model, optimizer)
    ema.update(model)
    saved = full_state(network)
    with writing_waits(event):
        fabric.save(folder / "first.ckpt", state)
        train(fabric, model, optimizer)  # and the values of the checkpoint do not change
        ema.update(model)
        assert not (folder / "first.ckpt/meta.pt").exists()
        event.set()
        fabric.save(folder / "second.ckpt", {**state, "step": 8})  # waits for the first
        assert (folder / "first.ckpt/meta.pt").exists()
        fabric.strategy.finish_saving()
        assert (folder / "second.ckpt/meta.pt").exists()
    expected = full_state(network), averages(ema, network)
    assert fabric.load(folder / "first.ckpt", state) == {}
    assert state["step"] == 4
    assert_close(full_state(network), saved, 0.0)
    train(fabric, model, optimizer)
    ema.update(model)
    assert_close(full_state(network), expected[0], 0.0)
    assert_close(averages(ema, network), expected[1], 0.0)

    def fail(*args, **kw):
        raise OSError("no space left, for the test")

    first = dist.get_rank() == 0
    words = "no space left" if first else "no space left|another rank could not"
    with mock.patch.object(FileSystemWriter, "write_data", fail if first else FileSystemWriter.write_data):
        fabric.save(folder / "third.ckpt", state)
        with pytest.raises((CheckpointException, TidePeerError), match=words):
            fabric.strategy.finish_saving()
    fabric.strategy.finish_saving()  # said once
    assert not (folder / "third.ckpt/meta.pt").exists()
    whole = fabric_of(namespace)
    model = whole.setup_module(Network())
    with mock.patch.object(torch, "save", fail), pytest.raises((OSError, TidePeerError), match=words):
        whole.save(folder / "whole.ckpt", {"model": model})


def check_mistakes(namespace, folder):
    """The likeliest ones at this door."""
    strategy = strategy_of(namespace)
    kind = type(strategy)
    for options, words in (
        ({"replicat_size": 2}, "TideFSDPFabricStrategy has no option 'replicat_size'; did you mean 'replicate_size'"),
        ({"tensor_parallel_size": 2}, "does not take tensor_parallel_size: .* use ModelParallelStrategy for tensor"),
        ({"state_dict_type": "shard"}, "state_dict_type must be 'full' or 'sharded'; got 'shard'"),
        ({"save_in_background": True}, "save_in_background=True needs state_dict_type='sharded'"),
        ({"plan": "fast"}, "'plan' must be "),
    ):
        with pytest.raises(TideConfigError, match=words):
            kind(**options)
    plugin = importlib.import_module(f"{namespace.__name__}.plugins.io").TorchCheckpointIO()
    with pytest.raises(TideConfigError, match=r"not with the plugin TorchCheckpointIO: .*save_in_background"):
        fabric_of(namespace, strategy, plugins=[plugin])
    with pytest.raises(TideConfigError, match=r"auto_wrap_policy names 'Blok', .* did you mean 'Block'"):
        fabric_of(namespace, strategy_of(namespace, auto_wrap_policy={"Blok"})).setup_module(Network())
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
    with pytest.raises(TideConfigError, match=r"fabric.save\(\) needs state=.* sharded; found 0 in it"):
        fabric.save(folder / "x.ckpt", {"model": Network()})
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with meta\.pt"):
        fabric.load(folder / "x.ckpt", {"model": network})
    assert isinstance(network, FSDPModule)
    ema = TideFabricEMA()
    with pytest.raises(TideConfigError, match="TideFabricEMA has no average yet: it begins after optimizer step 0"):
        averages(ema, network)
    with pytest.raises(TideConfigError, match=r"got Network\. For other models use .*AveragedModel"):
        ema.update(Network())
    ema.update(network)
    with pytest.raises(TideConfigError, match="averages another model: make one for each"):
        ema.update(fabric.setup_module(Network()))
    with ema.averaged(), pytest.raises(TideConfigError, match=r"Save outside of it; or leave the TideFabricEMA out"):
        fabric.save(folder / "x.ckpt", {"model": network, "ema": ema})
    with pytest.raises(TideConfigError, match="decay must be a number from 0 to 1"):
        TideFabricEMA(2)


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
