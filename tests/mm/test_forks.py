"""A fork of a beginning: it shares whole pages and what it must of the last one, and publishes from where it is."""

import numpy as np
import pytest
from memory_house import Guest, House

from mm import OvercommitMode

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


@pytest.mark.parametrize("length", range(14))
def test_a_fork_of_any_beginning_reads_it_and_writes_beside_it(length: int) -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    free = house.memory.free_frames
    child = house.fork(parent, length)
    assert house.memory.free_frames == free
    assert child.frames == parent.frames[: -(-length // P)]
    house.check(parent, child)
    house.step(child, tokens(6, 2))
    house.step(parent, tokens(6, 3))
    house.check(parent, child)


def test_only_a_page_that_both_go_on_writing_costs_the_parent_a_copy() -> None:
    for length, copies in ((12, 0), (13, 1), (6, 0)):
        house = House()
        parent = house.start(tokens(13, 1))
        house.fork(parent, length)
        house.step(parent, tokens(1, 2))
        assert house.memory.counters().cow_fault == copies


def test_a_fork_of_a_beginning_publishes_below_the_last_page_that_it_shares() -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    child = house.fork(parent, 9)
    house.step(child, tokens(7, 2))
    house.check(parent, child)
    assert house.lookup([*child.tokens, 1]).cached_tokens == 16
    assert house.lookup([*parent.tokens, 1]).cached_tokens == 13 - 13 % P
    assert house.memory.cache.collisions == 0


def test_a_fork_publishes_all_its_pages_anew_where_those_before_are_lost() -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    house.memory.residency.uncache(house.memory.cache.entry_of_frame[parent.frames[1]])
    child = house.fork(parent, 9)
    house.step(child, tokens(7, 2))
    house.check(parent, child)
    assert house.lookup([*child.tokens, 1]).cached_tokens == 16


def hints(house: House, guest: Guest) -> list[bool]:
    """By page, whether the device has it as shared."""
    return house.device.shared[guest.row, : len(guest.frames)].tolist()


def test_the_device_knows_of_both_that_their_pages_are_shared_and_of_a_copy_that_it_is_not() -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    assert hints(house, parent) == [False] * 4
    child = house.fork(parent, 13)
    assert hints(house, child) == [True] * 4
    house.step(child, tokens(4, 2))
    assert hints(house, child) == [True, True, True, False, False]
    house.step(parent, tokens(4, 3))
    assert hints(house, parent)[:3] == [True] * 3
    second = house.fork(parent, 17)
    house.step(second, tokens(1, 4))
    house.step(parent, tokens(1, 5))
    assert hints(house, parent)[:4] == [True] * 4, "of pages that came since the first fork, too"
    assert hints(house, second) == [True] * 4 + [False]


def test_a_parent_is_told_once_of_each_page() -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    house.fork(parent, 13)
    house.step(parent, tokens(1, 2))
    house.fork(parent, 12)
    assert not house.memory.tables.has_unsent
    parent.space.truncate(8)
    parent.tokens = parent.tokens[:8]
    house.step(parent, tokens(5, 3))
    house.fork(parent, 13)
    rows, pages = house.memory.tables.take_unsent()
    assert (rows.tolist(), pages.tolist()) == ([parent.row] * 3, [1, 2, 3])


def test_a_fork_longer_than_its_parent_is_refused() -> None:
    house = House()
    parent = house.start(tokens(5, 1))
    with pytest.raises(ValueError, match="cannot fork 6 of 5 positions"):
        parent.space.fork("child", 6)


def test_what_sharing_saves_is_counted_at_any_moment_and_over_time() -> None:
    house = House()
    parent = house.start(tokens(13, 1))
    children = [house.fork(parent, 13) for _ in range(3)]
    assert house.memory.information().saved_frames == 3 * 4
    before = house.memory.counters()
    for turn in range(5):
        house.memory.turn(float(turn), turn)
    after = house.memory.counters()
    assert after.saved_frame_turns - before.saved_frame_turns == 5 * 12
    assert after.mapped_frame_turns - before.mapped_frame_turns == 5 * 4
    for child in children:
        house.step(child, tokens(1, child.row))
    assert house.memory.information().saved_frames == 3 * 3
    parent.space.release()
    house.check(*children)
    for child in children:
        child.space.release()
    assert house.memory.information().saved_frames == 0


def test_a_promise_for_forks_is_made_once_and_passes_to_who_is_left() -> None:
    house = House(frames=20)
    house.memory.ledger.mode = OvercommitMode.STRICT
    space = house.memory.create("first", max_tokens=5 * P, extra_pages=8)
    space.grow(2)
    child, _ = house.memory.fork(space, "second", max_tokens=0)
    assert house.memory.information().committed_frames == 13
    house.memory.pass_promise(space, child)
    space.release()
    assert house.memory.information().committed_frames == 13
    assert house.memory.sequence_memory(child).committed == 13
    child.release()
    assert house.memory.information().committed_frames == 0
    assert house.memory.audit() == []


def test_a_promise_for_forks_is_never_more_than_there_is() -> None:
    house = House(frames=20)
    space = house.memory.create("first", max_tokens=5 * P, extra_pages=100)
    assert house.memory.sequence_memory(space).committed == 20
