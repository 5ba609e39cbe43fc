"""Rails without a network: where schedules are cut, what messages say, what hosts are, what a bringer may do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode import Table
from test_native_program import encode

from tide_strategies._native import Arena
from tide_strategies.collectives import signals
from tide_strategies.collectives.all_gather import all_gather
from tide_strategies.collectives.reduce_scatter import reduce_scatter
from tide_strategies.collectives.schedule import (
    NODE,
    Await,
    Copy,
    Counter,
    Item,
    Land,
    Notify,
    Op,
    Put,
    Ref,
    Schedule,
    Space,
    Sum,
    Zero,
)
from tide_strategies.errors import TideArenaError
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.runtime.cuda.group import needed_device_memory
from tide_strategies.runtime.hosts import Placement, found_topology, hosts_of, place, place_devices
from tide_strategies.runtime.rails.cut import Cut, Send, cut
from tide_strategies.runtime.rails.message import INLINE_BYTES, MESSAGE_BYTES, Kind, Message, parse, payload
from tide_strategies.topology import Topology

# --- cutting ---------------------------------------------------------------------------------------------------

ARRIVED, READY = signals.arrived(0), Counter("ready")
BOX = Ref(Space.OUTBOX, 0, 64)


def put(to: int, src: Ref = BOX) -> Put:
    return Put(src, Ref(Space.INBOX, 1, 128, to), 32, ARRIVED)


def cut_up(topology: Topology, *ops: Op, rank: int = 0) -> tuple[Cut, list[Any]]:
    """The cut of one stream, and its steps with native pieces as lists of operations."""
    made = cut(Schedule("test", rank, topology.ranks, {"main": ops}, {}), topology, 0, Table)
    table = made.encoded.program
    pieces = [list(made.encoded.operations[first : first + count]) for first, count in table.streams]
    return made, [s if isinstance(s, Send) else pieces[s] for s in made.steps["main"]]


def read(peer: int, count: int) -> Await:
    return Await(signals.RAILED, peer, count)


def test_a_schedule_is_cut_where_it_sends_and_nowhere_else() -> None:
    here = Notify(READY, 1)
    made, steps = cut_up(Topology(2, 2), here, put(2), Notify(signals.clear(0), 2), Notify(READY))
    assert [type(s) for s in steps] == [list, Send, Send, list]
    assert steps[0] == [here]
    counters = made.encoded.counters
    sent, told = steps[1:3]
    assert (sent.to, counters[sent.counter], sent.offset, sent.nbytes) == (2, ARRIVED, 64, 32)
    assert (sent.space, sent.index, sent.at) == (Space.INBOX, 1, 128)
    assert made.encoded.bases[sent.base] == (Space.OUTBOX, 0, -1)
    assert (told.to, counters[told.counter], told.base) == (2, signals.clear(0), -1)
    # READY is for the node: who hears it may write to what the put reads.
    assert steps[3] == [read(2, 1), Notify(READY)]
    assert (list(counters).index(signals.RAILED), 2, 1) in made.encoded.program.advance


@pytest.mark.parametrize(
    ("op", "waits"),
    [
        (Zero(Ref(Space.OUTBOX, 0, 0), 4), True),
        (Sum(Ref(Space.OUTBOX, 0), (Ref(Space.STAGING),), 1, Item.F32, Item.F32), True),
        (Zero(Ref(Space.OUTBOX, 1, 0), 4), False),
        (Land(Ref(Space.OUTPUT), (Ref(Space.INBOX),), 1, Item.F32), False),
        (Copy(Ref(Space.OUTBOX), Ref(Space.LANDING, 0, 0, NODE), 1, Item.RAW4, Item.RAW4), False),
        (Await(READY, 1, 1), False),
        (Notify(READY, 0), True),
        (Notify(signals.STAGE_FREE, 1), True),
        (Notify(signals.FILLED), False),
    ],
)
def test_only_what_could_overwrite_a_source_waits_until_it_is_read(op: Op, waits: bool) -> None:
    _, steps = cut_up(Topology(2, 1), put(1), op)
    ops = [o for s in steps[1:] for o in (s if isinstance(s, list) else [s])]
    assert (ops[0] == read(1, 1)) == waits
    # At the end of a stream everything has been read: other streams, and other calls, need not know.
    assert ops.count(read(1, 1)) == 1


def test_sources_of_each_receiver_are_awaited_by_themselves() -> None:
    _, steps = cut_up(Topology(3, 1), put(1), put(2, Ref(Space.OUTBOX, 1)), put(1), Zero(BOX, 4))
    assert [type(s) for s in steps] == [Send, Send, Send, list]
    assert steps[3] == [read(1, 2), Zero(BOX, 4), read(2, 1)]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2), (5, 1)]),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    data=st.data(),
)
def test_real_schedules_lose_nothing(shape: tuple[int, int], sizes: list[int], data: st.DataObject) -> None:
    topology = Topology(*shape)
    rank = data.draw(st.integers(0, topology.ranks - 1))
    layout = GroupLayout(tuple(ParamShape.of((n,), 4) for n in sizes), topology.ranks)
    gather = all_gather(layout, topology, rank, [Item.RAW4] * len(sizes))
    reduction = reduce_scatter(layout, topology, rank, grad=Item.F32, output=Item.F32, chunk_bytes=512)
    for schedule in (gather, reduction):
        made = cut(schedule, topology, len(sizes), Table)
        away = [r for r in range(topology.ranks) if r not in topology.node_ranks(rank)]
        for name, ops in schedule.streams.items():
            native: list[Op] = []
            sends: list[tuple[int, Counter, int]] = []
            for step in made.steps[name]:
                if isinstance(step, Send):
                    sends.append((step.to, made.encoded.counters[step.counter], step.nbytes))
                else:
                    first, count = made.encoded.program.streams[step]
                    native += made.encoded.operations[first : first + count]
            kept = [o for o in ops if not _remote(o, away)]
            assert [o for o in native if not (isinstance(o, Await) and o.counter == signals.RAILED)] == kept
            assert sends == [
                (o.dst.at, o.signal, o.nbytes) if isinstance(o, Put) else (o.to, o.counter, 0)  # type: ignore[union-attr]
                for o in ops
                if _remote(o, away)
            ]


def _remote(op: Op, away: list[int]) -> bool:
    return (isinstance(op, Put) and op.dst.at in away) or (isinstance(op, Notify) and op.to in away)


# --- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.NOTIFY, 3, 2**32 - 1, 2**32 - 1),
        Message(Kind.PUT, 0, 1, 2, 1, 90, 10),
        Message(Kind.LONG_PUT, 4, 1, 2, 0, 0, 2**33),
        Message(Kind.ABORT, 1, 7, nbytes=5),
        Message(Kind.LEAVE),
    ],
)
def test_a_message_says_what_was_said(message: Message) -> None:
    text = bytes(range(message.nbytes)) if message.kind in (Kind.PUT, Kind.ABORT) else b""
    sent = message.pack(text)
    buffer = bytearray(MESSAGE_BYTES)
    buffer[: len(sent)] = sent
    assert parse(buffer, [2**33, 100], 5) == message
    if text:
        assert payload(buffer, message) == text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(Kind.NOTIFY, 5), "counter 5; there are 5"),
        (Message(Kind.PUT, 0, 1, 1, 2, 0, 1), "region 2"),
        (Message(Kind.PUT, 0, 1, 1, 1, 91, 10), "10 bytes to byte 91"),
        (Message(Kind.LONG_PUT, 0, 1, 1, 1, 2**64 - 8, 10), "10 bytes to byte"),
        (Message(Kind.PUT, 0, 1, 1, 0, 0, INLINE_BYTES + 1), f"at most {INLINE_BYTES} fit"),
        (Message(Kind.ABORT, 0, 1, nbytes=INLINE_BYTES + 1), f"at most {INLINE_BYTES} fit"),
    ],
)
def test_a_message_that_would_leave_its_bounds_is_refused(message: Message, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(message.pack().ljust(MESSAGE_BYTES), [2**33, 100], 5)


@pytest.mark.parametrize("at", [0, 4])
def test_what_is_no_message_is_refused(at: int) -> None:
    buffer = Message(Kind.NOTIFY).pack().ljust(MESSAGE_BYTES)
    buffer[at] ^= 0x55
    with pytest.raises(ValueError, match="no message of this version"):
        parse(buffer, [], 1)


# --- hosts -----------------------------------------------------------------------------------------------------


def identities(hosts: str, **other: Any) -> list[dict[str, Any]]:
    """One letter for each rank's host."""
    facts = {"pid_namespace": 1, "net_namespace": 2, "uid": 3, **other}
    return [{"boot_id": f"boot {h}", "hostname": h, "pid": i, **facts} for i, h in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "topology"), [("aaaa", (1, 4)), ("aabb", (2, 2)), ("abcd", (4, 1)), ("bbaacc", (3, 2))]
)
def test_the_topology_is_what_the_hosts_form(hosts: str, topology: tuple[int, int]) -> None:
    assert found_topology(identities(hosts)) == Topology(*topology)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [("aab", "host b has 1 of the ranks, host a has 2"), ("abab", r"host a has ranks \[0, 2\]")],
)
def test_hosts_that_form_no_topology_are_told_why(hosts: str, words: str) -> None:
    with pytest.raises(TideArenaError, match=words) as caught:
        found_topology(identities(hosts))
    assert caught.value.code == "TIDE-F027"


