"""The likeliest mistakes at the Lightning door, and the words that each gets; run by ``test_lightning_checkpoints``.

Each function makes one mistake. The words have to say what to do; where they are Lightning's own, the error is too.
"""

import importlib
import re
from importlib.util import find_spec

import pytest
import torch
from lightning_models import module_class, part_loader, strategy_of, trainer_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tide_strategies.errors import TideConfigError

CHECKS = {}


def gets(words, error=TideConfigError):
    """Register a mistake with the words that it gets, a regular expression."""

    def register(make):
        def check(pl, folder):
            with pytest.raises(error, match=re.compile(words, re.DOTALL)):
                make(pl, folder)

        check.__name__ = f"mistake_{make.__name__}"
        CHECKS[check.__name__] = check
        return make

    return register


def fit(pl, module=None, strategy="tide_fsdp", resume=None, **kw):
    trainer = trainer_of(pl, strategy, **kw)
    trainer.fit(module_class(pl)() if module is None else module, part_loader(), ckpt_path=resume)
    return trainer


@gets(r"TideFSDPStrategy has no option 'replicat_size'; did you mean 'replicate_size'")
def misspelled_option(pl, folder):
    strategy_of(pl, replicat_size=2)


@gets(r"does not take tensor_parallel_size: .* use ModelParallelStrategy for tensor parallelism")
def option_of_the_stock_strategy(pl, folder):
    strategy_of(pl, tensor_parallel_size=2)


@gets(r"invalid strategy name: `strategy='tide_fsd'`", ValueError)
def misspelled_strategy(pl, folder):
    trainer_of(pl, "tide_fsd")


if find_spec("pytorch_lightning") is not None:

    @gets(r"must be either a string or an instance of `lightning.pytorch.strategies.Strategy`", ValueError)
    def strategy_of_the_other_copy_of_lightning(pl, folder):
        other = importlib.import_module("tide_strategies.integrations.lightning.trainer_standalone").TideFSDPStrategy
        trainer_of(pl, other())


@gets(r"replicate_size=3 does not divide the 2 processes of this job; possible values: 1, 2")
def replicas_that_do_not_divide_the_processes(pl, folder):
    fit(pl, strategy=strategy_of(pl, replicate_size=3))


@gets(r"precision='64-true' is not supported.*choose one of .*'bf16-mixed'")
def precision_that_does_not_work(pl, folder):
    fit(pl, precision="64-true")


@gets(r"auto_wrap_policy names 'Blok', but the model has no such module; did you mean 'Block'")
def class_that_the_model_has_not(pl, folder):
    fit(pl, strategy=strategy_of(pl, auto_wrap_policy={"Blok"}))


@gets(r"FSDP1's FullyShardedDataParallel wraps network\. Leave the model unwrapped")
def model_wrapped_already(pl, folder):
    class Wrapped(module_class(pl)):
        def configure_model(self):
            self.network = FullyShardedDataParallel(self.network, device_id=torch.device("cpu"))

    fit(pl, Wrapped())


@gets(r"network\.blocks\.0\.up\.weight.* tensor parallelism.*ModelParallelStrategy")
def tensor_parallel_model(pl, folder):
    class Parallel(module_class(pl)):
        def configure_model(self):
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(self.network, mesh, {"blocks.0.up": ColwiseParallel()})

    fit(pl, Parallel())


@gets(r"StochasticWeightAveraging copies and averages whole models.*TideEMA\(decay=")
def stochastic_weight_averaging(pl, folder):
    fit(pl, callbacks=[pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)])


@gets(r"WeightAveraging copies and averages whole models.*TideEMA\(decay=")
def weight_averaging(pl, folder):
    fit(pl, callbacks=[pl.callbacks.WeightAveraging()])


@gets(r"WeightAveraging copies and averages whole models.*TideEMA\(decay=")
def moving_average_of_lightning(pl, folder):
    kind = getattr(pl.callbacks, "EMAWeightAveraging", None) or pl.callbacks.WeightAveraging  # 2.5 has one of them
    fit(pl, callbacks=[kind()])


@gets(r"compiled model is incompatible with the current strategy: `TideFSDPStrategy`.*avoid passing", RuntimeError)
def compiled_lightning_module(pl, folder):
    fit(pl, torch.compile(module_class(pl)(), backend="eager"))


@gets(r"network\.extra\.weight\. Add that method to the modules, or build them on a real device")
def meta_tensor_without_initialiser(pl, folder):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    class Late(module_class(pl)):
        def configure_model(self):
            with torch.device("meta"):
                self.network.extra = Bare()

    fit(pl, Late())


@gets(r"neither a file nor a folder with meta\.pt", FileNotFoundError)
def checkpoint_that_does_not_exist(pl, folder):
    fit(pl, resume=folder / "none.ckpt")


def resuming_with(pl, folder, kind, optimizers_of, saved_of=None):
    """Save with one optimizer, or with those of ``saved_of``, and resume with those of ``optimizers_of``."""

    class Other(module_class(pl)):
        automatic_optimization = False

        def __init__(self, make):
            super().__init__()
            self.make = make

        def configure_optimizers(self):
            return self.make(self.network)

    strategy = strategy_of(pl, state_dict_type=kind)
    saved = module_class(pl)() if saved_of is None else Other(saved_of)
    fit(pl, saved, strategy).save_checkpoint(folder / "saved.ckpt")
    fit(pl, Other(optimizers_of), resume=folder / "saved.ckpt", max_epochs=2)


def two_adams(network):
    return [torch.optim.Adam(part.parameters()) for part in (network.blocks, network.head)]


def one_adam(network):
    return torch.optim.Adam(network.parameters())


@gets(r"state of 1 optimizer\(s\), but 2 are configured; resume with the optimizers")
def full_checkpoint_of_fewer_optimizers(pl, folder):
    resuming_with(pl, folder, "full", two_adams)


@gets(r"state of 1 optimizer\(s\), but 2 are configured; resume with the optimizers")
def sharded_checkpoint_of_fewer_optimizers(pl, folder):
    resuming_with(pl, folder, "sharded", two_adams)


@gets(r"state of 2 optimizer\(s\), but 1 are configured; resume with the optimizers")
def sharded_checkpoint_of_more_optimizers(pl, folder):
    resuming_with(pl, folder, "sharded", one_adam, saved_of=two_adams)


@gets(r"has no 'optimizer_0\.state\.network\..*; resume with the model and the optimizers that")
def sharded_checkpoint_of_another_optimizer(pl, folder):
    resuming_with(pl, folder, "sharded", one_adam)


@gets(r"expert_parallel_size=2 needs expert_policy: .* such as expert_policy=\{'Experts'\}")
def parts_without_experts(pl, folder):
    strategy_of(pl, expert_parallel_size=2)


@gets(r"with expert_parallel_size > 1 .* use state_dict_type='sharded'")
def experts_in_one_file(pl, folder):
    strategy_of(pl, expert_policy={"Experts"}, expert_parallel_size=2)


@gets(r"expert_policy names 'Expert', but the model has no such module")
def experts_that_the_model_has_not(pl, folder):
    fit(pl, strategy=strategy_of(pl, expert_policy={"Expert"}))


@gets(r"expert_parallel_size=3 does not divide the 2 processes")
def parts_that_do_not_divide_the_processes(pl, folder):
    options = {"expert_policy": {"Block"}, "expert_parallel_size": 3, "state_dict_type": "sharded"}
    fit(pl, strategy=strategy_of(pl, **options))
