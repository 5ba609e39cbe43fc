"""Nothing breaks silently: every fault of every kind is found, and no wait, signal or zero is there for nothing."""

from dataclasses import replace

import pytest
from broken_callers import (
    release_gradients_first,
    skip_call,
    swap_calls,
    use_before_it_is_complete,
    vacate_first,
    without_join,
)

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.collectives.schedule import Await, Copy, Item, Notify, Put, Schedule, Space, Sum
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.faults import FAULTS, broken, found, places, redundant, schedules
from tide_strategies.verify.story import Story
from tide_strategies.verify.violation import Violation
from tide_strategies.verify.workloads import Workload, variants

BY_NAME = {fault.name: fault for fault in FAULTS}
#: Faults after which every schedule is wrong, wherever they hit.
ALWAYS = [
    "dropped wait",
    "dropped signal",
    "doubled signal",
    "wait for too little",
    "dropped transfer",
    "doubled transfer",
    "dropped zeroing",
    "misplaced data",
    "lost contribution",
    "contribution added twice",
]
#: Faults that may happen to change nothing (a signal that was first anyway), but not everywhere.
SOMEWHERE = ["early signal", "wait that comes late", "wait for too much"]


def groups(ranks: int, rows: int = 2) -> tuple[GroupLayout, ...]:
    """Groups in which no sub-slice of any pass is empty."""
    one = GroupLayout((ParamShape(rows * ranks, 4, 2),), ranks)
    return one, GroupLayout((ParamShape(2 * rows * ranks, 3, 2), ParamShape(ranks, 4, 2)), ranks)


def alike(work: Workload, interleave: bool, multicast: bool) -> list[Workload]:
    """Workloads that run the same schedules, the most demanding first."""
    chosen = [w for w in variants(work) if (w.interleave, w.multicast) == (interleave, multicast)][::-1]
    return chosen + [replace(w, mixed=True) for w in chosen if w.kind == "reduce-scatter"]


GATHER = Workload("all-gather", Topology(3, 2), groups(6), head_bytes=20)
REDUCE = Workload("reduce-scatter", Topology(3, 2), groups(6), plan=BasePlan(3, 2, 2, 1), chunk_bytes=96)


LANES = [
    replace(GATHER, topology=Topology(6, 1), layouts=groups(6), lane=True, reuse=True),
    replace(REDUCE, topology=Topology(10, 1), layouts=groups(10), plan=None, lane=True),
]