def test_a_host_is_what_memory_can_be_shared_on() -> None:
    for fact in ("net_namespace", "pid_namespace", "uid"):
        two = identities("aa")
        two[1][fact] = "another"
        assert hosts_of(two) == [[0], [1]]
    nameless = [{**i, "boot_id": None} for i in identities("ab")]
    assert hosts_of(nameless) == [[0], [1]]


@pytest.mark.parametrize(
    ("hosts", "stated", "rail", "expected"),
    [
        ("aaaa", None, "auto", (1, 4, "none", "direct", "all ranks are on one host")),
        ("aaaa", None, "p2p", (1, 4, "none", "direct", "all ranks are on one host")),
        ("aaaa", (2, 2), "auto", (2, 2, "local", "two-level", "topology as stated, all ranks share memory")),
        ("aaaa", (2, 2), "local", (2, 2, "local", "two-level", "topology as stated, all ranks share memory")),
        ("aaaa", (4, 1), "p2p", (4, 1, "p2p", "lane", "topology as stated, messages are asked for")),
        ("aabb", None, "auto", (2, 2, "p2p", "two-level", "2 hosts found")),
        ("aabb", (4, 1), "auto", (4, 1, "p2p", "lane", "topology as stated")),
        ("abc", None, "auto", (3, 1, "p2p", "lane", "3 hosts found")),
        ("aaaa", (1, 4), "nccl_rma", (1, 4, "none", "direct", "topology as stated")),
    ],
)
def test_rails_are_used_where_memory_ends_or_when_asked_for(hosts: str, stated: Any, rail: str, expected: Any) -> None:
    found = place(identities(hosts), Topology(*stated) if stated else None, rail)
    nodes, ranks, connected, schedule, why = expected
    assert found == Placement(Topology(nodes, ranks), connected, why)
    assert found.schedule == schedule


