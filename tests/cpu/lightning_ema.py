"""What ``TideEMA`` promises, against averages of the whole model; run by ``test_lightning_checkpoints``."""

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning_models import (
    Network,
    assert_close,
    full_state,
    loader,
    loss_of,
    module_class,
    on,
    part_loader,
    strategy_of,
    trainer_of,
)
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tide_strategies.errors import TideConfigError

DECAY = 0.75


def ema_of(pl, **kw):
    kind = "unified" if pl.__name__ == "lightning.pytorch" else "standalone"
    return importlib.import_module(f"tide_strategies.integrations.lightning.trainer_{kind}").TideEMA(DECAY, **kw)


class Dense:
    """The average as anybody would write it, of the whole parameters gathered after each step."""

    def __init__(self, pl, float32=True):
        self.average, self.float32 = {}, float32
        self.callback = on(pl, on_train_batch_end=self.update)

    def update(self, trainer, module):
        now = {k: v.float() if self.float32 else v for k, v in full_state(module).items() if v.is_floating_point()}
        if self.average:
            get_ema_multi_avg_fn(DECAY)([self.average[k] for k in now], list(now.values()), 0)
        self.average = self.average or now


def averages(ema, module):
    with ema.averaged():
        return full_state(module)


def fit(pl, module, callbacks, kind="full", *, epochs=1, resume=None, **kw):
    trainer = trainer_of(pl, strategy_of(pl, state_dict_type=kind), max_epochs=epochs, callbacks=callbacks, **kw)
    trainer.fit(module, part_loader(), loader(), ckpt_path=resume)
    return trainer


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def check_ema_equals_that_of_the_whole_model(pl, folder):
    alone = module_class(pl)(optimizer_of=adam)
    fit(pl, alone, [], epochs=2)
    module, ema, dense = module_class(pl)(optimizer_of=adam), ema_of(pl), Dense(pl)
    trainer = fit(pl, module, [ema, dense.callback], epochs=2)
    averaged = averages(ema, module)
    # The same additions element by element; a fused multiply-add may round one of them differently.
    assert_close(averaged, dense.average, 1e-6)
    assert max((averaged[k] - v).abs().max() for k, v in full_state(module).items()) > 1e-2
    # Validation has used the averages, and training has not noticed.
    assert_close(full_state(module), full_state(alone), 0.0)
    plain = Network()
    plain.load_state_dict({k.removeprefix("network."): v for k, v in dense.average.items()})
    with torch.no_grad():
        expected = sum(loss_of(plain, batch) for batch in loader()).item() / len(loader())
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(expected, rel=1e-5)
    (tested,) = trainer.test(module, loader(), verbose=False)
    assert tested["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert_close(full_state(module), full_state(alone), 0.0)


def check_ema_between_microbatches(pl, folder):
    """Validation in the middle of an accumulation, when groups may still be gathered for the next micro-batch."""
    states = []
    for callbacks in ([], [ema_of(pl)]):
        module = module_class(pl)()
        strategy = strategy_of(pl, all_gather={"cache": "microbatch"})
        options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "callbacks": callbacks}
        trainer_of(pl, strategy, **options).fit(module, part_loader(), loader())
        states.append(full_state(module))
    assert_close(states[1], states[0], 0.0)


def check_ema_with_manual_optimisation(pl, folder):
    class Manual(module_class(pl)):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            self.manual_backward(loss_of(self.network, batch))
            optimizer.step()
            optimizer.zero_grad()

    module, ema, dense = Manual(), ema_of(pl), Dense(pl)
    fit(pl, module, [ema, dense.callback])
    assert_close(averages(ema, module), dense.average, 1e-6)


class Half(nn.Module):
    """A block in bf16 among those in fp32, and a buffer that training changes."""

    def __init__(self, block):
        super().__init__()
        self.block = block.bfloat16()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += 1.0
            self.calls += 1
        return self.block(x.bfloat16()).float()


def check_ema_of_several_dtypes_and_buffers(pl, folder):
    for float32 in (True, False):
        network = Network()
        network.blocks[1] = Half(network.blocks[1])
        network.blocks[2].requires_grad_(False)
        module, ema = module_class(pl)(network), ema_of(pl, float32=float32, average_buffers=True)
        dense = Dense(pl, float32)
        strategy = strategy_of(pl, auto_wrap_policy={"Half", "Block"})
        trainer_of(pl, strategy, callbacks=[ema, dense.callback]).fit(module, part_loader())
        averaged = averages(ema, module)
        kept = ema._average.state()
        expected = torch.float32 if float32 else torch.bfloat16
        assert kept["network.blocks.1.block.up.weight"].dtype == expected
        assert averaged["network.blocks.1.block.up.weight"].dtype == torch.bfloat16
        assert not any(name.startswith("network.blocks.2") for name in kept), "frozen parameters need no average"
        for name, tensor in kept.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            # One rounding of a value up to about 2 in bf16 where averages are kept in it.
            tolerance = 2**-7 if whole.dtype == torch.bfloat16 else 1e-6
            assert (whole - dense.average[name]).abs().max() <= tolerance, name
        assert 1 < averaged["network.blocks.1.seen"][0] < network.blocks[1].seen[0] == 4
        assert averaged["network.blocks.1.calls"] == network.blocks[1].calls == 4


