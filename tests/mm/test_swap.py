"""Pages between frames and slots: nothing is lost, nothing is reused too early, nothing is copied twice."""

import numpy as np
import pytest
from memory_house import Guest, House

from mm import Advice, MemoryManager, OutOfFrames, OutOfSwapSlots, PageNotResident, SwapBounds, TenantLimits

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def swap_out(house: House, *guests: Guest) -> None:
    house.finish(house.memory.swap_out([guest.space for guest in guests]))


def test_a_swapped_out_frame_is_free_only_when_its_copy_is_complete() -> None:
    house = House(frames=4, slots=4)
    guest = house.start(tokens(3 * P + 1, seed=1))
    orders = house.begin(house.memory.swap_out([guest.space]))
    assert (house.memory.free_frames, house.memory.arriving_frames) == (0, 4)
    with pytest.raises(OutOfFrames):
        house.start(tokens(P, seed=2))
    house.finish(orders)
    assert (house.memory.free_frames, house.memory.arriving_frames) == (4, 0)
    house.check(guest)


def test_a_sequence_comes_back_with_all_it_had() -> None:
    house = House(frames=6, slots=8)
    guest = house.start(tokens(3 * P + 1, seed=1))
    swap_out(house, guest)
    other = house.start(tokens(4 * P, seed=2))
    with pytest.raises(OutOfFrames):
        house.memory.swap_in(guest.space)
    house.check(guest, other)
    other.space.release()
    house.finish(house.memory.swap_in(guest.space))
    house.step(guest, [5])
    house.check(guest)


def test_a_row_in_swap_cannot_run() -> None:
    house = House(slots=8)
    guest = house.start(tokens(P, seed=1))
    orders = house.begin(house.memory.swap_out([guest.space]))
    for _ in range(2):
        assert not guest.space.is_resident
        with pytest.raises(PageNotResident):
            guest.space.grow(1)
        if orders.ticket in house.mover.in_flight:
            house.finish(orders)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_copy_loses_nothing(direction: str) -> None:
    house = House(frames=8, slots=8)
    guest = house.start(tokens(2 * P + 1, seed=1))
    if direction == "in":
        swap_out(house, guest)
        house.finish(house.memory.swap_in(guest.space), succeeds=False)
        assert not guest.space.is_resident
        house.check(guest)
        house.finish(house.memory.swap_in(guest.space))
    else:
        house.finish(house.memory.swap_out([guest.space]), succeeds=False)
    assert guest.space.is_resident
    assert house.memory.counters().swap_failed == 3
    house.step(guest, [5])
    house.check(guest)


def test_a_clean_page_is_dropped_without_a_copy() -> None:
    """Full pages keep their slot when they come back: the next time only the last page is copied."""
    house = House(slots=8)
    guest = house.start(tokens(3 * P + 1, seed=1))
    swap_out(house, guest)
    house.finish(house.memory.swap_in(guest.space))
    moved = house.mover.moved_pages
    orders = house.begin(house.memory.swap_out([guest.space]))
    assert len(orders.out_frames) == 1
    house.finish(orders)
    assert house.mover.moved_pages == moved + 1
    house.check(guest)


def test_a_partly_filled_page_is_dirty_as_soon_as_it_is_back() -> None:
    """It is written again next: its slot is given up, and the page is written in place."""
    house = House(slots=8)
    guest = house.start(tokens(P + 1, seed=1))
    swap_out(house, guest)
    house.finish(house.memory.swap_in(guest.space))
    assert house.memory.swap.used_slots == 1
    copies = house.memory.counters().cow_fault
    house.step(guest, [5])
    assert house.memory.counters().cow_fault == copies
    house.check(guest)


def test_pages_that_others_map_stay() -> None:
    """Only exclusive pages move: taking a shared one would free nothing."""
    house, prefix = House(slots=8), tokens(2 * P, seed=1)
    first, second = house.start([*prefix, 1]), house.start([*prefix, 2])
    orders = house.begin(house.memory.swap_out([second.space]))
    assert len(orders.out_frames) == 1
    house.finish(orders)
    assert second.frames[:2] == first.frames[:2]
    house.check(first, second)
    house.finish(house.memory.swap_in(second.space))
    house.step(second, [3])
    house.check(first, second)


