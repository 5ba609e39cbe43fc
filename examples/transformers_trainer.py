"""Train a causal language model with transformers' Trainer, an ordinary script with ordinary arguments.

    accelerate launch --config configs/accelerate/tide_cpu.yaml examples/transformers_trainer.py
    accelerate launch --config configs/accelerate/tide.yaml examples/transformers_trainer.py --max_steps 500 --bf16

Every option of TrainingArguments works, ``--fsdp`` and ``--resume_from_checkpoint`` among them.
"""

import sys

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


class Examples(Dataset):
    """Windows of bytes as the model's inputs and labels."""

    def __init__(self, text, count):
        self.windows = Windows(text, count)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def main():
    """Train, then measure the loss on text that was not trained on."""
    given = {word.split("=")[0].removeprefix("--") for word in sys.argv[1:]}
    defaults = [word for name, value in DEFAULTS.items() if name not in given for word in (f"--{name}", value)]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*defaults, *sys.argv[1:]])
    set_seed(args.seed)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes, **heads))
    train_text, val_text = library_text()
    train, val = Examples(train_text, 4096), Examples(val_text, 64)
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=val)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss on new text: {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
