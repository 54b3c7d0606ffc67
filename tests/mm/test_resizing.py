"""The pool and the swap area get smaller and larger while they are in use."""

import numpy as np
import pytest
from memory_house import House

from mm import Watermarks


def test_frames_beyond_the_end_are_neither_free_nor_held() -> None:
    house = House(frames=20)
    memory = house.memory
    memory.resize(8, 0)
    assert (memory.free_frames, memory.information().total_frames) == (8, 8)
    assert memory.max_tokens_of(None) == 8 * 4
    frames = memory.frames.allocate(np.zeros(8, np.int32), references=0)
    assert sorted(frames.tolist()) == list(range(8))
    memory.frames.free(frames)
    memory.resize(20, 0)
    assert memory.free_frames == 20
    memory.check_invariants()


def test_idle_pages_at_the_end_go_and_those_that_are_mapped_stand_in_the_way() -> None:
    house = House(frames=12)
    memory = house.memory
    guest = house.start(list(range(30)))
    with pytest.raises(ValueError, match="hold what is to go"):
        memory.resize(4, 0)
    found = memory.beyond(4, 0)
    assert (found.rows.tolist(), found.pins, found.is_copying) == ([guest.row], [], False)
    guest.space.release()
    assert memory.lru.idle_pages > 4
    memory.resize(4, 0)
    assert memory.lru.idle_pages + memory.free_frames == 4
    memory.check_invariants()


def test_a_pin_at_the_end_is_named() -> None:
    house = House(frames=32)
    memory = house.memory
    house.start(list(range(9))).space.release()
    pin = memory.pin(memory.chain(np.arange(8, dtype=np.int32)), "me")
    assert memory.beyond(1, 0).pins == [pin.number]
    memory.unpin(pin.number)
    assert memory.beyond(1, 0).pins == []


def test_marks_and_shares_follow_the_size() -> None:
    memory = House(frames=400).memory
    before = memory.reclaimer.watermarks
    memory.resize(200, 0)
    after = memory.reclaimer.watermarks
    assert (after.low, after.high) == (before.low // 2, before.high // 2)
    assert memory.pins.limit == 50
    assert memory.ledger.limit(0) == 200


def test_marks_that_a_small_pool_rounds_away_are_back_when_it_has_grown() -> None:
    memory = House(frames=400).memory
    before = memory.reclaimer.watermarks
    for frames in (90, 7, 30, 400):
        memory.resize(frames, 0)
    assert memory.reclaimer.watermarks == before
    memory.resize(10, 0)
    memory.reclaimer.watermarks = Watermarks(1, 2, 3)
    memory.resize(100, 0)
    assert memory.reclaimer.watermarks == Watermarks(10, 20, 30)


@pytest.mark.parametrize(("frames", "slots"), [(0, 0), (33, 0), (32, 9), (32, -1)])
def test_what_was_not_reserved_cannot_be_had(frames: int, slots: int) -> None:
    with pytest.raises(ValueError, match="at most"):
        House(frames=32, slots=8).memory.resize(frames, slots)