def test_a_page_of_a_fork_family_is_swapped_once_and_shared_again() -> None:
    house = House(slots=8)
    parent = house.start(tokens(2 * P + 2, seed=1))
    child = house.fork(parent)
    swap_out(house, parent, child)
    assert house.mover.moved_pages == 3
    assert house.memory.free_frames == 32
    assert parent.frames == child.frames
    house.finish(house.memory.swap_in(parent.space))
    assert house.mover.moved_pages == 6
    house.finish(house.memory.swap_in(child.space))
    assert house.mover.moved_pages == 7  # the last page, which parent may write by now
    assert child.frames[:2] == parent.frames[:2]
    house.step(parent, [1])
    house.step(child, [2])
    house.check(parent, child)
    assert house.device.shared[[parent.row, child.row], :3].tolist() == [[True, True, False]] * 2


def test_a_second_sequence_joins_a_copy_under_way() -> None:
    house = House(slots=8)
    parent = house.start(tokens(2 * P, seed=1))
    child = house.fork(parent)
    swap_out(house, parent, child)
    orders = house.begin(house.memory.swap_in(parent.space))
    assert len(orders.in_frames) == 2
    assert not len(house.memory.swap_in(child.space))
    assert not child.space.is_resident
    house.finish(orders)
    assert child.space.is_resident
    assert child.frames == parent.frames
    house.check(parent, child)


@pytest.mark.parametrize("succeeds", [True, False])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_released_amid_a_copy_everything_is_free_after_it(direction: str, *, succeeds: bool) -> None:
    """And not before: the copy still reads and writes."""
    house = House(slots=8)
    space = house.memory.create("uncached")
    guest = Guest(space, None, tokens(2 * P, seed=1), "")
    house.prefill(guest)
    if direction == "in":
        swap_out(house, guest)
        orders = house.begin(house.memory.swap_in(space))
    else:
        orders = house.begin(house.memory.swap_out([space]))
    space.release()
    assert house.memory.free_frames == 30
    assert house.memory.swap.free_slots == 6
    house.check()
    house.finish(orders, succeeds=succeeds)
    assert house.memory.free_frames == 32
    assert house.memory.swap.free_slots == 8
    house.check()


def test_slots_whose_memory_is_not_taken_yet_are_free() -> None:
    memory = MemoryManager(frames=8, max_rows=2, max_pages=4, slots=10, opened_slots=3)
    assert (memory.information().total_slots, memory.information().free_slots) == (10, 10)


def test_too_few_slots_change_nothing() -> None:
    house = House(slots=2)
    guest = house.start(tokens(3 * P, seed=1))
    with pytest.raises(OutOfSwapSlots, match="needs 3 swap slots: 2 obtainable"):
        house.memory.swap_out([guest.space])
    assert guest.space.is_resident
    assert house.memory.swap.free_slots == 2
    house.check(guest)


def test_each_use_of_the_area_has_its_bound() -> None:
    """Sequences get at most 4 of 6 slots, the cache at most 3; both in their turn."""
    house = House(frames=32, slots=6, swap_bounds=SwapBounds(sequences=4, cache=3))
    house.run(tokens(5 * P, seed=1))
    chain = house.memory.chain(np.array(tokens(5 * P, seed=1), np.int32))
    house.finish(house.memory.advise_prefix(chain, Advice.PAGEOUT))
    assert house.memory.swap.cache_slots == 3
    first, second = house.start(tokens(3 * P, seed=2)), house.start(tokens(2 * P, seed=3))
    swap_out(house, first)
    with pytest.raises(OutOfSwapSlots):
        house.memory.swap_out([second.space])
    assert house.memory.information().sequence_slots == 3
    house.check(first, second)