@pytest.mark.parametrize(
    ("hosts", "stated", "rail", "code"),
    [
        ("aabb", None, "local", "TIDE-F020"),
        ("aabb", (1, 4), "auto", "TIDE-F020"),
        ("aaab", (2, 2), "auto", "TIDE-F020"),
        ("abb", None, "auto", "TIDE-F027"),
        ("aabb", None, "nccl_rma", "TIDE-F028"),
    ],
)
def test_what_cannot_be_placed_has_a_code(hosts: str, stated: Any, rail: str, code: str) -> None:
    with pytest.raises(TideArenaError) as caught:
        place(identities(hosts), Topology(*stated) if stated else None, rail)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("hosts", "stated", "rail", "expected"),
    [
        ("aaaa", None, "p2p", (1, 4, "none", "GPU ranks of a group are one node")),
        ("aaaa", None, "nccl_rma", (1, 4, "none", "GPU ranks of a group are one node")),
        ("aabb", (1, 4), "auto", (1, 4, "none", "GPU ranks of a group are one node")),  # found out when they share
        ("aaaa", (2, 2), "auto", (2, 2, "local", "topology as stated, all ranks map each other's memory")),
        ("aaaa", (4, 1), "local", (4, 1, "local", "topology as stated, all ranks map each other's memory")),
        ("aaaa", (2, 2), "nccl_rma", (2, 2, "nccl_rma", "topology as stated, puts through NCCL are asked for")),
        ("aabb", None, "auto", (2, 2, "nccl_rma", "2 hosts found")),
        ("aabb", (4, 1), "auto", (4, 1, "nccl_rma", "topology as stated")),
        ("abcdefgh", None, "auto", (8, 1, "nccl_rma", "8 hosts found")),
        ("aaaa", (2, 2), "p2p", (2, 2, "p2p", "topology as stated, messages are asked for")),
        ("aabb", None, "p2p", (2, 2, "p2p", "2 hosts found, messages are asked for")),
        ("aabb", None, "local", "TIDE-F023"),
        ("aabb", (2, 2), "local", "TIDE-F023"),
        ("aaab", (2, 2), "auto", "TIDE-F020"),
        ("aab", None, "auto", "TIDE-F027"),
    ],
)
def test_gpu_nodes_are_connected_by_memory_within_a_host_and_by_a_rail_between_them(
    hosts: str, stated: Any, rail: str, expected: Any
) -> None:
    where = identities(hosts), Topology(*stated) if stated else None, rail
    if isinstance(expected, tuple):
        nodes, ranks, connected, why = expected
        sharing = ranks if connected in ("nccl_rma", "p2p") and len(set(hosts)) > 1 else 0
        found = place_devices(*where)
        assert found == Placement(Topology(nodes, ranks), connected, why, lanes=1 in (nodes, ranks), host_ranks=sharing)
        assert found.schedule == ("lane" if ranks == 1 else "two-level" if nodes > 1 else "direct")
        return
    with pytest.raises(TideArenaError) as caught:
        place_devices(*where)
    assert caught.value.code == expected


