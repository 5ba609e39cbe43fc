"""transformers' Trainer in the environment that ``accelerate launch --config tide.yaml`` makes: nothing else is set.

Importing transformers takes longer than the trainings, so one pair of processes runs them all.
"""

import traceback
from importlib.util import find_spec

import pytest
import torch
from harness import launch

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


def misspelt_class(rank, world, folder):
    import transformers_jobs as jobs

    jobs.environment(rank, world, TIDE)
    options = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayers"]}}
    try:
        jobs.trainer(folder, jobs.llama(), **options).train()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def run_all(rank, world, folder):
    jobs = {variant: (equal_to_stock, variant) for variant in VARIANTS}
    if find_spec("peft"):
        jobs["lora"] = (equal_to_stock, "lora")
    jobs.update({kind: (resumed, kind) for kind in KINDS})
    jobs["plain transformers"] = (loads_in_plain_transformers,)
    jobs["misspelt class"] = (misspelt_class,)
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


def test_a_misspelt_layer_class_is_told(outcomes):
    for said in outcomes:
        assert "TideConfigError" in said["misspelt class"]
        assert "did you mean 'LlamaDecoderLayer'?" in said["misspelt class"]
