"""Parameter groups of known architectures, from a Hugging Face ``config.json`` or a preset: no weights, no torch.

Decoder blocks of the Llama family (Llama, Mistral, Qwen2, Qwen3) and its mixtures of experts
(Mixtral, Qwen3-MoE) are written out as transformers builds them; the experts of a block are packed tensors, as in
transformers 5.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from tide_strategies.errors import TideConfigError
from tide_strategies.planner.groups import Group, Model, block
from tide_strategies.planner.reading import read_json

Sizes = list[tuple[int, ...]]
#: "vocab": embedding and head are groups of their own, as torchtitan wraps; "blocks": the root keeps them.
Wrap = Literal["vocab", "blocks"]

#: Larger numbers than this are a mistake in the file, not a model.
_MAX_EXTENT = 10**8
_MAX_LAYERS = 10_000

_DENSE = {"llama", "mistral", "qwen2", "qwen3"}
_MOE = {"mixtral", "qwen3_moe"}


def from_config(config: Any, name: str, *, itemsize: int = 2, master_itemsize: int = 4, wrap: Wrap = "vocab") -> Model:
    """The model that a parsed ``config.json`` describes.

    Args:
        config: the mapping.
        name: for people.
        itemsize: bytes of a gathered item.
        master_itemsize: bytes of a stored item.
        wrap: which modules are groups.

    Raises:
        TideConfigError: an architecture that is not known, or a field that is missing or no sensible number.
    """
    if not isinstance(config, Mapping):
        raise TideConfigError(f"{name}: a model config is a JSON object; got {type(config).__name__}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DENSE | _MOE:
        known = ", ".join(sorted(_DENSE | _MOE))
        raise TideConfigError(
            f"{name}: model_type {reprlib.repr(kind)[:80]} is not known here; known are {known}. Give a Python path "
            "instead (package.module:function, where the function returns the model)."
        )
    return _decoder(config, str(kind), name, itemsize, master_itemsize, wrap)


def from_file(path: Path, **options: Any) -> Model:
    """As :func:`from_config`, from a ``config.json`` or the folder that holds one.

    Raises:
        TideConfigError: also if the file cannot be read (``planner/reading.py``).
    """
    file = path / "config.json" if path.is_dir() else path
    return from_config(read_json(file, "a model config"), str(path), **options)


def preset(name: str, *, itemsize: int = 2, master_itemsize: int = 4, wrap: Wrap = "vocab") -> Model:
    """A preset by name.

    Raises:
        TideConfigError: no such preset; names the nearest.
    """
    make = PRESETS.get(name.lower())
    if make is None:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TideConfigError(f"no preset and no file {name!r}{hint or '.'} Presets: {', '.join(PRESETS)}.")
    return make(itemsize, master_itemsize, wrap)


def _number(config: Mapping[str, Any], key: str, default: int | None = None, *, high: int = _MAX_EXTENT) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= high:
        raise TideConfigError(
            f"model config: {key} must be a whole number from 1 to {high}; got {reprlib.repr(value)[:80]}"
        )
    return value


def _decoder(config: Mapping[str, Any], kind: str, name: str, itemsize: int, master: int, wrap: Wrap) -> Model:
    hidden = _number(config, "hidden_size")
    layers = _number(config, "num_hidden_layers", high=_MAX_LAYERS)
    vocab = _number(config, "vocab_size")
    attention = _attention(config, kind, hidden)
    dense: Sizes = []
    sparse = _sparse_layers(config, layers) if kind in _MOE else frozenset()
    if len(sparse) < layers:
        inner = _number(config, "intermediate_size")
        dense = [(inner, hidden), (inner, hidden), (hidden, inner)]
    groups = []
    active = 0
    for i in range(layers):
        feed, used = dense, _items(dense)
        if i in sparse:
            feed, used = _experts(config, hidden)
        sizes = [*attention, *feed, (hidden,), (hidden,)]
        active += used + _items([*attention, (hidden,), (hidden,)])
        groups.append(block(f"model.layers.{i}", sizes, itemsize))
    tied = bool(config.get("tie_word_embeddings", False))
    ends: Sizes = [(vocab, hidden)]
    head: Sizes = [(hidden,)] if tied else [(hidden,), (vocab, hidden)]
    all_groups = _wrapped(groups, ends, head, itemsize, wrap, tied)
    total = sum(s.rows * s.row_items for g in all_groups for s in g.params)
    active += _items(ends) + _items(head)
    return Model(name, all_groups, master, min(1.0, active / total))


def _wrapped(
    blocks: list[Group], embedding: Sizes, head: Sizes, itemsize: int, wrap: Wrap, tied: bool
) -> tuple[Group, ...]:
    """The blocks with embedding, final norm and head around them. A tied embedding belongs to the root."""
    if wrap == "blocks" or tied:
        return (block("(root)", [*embedding, *head], itemsize, resharded=False), *blocks)
    # The last block's neighbour: torchtitan keeps norm and head unsharded until their backward.
    return (
        block("embed_tokens", embedding, itemsize),
        *blocks,
        block("norm, lm_head", head, itemsize, resharded=False),
    )


def _attention(config: Mapping[str, Any], kind: str, hidden: int) -> Sizes:
    heads = _number(config, "num_attention_heads")
    key_values = _number(config, "num_key_value_heads", heads)
    width = _number(config, "head_dim", max(1, hidden // heads))
    sizes: Sizes = [(heads * width, hidden), (key_values * width, hidden), (key_values * width, hidden)]
    if kind == "qwen2" or config.get("attention_bias") is True:
        sizes += [(heads * width,), (key_values * width,), (key_values * width,)]
    if kind in ("qwen3", "qwen3_moe"):
        sizes += [(width,), (width,)]
    return [*sizes, (hidden, heads * width)]


def _sparse_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Numbers of the layers with experts."""
    step = _number(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(n) is int for n in dense):
        raise TideConfigError(
            f"model config: mlp_only_layers must list numbers of layers; got {reprlib.repr(dense)[:80]}"
        )
    return frozenset(range(step - 1, layers, step)) - set(dense)


