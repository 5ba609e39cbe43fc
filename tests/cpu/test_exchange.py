"""Small payloads between ranks: every length arrives whole, and whatever a peer does ends in time and in words."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import launch, launch_raw

from tide_strategies.errors import TideMismatchError, TidePeerError, TideTimeoutError
from tide_strategies.fsdp2.agreement import agree_on_groups, agree_on_options
from tide_strategies.runtime.exchange import exchange_json, process_group_exchange

MIB = 1 << 20
# Per call, the length that each of three ranks sends.
LENGTHS = [(0, 0, 0), (1, 1, 1), (0, 1, 2), (7, 4097, 0), (MIB, 3, MIB + 1), (255, 256, 257)]
TIMEOUT_S = 2.0


def payload(rank: int, length: int) -> bytes:
    return bytes((i * 31 + rank) % 256 for i in range(min(length, 997))).ljust(length, b"\xff")


def raised(kind: type[Exception], function: Any, *args: Any) -> tuple[str, float]:
    """The words of the error that ``function`` must raise, exactly of this type, and the seconds it took."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        function(*args)
    assert type(caught.value) is kind
    return str(caught.value), time.monotonic() - start


def _lengths(rank: int, world: int, _: Any) -> list[bool]:
    exchange = process_group_exchange(dist.group.WORLD, 30.0, "the test")
    arrived = []
    for lengths in LENGTHS:
        want = [payload(r, n) for r, n in enumerate(lengths)]
        arrived.append(exchange(want[rank]) == want)
    with torch.inference_mode():
        arrived.append(exchange(b"x" * rank) == [b"", b"x", b"xx"])
    pair = dist.new_group([0, 2])
    if rank != 1:
        values = exchange_json(process_group_exchange(pair, 30.0, "the pair"), {"rank": rank, "text": "\u00e9\0"})
        arrived.append(values == [{"rank": 0, "text": "\u00e9\0"}, {"rank": 2, "text": "\u00e9\0"}])
    return arrived


def test_payloads_of_every_length_arrive_whole_and_in_rank_order() -> None:
    results = launch(3, _lengths)
    assert [len(r) for r in results] == [len(LENGTHS) + 2, len(LENGTHS) + 1, len(LENGTHS) + 2]
    assert all(all(r) for r in results)


MALFORMED = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"nothing"]
OTHER_SHAPES: list[Any] = [None, 3, [], {}, {"groups": 1, "codes": []}, {"groups": [], "codes": ["TIDE-OK"]}]


def _malformed(rank: int, world: int, _: Any) -> dict[str, Any]:
    exchange = process_group_exchange(dist.group.WORLD, 30.0, "the test")
    words = []
    for wrong in MALFORMED:
        words.append(
            raised(TideMismatchError, exchange_json, lambda good, w=wrong: exchange(w if rank else good), {})[0]
        )
    structure = []
    for other in OTHER_SHAPES:
        if rank == 1:
            exchange_json(exchange, "0" * 64)  # another digest, upon which all is said
            exchange_json(exchange, other)
        else:
            described = [{"name": "(root)", "parameters": {}}]
            structure.append(
                raised(TideMismatchError, agree_on_groups, [dist.group.WORLD], described, ["TIDE-OK"], 30.0)[0]
            )
    for other, before in ((3, "0" * 64), (["x"], "0" * 64), (3, None), ({"plan": "auto"}, None), ("0", None)):
        if rank == 1:
            if before is not None:
                exchange_json(exchange, before)
            exchange_json(exchange, other)
        else:
            structure.append(raised(TideMismatchError, agree_on_options, [dist.group.WORLD], {"plan": "auto"}, 30.0)[0])
    dist.barrier()
    return {"malformed": words, "structure": structure}


def test_what_is_no_message_is_refused_in_words_on_every_rank() -> None:
    first, second = launch(2, _malformed)
    assert len(first["malformed"]) == len(MALFORMED)
    for words in [*first["malformed"], *second["malformed"]]:
        assert "rank 1 of the group sent something that is no TIDE message" in words
        assert "same version" in words
    assert len(first["structure"]) == len(OTHER_SHAPES) + 5
    for words in first["structure"]:
        assert "rank 1" in words
        assert len(words) < 600


def _late(rank: int, world: int, _: Any) -> dict[str, Any]:
    """Rank 1 is late for one exchange, then takes part in half of another; each on a group of its own."""
    out: dict[str, Any] = {}
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    exchange = process_group_exchange(groups[0], TIMEOUT_S, "the late exchange")
    if rank == 1:
        time.sleep(TIMEOUT_S + 1.0)
    out["late"] = raised(TideTimeoutError, exchange, b"x")
    dist.barrier()
    exchange = process_group_exchange(groups[1], TIMEOUT_S, "the half exchange")
    if rank == 1:
        time.sleep(0.9 * TIMEOUT_S)
        dist.all_gather([torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([3]), group=groups[1])
    else:
        out["half"] = raised(TideTimeoutError, exchange, b"abc")
    dist.barrier()
    exchange = process_group_exchange(groups[2], 30.0, "the strange exchange")
    out["strange"] = []
    for strange in (-1, 1 << 40):
        if rank == 1:
            dist.all_gather(
                [torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([strange]), group=groups[2]
            )
        else:
            out["strange"].append(raised(TideMismatchError, exchange, b"abc"))
    dist.barrier()
    return out


def test_a_late_rank_ends_in_a_timeout_within_the_bound() -> None:
    first, second = launch(2, _late)
    for words, seconds in (first["late"], first["half"], second["late"]):
        assert f"within timeout_s={TIMEOUT_S:g}" in words
        assert "exchange" in words
        # The bound is one for the whole exchange, whatever part of it came about; a second for the scheduler.
        assert seconds < TIMEOUT_S + 1.0
    assert first["late"][1] >= TIMEOUT_S
    for words, seconds in first["strange"]:
        assert "rank 1 does something else than the strange exchange" in words
        assert seconds < 5.0
    assert len(first["strange"]) == 2


def _gone(rank: int, world: int, _: Any) -> tuple[str, float]:
    exchange = process_group_exchange(dist.group.WORLD, 30.0, "the last exchange")
    exchange(b"here")
    if rank == 1:
        os._exit(3)
    return raised(TidePeerError, exchange, b"still here")


def test_a_dead_rank_is_an_error_long_before_the_timeout() -> None:
    first, second = launch_raw(2, _gone, timeout=60)
    assert second.exit_code == 3
    assert first.error is None, first.error
    words, seconds = first.value
    assert "a rank has gone during the last exchange" in words
    assert seconds < 10.0


def test_json_that_cannot_be_said_is_an_error_here() -> None:
    with pytest.raises(TypeError):
        exchange_json(lambda b: [b], object())
    assert exchange_json(lambda b: [b, json.dumps("é").encode()], 1) == [1, "é"]
