"""Checkpoints that are written while training goes on; run by ``test_lightning_checkpoints``."""

import contextlib
import importlib
import threading
from unittest import mock

import pytest
import torch.distributed as dist
from lightning_models import assert_close, full_state, module_class, on, part_loader, sgd, strategy_of, trainer_of
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from tide_strategies.errors import TideConfigError, TidePeerError
from tide_strategies.integrations.lightning import saving


def io_of(pl):
    """The namespace's own writer of files, and its plugin for writing in the background."""
    fabric = importlib.import_module(pl.__name__.replace("pytorch", "fabric")).plugins.io.TorchCheckpointIO
    return fabric, pl.plugins.io.AsyncCheckpointIO


def trainer_in_background(pl, kind, callbacks, **kw):
    plugins = [io_of(pl)[1]()]
    return trainer_of(pl, strategy_of(pl, state_dict_type=kind), callbacks=callbacks, plugins=plugins, **kw)


@contextlib.contextmanager
def writing_waits(pl, event):
    """What would be written reaches the disk only once the event is set."""

    def late(write):
        def wait_and_write(*args, **kw):
            assert event.wait(30)
            return write(*args, **kw)

        return wait_and_write

    files = io_of(pl)[0]
    with (
        mock.patch.object(files, "save_checkpoint", late(files.save_checkpoint)),
        mock.patch.object(saving, "save", late(saving.save)),
    ):
        yield


def check_saving_in_the_background(pl, folder):
    for kind in ("full", "sharded"):
        path, event, at_step, there = folder / f"{kind}.ckpt", threading.Event(), [], []

        def save(trainer, module, path=path, at_step=at_step):
            if trainer.current_epoch == 0:
                at_step.append(full_state(module))
                trainer.save_checkpoint(path)

        def end(trainer, module, path=path, event=event, there=there):
            there.append((path / "meta.pt").exists() if path.is_dir() else path.exists())
            event.set()

        module = module_class(pl)(optimizer_of=sgd)
        with writing_waits(pl, event):
            trainer = trainer_in_background(pl, kind, [on(pl, on_train_epoch_end=save, on_train_end=end)], max_epochs=2)
            trainer.fit(module, part_loader())
        assert there == [False], "training has waited for the checkpoint"
        # fit() returns once it is written: values of the first epoch's end, from which training reaches the same end.
        states, resumed = [], module_class(pl)()
        start = on(pl, on_train_start=lambda t, m, states=states: states.append(full_state(m)))
        again = trainer_in_background(pl, kind, [start], max_epochs=2)
        again.fit(resumed, part_loader(), ckpt_path=path)
        assert_close(states[0], at_step[0], 0.0)
        assert_close(full_state(resumed), full_state(module), 0.0)
        # After training nobody would wait, so the call itself does.
        late = folder / f"{kind}-late.ckpt"
        again.save_checkpoint(late)
        assert (late / "meta.pt").is_file() if kind == "sharded" else late.is_file()


def check_model_checkpoint_in_the_background(pl, folder):
    keep = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=True)
    seen = []
    look = on(pl, on_train_batch_end=lambda t, m: seen.append({p.name for p in folder.glob("step*/meta.pt")}))
    trainer = trainer_in_background(pl, "sharded", [keep, look], enable_checkpointing=True, max_epochs=2)
    trainer.fit(module_class(pl)(), part_loader())
    assert all(seen[1:]), "an old checkpoint goes only when the new one is whole"
    assert {p.name for p in folder.iterdir()} == {"step=8.ckpt", "last.ckpt"}
    assert all((p / "meta.pt").is_file() for p in folder.iterdir())


def check_failing_to_save_ends_training_on_all_ranks(pl, folder):
    def fail(*args, **kw):
        raise OSError("no space left, for the test")

    first = dist.get_rank() == 0
    failing = {
        "full": mock.patch.object(io_of(pl)[0], "save_checkpoint", fail),  # on rank 0 alone: only it writes
        "sharded": mock.patch.object(FileSystemWriter, "write_data", fail if first else FileSystemWriter.write_data),
    }
    for kind, patch in failing.items():
        for background in (False, True):
            when = "on_train_batch_end" if background else "on_train_start"
            save = on(pl, **{when: lambda t, m, k=kind: t.save_checkpoint(folder / k)})
            make = (
                trainer_in_background
                if background
                else lambda pl, kind, c: trainer_of(pl, strategy_of(pl, state_dict_type=kind), callbacks=c)
            )
            words = "no space left" if first or kind == "sharded" else "another rank could not"
            errors = (OSError, CheckpointException, TidePeerError)
            with patch, pytest.raises(errors, match=words):
                make(pl, kind, [save]).fit(module_class(pl)(), part_loader())
            assert not (folder / kind / "meta.pt").exists()


def check_plugins_that_sharded_checkpoints_would_ignore(pl, folder):
    class Own(io_of(pl)[0]):
        pass

    with pytest.raises(TideConfigError, match=r"not by the plugin Own\. Use state_dict_type='full' with it"):
        trainer_of(pl, strategy_of(pl, state_dict_type="sharded"), plugins=[Own()]).fit(module_class(pl)())
    trainer = trainer_of(pl, strategy_of(pl), plugins=[Own()])
    trainer.fit(module_class(pl)(), part_loader())
    trainer.save_checkpoint(folder / "own.ckpt")
