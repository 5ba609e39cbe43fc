"""Options of the strategies: what is refused, in which words, before any process starts."""

import pickle
from importlib.util import find_spec

import pytest
from torch.distributed.fsdp import MixedPrecisionPolicy

import tide_strategies
from tide_strategies import TideConfig, TideConfigError

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


@pytest.fixture
def trainer():
    import lightning.pytorch  # noqa: F401  # not while tests are collected: it takes seconds

    return tide_strategies.TideFSDPStrategy


@pytest.fixture
def fabric(trainer):
    return tide_strategies.integrations.lightning.TideFSDPFabricStrategy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicat_size": 2}, r"TideFSDPStrategy has no option 'replicat_size'; did you mean 'replicate_size'"),
        ({"timeout_sec": 3}, r"did you mean 'timeout_s'"),
        ({"plan": "fast"}, r"'plan' must be 'auto' or 'tide' or 'stock' or a section with .*; got 'fast'"),
        ({"tide": {"al_gather": {}}}, r"unknown TIDE option 'al_gather'; did you mean 'all_gather'"),
        ({"tide": {"plan": "stock"}, "plan": "tide"}, r"plan given both inside tide= and as a keyword"),
        ({"tide": 3}, r"must be a mapping or a TideConfig, not int"),
        ({"tide": 3, "plan": "tide"}, r"must be a mapping or a TideConfig, not int"),
        ({"tensor_parallel_size": 2}, r"does not take tensor_parallel_size: tide_fsdp does data parallelism only"),
        ({"data_parallel_size": 2}, r"use replicate_size=R"),
        ({"save_distributed_checkpoint": True}, r"use state_dict_type='sharded' or 'full'"),
        ({"state_dict_type": "shard"}, r"state_dict_type must be 'full' or 'sharded'; got 'shard'"),
        ({"replicate_size": 0}, r"replicate_size must be a whole number, 1 or more; got 0"),
        ({"min_num_params": -1}, r"min_num_params must be a whole number, 0 or more; got -1"),
        ({"cpu_offload": "yes"}, r"cpu_offload must be true or false; got 'yes'"),
        ({"weights_only": None}, r"weights_only must be true or false; got None"),
        ({"reshard_after_forward": "no"}, r"reshard_after_forward must be true, false, or the number"),
        ({"mp_policy": "bf16"}, r"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy; got 'bf16'"),
    ],
)
@pytest.mark.parametrize("door", ["trainer", "fabric"])
def test_refusals(options, words, door, request):
    strategy = request.getfixturevalue(door)
    with pytest.raises(TideConfigError, match=words.replace("TideFSDPStrategy", strategy.__name__)):
        strategy(**options)


def test_sync_every_microbatch_is_of_the_trainer_alone(trainer, fabric):
    with pytest.raises(TideConfigError, match="sync_every_microbatch must be true or false"):
        trainer(sync_every_microbatch=1)
    with pytest.raises(TideConfigError, match="no option 'sync_every_microbatch'"):
        fabric(sync_every_microbatch=True)


def test_tide_options_reach_the_config(trainer):
    expected = TideConfig(plan="stock", timeout_s=60)
    assert trainer(plan="stock", timeout_s=60).tide_config == expected
    assert trainer(tide={"plan": "stock"}, timeout_s=60).tide_config == expected
    assert trainer(tide=TideConfig(plan="stock"), timeout_s=60).tide_config == expected
    assert trainer(tide=expected).tide_config == expected
    assert trainer(tide={"all_gather.slots": 3}).tide_config.all_gather.slots == 3
    assert trainer(all_gather={"slots": 3}).tide_config.all_gather.slots == 3


def test_strategies_pickle(trainer, fabric):
    policy = MixedPrecisionPolicy()
    for cls in (trainer, fabric):
        copy = pickle.loads(pickle.dumps(cls(replicate_size=2, mp_policy=policy, plan="stock")))
        assert type(copy) is cls
        assert (copy.replicate_size, copy.tide_config.plan, copy.sharding.mp_policy) == (2, "stock", policy)


def test_classes_of_the_namespace_in_use(trainer, fabric):
    from lightning.fabric.strategies import ModelParallelStrategy as FabricHost
    from lightning.pytorch.strategies import ModelParallelStrategy as Host

    assert issubclass(trainer, Host)
    assert issubclass(fabric, FabricHost)
    assert trainer is tide_strategies.integrations.lightning.TideFSDPStrategy


def test_report_before_anything_ran(trainer):
    assert not trainer().tide_report().installed