def _experts(config: Mapping[str, Any], hidden: int) -> tuple[Sizes, int]:
    """Router and packed experts of a block, and how many parameters one token uses."""
    experts = _number(config, "num_experts", config.get("num_local_experts"), high=_MAX_LAYERS)
    chosen = _number(config, "num_experts_per_tok", high=experts)
    inner = _number(config, "moe_intermediate_size", config.get("intermediate_size"))
    sizes: Sizes = [(experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)]
    return sizes, experts * hidden + chosen * 3 * inner * hidden


def _items(sizes: Sizes) -> int:
    total = 0
    for size in sizes:
        items = 1
        for extent in size:
            items *= extent
        total += items
    return total


def _llama_70b(itemsize: int, master: int, wrap: Wrap) -> Model:
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "vocab_size": 128256}
    return _decoder(config, "llama", "Llama-3.1 70B", itemsize, master, wrap)


def _qwen3_30b(itemsize: int, master: int, wrap: Wrap) -> Model:
    config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    config |= {"vocab_size": 151936}
    return _decoder(config, "qwen3_moe", "Qwen3-30B-A3B", itemsize, master, wrap)


def _wan_14b(itemsize: int, master: int, wrap: Wrap) -> Model:
    """One expert of Wan2.2-T2V-A14B: blocks of self-attention, cross-attention, feed-forward and modulation."""
    width, inner, text, patch = 5120, 13824, 4096, 16 * 1 * 2 * 2
    attention: Sizes = [*[(width, width), (width,)] * 4, (width,), (width,)]
    one: Sizes = [*attention, *attention, (width,), (width,)]
    one += [(inner, width), (inner,), (width, inner), (width,), (1, 6, width)]
    blocks = [block(f"blocks.{i}", one, itemsize) for i in range(40)]
    root: Sizes = [(width, 16, 1, 2, 2), (width,), (width, text), (width,), (width, width), (width,)]
    root += [(width, 256), (width,), (width, width), (width,), (6 * width, width), (6 * width,)]
    root += [(patch, width), (patch,), (1, 2, width)]
    return Model("Wan2.2-T2V-A14B (one expert)", (block("(root)", root, itemsize, False), *blocks), master)


#: name -> how to make the model from (bytes per gathered item, bytes per stored item, wrapping).
PRESETS: dict[str, Callable[[int, int, Wrap], Model]] = {
    "llama-3.1-70b": _llama_70b,
    "qwen3-30b-a3b": _qwen3_30b,
    "wan2.2-14b": _wan_14b,
}
