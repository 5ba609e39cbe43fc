"""Landings keep their address for life, and never share what is behind it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_strategies import _native
from tide_strategies.runtime.slots import Landing, Slot, SlotRing


class FakeWindow:
    """Remembers what it shows."""

    def __init__(self) -> None:
        self.shows: Any = None
        self.maps = 0

    address = 0x1000

    def map(self, *backing: Any) -> None:
        self.shows, self.maps = backing, self.maps + 1

    def poison(self) -> None:
        self.shows = "poison"

    def tensor(self, byte_offset: int, numel: int, dtype: str) -> Any:
        raise AssertionError("slots are handed out without making tensors")


def ring(slots: int, poison: bool = False) -> SlotRing:
    numbers = itertools.count()
    return SlotRing(lambda: Slot(n := next(numbers), (f"memory {n}",)), slots, poison)


def landings(count: int) -> list[Landing]:
    return [Landing(FakeWindow()) for _ in range(count)]


def test_two_slots_alternate_in_the_order_of_execution() -> None:
    """The forward of four blocks, whatever order they were made in: each takes the slot vacated longest ago."""
    slots, blocks = ring(2), landings(4)
    for _ in range(3):  # and again in the next steps, where every block finds its former slot free
        taken = []
        for block in (blocks[2], blocks[0], blocks[3], blocks[1]):
            taken.append(slots.acquire(block).index)
            slots.release(block)
        assert taken == [0, 1, 0, 1]
    assert len(slots) == 2
    assert slots.has_room
    assert [b.window.maps for b in blocks] == [1, 1, 1, 1], "nothing is mapped anew without need"


def test_the_backward_holds_two_at_once_and_needs_no_third() -> None:
    """FSDP2's order: block i - 1 is gathered before block i is resharded."""
    slots, blocks = ring(2), landings(4)
    for block in blocks:
        slots.acquire(block)
        slots.release(block)
    slots.acquire(blocks[3])
    for i in (3, 2, 1):
        slots.acquire(blocks[i - 1])
        slots.release(blocks[i])
    slots.release(blocks[0])
    assert len(slots) == 2


def test_more_landings_at_once_than_slots_make_the_ring_grow() -> None:
    slots, blocks = ring(2), landings(4)
    taken = [slots.acquire(b).index for b in blocks]
    assert taken == [0, 1, 2, 3]
    assert len(slots) == 4
    assert [b.window.shows for b in blocks] == [(f"memory {i}",) for i in range(4)]
    for b in blocks:
        slots.release(b)
    assert [slots.acquire(b).index for b in blocks] == taken
    assert len(slots) == 4


def test_a_landing_whose_slot_is_taken_moves_to_another() -> None:
    slots, (a, b, c) = ring(2), landings(3)
    slots.acquire(a)
    slots.release(a)
    slots.acquire(b)
    slots.release(b)
    assert slots.acquire(c).index == 0, "a's, vacated longest ago"
    assert slots.acquire(a).index == 1
    assert a.window.shows == ("memory 1",)
    assert a.slot is not None
    assert a.last_slot is a.slot


def test_values_are_intact_until_another_landing_has_been_in_the_slot() -> None:
    slots, (a, b) = ring(1), landings(2)
    assert not a.intact, "never gathered"
    slots.acquire(a)
    assert not a.intact, "in use, not vacated"
    slots.release(a)
    assert a.intact
    slots.acquire(b)
    assert not a.intact
    slots.release(b)
    assert not a.intact
    assert b.intact
    slots.acquire(a)
    slots.release(a)
    assert a.intact
    assert not b.intact


def test_poison_shows_after_release_and_goes_with_the_next_use() -> None:
    slots, (a,) = ring(2, poison=True), landings(1)
    slots.acquire(a)
    assert a.window.shows == ("memory 0",)
    slots.release(a)
    assert a.window.shows == "poison"
    assert a.intact, "the slot itself is not poisoned"
    slots.acquire(a)
    assert a.window.shows == ("memory 0",)


def test_a_landing_is_vacated_once() -> None:
    slots, (a,) = ring(1), landings(1)
    with pytest.raises(AssertionError):
        slots.release(a)


actions = st.lists(st.integers(0, 5), max_size=60)


@settings(max_examples=200, deadline=None)
@given(actions, st.integers(1, 4), st.booleans())
def test_any_order_is_free_of_conflicts_and_alike_on_all_ranks(order: list[int], count: int, poison: bool) -> None:
    """Each number acquires its landing, or releases it if it is in use. Two ranks follow the same order."""
    ranks = [(ring(count, poison), landings(6), []) for _ in range(2)]
    most = 0
    for slots, blocks, choices in ranks:
        values: dict[int, Landing] = {}  # whose values each slot's memory really holds
        for i in order:
            block = blocks[i]
            if block.slot is not None:
                slots.release(block)
            else:
                was_intact = block.intact
                before = block.last_slot
                slot = slots.acquire(block)
                choices.append(slot.index)
                if was_intact:
                    assert slot is before, "values that are still there are used again"
                    assert values[slot.index] is block
                values[slot.index] = block
            used = [b.slot for b in blocks if b.slot is not None]
            assert len({s.index for s in used}) == len(used)
            assert all(b.slot.occupant is b and b.window.shows == b.slot.backing for b in blocks if b.slot is not None)
            assert all(values[b.last_slot.index] is b for b in blocks if b.intact and b.last_slot is not None)
            most = max(most, len(used))
        assert len(slots) == max(count, most)
    assert ranks[0][2] == ranks[1][2]


def test_an_address_lasts_while_what_is_behind_it_changes() -> None:
    """With real shared memory: tensors made once show whichever slot backs the landing."""
    torch = pytest.importorskip("torch")
    arena = _native.Arena.create(1, 0, 1)
    page = 4096
    start = -(-arena.control_bytes // page) * page

    numbers = itertools.count()

    def grow() -> Slot:
        n = next(numbers)
        arena.reserve(start + n * page, page)
        return Slot(n, (arena, start + n * page))

    slots = SlotRing(grow, 1)
    memory = [_native.Mapping(arena, grow().backing[1], page) for _ in range(2)]
    a, b = Landing(_native.Window(64)), Landing(_native.Window(64))
    slots.acquire(a)
    tensor = torch.from_dlpack(a.window.tensor(0, 16, "float32"))
    addresses = (a.window.address, tensor.data_ptr())
    tensor.fill_(1.0)
    slots.release(a)
    slots.acquire(b)
    other = torch.from_dlpack(b.window.tensor(0, 16, "float32"))
    assert other.tolist() == [1.0] * 16, "the same slot, at another address"
    other.fill_(2.0)
    slots.acquire(a)  # the ring grows, and a moves
    assert len(slots) == 2
    assert a.slot is not b.slot
    tensor.fill_(3.0)
    assert other.tolist() == [2.0] * 16
    slots.release(a)
    slots.release(b)
    slots.acquire(b)
    assert (a.window.address, tensor.data_ptr()) == addresses
    assert other.tolist() == [2.0] * 16
    del memory
