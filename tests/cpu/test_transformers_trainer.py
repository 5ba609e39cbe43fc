"""transformers' Trainer in the environment that ``accelerate launch --config tide.yaml`` makes: nothing else is set.

Importing transformers takes longer than the trainings, so one pair of processes runs them all.
"""

import traceback
from importlib.util import find_spec

import pytest
import torch
from harness import launch

from tide_strategies.errors import TideConfigError

pytestmark = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("transformers")), reason="needs accelerate and transformers"
)

TIDE, STOCK = '{"timeout_s": 60, "strict": true}', '{"enabled": false}'
ALL_FAST = "3 of 3 groups accelerated"  # two layers, and the tied embeddings with the last norm
KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
VARIANTS = {"plain": {}, "--fsdp": {"fsdp": True, "max_grad_norm": 0.1}, "bf16": {"bf16": True, "use_cpu": True}}


def equal_to_stock(variant, rank, world, folder):
    """(same bits, dtype of the reduction, TIDE's own words with it and without it)"""
    import transformers_jobs as jobs

    results, statuses = [], []
    for tide in (TIDE, STOCK):
        precision = {"ACCELERATE_MIXED_PRECISION": "bf16"} if variant == "bf16" else {}
        jobs.environment(rank, world, tide, **precision)
        model = jobs.llama(lora=variant == "lora")
        options = VARIANTS.get(variant, {})
        trainer = jobs.trainer(folder / variant, model, save_strategy="no", **options)
        loss = trainer.train().training_loss
        results.append((loss, trainer.evaluate()["eval_loss"], jobs.parameters(trainer)))
        statuses.append(jobs.tide_report(trainer).status)
        policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    adapters = sum("lora" in name for name in results[0][2])
    return results[0] == results[1], str(policy and policy.reduce_dtype), statuses, adapters


def resumed(kind, rank, world, folder):
    """(same bits, steps, steps of a second train(), its words, still tied)"""
    import transformers_jobs as jobs

    jobs.environment(rank, world, TIDE, FSDP_STATE_DICT_TYPE=kind)
    through = jobs.trainer(folder / kind, jobs.llama())
    through.train()
    later = jobs.trainer(folder / f"{kind}-later", jobs.llama(seed=5))
    later.train(resume_from_checkpoint=str(folder / kind / "checkpoint-2"))
    same = jobs.parameters(later) == jobs.parameters(through)
    steps = through.train().global_step
    through.save_model(str(folder / "final"))
    tied = through.model.lm_head.weight is through.model.model.embed_tokens.weight
    return same, later.state.global_step, steps, jobs.tide_report(through).status, tied


def loads_in_plain_transformers(rank, world, folder):
    """What the FULL_STATE_DICT run saved last."""
    import transformers_jobs as jobs

    jobs.environment(rank, world, "")
    torch.distributed.barrier()  # rank 0 writes it
    model = jobs.LlamaForCausalLM.from_pretrained(str(folder / "final"))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return tied, bool(model.lm_head.weight.detach().isfinite().all())