ADDING = {"lost contribution", "contribution added twice"}
CASES = [(n, w) for n in ALWAYS for w in (REDUCE, GATHER, *LANES) if w.kind == "reduce-scatter" or n not in ADDING]
# Only a landing by multicast reads zeros, which a lane has not; of lanes, each signal and wait is dropped below.
CASES = [(n, w) for n, w in CASES if w is REDUCE or n != "dropped zeroing"]
CASES = [(n, w) for n, w in CASES if not w.lane or n not in ("dropped wait", "dropped signal")]


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize(("name", "work"), CASES, ids=[f"{n}, {w.kind} {w.topology}" for n, w in CASES])
def test_every_fault_is_found_wherever_it_hits(request, name, work, interleave) -> None:
    """Everywhere; without ``--all`` at every other place by one thread, and at those between them side by side."""
    fault, multicast = BY_NAME[name], name == "dropped zeroing"
    chosen = alike(work, interleave, multicast)
    schedule = schedules(chosen[0], work.kind)[0]
    hit = list(places(schedule, fault.hits))
    assert hit
    if not request.config.getoption("--all"):
        hit = hit[0 if interleave else 1 :: 2]
    for place in hit:
        change = broken(fault, work.kind, 0, place, schedule.streams[place[0]][place[1]])
        assert found(chosen, change, count=True) is not None, (name, place)


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize("work", [GATHER, REDUCE], ids=["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("name", SOMEWHERE)
def test_faults_of_timing_are_found(name, work, interleave) -> None:
    chosen = alike(work, interleave, False)
    schedule = schedules(chosen[0], work.kind)[0]
    kinds: dict[str, bool] = {}
    for place in places(schedule, BY_NAME[name].hits):
        op = schedule.streams[place[0]][place[1]]
        change = broken(BY_NAME[name], work.kind, 0, place, op)
        caught = found(chosen, change, count=True) is not None
        kinds[op.counter.name] = kinds.get(op.counter.name, False) or caught
    missed = {k for k, caught in kinds.items() if not caught}
    # A signal that is first in its stream cannot come earlier, a wait that is last not later.
    assert missed <= {"early signal": {"vacated"}, "wait that comes late": {"landed"}, "wait for too much": set()}[name]


REMOVED = [
    replace(GATHER, topology=Topology(1, 3), layouts=groups(3)),
    replace(REDUCE, topology=Topology(1, 3), layouts=groups(3), plan=None, chunk_bytes=16),
    replace(GATHER, topology=Topology(2, 2), layouts=groups(4)),
    replace(GATHER, topology=Topology(5, 2), layouts=groups(10), adopted=True),
    replace(GATHER, topology=Topology(6, 1), layouts=groups(6)),
    replace(REDUCE, topology=Topology(2, 2), layouts=groups(4, 6), plan=BasePlan(2, 2, 2, 2, passes=3)),
    replace(REDUCE, topology=Topology(3, 2), layouts=groups(6), plan=BasePlan(3, 2, 2, 2)),
    replace(REDUCE, topology=Topology(5, 2), layouts=groups(10), plan=BasePlan(5, 2, 2, 1, slot_reuse=True)),
    replace(REDUCE, topology=Topology(7, 1), layouts=groups(7), plan=BasePlan(7, 1, 1, 1)),
    replace(REDUCE, topology=Topology(5, 1), layouts=groups(5), plan=BasePlan(5, 1, 1, 2)),
]


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize("work", LANES, ids=lambda w: w.kind)
def test_no_wait_or_signal_of_a_lane_is_redundant(work, interleave) -> None:
    assert redundant(alike(work, interleave, False), work.kind, [0]) == []


REUSED = [
    replace(GATHER, topology=Topology(1, 3), layouts=groups(3), reuse=True),
    replace(GATHER, topology=Topology(3, 2), layouts=groups(6), reuse=True),
    replace(GATHER, topology=Topology(3, 1), layouts=groups(3), reuse=True, lane=True),
]


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize("work", REUSED, ids=lambda w: str(w.topology))
def test_who_uses_a_landing_again_has_to_say_when_it_is_vacated(work, interleave) -> None:
    chosen = alike(work, interleave, False)
    for rank in range(work.topology.ranks):
        for name in ("dropped signal", "doubled signal"):
            schedule = schedules(chosen[0], "reuse")[rank]
            ((stream, at),) = places(schedule, BY_NAME[name].hits)
            change = broken(BY_NAME[name], "reuse", rank, (stream, at), schedule.streams[stream][at])
            assert found(chosen, change, count=False) is not None, (rank, name)


@pytest.mark.parametrize(
    ("interleave", "multicast"),
    [
        pytest.param(True, False, marks=pytest.mark.exhaustive, id="one thread-peer reads"),
        pytest.param(True, True, id="one thread-multicast"),
        pytest.param(False, False, id="side by side-peer reads"),
        pytest.param(False, True, marks=pytest.mark.exhaustive, id="side by side-multicast"),
    ],
)
@pytest.mark.parametrize("work", REMOVED, ids=lambda w: f"{w.kind} {w.topology} {w.plan and w.plan.passes}")
def test_no_wait_signal_or_zero_is_redundant(work, interleave, multicast) -> None:
    assert redundant(alike(work, interleave, multicast), work.kind, [0]) == []


def padded(ranks: int) -> tuple[GroupLayout, ...]:
    """Groups whose last ranks have nothing, and whose sub-slices are padding in part."""
    second = GroupLayout((ParamShape(ranks + 1, 1, 2), ParamShape(0, 4, 2)), ranks)
    return GroupLayout((ParamShape(2, 3, 2),), ranks), second


#: Each with how many waits of its first and last rank order nothing with such groups: by one thread, and side by side.
PADDED = [
    (replace(GATHER, layouts=padded(6)), 2, 6),
    (replace(REDUCE, layouts=padded(6)), 6, 14),
    (replace(REDUCE, topology=Topology(2, 2), layouts=padded(4), plan=BasePlan(2, 2, 2, 2)), 4, 5),
]


@pytest.mark.parametrize("interleave", [True, False], ids=["one thread", "side by side"])
@pytest.mark.parametrize(
    ("work", "one", "side"), PADDED, ids=lambda w: f"{w.kind} {w.topology}" if hasattr(w, "kind") else str(w)
)
def test_only_waits_can_be_redundant_and_only_where_they_guard_padding(work, one, side, interleave) -> None:
    """Schedules have one shape, whatever the layout: the same wait is needed as soon as no sub-slice is empty."""
    last, full = work.topology.ranks - 1, replace(work, layouts=groups(work.topology.ranks))
    idle = redundant(alike(work, interleave, False), work.kind, [0, last])
    assert len(idle) == (one if interleave else side)
    needed = schedules(replace(full, interleave=interleave), work.kind)
    for rank, (stream, _), op in idle:
        assert isinstance(op, Await), op  # never a signal or a zero
        assert op in needed[rank].streams[stream], (rank, stream, op)
    assert redundant(alike(full, interleave, False), work.kind, [last]) == []  # of rank 0 this is shown above


# Faults of the caller and of the order of calls.


def story_of(edit=None, interleave: bool = False, calls: int = 4) -> Story:
    """Reduce-scatters of one group, whose caller's steps on rank 0 a test may edit."""
    story = Story(Topology(3, 2), interleave=interleave)
    reduced = []
    for _ in range(calls):
        reduced.append(story.reduce(groups(6)[0], chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)))
        if interleave:  # at most one network phase may wait
            story.finish(reduced.pop())
    for one in reduced:
        story.finish(one)
    if edit:
        edit(story._threads[0, "caller"])
    return story


@pytest.mark.parametrize("stream", ["push", "sum"])
def test_gradients_freed_before_they_are_read_are_found(stream) -> None:
    story_of().run()
    with pytest.raises(Violation, match="race"):
        story_of(without_join(stream)).run()


def test_an_output_used_before_it_is_complete_is_found() -> None:
    with pytest.raises(Violation, match=r"race|result"):
        story_of(without_join("network")).run()


def gathers(edit=None, interleave: bool = False, slots: int = 2) -> Story:
    story = Story(Topology(3, 2), interleave=interleave)
    layout = groups(6)[0]
    for i in range(4):
        one = story.gather(layout, [Item.RAW2], i % slots)
        story.use(one)
        story.vacate(one)
    if edit:
        edit(story._threads[0, "caller"])
    return story


def test_parameters_used_before_they_are_gathered_are_found() -> None:
    gathers().run()
    for stream in ("copy", "completion"):
        with pytest.raises(Violation, match=r"race|unwritten|result"):
            gathers(without_join(stream)).run()


def test_a_landing_vacated_while_in_use_is_found() -> None:
    for interleave in (True, False):
        with pytest.raises(Violation, match="race"):
            gathers(vacate_first, interleave, slots=1).run()


def test_one_thread_that_releases_or_uses_too_early_is_found() -> None:
    for breaks in (release_gradients_first, use_before_it_is_complete):
        with pytest.raises(Violation, match=r"race|unwritten|result"):
            story_of(breaks, interleave=True).run()
    with pytest.raises(Violation, match=r"race|unwritten|result"):
        gathers(use_before_it_is_complete, interleave=True).run()


def test_calls_in_another_order_on_one_rank_are_found() -> None:
    story_of(interleave=True).run()
    with pytest.raises(Violation):
        story_of(swap_calls, interleave=True).run()


def test_a_skipped_call_is_found() -> None:
    with pytest.raises(Violation, match=r"deadlock|result"):
        story_of(skip_call, interleave=True).run()


@pytest.mark.parametrize("bank", [0, 1])
def test_one_bank_for_all_calls_is_found(bank) -> None:
    def same(kind: str, number: int, schedule: Schedule) -> Schedule:
        def moved(op):
            if isinstance(op, (Put, Copy)):
                return replace(op, src=at(op.src), dst=at(op.dst))
            return replace(op, dst=at(op.dst)) if isinstance(op, Sum) else op

        def at(ref):
            return replace(ref, index=bank) if ref.space.value in ("outbox", "spare") else ref

        memory = {(s, bank if s.value in ("outbox", "spare") else i): n for (s, i), n in schedule.memory.items()}
        streams = {name: tuple(map(moved, ops)) for name, ops in schedule.streams.items()}
        return replace(schedule, streams=streams, memory=memory)

    story = Story(Topology(3, 2), interleave=False, change=same)
    for one in [story.reduce(groups(6)[0], chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)) for _ in range(4)]:
        story.finish(one)
    with pytest.raises(Violation, match="race"):
        story.run()


