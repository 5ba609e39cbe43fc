"""Four ranks under Lightning's strategy: experts in two parts, two replicas, two virtual nodes; in one launch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import launch

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


def _run(rank: int, world: int, folder: Path) -> list[str]:
    """Which of them have come to their end, where each asserts what holds."""
    import lightning_experts
    import lightning_hsdp
    import lightning_nodes

    lightning_experts.with_four_ranks(folder)
    lightning_hsdp.with_four_ranks()
    lightning_nodes.with_four_ranks()
    return ["experts", "replicas", "nodes"]


def test_experts_replicas_and_virtual_nodes_run_on_tide_and_train_as_they_should(tmp_path: Path) -> None:
    assert launch(4, _run, tmp_path, timeout=150) == [["experts", "replicas", "nodes"]] * 4
