"""Hosts compare what they begin: the words they leave for each other, and the store in which they leave them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tide_strategies.config import TideConfig
from tide_strategies.errors import TideMismatchError
from tide_strategies.fsdp2 import connect
from tide_strategies.fsdp2.board import StoreBoard, open_board
from tide_strategies.fsdp2.handle import TideHandle
from tide_strategies.fsdp2.install import Installation
from tide_strategies.runtime.calls import CallBook
from tide_strategies.runtime.cuda import engine, host_order
from tide_strategies.runtime.cuda.host_order import Calls, HostOrder, Word
from tide_strategies.runtime.hosts import Placement
from tide_strategies.topology import Topology

KEPT, TOLD = 64, 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_order, "_KEPT", KEPT)
    monkeypatch.setattr(host_order, "_TOLD", TOLD)
    monkeypatch.setattr(host_order, "_LAST_S", 0.2)
    monkeypatch.setattr(host_order, "_END_S", 0.2)


def begun(tags: list[int]) -> Calls:
    calls = Calls()
    for tag in tags:
        calls.note(tag)
    return calls


def said(tags: list[int]) -> Word:
    """The word of a rank that has begun these, as the other host reads it."""
    return Word.parse(begun(tags).word().pack())


def some(count: int) -> list[int]:
    """Tags of a few kinds of calls that take turns, as layers do."""
    return [0xFFFFFFF0 + n % 5 for n in range(count)]


@pytest.mark.parametrize("own", [0, 1, TOLD, TOLD + 1, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT + 5])
def test_what_is_alike_is_compared_as_far_as_both_have_come(own: int) -> None:
    """Behind, level, ahead; far ahead, until this rank gets there; far behind, when nothing of it is kept."""
    calls = begun(some(own))
    for peer in range(own + 3 * KEPT):
        told_from = max(peer - TOLD, 0)
        comparable = told_from <= own < told_from + KEPT
        assert calls.compare(said(some(peer))) == (min(own, peer) if comparable else 0, 0), peer


def with_a_difference(tags: list[int], at: int, kind: str) -> list[int]:
    """Whose first call that is not the same has index ``at``."""
    theirs = list(tags)
    if kind == "swap":
        theirs[at : at + 2] = theirs[at : at + 2][::-1]
    elif kind == "drop":
        del theirs[at]
    elif kind == "repeat":
        theirs.insert(at, theirs[at - 1])
    else:
        theirs[at] ^= 1 << at % 32
    return theirs


@pytest.mark.parametrize("kind", ["swap", "drop", "repeat", "other"])
def test_a_difference_is_told_to_the_call(kind: str) -> None:
    for own, lead in itertools.product([2, 5, 40, 300], [-TOLD, -1, 0, 1, TOLD]):
        tags, last = some(own + TOLD + 2), max(own + lead, 0)
        calls = begun(tags[:own])
        for at in range(max(own - TOLD - 1, 0), own):
            theirs, number = with_a_difference(tags, at, kind), at + 1
            word = said(theirs[:last])
            same, different = calls.compare(word)
            if number > min(own, last):
                assert (same, different) == (min(own, last), 0)
            elif number > word.first:
                assert (same, different) == (0, number)
                assert word.tag(number) == theirs[at] != calls.tag(number) == tags[at]
            else:  # it is known by its digest alone
                assert (same, different) == (0, word.first)
                assert word.tag(different) is None


def test_what_is_no_word_is_refused() -> None:
    for data in (b"", b"\0" * 11, b"\0" * 13):
        with pytest.raises(ValueError, match=f"{len(data)} bytes that are no word"):
            Word.parse(data)


class Words(dict[str, bytes]):
    """A board in this process."""

    interval_s = 0.02
    read = dict.get

    def publish(self, key: str, value: bytes) -> None:
        self[key] = value


BOOK = CallBook(Topology(2, 1), 1)
LEFT, RIGHT = BOOK.tag("all-gather of 'left'"), BOOK.tag("all-gather of 'right'")


def order_of(rank: int, board: Any, tags: list[int]) -> HostOrder:
    host = SimpleNamespace(rank=rank, host=range(rank, rank + 1), size=2, aborted=lambda: None)
    order = HostOrder(host, BOOK, board)
    for tag in tags:
        order.note(tag)
    return order


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_found(order: HostOrder) -> str:
    until(order.look)
    found = order.look()
    assert isinstance(found, TideMismatchError)
    return str(found)


def test_both_hosts_name_both_sides() -> None:
    board = Words()
    orders = [order_of(0, board, [LEFT, LEFT, RIGHT, RIGHT]), order_of(1, board, [LEFT, RIGHT, LEFT, RIGHT])]
    assert "rank 0 began call 2, all-gather of 'left', while rank 1, on another host, began all-gather of 'right'." in (
        until_found(orders[0])
    )
    assert "rank 1 began call 2, all-gather of 'right', while rank 0, on another host, began all-gather of 'left'." in (
        until_found(orders[1])
    )
    assert all(order.close() is not None for order in orders)


def test_a_host_that_is_far_ahead_is_compared_when_this_one_gets_there() -> None:
    """And it stays the same word: each next one would be farther still."""
    board, calls = Words(), begun([LEFT] * 20)
    board.publish("1", calls.word().pack())
    order = order_of(0, board, [RIGHT])
    until(lambda: order._ahead is not None)
    for _ in range(10):
        calls.note(LEFT)
        board.publish("1", calls.word().pack())
    time.sleep(3 * board.interval_s)
    assert order.look() is None
    for _ in range(11):  # to the first call that the first word knows by its digest
        order.note(LEFT)
    assert "in call 12 or before, too long ago to tell in which, rank 0 began another one than rank 1" in (
        until_found(order)
    )
    order.close()


def test_calls_that_are_not_compared_yet_are_at_the_end() -> None:
    board = Words()
    board.interval_s = 60.0
    orders = [order_of(0, board, [LEFT]), order_of(1, board, [RIGHT])]
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda o=o, r=r: found.update({r: o.close()})) for r, o in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all("call 1" in str(found[r]) for r in (0, 1)), found
    lone = order_of(0, Words(), [LEFT])  # whose peer says nothing
    begun_at = time.monotonic()
    assert lone.close() is None
    assert time.monotonic() - begun_at < 5


@pytest.mark.parametrize("how", ["raises", "hangs", "lies"])
def test_a_board_that_fails_is_told_once(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_order, "_SILENT_S", 0.1)
    never = threading.Event()

    class Broken(Words):
        def read(self, key: str) -> bytes | None:
            if how == "raises":
                raise RuntimeError("Broken pipe\nframe 0")
            return b"?" if how == "lies" else None

        def publish(self, key: str, value: bytes) -> None:
            if how == "hangs":
                never.wait(30)

    words = {
        "raises": "(RuntimeError: Broken pipe)",
        "hangs": "(the store has not answered for 0.1 s)",
        "lies": "(ValueError: 1 bytes that are no word of this version of TIDE)",
    }
    with caplog.at_level(logging.WARNING, "tide_strategies"):
        order = order_of(0, Broken(), [LEFT, RIGHT])
        until(lambda: order.look() or caplog.records)
        assert order.look() is None
        begun_at = time.monotonic()
        assert order.close() is None
        assert time.monotonic() - begun_at < 5
    never.set()
    (record,) = caplog.records
    assert words[how] in record.getMessage()
    assert "rank 0 cannot compare its calls with those of rank 1, on another host, beyond call 0 of 2" in (
        record.getMessage()
    )


def test_nobody_asks_a_store_that_is_not_needed_any_more() -> None:
    """When all is compared and nothing begins, it may go: rank 0's program, whose store it is, has ended."""
    asked: list[str] = []

    class Counted(Words):
        def read(self, key: str) -> bytes | None:
            asked.append(key)
            return self.get(key)

    board = Counted()
    orders = [order_of(r, board, [LEFT, RIGHT]) for r in (0, 1)]
    until(lambda: all(order._through for order in orders))
    before = len(asked)
    time.sleep(0.1)
    assert [order.close() for order in orders] == [None, None]
    assert len(asked) == before


