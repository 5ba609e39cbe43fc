"""Model and data of the demo: a small GPT over bytes, and text that every machine has.

Nothing here knows of TIDE, FSDP2 or Lightning. The text is the source of the installed Python's own standard
library, so the demo needs no download and two runs on one machine always see the same bytes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of the model. The defaults make 10.8 million parameters."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 128


class Block(nn.Module):
    """One transformer layer, normalised before attention and before the MLP. ``[batch, time, width]`` both ways."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """A GPT over bytes: ``[batch, time]`` integers in, ``[batch, time, 256]`` logits out."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def planned() -> tuple[GPT, Callable[[nn.Module], Tensor]]:
    """The demo's model and its step on a batch of four windows, for ``tide plan``."""

    def step(model: nn.Module) -> Tensor:
        windows = torch.zeros(4, GPTConfig().context + 1, dtype=torch.long)
        return next_byte_loss(model, windows)

    return GPT(), step


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross entropy (nats) of each byte of ``windows``, ``[batch, context + 1]`` int64, given those before it."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Windows(Dataset[Tensor]):
    """``count`` windows of ``context + 1`` bytes at places of ``text`` that depend on ``seed`` alone.

    Each item is ``[context + 1]`` int64: the first ``context`` bytes are the input, the last ``context`` the target.
    """

    def __init__(self, text: Tensor, count: int, context: int = GPTConfig().context, seed: int = 0) -> None:
        if len(text) <= context:
            raise ValueError(f"the text has {len(text)} bytes; windows of {context + 1} need more")
        self.text, self.context = text, context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.context + 1].long()


def library_text(size: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """The first ``size`` bytes of the standard library's source, files in order of their names.

    Returns:
        Training text (nine tenths) and validation text (the rest), 1-D uint8.

    Raises:
        FileNotFoundError: if this Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in _source_files(root):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= size:
            break
    if total < 100_000:
        raise FileNotFoundError(
            f"the demo trains on the source of Python's standard library, but {root} holds only {total} bytes of it; "
            "use a Python that was installed with its .py files"
        )
    text = torch.frombuffer(bytearray(b"".join(parts)[:size]), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _source_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith("config-")]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())