def test_a_sequence_takes_slots_from_the_cache() -> None:
    """The second tier of the cache gives way: its oldest page is lost."""
    house = House(slots=4, swap_bounds=SwapBounds(sequences=4, cache=4))
    cached = tokens(4 * P, seed=1)
    house.run(cached)
    house.finish(house.memory.advise_prefix(house.memory.chain(np.array(cached, np.int32)), Advice.PAGEOUT))
    guest = house.start(tokens(2 * P + 1, seed=2))
    swap_out(house, guest)
    assert house.lookup([*cached, 1]).cached_tokens == P
    house.check(guest)


def test_a_tenant_fills_no_more_slots_than_its_swap_max() -> None:
    house = House(slots=8)
    house.memory.tenants.set_limits("a", TenantLimits(swap_max=2))
    guest = house.start(tokens(3 * P, seed=1), tenant="a")
    with pytest.raises(OutOfSwapSlots):
        house.memory.swap_out([guest.space])
    house.memory.tenants.set_limits("a", TenantLimits(swap_max=3))
    swap_out(house, guest)
    house.check(guest)


def test_a_cached_page_in_swap_is_found_and_brought_in() -> None:
    """The second tier of the page cache: a hit costs a copy instead of a computation."""
    house, prompt = House(slots=8), tokens(3 * P, seed=1)
    house.run(prompt)
    house.finish(house.memory.advise_prefix(house.memory.chain(np.array(prompt, np.int32)), Advice.PAGEOUT))
    assert house.memory.free_frames == 32
    match = house.lookup([*prompt, 1, 2])
    assert (match.cached_tokens, match.swapped_pages, match.frames_for(3 * P + 2, P)) == (3 * P, 3, 4)
    guest = house.start([*prompt, 1, 2])
    assert house.memory.counters().swap_in == 3
    house.check(guest)


def test_a_page_hit_while_it_is_swapped_out_stays() -> None:
    """Its copy completes all the same: it is clean from then on."""
    house, prompt = House(slots=8), tokens(2 * P, seed=1)
    house.run(prompt)
    chain = house.memory.chain(np.array(prompt, np.int32))
    orders = house.begin(house.memory.advise_prefix(chain, Advice.PAGEOUT))
    guest = house.start([*prompt, 1])
    house.finish(orders)
    assert guest.space.is_resident
    assert house.memory.sequence_memory(guest.space).clean == 2
    house.check(guest)


def test_slots_get_memory_behind_them_in_pieces() -> None:
    house = House(slots=8, opened_slots=0)
    guest = house.start(tokens(3 * P, seed=1))
    with pytest.raises(OutOfSwapSlots):
        house.memory.swap_out([guest.space])
    house.memory.open_slots(4)
    swap_out(house, guest)
    house.memory.open_slots(8)
    assert house.memory.swap.free_slots == 5
    house.check(guest)


def test_with_no_swap_at_all_everything_else_works() -> None:
    """C13, the zero: a swap-out is refused, and a prompt still finds its pages."""
    house, prompt = House(slots=0), tokens(2 * P, seed=1)
    guest = house.start(prompt)
    with pytest.raises(OutOfSwapSlots):
        house.memory.swap_out([guest.space])
    guest.space.release()
    assert house.run([*prompt, 1]).cached_tokens == 2 * P
    house.check()


def test_a_page_that_is_published_amid_its_swap_out_goes_all_the_same() -> None:
    """The cache has the same page in another slot: the frame in the copy must not become that one's twin."""
    house, prompt = House(slots=8), tokens(2 * P, seed=1)
    house.run(prompt)
    chain = house.memory.chain(np.array(prompt, np.int32))
    house.finish(house.memory.advise_prefix(chain, Advice.PAGEOUT))
    match = house.memory.lookup(chain, resident_only=True)
    guest = Guest(house.memory.create("second", match=match), match, prompt, "")
    house.step(guest, prompt, is_good=False)
    orders = house.begin(house.memory.swap_out([guest.space]))
    house.commit(guest)
    house.check(guest)
    house.finish(orders)
    house.check(guest)
    house.finish(house.memory.swap_in(guest.space))
    house.check(guest)
