"""Train a causal language model with transformers' Trainer, an ordinary script with ordinary arguments.

    accelerate launch --config configs/accelerate/tide_cpu.yaml examples/transformers_trainer.py
    accelerate launch --config configs/accelerate/tide.yaml examples/transformers_trainer.py --max_steps 500 --bf16

Every option of TrainingArguments works, ``--fsdp`` and ``--resume_from_checkpoint`` among them. The model is a small
Llama; ``--layers``, ``--width`` and the like make a larger one.
"""

import sys
from dataclasses import dataclass, field

from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from tide_strategies.cli.demo_model import Windows, library_text  # only the text

DEFAULTS = {
    "output_dir": "trainer_output",
    "max_steps": "60",
    "per_device_train_batch_size": "4",
    "gradient_accumulation_steps": "2",
    "learning_rate": "1e-3",
    "warmup_steps": "6",
    "logging_steps": "10",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": "True",
}


@dataclass
class ModelArguments:
    """Sizes of the model."""

    layers: int = field(default=4, metadata={"help": "decoder layers"})
    width: int = field(default=256, metadata={"help": "size of the hidden states"})
    hidden: int = field(default=704, metadata={"help": "size of the hidden layer of each MLP"})
    heads: int = field(default=4, metadata={"help": "attention heads; they divide the width"})
    kv_heads: int = field(default=2, metadata={"help": "heads of keys and values; they divide the heads"})
    context: int = field(default=128, metadata={"help": "bytes in a window"})


class Examples(Dataset):
    """Windows of bytes as the model's inputs and labels."""

    def __init__(self, text, count, context):
        self.windows = Windows(text, count, context)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def main():
    """Train, then measure the loss on text that was not trained on."""
    given = {word.split("=")[0].removeprefix("--") for word in sys.argv[1:]}
    defaults = [word for name, value in DEFAULTS.items() if name not in given for word in (f"--{name}", value)]
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    sizes, args = parser.parse_args_into_dataclasses([*defaults, *sys.argv[1:]])
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=max(2048, sizes.context + 1),
        tie_word_embeddings=True,
    )
    train_text, val_text = library_text()
    train, val = Examples(train_text, 4096, sizes.context), Examples(val_text, 64, sizes.context)
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=train, eval_dataset=val)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss on new text: {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
