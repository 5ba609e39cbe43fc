"""The block stack that ``tide bench step`` trains: Llama's blocks without embeddings, head and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEAD = 128
_QUERIES_PER_KEY = 4


class Block(nn.Module):
    """One block: RMSNorm, causal grouped-query attention, RMSNorm, SwiGLU. ``[batch, time, width]`` both ways.

    Args:
        width: a multiple of ``head``.
        hidden: width of the SwiGLU.
        head: width of an attention head; the default is at most 128 and gives at least four heads.
    """

    def __init__(self, width: int, hidden: int, head: int | None = None) -> None:
        super().__init__()
        self.head = head or head_width(width)
        self.heads = width // self.head
        self.key_heads = max(1, self.heads // _QUERIES_PER_KEY)
        keys = self.key_heads * self.head
        self.attention_norm = nn.RMSNorm(width)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, keys, bias=False)
        self.values = nn.Linear(width, keys, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        normed = self.attention_norm(x)

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, time, -1, self.head).transpose(1, 2)

        q, k, v = heads(self.queries(normed)), heads(self.keys(normed)), heads(self.values(normed))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        normed = self.feed_forward_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Stack(nn.Module):
    """Blocks and a last RMSNorm: the root of the training, with a small parameter group of its own."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def hidden_width(width: int) -> int:
    """SwiGLU width at which a block of width 4,096 has 134.7 million parameters: 11/6 of it, in steps of 128."""
    step = min(128, width)
    return max(step, round(11 * width / 6 / step) * step)


def head_width(width: int) -> int:
    """128, or less for widths that would have fewer than four heads."""
    head = _HEAD
    while head > 8 and (width // head < _QUERIES_PER_KEY or width % head):
        head //= 2
    return head


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that reaches every parameter, in fp32."""
    return model(x).float().square().mean()


def block_batch(tokens: int, sequence: int, width: int, device: torch.device, seed: int) -> Tensor:
    """Random bf16 activations for ``tokens`` tokens in sequences of at most ``sequence``: ``[batch, time, width]``.

    Raises:
        ValueError: the tokens do not divide into sequences.
    """
    time = min(tokens, sequence)
    if tokens % time:
        raise ValueError(f"{tokens} tokens do not divide into sequences of {time}; choose another --sequence")
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens // time, time, width, device=device, generator=generator).bfloat16()
