"""transformers' Trainer in the environment that ``accelerate launch --config tide.yaml`` makes: nothing else is set.

Importing transformers takes longer than the trainings, so one pair of processes runs them all.
"""

import traceback
import warnings
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
LORA_FAST = "4 of 4 groups accelerated"  # by PEFT's own policy the last norm is apart from the embeddings
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
    """(same bits, steps, steps of a second train(), its words, still tied)

    With LoRA the frozen weights are those that a program starts from, and checkpoints hold the adapters.
    """
    import transformers_jobs as jobs

    lora = kind == "lora"
    state_dict = {"FSDP_STATE_DICT_TYPE": kind} if not lora else {}
    jobs.environment(rank, world, TIDE, **state_dict)
    through = jobs.trainer(folder / kind, jobs.llama(lora=lora))
    through.train()
    later = jobs.trainer(folder / f"{kind}-later", jobs.llama(seed=0 if lora else 5, lora=lora))
    later.train(resume_from_checkpoint=str(folder / kind / "checkpoint-2"))
    same = jobs.parameters(later) == jobs.parameters(through)
    if lora:
        return same, later.state.global_step, jobs.tide_report(later).status
    steps = through.train().global_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        through.save_model(str(folder / f"{kind}-final"))
    told = [str(w.message) for w in caught if "save_model" in str(w.message)]
    if kind == "SHARDED_STATE_DICT":  # as the warning says
        assert not (folder / f"{kind}-final").exists()
        through.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        through.save_model(str(folder / f"{kind}-final"))
    tied = through.model.lm_head.weight is through.model.model.embed_tokens.weight
    return same, later.state.global_step, steps, jobs.tide_report(through).status, tied, told


def loads_in_plain_transformers(rank, world, folder):
    """What the runs with either state-dict type saved last: the same, tied and finite."""
    import transformers_jobs as jobs

    jobs.environment(rank, world, "")
    torch.distributed.barrier()  # rank 0 writes it
    one, other = (jobs.LlamaForCausalLM.from_pretrained(str(folder / f"{kind}-final")) for kind in KINDS)
    same = all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    tied = one.lm_head.weight is one.model.embed_tokens.weight
    return same, tied, bool(one.lm_head.weight.detach().isfinite().all())


def mistakes(rank, world, folder):
    """Mistake -> what its author is told. The last two are none: they work.

    A misspelt class or option, FSDP1, a kind of sharding that FSDP2 has under another name, fp16 under
    ``strict``, evaluation before training, an optimizer of one's own, saving weights alone from shards, checkpointing
    asked for twice, bf16 on the CPU, a checkpoint that is not there or of the other type, TIDE's options among those
    of FSDP. (Sharded checkpoints and save_model: see ``resumed``.)
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
    options_of_tide = {"timout_s": 3, "fsdp_tide": {}, "all_gather": {"slots": 3}, "reshard_after_forward": True}
    other_type = str(folder / "SHARDED_STATE_DICT" / "checkpoint-2")  # here FULL_STATE_DICT is the default
    actions = {
        "misspelt class": lambda: make(fsdp=True, fsdp_config=classes).train(),
        "FSDP1": lambda: make(fsdp=True, fsdp_config=version_1),
        "evaluation first": lambda: make().evaluate(),
        "own optimizer": own_optimizer,
        "weights alone, sharded": lambda: make(save_only_model=True),
        "checkpointing twice": lambda: make(fsdp=True, fsdp_config=twice, gradient_checkpointing=True),
        "bf16 without use_cpu": lambda: make(bf16=True),
        "hybrid": lambda: make(fsdp="hybrid_shard auto_wrap"),
        "options among FSDP's": lambda: make(fsdp=True, fsdp_config=options_of_tide),
        "the same as JSON, without --fsdp": lambda: make(fsdp_config='{"timeout_s": 3}'),
        "other type": lambda: make(fsdp=True).train(resume_from_checkpoint=other_type),
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
        jobs["lora resumed"] = (resumed, "lora")
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
        assert with_tide == (LORA_FAST if variant == "lora" else ALL_FAST)
        assert without.startswith("off")
        assert adapters == (8 if variant == "lora" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted_and_a_second_train_works(outcomes, kind):
    for said in outcomes:
        *results, told = said[kind]
        assert results == [True, 4, 4, ALL_FAST, True]
        full = kind == "FULL_STATE_DICT"
        assert len(told) == (0 if full or said is not outcomes[0] else 1), "sharded, and on the main process"
        for words in told:
            assert "writes no model under SHARDED_STATE_DICT" in words
            assert "set_state_dict_type('FULL_STATE_DICT') before it" in words


def test_resumed_with_lora(outcomes):
    for said in outcomes:
        if "lora" not in said:
            pytest.skip("needs peft")
        assert said["lora resumed"] == (True, 4, LORA_FAST)


def test_the_saved_model_loads_in_plain_transformers(outcomes):
    for said in outcomes:
        assert said["plain transformers"] == (True, True, True)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("misspelt class", "did you mean 'LlamaDecoderLayer'?"),
        ("misspelt option", "unknown TIDE option 'timout_s'; did you mean 'timeout_s'?"),
        ("hybrid", "fsdp=True, and in the Accelerate file parallelism_config"),
        (
            "options among FSDP's",
            "holds timout_s (did you mean 'timeout_s'?), fsdp_tide, all_gather, which",
        ),
        ("options among FSDP's", "into the section tide_config"),
        ("the same as JSON, without --fsdp", "fsdp_config of TrainingArguments holds timeout_s"),
        ("other type", "was written with SHARDED_STATE_DICT, and this run has FULL_STATE_DICT"),
        ("other type", "state_dict_type='SHARDED_STATE_DICT' in TideFSDPPlugin or in fsdp_config"),
        ("fp16, strict", "TIDE-F013"),
        ("FSDP1", "fsdp_config={'version': 2} in TrainingArguments"),
        ("evaluation first", "TrainingArguments(eval_on_start=True)"),
        ("own optimizer", "override the `create_optimizer"),
        ("weights alone, sharded", "not compatible with FSDP state dict type 'SHARDED_STATE_DICT'"),
        ("checkpointing twice", "Use FSDP's activation checkpointing"),
        ("bf16 without use_cpu", "You need to assign use_cpu"),
        ("no such checkpoint", "there are none. It must be a folder that all ranks see"),
        ("evaluation on start", "4"),
        ("fsdp as text", "4"),
    ],
)
def test_mistakes_are_told(outcomes, mistake, words):
    for said in outcomes:
        assert words in said["mistakes"][mistake]
