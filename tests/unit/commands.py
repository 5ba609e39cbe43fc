"""What the tests of commands share: a way to run one, and a model to run it on."""

from __future__ import annotations

import pytest

from tide_strategies.cli.main import main

Output = pytest.CaptureFixture[str]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as e:
        return int(e.code or 0)
