"""Fine-tune a causal language model with Accelerate; nothing in the training knows how the model is sharded.

    accelerate launch --config configs/accelerate/tide_cpu.yaml examples/accelerate_finetune.py
    accelerate launch --config configs/accelerate/tide.yaml examples/accelerate_finetune.py --model PATH_OR_NAME

The first command trains a small Llama, built from a configuration, on two CPU processes in about a minute.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from tide_strategies.cli.demo_model import Windows, library_text  # only the text


def parse_args():
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model to start from, for AutoModelForCausalLM (default: a small new one)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows of text per process and micro-batch")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint there at the end")
    return parser.parse_args()


def build_model(name):
    """A pretrained model, or a small one over bytes with tied embeddings."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes, **heads))


@torch.no_grad()
def evaluate(accelerator, model, batches):
    """Mean loss over the text that is not trained on."""
    model.eval()
    losses = [accelerator.gather(model(input_ids=b, labels=b).loss.reshape(1)) for b in batches]
    model.train()
    return torch.cat(losses).mean().item()


def main():
    """Train, report the loss on new text, save if asked to."""
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    model = build_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    train_text, val_text = library_text()
    windows = args.steps * args.accumulate * args.batch * accelerator.num_processes
    train = DataLoader(Windows(train_text, windows, args.context), batch_size=args.batch)
    val = DataLoader(Windows(val_text, 8 * args.batch, args.context), batch_size=args.batch)
    # The scheduler stays outside: inside, Accelerate would advance it once per process.
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    accelerator.register_for_checkpointing(scheduler)

    step = 0
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
            step += 1
            if step % 10 == 0:
                mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
                accelerator.print(f"step {step:4d}  loss {mean:.3f}", flush=True)
    accelerator.print(f"loss on new text: {evaluate(accelerator, model, val):.3f}", flush=True)
    if args.save:
        accelerator.save_state(args.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
