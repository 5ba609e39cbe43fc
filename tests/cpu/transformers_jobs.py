"""A small Llama with tied embeddings and a Trainer around it, as any script for transformers would write them."""

import os

# In a launched worker the environment asks for TIDE before transformers is imported, so that it is extended then.
os.environ["TIDE_CONFIG"] = "{}"
import tide_strategies  # noqa: F401, I001
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama(seed=0, lora=False):
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def trainer(folder, model, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_steps=4,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def parameters(trainer):
    """Every bit of the local shards, tied parameters once."""
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves the last groups whole
    return {n: p.to_local().detach().numpy().tobytes() for n, p in trainer.model.named_parameters()}


def tide_report(trainer):
    return trainer.accelerator.state.fsdp_plugin.tide_report()


def environment(rank, world, tide, **more):
    """What ``accelerate launch`` sets for a file with a ``tide_config:`` section."""
    for name in [n for n in os.environ if n.startswith(("FSDP_", "ACCELERATE_", "TIDE_"))]:
        if name != "TIDE_PLAN":  # the tests' own
            del os.environ[name]
    os.environ.update(
        ACCELERATE_USE_CPU="true",
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",
        LOCAL_WORLD_SIZE=str(world),
        TIDE_CONFIG=tide,
        **more,
    )
