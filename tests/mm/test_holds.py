"""Pages that are held for copies to and from elsewhere: not freed, not reused, and let go once."""

import random

import numpy as np
import pytest
from memory_house import House, values

from mm import OutOfFrames, OverTenantLimit, PageNotResident, TenantLimits, WouldRun
from mm.swapper import LONGEST_REST_S


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def test_held_frames_keep_their_content_after_the_end_of_their_row() -> None:
    house = House(frames=8)
    guest = house.start(tokens(13, 1))
    hold = house.memory.hold(guest.space, 11)
    assert hold.frames.tolist() == guest.frames[:3]
    guest.space.release()
    house.memory.check_invariants()
    assert house.memory.is_copying
    other = house.start(tokens(20, 2))
    assert not set(other.frames) & set(hold.frames.tolist())
    assert house.mover.content(hold.entries, 11) == values("", guest.tokens[:11])
    house.memory.let_go(hold)
    other.space.release()
    house.memory.check_invariants()
    assert house.memory.available_frames == 8


@pytest.mark.parametrize("ends", [False, True])
def test_a_fork_of_a_beginning_copies_a_held_page_before_it_writes(*, ends: bool) -> None:
    """Whoever wrote the rest of the page may be gone: then it is the fork's alone, but for the hold."""
    house = House(frames=8)
    guest = house.start(tokens(7, 1))
    child = house.fork(guest, 5)
    hold = house.memory.hold(guest.space, 7)
    if ends:
        guest.space.release()
    house.step(child, tokens(1, 2))
    assert house.mover.content(hold.entries, 7) == values("", guest.tokens)
    house.check(child)
    house.memory.let_go(hold)
    house.check(child)


def test_parent_and_fork_that_write_together_both_leave_a_held_page() -> None:
    house = House(frames=8)
    guest = house.start(tokens(7, 1))
    child = house.fork(guest, 5)
    hold = house.memory.hold(guest.space, 7)
    for rows in ([guest.row, child.row], [child.row, guest.row]):
        faults = house.memory.growth.needed(np.array(rows, np.int32), np.ones(2, np.int32))
        assert len(faults) == 2
    house.memory.let_go(hold)
    assert len(house.memory.growth.needed(np.array(rows, np.int32), np.ones(2, np.int32))) == 1


def test_a_cached_page_that_is_held_is_charged_to_whoever_maps_it() -> None:
    """It is not idle, as it cannot be reclaimed now; nor does anybody map it."""
    house = House(frames=16)
    house.memory.tenants.set_limits("b", TenantLimits(high=4, max=4))
    guest = house.start(tokens(9, 1))
    hold = house.memory.hold(guest.space, 8)
    guest.space.release()
    house.start(tokens(2, 2), tenant="b")
    prompt = tokens(9, 1)[:8] + tokens(5, 3)
    chain = house.memory.chain(np.array(prompt, np.int32), tenant="b")
    assert house.memory.would_run(chain, 13, "b").verdict is WouldRun.WAIT, "two charged, two more, beside one"
    with pytest.raises(OverTenantLimit):
        house.start(prompt, tenant="b")
    house.memory.let_go(hold)
    house.memory.check_invariants()


def test_a_hold_may_not_be_longer_than_what_is_there() -> None:
    house = House()
    guest = house.start(tokens(9, 1))
    with pytest.raises(ValueError, match="cannot hold 10 of 9"):
        house.memory.hold(guest.space, 10)


def test_a_row_that_is_filled_stands_still_until_it_is() -> None:
    house = House(frames=8)
    space = house.memory.create("a")
    hold = house.memory.fill(space, 10)
    assert (len(hold.frames), space.length, space.is_resident) == (3, 10, False)
    house.memory.check_invariants()
    with pytest.raises(PageNotResident):
        house.memory.grow(np.array([space.row], np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="has 10 positions"):
        house.memory.fill(space, 1)
    house.memory.let_go(hold)
    assert space.is_resident
    orders = house.memory.grow(np.array([space.row], np.int32), np.ones(1, np.int32))
    assert orders.table_changes.frames.tolist() == hold.frames.tolist(), "the device learns of them by the next step"
    house.memory.check_invariants()


def test_a_fill_that_does_not_fit_changes_nothing() -> None:
    house = House(frames=4)
    space = house.memory.create("a")
    with pytest.raises(OutOfFrames):
        house.memory.fill(space, 20)
    house.memory.check_invariants()
    assert (space.length, house.memory.free_frames) == (0, 4)


def test_a_row_that_ends_while_it_is_filled_gives_its_frames_back_when_the_copy_ends() -> None:
    house = House(frames=4)
    space = house.memory.create("a")
    hold = house.memory.fill(space, 10)
    space.release()
    house.memory.check_invariants()
    assert house.memory.free_frames == 1
    again = house.memory.create("b")
    house.memory.let_go(hold)
    house.memory.check_invariants()
    assert (house.memory.free_frames, again.is_resident) == (4, True)


@pytest.mark.parametrize("seed", range(6))
def test_the_books_balance_whatever_happens_to_held_pages(seed: int) -> None:
    """Swapped out and in, shared, forked, released, evicted: with copies that end in any order, or fail."""
    chance = random.Random(seed)
    house = House(frames=20, slots=12)
    guests, holds = [], []
    for turn in range(300):
        house.memory.turn(turn * 2 * LONGEST_REST_S, turn)  # a copy that failed keeps none from swapping
        match chance.randrange(8):
            case 0 | 1 if house.memory.available_frames > 6 and len(guests) < 6:
                guests.append(house.admit(tokens(chance.randrange(1, 17), chance.randrange(3))))
                if guests[-1].space.is_resident:  # else it waits for a copy that another has ordered
                    house.prefill(guests[-1])
            case 2 if guests:
                guest = chance.choice(guests)
                if guest.space.length:
                    holds.append(house.memory.hold(guest.space, chance.randrange(1, guest.space.length + 1)))
            case 3 if holds:
                house.memory.let_go(holds.pop(chance.randrange(len(holds))))
            case 4 if guests:
                guests.pop(chance.randrange(len(guests))).space.release()
            case 5 if guests:
                guest = chance.choice(guests)
                if guest.space.is_resident and house.memory.swap.free_slots > 5:
                    house.mover.start(house.memory.swap_out([guest.space]))
            case 6 if guests:
                guest = chance.choice(guests)
                if not guest.space.is_resident and house.memory.available_frames > 6:
                    house.mover.start(house.memory.swap_in(guest.space))
            case 7 if house.mover.in_flight:
                ticket, succeeds = chance.choice(list(house.mover.in_flight)), chance.random() < 0.8
                house.mover.end(ticket, succeeds=succeeds)
                for number, succeeded in house.mover.ended():
                    (house.memory.complete if succeeded else house.memory.fail)(number)
        assert not house.memory.audit(), turn