def mistakes(rank, world, folder):
    """Mistake -> what its author is told. The last two are none: they work.

    A misspelt class or option, FSDP1, a kind of sharding that FSDP2 has under another name, fp16 under
    ``strict``, evaluation before training, an optimizer of one's own, saving weights alone from shards, checkpointing
    asked for twice, bf16 on the CPU, a checkpoint that is not there.
    """
    import transformers_jobs as jobs

    def make(model=None, **options):
        return jobs.trainer(folder / "mistakes", model or jobs.llama(), save_strategy="no", **options)

    def own_optimizer():
        trainer = make()
        optimizers = torch.optim.SGD(trainer.model.parameters()), None
        jobs.Trainer(model=trainer.model, args=trainer.args, optimizers=optimizers)

    version_1 = {"version": 1, "sync_module_states": False}
    classes = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayers"]}
    twice = {"activation_checkpointing": True}
    actions = {
        "misspelt class": lambda: make(fsdp=True, fsdp_config=classes).train(),
        "FSDP1": lambda: make(fsdp=True, fsdp_config=version_1),
        "evaluation first": lambda: make().evaluate(),
        "own optimizer": own_optimizer,
        "weights alone, sharded": lambda: make(save_only_model=True),
        "checkpointing twice": lambda: make(fsdp=True, fsdp_config=twice, gradient_checkpointing=True),
        "bf16 without use_cpu": lambda: make(bf16=True),
        "hybrid": lambda: make(fsdp="hybrid_shard"),
        "fp16, strict": lambda: make(fp16=True).train(),
        "no such checkpoint": lambda: make().train(resume_from_checkpoint=str(folder / "nowhere")),
        "evaluation on start": lambda: make(eval_strategy="no", eval_on_start=True).train().global_step,
        "fsdp as text": lambda: make(fsdp="full_shard auto_wrap").train().global_step,
    }
    said = {}
    for name, action in actions.items():
        jobs.environment(rank, world, TIDE)
        try:
            said[name] = str(action())
        except Exception as e:
            said[name] = f"{type(e).__name__}: {e}"
    jobs.environment(rank, world, '{"timout_s": 3}')
    try:
        make()
    except TideConfigError as e:
        said["misspelt option"] = str(e)
    return said


def run_all(rank, world, folder):
    jobs = {variant: (equal_to_stock, variant) for variant in VARIANTS}
    if find_spec("peft"):
        jobs["lora"] = (equal_to_stock, "lora")
    jobs.update({kind: (resumed, kind) for kind in KINDS})
    jobs["plain transformers"] = (loads_in_plain_transformers,)
    jobs["mistakes"] = (mistakes,)
    said = {}
    for name, (function, *arguments) in jobs.items():
        try:
            said[name] = function(*arguments, rank, world, folder)
        except Exception:
            said[name] = traceback.format_exc()
    return said


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    return launch(2, run_all, folder, timeout=200)


@pytest.mark.parametrize("variant", [*VARIANTS, "lora"])
def test_bits_of_stock(outcomes, variant):
    for said in outcomes:
        if variant not in said:
            pytest.skip("needs peft")
        equal, reduce, (with_tide, without), adapters = said[variant]
        assert equal
        assert reduce == ("torch.float32" if variant == "bf16" else "None")
        assert with_tide.endswith("groups accelerated")
        assert with_tide == ALL_FAST or variant == "lora"
        assert without.startswith("off")
        assert adapters == (8 if variant == "lora" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted_and_a_second_train_works(outcomes, kind):
    for said in outcomes:
        assert said[kind] == (True, 4, 4, ALL_FAST, True)


def test_the_saved_model_loads_in_plain_transformers(outcomes):
    for said in outcomes:
        assert said["plain transformers"] == (True, True)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("misspelt class", "did you mean 'LlamaDecoderLayer'?"),
        ("misspelt option", "unknown TIDE option 'timout_s'; did you mean 'timeout_s'?"),
        ("hybrid", "only available with FSDP1"),
        ("fp16, strict", "TIDE-F013"),
        ("FSDP1", "fsdp_config={'version': 2} in TrainingArguments"),
        ("evaluation first", "TrainingArguments(eval_on_start=True)"),
        ("own optimizer", "override the `create_optimizer"),
        ("weights alone, sharded", "not compatible with FSDP state dict type 'SHARDED_STATE_DICT'"),
        ("checkpointing twice", "Use FSDP's activation checkpointing"),
        ("bf16 without use_cpu", "You need to assign use_cpu"),
        ("no such checkpoint", "No such file or directory"),
        ("evaluation on start", "4"),
        ("fsdp as text", "4"),
    ],
)
def test_mistakes_are_told(outcomes, mistake, words):
    for said in outcomes:
        assert words in said["mistakes"][mistake]