def test_words_go_through_a_store_on_a_connection_of_their_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group_store = dist.PrefixStore("group", store)
    boards = [StoreBoard(group_store, "name", hosts) for hosts in (2, 1024)]
    assert [board.interval_s for board in boards] == [1.0, 4.0]
    held = threading.Thread(target=group_store.get, args=("later",), daemon=True)  # the program waits in its own
    held.start()
    word = begun(some(9)).word().pack()
    assert b"\0" in word
    assert boards[0].read("0") is None
    boards[0].publish("0", b"before")
    boards[0].publish("0", word)
    assert boards[1].read("0") == word
    assert StoreBoard(group_store, "another", 2).read("0") is None
    assert held.is_alive()
    boards[0]._shared.clone().underlying_store.set("later", "now")
    held.join(10)


def test_a_store_in_a_file_gets_few_words(tmp_path: Any) -> None:
    board = StoreBoard(dist.PrefixStore("group", dist.FileStore(str(tmp_path / "store"), 1)), "name", 2)
    assert board.interval_s == 60.0
    board.publish("0", b"word")
    assert board.read("0") == b"word"


def test_one_host_has_no_board() -> None:
    def exchange(payload: bytes) -> list[bytes]:
        raise AssertionError("nothing is to be agreed")

    assert open_board(exchange, None, Placement(Topology(2, 1), "local", "")) is None


@pytest.mark.parametrize("host_ranks", [0, 1])
def test_gpu_engines_of_several_hosts_have_one(host_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CudaEngine", lambda *_, board, **__: board)
    monkeypatch.setattr(connect, "_device_rail", lambda *_: None)
    monkeypatch.setattr(connect.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    ranks = SimpleNamespace(rank=lambda: 0, get_group_store=dist.HashStore)
    placement = Placement(Topology(2, 1), "nccl_rma", "", host_ranks=host_ranks)
    made = connect.gpu_engine(lambda payload: [payload], ranks, TideConfig(), placement, 1, {})
    assert isinstance(made, StoreBoard) is bool(host_ranks)


def test_without_a_store_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    placement = Placement(Topology(2, 1), "nccl_rma", "", host_ranks=1)
    with caplog.at_level(logging.WARNING, "tide_strategies"):
        assert open_board(lambda payload: [payload], SimpleNamespace(), placement) is None
    (record,) = caplog.records
    assert "calls are not compared between hosts (AttributeError" in record.getMessage()


def test_what_is_found_at_the_end_leaves_nothing_open() -> None:
    closed = []

    def closes(name: str) -> None:
        closed.append(name)
        if name == "first":
            raise TideMismatchError("calls differ")

    engines = [SimpleNamespace(close=lambda n=n: closes(n)) for n in ("first", "second")]
    installation = object.__new__(Installation)
    installation.groups, installation.engines, installation.plans = [], list(engines), []
    handle = TideHandle(TideConfig())
    handle._installations += [installation, SimpleNamespace(close=lambda: closes("another"))]
    with pytest.raises(TideMismatchError, match="calls differ"):
        handle.close()
    assert closed == ["first", "second", "another"]
    assert not handle.installed
    assert installation.engines == []
    handle.close()
