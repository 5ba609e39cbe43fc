"""Parameter groups of real models, for verifying real geometry."""

from __future__ import annotations

from tide_strategies.layout import GroupLayout, ParamShape

#: model -> group -> sizes of its parameters: a block, and the largest group.
GROUPS: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "llama-3.1-70b": {
        "block": [
            *[(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)],
            *[(28672, 8192), (28672, 8192), (8192, 28672), (8192,), (8192,)],
        ],
        "vocabulary": [(128256, 8192)],
    },
    "qwen3-30b-a3b": {
        "block": [
            *[(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128,), (128,), (2048,), (2048,)],
            *[(128, 2048), (128, 1536, 2048), (128, 2048, 768)],
        ],
        "vocabulary": [(151936, 2048)],
    },
    "wan2.2-14b": {
        "block": [
            *[*[(5120, 5120), (5120,)] * 4, (5120,), (5120,)] * 2,
            *[(5120,), (5120,), (13824, 5120), (13824,), (5120, 13824), (5120,), (1, 6, 5120)],
        ],
    },
}


def layouts(preset: str, ranks: int) -> dict[str, GroupLayout]:
    """Groups of a model in bf16 among ``ranks`` ranks, by name.

    Raises:
        KeyError: if there is no such preset.
    """
    return {
        name: GroupLayout(tuple(ParamShape.of(size, 2) for size in sizes), ranks)
        for name, sizes in GROUPS[preset].items()
    }
