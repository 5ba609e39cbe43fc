"""Checkpoints of ``tide_fsdp``: full and sharded, resumed bit for bit, read without running their code.

The same launch serves moving averages (``lightning_ema``), writing in the background (``lightning_saving``), expert
subgroups (``lightning_experts``) and the likeliest mistakes (``lightning_mistakes``).
"""

from importlib.util import find_spec

import lightning_ema
import lightning_experts
import lightning_mistakes
import lightning_saving
import pytest
import torch
from harness import launch
from lightning_models import (
    Network,
    Normed,
    assert_close,
    assert_passed,
    full_state,
    in_new_folder,
    loader,
    module_class,
    on,
    part_loader,
    quiet_import,
    run_checks,
    sgd,
    strategy_of,
    trainer_of,
)

from tide_strategies.errors import TideConfigError

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def fit(pl, module, kind, *, epochs, resume=None):
    trainer = trainer_of(pl, strategy_of(pl, state_dict_type=kind), max_epochs=epochs)
    trainer.fit(module, part_loader(), ckpt_path=resume)
    return trainer


def resumed_equals_uninterrupted(pl, folder, kind, make, load_kind=None):
    """Two epochs at once, against one epoch, a checkpoint, and a second epoch in a new module and Trainer."""
    whole = make()
    fit(pl, whole, kind, epochs=2)
    path = folder / f"{kind}.ckpt"
    first = fit(pl, make(), kind, epochs=1)
    first.save_checkpoint(path)
    assert path.is_dir() == (kind == "sharded")
    second = make()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)  # what it starts from must not matter
    trainer = fit(pl, second, load_kind or kind, epochs=2, resume=path)
    assert trainer.global_step == 8
    assert_close(full_state(second), full_state(whole), 0.0)
    return path, first, whole


def with_schedule(pl, hparams=None):
    class Scheduled(module_class(pl)):
        def __init__(self, options=None):
            super().__init__(optimizer_of=adamw)
            if options is not None:
                self.save_hyperparameters(options)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return lambda: Scheduled(hparams)


def check_full(pl, folder):
    path, first, _ = resumed_equals_uninterrupted(pl, folder, "full", with_schedule(pl))
    # One ordinary file: plain PyTorch reads it, module and optimizer alike.
    content = torch.load(path, weights_only=True, map_location="cpu")
    expected = full_state(first.lightning_module)
    assert_close(content["state_dict"], expected, 0.0)
    plain = Network()
    plain.load_state_dict({k.removeprefix("network."): v for k, v in content["state_dict"].items()})
    adamw(plain.parameters()).load_state_dict(content["optimizer_states"][0])
    loaded = module_class(pl).load_from_checkpoint(path, map_location="cpu")
    assert_close(loaded.state_dict(), expected, 0.0)


def check_sharded(pl, folder):
    path, _, _ = resumed_equals_uninterrupted(pl, folder, "sharded", with_schedule(pl))
    assert {p.name for p in path.iterdir()} >= {"meta.pt", ".metadata"}


def check_either_kind_loads_whichever_is_set(pl, folder):
    resumed_equals_uninterrupted(pl, folder, "sharded", with_schedule(pl), load_kind="full")
    resumed_equals_uninterrupted(pl, folder, "full", with_schedule(pl), load_kind="sharded")


def check_sgd_without_state(pl, folder):
    for kind in ("full", "sharded"):
        resumed_equals_uninterrupted(pl, folder, kind, lambda: module_class(pl)(optimizer_of=plain_sgd))


def check_several_optimizers(pl, folder):
    """Of different kinds, so that states in each other's place would not fit, each in every other step."""

    class Two(module_class(pl)):
        automatic_optimization = False

        def training_step(self, batch, index):
            self.manual_backward(super().training_step(batch, index))
            self.optimizers()[index % 2].step()
            for optimizer in self.optimizers():
                optimizer.zero_grad()

        def configure_optimizers(self):
            return adamw(self.network.blocks.parameters()), sgd([self.network.scale, *self.network.head.parameters()])

    for kind in ("full", "sharded"):
        resumed_equals_uninterrupted(pl, folder, kind, Two)


def check_running_statistics_averaged_before_they_are_saved(pl, folder):
    class Averaging(module_class(pl)):
        def __init__(self):
            super().__init__(Normed(), adamw)

        def on_train_epoch_end(self):
            for name, buffer in self.named_buffers():
                if name.endswith(("running_mean", "running_var")):
                    buffer.copy_(self.trainer.strategy.reduce(buffer, reduce_op="mean"))

    for kind in ("full", "sharded"):
        resumed_equals_uninterrupted(pl, folder, kind, Averaging)


