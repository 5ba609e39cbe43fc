"""Train a small GPT with Lightning, its parameters sharded over processes by ``strategy="tide_fsdp"``.

    python examples/lightning_gpt.py                  # 2 CPU processes, TIDE collectives
    python examples/lightning_gpt.py --plan stock     # the same with the stock collectives of FSDP2
    python examples/lightning_gpt.py --accelerator gpu --devices 8 --precision bf16-mixed \\
        --layers 32 --width 4096 --heads 32 --context 2048

The model and the LightningModule are ordinary PyTorch: nothing in them knows how it is sharded.
"""

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from tide_strategies import TideFSDPStrategy
from tide_strategies.cli.demo_model import GPT, GPTConfig, Windows, library_text, next_byte_loss
from tide_strategies.cli.demo_record import StepRecorder


class ByteGPT(L.LightningModule):
    """Predict each byte of a window from those before it."""

    def __init__(self, config):
        super().__init__()
        self.model = GPT(config)

    def training_step(self, batch, batch_idx):
        loss = next_byte_loss(self.model, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", next_byte_loss(self.model, batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=6e-4, betas=(0.9, 0.95))


def parse_args():
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=["auto", "tide", "stock"], default="auto", help="whose collectives to use")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows of text per process and step")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true (default: 32-true)")
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(GPTConfig(), name), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write losses, times and memory to this JSON file")
    return parser.parse_args()


def main():
    """Train, then measure the loss on text that was not trained on."""
    args = parse_args()
    L.seed_everything(0, verbose=False)
    train_text, val_text = library_text()
    config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    together = args.batch * args.devices * args.nodes
    train = Windows(train_text, args.steps * together, args.context)
    val = Windows(val_text, 8 * together, args.context)

    # "tide_fsdp" takes no further options; to set some, give the strategy itself.
    strategy = "tide_fsdp" if args.plan == "auto" else TideFSDPStrategy(plan=args.plan)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        precision=args.precision,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=[StepRecorder(args.out)],
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(ByteGPT(config), DataLoader(train, batch_size=args.batch), DataLoader(val, batch_size=args.batch))


if __name__ == "__main__":
    main()
