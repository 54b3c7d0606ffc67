"""Limits and protections of tenants, and who is charged for a shared page."""

import numpy as np
import pytest
from memory_house import House

from mm import Candidates, OutOfFrames, OverTenantLimit, TenantLimits, Watermarks

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def usage(house: House) -> dict[str, int]:
    return {tenant.name: tenant.current for tenant in house.memory.tenant_memory()}


def test_over_max_only_the_tenants_own_pages_are_reclaimed() -> None:
    house = House(frames=12)
    house.memory.tenants.set_limits("a", TenantLimits(max=4, high=4))
    house.run(tokens(3 * P, 1), tenant="a")
    house.run(tokens(3 * P, 2), tenant="b")
    guest = house.start(tokens(3 * P, 3), tenant="a")
    assert usage(house) == {"default": 0, "a": 4, "b": 3}
    assert house.lookup([*tokens(3 * P, 2), 1]).cached_tokens == 3 * P
    assert house.memory.free_frames == 5
    house.check(guest)


def test_over_max_an_allocation_is_refused_though_the_pool_has_room() -> None:
    house = House(frames=12)
    house.memory.tenants.set_limits("a", TenantLimits(max=4, high=4))
    guest = house.start(tokens(3 * P, 1), tenant="a")
    with pytest.raises(OverTenantLimit, match="tenant 'a' needs 2 frames, uses 3 of 4") as refused:
        house.start(tokens(2 * P, 2), tenant="a")
    assert refused.value.tenant == "a"
    house.start(tokens(2 * P, 3), tenant="b")
    events = next(t.events for t in house.memory.tenant_memory() if t.name == "a")
    assert (events.max, events.refused) == (1, 1)
    house.check(guest)


def test_pages_within_min_are_never_taken_by_others() -> None:
    house = House(frames=8)
    house.memory.tenants.set_limits("a", TenantLimits(min=3, low=3))
    house.run(tokens(4 * P, 1), tenant="a")
    with pytest.raises(OutOfFrames, match="needs 6 frames: 4 free, 1 reclaimable"):
        house.start(tokens(6 * P, 2), tenant="b")
    assert house.lookup([*tokens(4 * P, 1), 1], tenant="a").cached_tokens == 4 * P
    guest = house.start(tokens(6 * P, 3), tenant="a")  # its own needs may take them
    house.check(guest)


def test_pages_within_low_go_only_when_nothing_else_is_left() -> None:
    house = House(frames=8)
    house.memory.tenants.set_limits("a", TenantLimits(low=4))
    house.run(tokens(4 * P, 1), tenant="a")
    house.run(tokens(4 * P, 2), tenant="b")
    first = house.start(tokens(3 * P, 3), tenant="c")
    assert house.lookup([*tokens(4 * P, 1), 1]).cached_tokens == 4 * P
    second = house.start(tokens(3 * P, 4), tenant="c")
    assert house.lookup([*tokens(4 * P, 1), 1]).cached_tokens == 2 * P
    events = {tenant.name: tenant.events.low for tenant in house.memory.tenant_memory()}
    assert (events["a"], events["b"]) == (2, 0)
    house.check(first, second)


def test_above_high_the_tenant_is_reclaimed_in_the_background() -> None:
    house = House(frames=32, watermarks=Watermarks(0, 0, 0))
    house.memory.tenants.set_limits("a", TenantLimits(high=2))
    house.run(tokens(5 * P, 1), tenant="a")
    house.run(tokens(5 * P, 2), tenant="b")
    house.memory.background_reclaim()
    assert usage(house) == {"default": 0, "a": 2, "b": 5}
    house.check()


def test_a_tenant_with_twice_the_weight_keeps_idle_pages_twice_as_long() -> None:
    house = House(frames=8)
    house.memory.tenants.set_limits("heavy", TenantLimits(weight=200))
    house.memory.turn(0.0, 1)
    house.run(tokens(2 * P, 1), tenant="heavy")
    house.memory.turn(40.0, 2)
    house.run(tokens(2 * P, 2), tenant="light")
    house.memory.turn(60.0, 3)  # idle for 60 s at weight 200, and for 20 s at weight 100
    house.start(tokens(5 * P, 3))
    assert house.lookup([*tokens(2 * P, 2), 1]).cached_tokens == 2 * P
    house.memory.turn(100.0, 4)  # 100 s at 200, and 60 s at 100
    house.start(tokens(P, 4))
    assert house.lookup([*tokens(2 * P, 2), 1]).cached_tokens == P


def test_a_shared_page_is_charged_to_its_first_toucher_and_passes_on() -> None:
    house, prefix = House(), tokens(2 * P, 1)
    first = house.start([*prefix, 1], tenant="a")
    second = house.start([*prefix, 2], tenant="b")
    assert usage(house) == {"default": 0, "a": 3, "b": 1}
    first.space.release()
    assert usage(house) == {"default": 0, "a": 0, "b": 3}
    second.space.release()
    assert usage(house) == {"default": 0, "a": 0, "b": 2}  # cached: with the last holder until it is evicted
    third = house.start([*prefix, 3], tenant="a")
    assert usage(house) == {"default": 0, "a": 3, "b": 0}  # mapped again: who maps it is charged
    house.check(third)
    third.space.release()
    house.memory.drop_caches()
    assert usage(house) == {"default": 0, "a": 0, "b": 0}


def test_forks_and_copies_keep_the_charges_exact() -> None:
    house, prefix = House(), tokens(P + 2, 1)
    first = house.start(prefix, tenant="a")
    second = house.start([*prefix, 5], tenant="b")
    children = [house.fork(second), house.fork(first)]
    for token, guest in enumerate([first, second, *children]):
        house.step(guest, [token])
        house.check(first, second, *children)
    for guest in (second, first, *children):
        guest.space.release()
        house.check()


def test_preemption_is_counted_for_the_tenant() -> None:
    house = House()
    guest = house.start(tokens(P, 1), tenant="a")
    house.memory.choose_victim(Candidates.equal(np.array([guest.row], np.int32)), 1)
    assert {t.name: t.events.preempt for t in house.memory.tenant_memory()} == {"default": 0, "a": 1}


def test_the_peak_is_remembered() -> None:
    house = House()
    house.start(tokens(5 * P, 1), tenant="a").space.release()
    house.memory.drop_caches()
    assert next((t.current, t.peak) for t in house.memory.tenant_memory() if t.name == "a") == (0, 5)


def test_limits_must_make_sense() -> None:
    with pytest.raises(ValueError, match="0 <= min <= low <= high <= max"):
        TenantLimits(min=5, low=3)
    with pytest.raises(ValueError, match="weight 0"):
        TenantLimits(weight=0)
    with pytest.raises(ValueError, match="swap_max -1"):
        TenantLimits(swap_max=-1)


def test_more_names_than_are_told_apart_share_the_last_place() -> None:
    house = House()
    numbers = [house.memory.tenants.id(f"tenant {i}") for i in range(400)]
    assert max(numbers) == 255
    assert house.memory.tenants.names[255] == "others"
    house.run(tokens(P, 1), tenant="tenant 399")
    house.check()
