"""Several ranks on one card: the same results as stock FSDP2, and the same ends when a peer fails.

Stock communicates through the host here, since NCCL refuses two ranks on one card, and adds in our order
(``stock_in_order``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lost_peer
import pytest
import torch
from harness import launch
from models import BF16, Case, build, full_parameters, train
from stock_in_order import add_in_our_order
from test_fsdp2_gpu import CACHED, GPU_CASES, SLOT_REUSE, deterministic
from test_fsdp2_parity import compare

from tide_strategies import apply_tide

BACKEND = "cpu:gloo,cuda:gloo"
TO_BF16 = {"param_dtype": torch.bfloat16}
FOUR = [*GPU_CASES, Case("hybrid sharding", hsdp=True, force_sum=True)]


def _compare(rank: int, world: int, cases: list[Case]) -> dict[str, float]:
    torch.cuda.set_device(0)
    deterministic()
    return compare(rank, world, cases, device="cuda", stock=add_in_our_order)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, float]:
    return launch(2, _compare, GPU_CASES, timeout=300, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in GPU_CASES])
def test_two_ranks_are_bit_equal_to_stock(two_ranks, name: str) -> None:
    assert two_ranks[name] == 0.0


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, float]:
    return launch(4, _compare, FOUR, timeout=400, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in FOUR])
def test_four_ranks_are_bit_equal_to_stock(four_ranks, name: str) -> None:
    assert four_ranks[name] == 0.0


def _nodes(topology: str, **more: Any) -> list[Case]:
    """The ranks as virtual nodes."""
    config = {"topology": topology}
    return [
        Case(f"{topology} in fp32", config=config),
        Case(f"{topology} with uneven rows in bf16", uneven=True, policy=BF16, config=config),
        Case(f"{topology} under slot reuse", uneven=True, policy=BF16, config=config | SLOT_REUSE, **more),
    ]


TWO_NODES = [
    *_nodes("2x1", accumulate=2, sync_every=False),
    Case("2x1 in one slot", policy=BF16, config={"topology": "2x1", "all_gather.slots": 1}),
    Case("2x1 with everything cached", policy=BF16, accumulate=3, config={"topology": "2x1"} | CACHED),
]
FOUR_NODES = [
    *_nodes("2x2"),
    *_nodes("4x1"),
    Case("4x1 to bf16", policy=TO_BF16, steps=1, config={"topology": "4x1"}),
]


@pytest.fixture(scope="module")
def two_nodes() -> dict[str, float]:
    return launch(2, _compare, TWO_NODES, timeout=300, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in TWO_NODES])
def test_two_nodes_are_bit_equal_to_stock(two_nodes, name: str) -> None:
    assert two_nodes[name] == 0.0


def _four_nodes(rank: int, world: int, _: None) -> tuple[dict[str, float], list[bool]]:
    return _compare(rank, world, FOUR_NODES), [_same_bits(rank, world, topology) for topology in ("2x2", "4x1")]


def _same_bits(rank: int, world: int, topology: str) -> bool:
    """Whether modes and chunks that keep the order of additions keep every bit."""
    case, results = Case("bits", uneven=True, policy=BF16), []
    for config in ({}, SLOT_REUSE, {"reduce_scatter.chunk_bytes": 4096}, {"reduce_scatter.landing_ctas": 1}):
        model = build(case, world, device="cuda")
        handle = apply_tide(model, {"timeout_s": 30, "strict": True, "topology": topology, **config})
        losses = train(model, case, rank)
        results.append((losses, full_parameters(model)))
        ahead = sum(g.all_gather.ahead for g in handle.report().groups)
        assert bool(ahead) == (config is not SLOT_REUSE), f"{ahead} all-gathers ahead of a network phase"
        handle.close()
    first = results[0]
    return all(r[0] == first[0] and all(torch.equal(r[1][n], first[1][n]) for n in first[1]) for r in results)


@pytest.fixture(scope="module")
def four_nodes() -> tuple[dict[str, float], list[bool]]:
    return launch(4, _four_nodes, timeout=300, backend=BACKEND)[0]


@pytest.mark.parametrize("name", [c.name for c in FOUR_NODES])
def test_four_ranks_as_nodes_agree_with_stock_within_rounding(four_nodes, name: str) -> None:
    # A reduction in bf16 rounds each of stock's sums where ours rounds once: one step of AdamW, at most lr either way.
    assert four_nodes[0][name] < (2e-2 if name.endswith("to bf16") else 1e-4)


def test_modes_and_chunks_keep_every_bit_across_nodes(four_nodes) -> None:
    assert four_nodes[1] == [True, True]


@pytest.mark.parametrize("how", ["stalled", "killed", "killed 2x1", "stalled 2x1 p2p", "killed 2x1 p2p"])
def test_a_lost_peer_ends_the_others_in_time(how: str, tmp_path: Path) -> None:
    lost_peer.check(how, tmp_path, BACKEND, cards=1)
