"""Who gives frames back, when, and in which order; and that a refusal changes nothing."""

import numpy as np
import pytest
from memory_house import House

from mm import OutOfFrames, SwapBounds, Watermarks

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def test_an_allocation_reclaims_the_coldest_idle_pages_by_itself() -> None:
    house = House(frames=8)
    house.run(tokens(4 * P, seed=1))
    house.run(tokens(4 * P, seed=2))
    guest = house.start(tokens(2 * P, seed=3))
    assert house.memory.counters().direct_reclaim == 2
    assert house.memory.counters().background_reclaim == 0
    # of the older prompt the last pages went, so that what is left can still be found
    assert house.lookup([*tokens(4 * P, seed=1), 1]).cached_tokens == 2 * P
    assert house.lookup([*tokens(4 * P, seed=2), 1]).cached_tokens == 4 * P
    house.check(guest)


def test_a_page_that_somebody_maps_is_never_reclaimed() -> None:
    house = House(frames=8)
    guest = house.start(tokens(4 * P, seed=1))
    house.run(tokens(4 * P, seed=2))
    with pytest.raises(OutOfFrames, match="needs 5 frames: 0 free, 4 reclaimable"):
        house.start(tokens(5 * P, seed=3))
    house.check(guest)
    assert house.lookup([*tokens(4 * P, seed=2), 1]).cached_tokens == 4 * P


def test_background_reclaim_starts_under_low_and_stops_at_high() -> None:
    house = House(frames=20, watermarks=Watermarks(min=1, low=3, high=6))
    guests = [house.start(tokens(4 * P, seed=seed)) for seed in range(4)]
    for guest in guests:
        guest.space.release()
    assert house.memory.free_frames == 4
    assert not len(house.memory.background_reclaim())
    assert house.memory.free_frames == 4  # not low yet
    guest = house.start(tokens(2 * P, seed=9))
    assert house.memory.free_frames == 2
    house.memory.background_reclaim()
    assert house.memory.free_frames == 6
    house.memory.background_reclaim()
    assert house.memory.free_frames == 6
    counters = house.memory.counters()
    assert (counters.direct_reclaim, counters.background_reclaim) == (0, 4)
    house.check(guest)


def test_background_reclaim_drops_clean_pages_first_and_swaps_dirty_ones_out() -> None:
    house = House(frames=12, slots=8, watermarks=Watermarks(0, 12, 12))
    house.memory.reclaimer.watermarks = Watermarks(0, 0, 0)
    dirty, clean = tokens(2 * P, seed=1), tokens(2 * P, seed=2)
    house.run(dirty)
    house.run(clean)
    chain = house.memory.chain(np.array(clean, np.int32))
    house.finish(house.memory.advise_prefix(chain, "pageout"))  # type: ignore[arg-type]
    house.finish(house.memory.advise_prefix(chain, "willneed"))  # type: ignore[arg-type]
    house.memory.reclaimer.watermarks = Watermarks(0, 9, 10)
    assert house.memory.free_frames == 8
    orders = house.memory.background_reclaim()
    assert len(orders) == 0  # the two clean ones suffice, though the dirty ones are colder
    assert house.memory.free_frames == 10
    house.memory.reclaimer.watermarks = Watermarks(0, 11, 12)
    orders = house.memory.background_reclaim()
    assert len(orders.out_frames) == 2
    assert house.memory.free_frames == 10
    assert house.memory.arriving_frames == 2
    house.finish(orders)
    assert house.memory.free_frames == 12
    house.check()
    for prompt in (dirty, clean):
        assert house.run([*prompt, 1]).cached_tokens == 2 * P
    assert house.memory.counters().evict == 0


def test_without_swap_background_reclaim_drops_the_pages() -> None:
    house = House(frames=8, watermarks=Watermarks(0, 8, 8))
    house.run(tokens(2 * P, seed=1))
    assert not len(house.memory.background_reclaim())
    assert house.memory.free_frames == 8
    assert house.memory.counters().evict == 2


def test_pages_on_their_way_out_are_counted_on() -> None:
    """Background reclaim does not take more while the frames it is waiting for are enough."""
    house = House(frames=8, slots=8, watermarks=Watermarks(0, 6, 7), swap_bounds=SwapBounds(8, 8))
    house.run(tokens(4 * P, seed=1))
    orders = house.begin(house.memory.background_reclaim())
    assert len(orders) == 3
    assert not len(house.memory.background_reclaim())
    house.finish(orders)
    assert house.memory.free_frames == 7


@pytest.mark.parametrize("frames", [50, 50_000])
def test_reclaim_looks_at_what_it_takes_and_not_at_the_pool(frames: int) -> None:
    """A cause, not a time: four idle pages are looked at, however large the pool."""
    house = House(frames=frames, watermarks=Watermarks(0, frames, frames))
    house.run(tokens(4 * P, seed=1))
    house.memory.background_reclaim()
    assert house.memory.counters().scan == 4


def test_watermarks_must_rise() -> None:
    with pytest.raises(ValueError, match="0 <= min <= low <= high must hold, got min"):
        Watermarks(2, 1, 3)
