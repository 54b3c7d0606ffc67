"""Which cached page goes first: what is used again outlives what passes through."""

import numpy as np
import pytest
from memory_house import House

from mm.lru import LruList, PageLists, PageLru
from mm.refault import Shadows

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def test_lists_keep_the_order_of_arrival() -> None:
    lists = PageLists(8, 2)
    for page in (3, 1, 4):
        lists.push(0, page)
    lists.push_coldest(0, 7)
    lists.push(1, 5)
    lists.remove(1)
    assert lists.members(0) == [7, 3, 4]
    assert (lists.coldest(0), lists.coldest(1), lists.sizes) == (7, 5, [3, 1])


def test_a_page_used_twice_is_active() -> None:
    lru = PageLru(4)
    lru.rest(0, 0)
    lru.rest(1, 0)
    lru.used(1)
    lru.rest(1, 0)
    assert lru.lists.members(LruList.INACTIVE) == [0]
    assert lru.lists.members(LruList.ACTIVE) == [1]
    assert lru.victim(0) == 0


def test_an_active_page_used_since_the_last_look_gets_a_second_chance() -> None:
    lru = PageLru(6)
    for page in (0, 1, 2, 3):
        lru.used(page)
        lru.rest(page, 0)
    lru.demote(0, 1)  # every one was used: each loses its mark, and the coldest goes
    assert lru.lists.members(LruList.INACTIVE) == [0]
    lru.used(1)
    lru.rest(1, 0)
    lru.demote(0, 1)
    assert lru.lists.members(LruList.INACTIVE) == [0, 2]
    assert lru.lists.members(LruList.ACTIVE) == [3, 1]


def test_with_nothing_inactive_the_active_pages_can_still_be_reclaimed() -> None:
    lru = PageLru(4)
    for page in range(4):
        lru.used(page)
        lru.rest(page, 0)
    assert lru.victim(0) == 0


def hit_rate_of_a_hot_prefix(house: House) -> float:
    """A shared prefix is used again after every 9 one-time prompts, which are 10 times the pool in all."""
    total = house.memory.frames.total
    hot, asked, found = tokens(8 * P, seed=1), 0, 0
    house.run([*hot, 0])
    house.run([*hot, 1])
    for i in range(10 * total // 5):
        house.run(tokens(5 * P, seed=100 + i))
        if i % 9 == 8:
            match = house.run([*hot, 2 + i])
            asked += 8 * P
            found += match.cached_tokens
    return found / asked


def test_a_scan_does_not_evict_a_hot_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of one-time prompts over 10 times the pool: plain LRU loses the prefix each time, these lists never."""
    assert hit_rate_of_a_hot_prefix(House(frames=40, page_size=P)) == 1.0

    def used_but_not_active(self: PageLru, page: int) -> None:
        self.remove(page)

    monkeypatch.setattr(PageLru, "used", used_but_not_active)
    assert hit_rate_of_a_hot_prefix(House(frames=40, page_size=P)) == 0.0


def test_a_page_that_comes_back_soon_is_active_at_once() -> None:
    """Refault distance within the active pages: with their room it would have stayed."""
    house = House(frames=12)
    hot = tokens(6 * P, seed=1)
    house.run([*hot, 0])
    house.run([*hot, 1])  # six active pages
    once = tokens(2 * P, seed=2)
    house.run(once)
    for seed in range(3, 6):
        house.run(tokens(2 * P, seed=seed))  # once's pages are evicted, others after it
    house.run([*once, 9])
    assert house.memory.counters().refault == 2
    back = house.memory.cache.walk(house.memory.chain(np.array(once, np.int32)), 2)
    assert [house.memory.lru.active[page] for page in back] == [True, True]
    assert house.memory.lru.active_pages == 6  # each pushed an active page out that nobody used lately
    house.check()


def test_a_page_that_comes_back_late_is_not() -> None:
    """Beyond the number of active pages no room would have kept it."""
    house = House(frames=12)
    once = tokens(2 * P, seed=2)
    house.run(once)
    for seed in range(3, 11):
        house.run(tokens(2 * P, seed=seed))
    house.run([*once, 9])
    assert house.memory.counters().refault == 2
    assert house.memory.lru.active_pages == 0


def test_refault_distances_say_what_more_memory_would_bring() -> None:
    shadows = Shadows(64)
    for number in range(20):
        shadows.add(bytes([number]), 0.0, "")
    assert shadows.take(bytes([19])) == 0
    assert shadows.take(bytes([17])) == 2
    assert shadows.take(bytes([4])) == 15
    assert shadows.take(bytes([4])) is None
    assert (shadows.frames_to_avoid(0.5), shadows.frames_to_avoid(1.0)) == (4, 16)


def test_shadows_are_bounded_and_the_oldest_is_forgotten() -> None:
    shadows = Shadows(3)
    for number in range(5):
        shadows.add(bytes([number]), 0.0, "")
    assert len(shadows) == 3
    assert shadows.find(bytes([1])) is None
    assert shadows.find(bytes([2])) is not None


def test_the_working_set_is_reported() -> None:
    house = House(frames=8)
    for round_ in range(4):
        for seed in range(5):
            house.run([*tokens(2 * P, seed=seed), round_])
    report = house.memory.working_set()
    assert report.refaults == house.memory.counters().refault > 0
    assert report.refaults == sum(report.distances)
    assert 0 < report.frames_to_avoid_half <= report.frames_to_avoid_most