@pytest.mark.parametrize("hosts", ["aabb", "aaaa"])
def test_a_rank_whose_nccl_has_no_rails_keeps_all_from_them(hosts: str) -> None:
    facts = identities(hosts, nccl=None)
    facts[2]["nccl"] = "NCCL 2.28.9 is loaded"
    with pytest.raises(TideArenaError, match=r", and rank 2: NCCL 2\.28\.9 is loaded$") as caught:
        place_devices(facts, Topology(2, 2), "nccl_rma")
    assert caught.value.code == "TIDE-F029"


def test_where_nccl_has_no_rails_messages_connect_nodes_and_say_why() -> None:
    facts = identities("aabb", nccl=None)
    facts[2]["nccl"] = "NCCL 2.28.9 is loaded"
    found = place_devices(facts, None, "auto")
    assert (found.rail, found.host_ranks) == ("p2p", 2)
    assert found.instead_of_nccl == "rank 2: NCCL 2.28.9 is loaded"
    assert found.why.startswith("2 hosts found, messages since NCCL does not connect them (TIDE-F032): rank 2: NCCL ")
    assert place_devices(facts, None, "p2p").instead_of_nccl == ""
    assert place_devices(identities("aaaa", nccl="none"), Topology(2, 2), "auto").rail == "local"


def test_gpu_lanes_of_more_nodes_than_one_sum_takes_are_two_level() -> None:
    nine = Topology(9, 1)
    assert place_devices(identities("abcdefghi"), nine, "auto").schedule == "two-level"
    layout = GroupLayout((ParamShape.of((18, 4), 2),), 9)
    assert (Space.STAGING, 0) not in needed_device_memory([layout], nine, 0, 256)
    # Partials in fp32 there: two rows of a block each for eight nodes. A lane of eight holds as much of gradients.
    assert needed_device_memory([layout], nine, 0, 256)[Space.INBOX, 1] > 0
    eight = GroupLayout((ParamShape.of((16, 4), 2),), 8)
    assert (Space.INBOX, 1) not in needed_device_memory([eight], Topology(8, 1), 0, 256)


# --- who brings the notifications of others ----------------------------------------------------------------------


def test_what_a_rail_brings_counts_for_the_rank_that_sent_it() -> None:
    arena = Arena.create(3, 0, 2)
    program = encode([[4, 0, 2, 1]], n_counters=1, advance=[(0, 2, 1)])
    call = program.begin(arena, [], [1], 7, 1.0)
    assert call.run(0, 0.0).status == "timeout"
    arena.deliver(1, 1, 1)
    arena.deliver(0, 2, 1)
    assert call.run(0, 0.0).status == "timeout", "neither another writer's cell nor another counter's"
    arena.deliver(1, 2, 1, call.seq, 7)
    assert call.run(0, 0.0).status == "ok"


def test_another_call_of_a_remote_rank_is_noticed() -> None:
    arena = Arena.create(2, 0, 1)
    program = encode([[4, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    call = program.begin(arena, [], [0], 7, 1.0)
    arena.deliver(0, 1, 1, call.seq, 8)
    outcome = call.run(0, 5.0)
    assert (outcome.status, outcome.writer, outcome.peer_tag) == ("mismatch", 1, 8)
    # A late word of an old call does not hide what a newer one said in the same place.
    arena.deliver(0, 1, 0, call.seq + 64, 9)
    arena.deliver(0, 1, 0, call.seq, 8)
    assert call.run(0, 5.0).status == "ok"


def test_a_lost_rank_ends_waits_unless_they_are_fulfilled() -> None:
    arena = Arena.create(2, 0, 2)
    program = encode([[4, 0, 1, 1]], n_counters=1, advance=[(0, 1, 1)])
    first, second = (program.begin(arena, [], [c], 7, 1.0) for c in (0, 1))
    arena.deliver(0, 1, 1)
    arena.lose(1)
    assert first.run(0, 30.0).status == "ok"
    assert second.run(0, 30.0).status == "peer_dead"


def test_an_abort_can_be_passed_on_in_the_name_of_who_stopped() -> None:
    arena = Arena.create(3, 0, 1)
    assert arena.abort(1, b"why", 2)
    assert not arena.abort(1, b"later")
    assert arena.aborted() == (2, 1, b"why")


@pytest.mark.parametrize(
    "bad",
    [
        lambda a: a.deliver(1, 0),
        lambda a: a.deliver(0, 2),
        lambda a: a.deliver(0, 0, -1),
        lambda a: a.deliver(0, 0, 1, 2**32),
        lambda a: a.lose(2),
        lambda a: a.abort(1, b"", 2),
    ],
)
def test_bringers_stay_within_the_arena(bad: Any) -> None:
    with pytest.raises(ValueError, match="allowed"):
        bad(Arena.create(2, 0, 1))