def check_ema_starts_and_pauses_as_told(pl, folder):
    seen = []
    ema = ema_of(pl, update_starting_at_step=1, update_every_n_steps=3)
    watch = on(pl, on_train_batch_end=lambda t, m: seen.append(ema._last_update))
    trainer_of(pl, callbacks=[ema, watch], max_epochs=2).fit(module_class(pl)(), part_loader())
    assert seen == [None, 2, 2, 2, 5, 5, 5, 8]


def check_ema_resumed_equals_uninterrupted(pl, folder):
    for kind, other in (("full", "sharded"), ("sharded", "full")):
        whole, ema = module_class(pl)(optimizer_of=adam), ema_of(pl)
        fit(pl, whole, [ema], kind, epochs=2)
        expected = averages(ema, whole), full_state(whole)
        # At the end of an epoch, and in the middle of its validation, when the averages are in the module.
        end, middle = folder / f"{kind}.ckpt", folder / f"{kind}-middle.ckpt"
        first = module_class(pl)(optimizer_of=adam)
        save = on(pl, on_validation_epoch_end=lambda t, m, path=middle: t.save_checkpoint(path))
        fit(pl, first, [ema_of(pl), save], kind).save_checkpoint(end)
        for path, load_kind in ((end, kind), (middle, other)):
            second, ema = module_class(pl)(Network(seed=5), optimizer_of=adam), ema_of(pl)
            trainer = fit(pl, second, [ema], load_kind, epochs=2, resume=path)
            assert trainer.global_step == 8
            assert_close(full_state(second), expected[1], 0.0)
            assert_close(averages(ema, second), expected[0], 0.0)
        # A Trainer that only tests uses the averages as well.
        fresh, ema = module_class(pl)(Network(seed=5)), ema_of(pl)
        trainer_of(pl, strategy_of(pl), callbacks=[ema]).test(fresh, loader(), ckpt_path=end, verbose=False)
        stored = averages(ema, fresh)
        assert max((stored[k] - v).abs().max() for k, v in full_state(first).items()) > 1e-2
    content = torch.load(folder / "full.ckpt", weights_only=True, map_location="cpu")
    whole = {k: v.to(torch.float32) for k, v in content["tide_ema"]["average"].items()}
    assert_close(whole, stored, 0.0)


def check_ema_of_shared_parameters_saved_while_applied(pl, folder):
    def tied():
        network = Network()
        network.blocks[2].up.weight = network.blocks[0].up.weight
        return module_class(pl)(network)

    module, path = tied(), folder / "tied.ckpt"
    save = on(pl, on_validation_epoch_end=lambda t, m: t.save_checkpoint(path))
    fit(pl, module, [ema_of(pl), save])
    saved = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    assert_close(saved, full_state(module), 0.0)


def check_ema_mistakes(pl, folder):
    plain = folder / "plain.ckpt"
    fit(pl, module_class(pl)(), []).save_checkpoint(plain)
    ema = ema_of(pl)
    with pytest.raises(TideConfigError, match="TideEMA has no average yet: it begins after optimizer step 0"):
        averages(ema, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(pl, module_class(pl)(), [ema], epochs=2, resume=plain)
    assert any("the checkpoint holds no average" in str(w.message) for w in caught) == (dist.get_rank() == 0)

    class Other(module_class(pl)):
        def __init__(self):
            super().__init__()
            self.strict_loading = False
            self.network.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    for kind in ("full", "sharded"):
        path = folder / f"{kind}.ckpt"
        fit(pl, module_class(pl)(), [ema_of(pl)], kind).save_checkpoint(path)
        with pytest.raises(TideConfigError, match=r"the average in .*Resume with the model that it was made with"):
            trainer_of(pl, strategy_of(pl), callbacks=[ema_of(pl)]).test(Other(), loader(), ckpt_path=path)
    with pytest.raises(TideConfigError, match="TideEMA needs Trainer"):
        trainer_of(pl, strategy="ddp", callbacks=[ema_of(pl)]).fit(module_class(pl)(), loader())
    for options, words in (
        ({"decay": 1.5}, "decay must be a number from 0 to 1, such as 0.999; got 1.5"),
        ({"update_every_n_steps": 0}, "update_every_n_steps must be a whole number, 1 or more; got 0"),
        ({"float32": 1}, "float32 must be true or false"),
    ):
        with pytest.raises(TideConfigError, match=words):
            type(ema)(**options)