def test_memory_beyond_what_a_schedule_asks_for_is_found() -> None:
    def less(kind: str, number: int, schedule: Schedule) -> Schedule:
        return replace(schedule, memory={key: n // 2 for key, n in schedule.memory.items()})

    story = Story(Topology(3, 2), change=less)
    story.finish(story.reduce(groups(6)[0], chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)))
    with pytest.raises(Violation, match="bounds"):
        story.run()


@pytest.mark.parametrize("space", [Space.INBOX, Space.OUTBOX, Space.SPARE])
def test_the_end_of_an_access_counts_though_a_larger_call_has_left_room(space: Space) -> None:
    def less(kind: str, number: int, schedule: Schedule) -> Schedule:
        if number < 2:  # these asked for more than the last
            return schedule
        return replace(schedule, memory={k: n - 8 * (k[0] is space) for k, n in schedule.memory.items()})

    story, (layout, larger) = Story(Topology(3, 2), change=less), groups(6)
    for each in (larger, larger, layout):
        story.finish(story.reduce(each, chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)))
    with pytest.raises(Violation, match="bounds"):
        story.run()


def test_two_streams_that_notify_one_counter_in_any_order_are_found() -> None:
    def twice(kind: str, number: int, schedule: Schedule) -> Schedule:
        streams = dict(schedule.streams)
        signal = next(op for op in streams["sum"] if isinstance(op, Notify))
        streams["push"] = (*streams["push"], signal)
        return replace(schedule, streams=streams)

    story = Story(Topology(3, 2), interleave=False, change=twice)
    story.finish(story.reduce(groups(6)[0], chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)))
    with pytest.raises(Violation, match="signal"):
        story.run()


def test_a_wait_for_more_than_a_call_brings_is_found() -> None:
    def more(kind: str, number: int, schedule: Schedule) -> Schedule:
        streams = {
            name: tuple(replace(op, count=99) if isinstance(op, Await) else op for op in ops)
            for name, ops in schedule.streams.items()
        }
        return replace(schedule, streams=streams)

    story = Story(Topology(3, 2), change=more)
    story.finish(story.reduce(groups(6)[0], chunk_bytes=96, plan=BasePlan(3, 2, 2, 1)))
    with pytest.raises(Violation, match="signal"):
        story.run()
