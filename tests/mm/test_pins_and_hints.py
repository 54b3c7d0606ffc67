"""What is held by hand stays, for as long as it is held; what is known ahead is acted on."""

import numpy as np
import pytest
from memory_house import House

from mm import Advice, ContentChain, OutOfFrames, QuotaExceeded

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def chain(house: House, prompt: list[int]) -> ContentChain:
    return house.memory.chain(np.array(prompt, np.int32))


def test_a_pinned_prefix_outlives_any_need() -> None:
    house, prompt = House(frames=16), tokens(2 * P, 1)
    house.run(prompt)
    pin = house.memory.pin(chain(house, prompt), "admin")
    assert (pin.tokens, len(pin.frames)) == (2 * P, 2)
    with pytest.raises(OutOfFrames):
        house.start(tokens(15 * P, 2))
    house.run(tokens(14 * P, 3))
    assert house.lookup([*prompt, 1]).cached_tokens == 2 * P
    assert house.memory.information().pinned_frames == 2
    house.check()
    assert house.memory.unpin(pin.number)
    house.run(tokens(16 * P, 4))
    assert house.lookup([*prompt, 1]).cached_tokens == 0


def test_a_frame_that_several_pin_is_one_pinned_frame() -> None:
    house, prompt = House(frames=16), tokens(2 * P, 1)
    house.run(prompt)
    assert house.memory.information().pinned_frames == 0
    for owner in ("x", "y"):
        house.memory.pin(chain(house, prompt), owner)
    assert house.memory.information().pinned_frames == 2
    assert house.memory.pins.pages == 4, "what quotas and limits bound"
    house.check()


def test_a_pin_ends_when_its_time_is_over() -> None:
    house, prompt = House(frames=16), tokens(2 * P, 1)
    house.run(prompt)
    pin = house.memory.pin(chain(house, prompt), "admin", ttl_s=30.0)
    house.memory.turn(29.9, 1)
    assert pin.number in house.memory.pins.held
    house.memory.turn(30.0, 2)
    assert not house.memory.pins.held
    assert not house.memory.unpin(pin.number)
    assert house.memory.information().cached_frames == 2
    house.check()


def test_a_pin_covers_what_is_cached_and_says_how_much() -> None:
    house, prompt = House(), tokens(3 * P, 1)
    house.run(prompt)
    assert house.memory.pin(chain(house, [*prompt, *tokens(2 * P, 2)]), "admin").tokens == 3 * P
    assert house.memory.pin(chain(house, tokens(P, 9)), "admin").tokens == 0


def test_quotas_bound_what_one_owner_and_all_may_pin() -> None:
    house, prompt = House(frames=32), tokens(4 * P, 1)  # quota 4 pages, limit 8
    house.run(prompt)
    house.memory.pin(chain(house, prompt[: 3 * P]), "x")
    with pytest.raises(QuotaExceeded, match="'x' asks to pin 4 pages, has 3 pinned, and the quota is 4"):
        house.memory.pin(chain(house, prompt), "x")
    house.memory.pin(chain(house, prompt), "y")
    with pytest.raises(QuotaExceeded, match="all owners"):
        house.memory.pin(chain(house, prompt[: 2 * P]), "z")
    assert house.memory.pins.pages == 7
    house.check()


def test_cold_pages_go_before_older_ones() -> None:
    house = House(frames=8)
    house.run(tokens(3 * P, 1))
    house.run(tokens(3 * P, 2))
    house.memory.advise_prefix(chain(house, tokens(3 * P, 2)), Advice.COLD)
    house.start(tokens(4 * P, 3))
    assert house.lookup([*tokens(3 * P, 1), 1]).cached_tokens == 3 * P
    assert house.lookup([*tokens(3 * P, 2), 1]).cached_tokens == P


def test_a_sequence_that_is_cold_leaves_its_pages_at_the_cold_end() -> None:
    house = House(frames=8)
    house.run(tokens(3 * P, 1))
    guest = house.start(tokens(3 * P, 2))
    guest.space.advise(Advice.COLD)
    guest.space.release()
    house.start(tokens(4 * P, 3))
    assert house.lookup([*tokens(3 * P, 1), 1]).cached_tokens == 3 * P
    assert house.lookup([*tokens(3 * P, 2), 1]).cached_tokens == P
    house.check()


def test_dontneed_keeps_nothing_of_a_sequence() -> None:
    house, prefix = House(), tokens(2 * P, 1)
    other = house.start([*prefix, 1])
    guest = house.start([*prefix, *tokens(2 * P, 2)])
    guest.space.advise(Advice.DONTNEED)
    house.step(guest, tokens(P, 3))
    guest.space.release()
    assert house.memory.information().cached_frames == 0
    assert house.lookup([*prefix, 5]).cached_tokens == 2 * P  # other maps these
    house.check(other)


def test_dontneed_forgets_a_prefix_that_nobody_maps() -> None:
    house, prompt = House(), tokens(3 * P, 1)
    house.run(prompt)
    house.memory.advise_prefix(chain(house, prompt), Advice.DONTNEED)
    assert house.memory.free_frames == 32
    assert not len(house.memory.cache)


def test_pageout_and_willneed_move_a_prefix_out_and_in() -> None:
    house, prompt = House(slots=8), tokens(3 * P, 1)
    house.run(prompt)
    house.finish(house.memory.advise_prefix(chain(house, prompt), Advice.PAGEOUT))
    assert house.memory.information().cached_slots == 3
    house.finish(house.memory.advise_prefix(chain(house, prompt), Advice.WILLNEED))
    assert house.memory.information().cached_frames == 3
    assert house.lookup([*prompt, 1]).swapped_pages == 0
    house.check()


def test_pageout_and_willneed_move_a_sequence_out_and_in() -> None:
    house = House(slots=8)
    guest = house.start(tokens(2 * P + 1, 1))
    house.finish(guest.space.advise(Advice.PAGEOUT))
    assert not guest.space.is_resident
    house.finish(guest.space.advise(Advice.WILLNEED))
    assert guest.space.is_resident
    house.check(guest)
