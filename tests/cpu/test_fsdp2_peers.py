"""The properties that PyTorch's own tests of FSDP2 check, with TIDE: as stock in every bit, order and type."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import peer_events
import peer_forwards
import peer_layouts
import pytest
import torch
from harness import launch
from peers import PEERS, SINCE, Side

#: Modules that register cases when they are imported.
REGISTERING = (peer_layouts, peer_events, peer_forwards)


def run(case: Any, rank: int, tide: bool) -> Any:
    """What came of one side of a case; with TIDE, every group must have run on it alone."""
    side = Side(rank, tide)
    try:
        result = case(side)
        for handle in side.handles:
            report = handle.report()
            assert report.installed, str(report)
            for group in report.groups:
                assert group.path == "tide" or group.code == "TIDE-F011", str(report)
                assert not group.reduce_scatter.stock_calls, str(report)
        assert bool(side.handles) == tide
        return result
    finally:
        for handle in side.handles:
            handle.close()


def difference(a: Any, b: Any, where: str = "result") -> str:
    """Where two results differ first; empty if they are equal in types, values and bits."""
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
        return "" if same else f"{where}: {a} and {b}"
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {list(a)} and {list(b)}"
        return next(filter(None, (difference(a[k], b[k], f"{where}[{k!r}]") for k in a)), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {a} and {b}"
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(x, y, f"{where}[{i}]") for i, (x, y) in pairs)), "")
    return "" if a == b else f"{where}: {a!r} and {b!r}"


def compare(rank: int, world: int, names: list[str]) -> dict[str, str]:
    """For each case, what is wrong with it; empty where nothing is."""
    wrong = {}
    gc.freeze()  # what has been imported is not searched again after every case
    for name in names:
        try:
            stock = run(PEERS[name], rank, tide=False)
            wrong[name] = difference(stock, run(PEERS[name], rank, tide=True))
        except Exception:
            wrong[name] = traceback.format_exc()
        gc.collect()
    return wrong


@pytest.fixture(scope="module")
def outcome() -> list[dict[str, str]]:
    return launch(2, compare, [name for name in PEERS if name not in SINCE], timeout=200)


@pytest.mark.parametrize("name", PEERS)
def test_as_stock(outcome: list[dict[str, str]], name: str) -> None:
    if name in SINCE:
        pytest.skip(f"stock FSDP2 itself fails at this before torch {SINCE[name]}")
    for rank, wrong in enumerate(outcome):
        assert not wrong[name], f"rank {rank}: {wrong[name]}"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([1.0, {"a": torch.ones(2)}], "result[1]['a']"),
        ([1.0, {"b": torch.zeros(2)}], "keys ['a'] and ['b']"),
        ([1.0, {"a": torch.zeros(2, dtype=torch.bfloat16)}], "result[1]['a']"),
        ([1.5, {"a": torch.zeros(2)}], "result[0]: 1.0 and 1.5"),
        ((1.0, {"a": torch.zeros(2)}), "list and tuple"),
        ([1.0], "result: "),
    ],
)
def test_a_difference_would_be_seen(other: Any, words: str) -> None:
    result = [1.0, {"a": torch.zeros(2)}]
    assert difference(result, [1.0, {"a": torch.zeros(2)}]) == ""
    assert words in difference(result, other)