def check_weights_alone_do_not_resume(pl, folder):
    for kind in ("full", "sharded"):
        module = module_class(pl)()
        keep = pl.callbacks.ModelCheckpoint(folder, kind, save_weights_only=True)
        callbacks = [keep, lightning_ema.ema_of(pl)]  # validation, after which it saves, runs with averages
        trainer = trainer_of(pl, strategy_of(pl, state_dict_type=kind), callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, part_loader(), loader())
        path = folder / f"{kind}.ckpt"
        content = torch.load(path / "meta.pt" if kind == "sharded" else path, weights_only=False)
        assert not {"optimizer_states", "tide_ema"} & content.keys()
        with pytest.raises(KeyError, match="checkpoint contains only the model"):  # Lightning's words
            fit(pl, module_class(pl)(), kind, epochs=2, resume=path)
        other = module_class(pl)(Network(seed=1))
        trainer_of(pl).test(other, loader(), ckpt_path=path, verbose=False)
        assert_close(full_state(other), full_state(module), 0.0)


def check_checkpoint_on_an_exception(pl, folder):
    def fail(trainer, module):
        if trainer.global_step == 2:
            raise LookupError("made to fail")

    for kind in ("full", "sharded"):
        module, other, states = module_class(pl)(), module_class(pl)(Network(seed=1)), []
        callbacks = [pl.callbacks.OnExceptionCheckpoint(folder, kind), on(pl, on_train_batch_end=fail)]
        strategy = strategy_of(pl, state_dict_type=kind)
        with pytest.raises(LookupError, match="made to fail"):
            trainer_of(pl, strategy, callbacks=callbacks, enable_checkpointing=True).fit(module, part_loader())
        look = on(pl, on_train_start=lambda t, m, s=states: s.append((t.global_step, full_state(m))))
        trainer_of(pl, callbacks=[look]).fit(other, part_loader(), ckpt_path=folder / f"{kind}.ckpt")
        assert states[0][0] == 2
        assert_close(states[0][1], full_state(module), 0.0)


def check_frozen_parameters(pl, folder):
    def make():
        module = module_class(pl)(optimizer_of=adamw)
        module.network.blocks[0].requires_grad_(False)
        module.network.scale.requires_grad_(False)
        return module

    for kind in ("full", "sharded"):
        resumed_equals_uninterrupted(pl, folder, kind, make)


def check_omegaconf_hyperparameters_load_safely(pl, folder):
    omegaconf = pytest.importorskip("omegaconf")
    hparams = omegaconf.OmegaConf.create({"lr": 0.1, "layers": [1, 2, "${lr}"], "name": None, "on": True})
    for kind in ("full", "sharded"):
        path, *_ = resumed_equals_uninterrupted(pl, folder, kind, with_schedule(pl, hparams))
    assert path.is_dir()


class Anything:
    """An object that only unrestricted unpickling can read."""


def check_objects_need_permission(pl, folder):
    make = lambda: module_class(pl)()  # noqa: E731
    for kind in ("full", "sharded"):
        module = make()
        module.on_save_checkpoint = lambda checkpoint: checkpoint.update(extra=Anything())
        path = folder / f"{kind}.ckpt"
        fit(pl, module, kind, epochs=1).save_checkpoint(path)
        with pytest.raises(TideConfigError, match=r"If you trust it, use TideFSDPStrategy\(weights_only=False\)"):
            fit(pl, make(), kind, epochs=2, resume=path)
        trusting = trainer_of(pl, strategy_of(pl, weights_only=False), max_epochs=2)
        trusting.fit(make(), part_loader(), ckpt_path=path)
        assert trusting.global_step == 8


def check_model_checkpoint_callback(pl, folder):
    callback = pl.callbacks.ModelCheckpoint(folder, "best", monitor="val_loss", save_last=True)
    strategy = strategy_of(pl, state_dict_type="sharded")
    module = module_class(pl)(optimizer_of=adamw)
    trainer = trainer_of(pl, strategy, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(module, part_loader(), loader())
    best = callback.best_model_score.item()
    (metrics,) = trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(best, rel=1e-5)
    assert (folder / "last.ckpt" / "meta.pt").is_file()
    began = []
    look = on(pl, on_train_start=lambda t, m: began.append(t.global_step))
    last = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    again = trainer_of(pl, strategy_of(pl), max_epochs=4, callbacks=[last, look], enable_checkpointing=True)
    again.fit(module_class(pl)(optimizer_of=adamw), part_loader(), ckpt_path="last")
    assert (began, again.global_step) == ([12], 16)


PARTS = (globals(), vars(lightning_ema), vars(lightning_experts), vars(lightning_saving))
CHECKS = {n: f for part in PARTS for n, f in sorted(part.items()) if n.startswith("check_")} | lightning_mistakes.CHECKS


def run_all(rank, world, arg):
    namespace, names, root = arg
    pl = quiet_import(namespace)
    return run_checks([in_new_folder(CHECKS[name], root) for name in names], pl)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return launch(2, run_all, ("lightning.pytorch", tuple(CHECKS), root), timeout=240, pg_timeout=30)


@pytest.mark.parametrize("name", CHECKS)
def test_checkpoints(name, outcomes):
    assert_passed(outcomes, name)
