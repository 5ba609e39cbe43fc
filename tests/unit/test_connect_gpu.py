"""What is decided for GPU ranks before memory is shared, and what follows when that fails. No GPU is asked."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideArenaError, TideFallbackError
from tide_strategies.fsdp2 import connect
from tide_strategies.planner.knobs import Knobs
from tide_strategies.runtime import hosts
from tide_strategies.runtime.cuda import multicast, nccl_domains
from tide_strategies.topology import Topology

KNOBS = Knobs(chunk_bytes=4096)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is connected: how, and the error that comes of it, if a test puts one there."""
    seen: list[Any] = []

    def connect_devices(exchange: Any, ranks: Any, members: Any, config: Any, knobs: Any, placement: Any) -> str:
        seen.append(placement)
        if placement.rail == "nccl_rma":
            raise TideArenaError("rank 0: no host RMA", "TIDE-F029")
        if placement.multicast == "on" and "error" in config.debug.trace:
            raise TideArenaError("creating the multicast object failed")
        return "engine"

    monkeypatch.setattr(connect, "_connect_devices", connect_devices)
    monkeypatch.setattr(connect.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(multicast, "multicast_facts", lambda device: {"refusal": "", "uuid": "rank 0"})
    return seen


def of(ranks: int, **options: Any) -> tuple[Any, Any]:
    """Connect as the first of so many ranks, each with a GPU of its own on one host."""

    def exchange(payload: bytes) -> list[bytes]:
        said = json.loads(payload)
        for rank in range(ranks):
            said["multicast"]["uuid"] = f"rank {rank}"
            yield json.dumps(said).encode()

    group = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    config = TideConfig.from_any(options)
    return connect._connect_cuda(lambda p: list(exchange(p)), group, (), config, lambda topology: KNOBS)


@pytest.mark.parametrize(
    ("ranks", "wanted", "says"),
    [
        (4, "auto", "on"),
        (2, True, "on"),
        (2, "auto", "off (a node has 2 ranks, which gain nothing by it)"),
        (4, False, "off (all_gather.multicast is off)"),
    ],
)
def test_multicast_is_what_the_option_and_the_ranks_make_it(
    attempts: list[Any], ranks: int, wanted: Any, says: str
) -> None:
    assert of(ranks, **{"all_gather.multicast": wanted}) == ("engine", KNOBS)
    assert [p.multicast for p in attempts] == [says]
    assert str(attempts[0].topology) == f"1x{ranks}"


def test_what_fails_with_multicast_is_tried_without(attempts: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tide_strategies"):
        of(4, **{"debug.trace": "error"})
    says = ["on", "off (creating the multicast object failed)"]
    assert [p.multicast for p in attempts] == says
    (record,) = caplog.records
    assert "multicast was to be used, and failed: creating the multicast object failed" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tide_strategies"):
        of(4, **{"debug.trace": "error", "all_gather.multicast": True})
    assert [p.multicast for p in attempts[2:]] == says
    (record,) = caplog.records
    assert "all_gather.multicast is true, and cannot be: creating the multicast object failed" in record.getMessage()


def test_strict_wants_what_was_asked_for(attempts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multicast, "multicast_facts", lambda device: {"refusal": "no switch", "uuid": ""})
    with pytest.raises(TideFallbackError, match="is true, and cannot be: rank 0: no switch"):
        of(2, **{"all_gather.multicast": True, "strict": True})
    assert attempts == []
    of(2, strict=True)
    assert [p.multicast for p in attempts] == ["off (rank 0: no switch)"]


def test_a_rail_that_is_asked_for_and_missing_is_no_silent_other(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_domains, "missing_nccl", lambda: "no NCCL is loaded")
    monkeypatch.setattr(connect, "stated_topology", lambda config, ranks: Topology(2, 1))
    with pytest.raises(
        TideArenaError, match=r"topology as stated, and rank 0 \(and 1 more\): no NCCL is loaded$"
    ) as caught:
        of(2, rail="nccl_rma")
    assert caught.value.code == "TIDE-F029"
    assert attempts == []
    of(2, rail="auto")
    assert [(p.rail, p.multicast) for p in attempts] == [("local", "off (a node has one rank)")]


@pytest.mark.parametrize("missing", [None, "no NCCL is loaded"])
def test_what_nccl_does_not_connect_messages_do_and_the_user_is_told(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str | None
) -> None:
    """Whether it is known beforehand, or comes out when NCCL is asked. Who wants no such thing has an error."""
    monkeypatch.setattr(nccl_domains, "missing_nccl", lambda: missing)
    monkeypatch.setattr(connect, "stated_topology", lambda config, ranks: Topology(2, 1))
    monkeypatch.setattr(hosts, "hosts_of", lambda identities: [[0], [1]])
    tried = ["nccl_rma", "p2p"] if missing is None else ["p2p"]
    why = "rank 0: no host RMA" if missing is None else "rank 0 (and 1 more): no NCCL is loaded"
    with caplog.at_level(logging.WARNING, "tide_strategies"):
        assert of(2) == ("engine", KNOBS)
    assert [p.rail for p in attempts] == tried
    (record,) = caplog.records
    assert (
        f"TIDE-F032 messages through the host connect the GPUs of different nodes, since NCCL does not: {why}; use"
        in (record.getMessage())
    )
    assert f"(TIDE-F032): {why}" in attempts[-1].why
    with pytest.raises(TideFallbackError, match="TIDE-F032"):
        of(2, strict=True)
    caplog.clear()
    assert of(2, strict=True, rail="p2p") == ("engine", KNOBS)
    assert (attempts[-1].rail, caplog.records) == ("p2p", [])
