"""Scheduling by priority: who goes first, who gives way, and that waiting makes up for it."""

import random

import pytest
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output

from mm import TenantLimits
from model.step_plan import SamplingParameters
from service.engine_client import BeamSearch
from service.request import Sequence, State

AGEING_S = 10.0  # a step takes a second


def by_priority(**more: object) -> Driver:
    return make(**{"ageing_s": AGEING_S, **more})  # type: ignore[arg-type]


def order_of_admission(driver: Driver, sequences: list[Sequence]) -> list[int]:
    driver.run()
    return [each.sequence_id for each in sorted(sequences, key=lambda each: (each.admitted_s or 0.0, each.sequence_id))]


def test_lower_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    driver = by_priority(rows=1)
    driver.submit(prompt_of(4), 3)
    driver.step()
    sequences = [driver.submit(prompt_of(4, 1 + i), 3, priority=p) for i, p in enumerate((2, 0, 2, 1, 0))]
    assert order_of_admission(driver, sequences) == [2, 5, 4, 1, 3]


def test_without_the_policy_arrival_alone_counts() -> None:
    driver = make(rows=1)
    sequences = [driver.submit(prompt_of(4, i), 3, priority=-i) for i in range(4)]
    assert order_of_admission(driver, sequences) == [0, 1, 2, 3]


def test_c18_an_urgent_one_starts_before_any_queued_one_in_the_place_of_a_running_one() -> None:
    """All places are taken by less urgent ones, which were scheduled a moment ago: the youngest gives its place."""
    driver = by_priority(rows=4)
    low = [driver.submit(prompt_of(5, salt), 40, priority=5) for salt in range(8)]
    for _ in range(4):
        driver.step()
    assert [each.state for each in low] == [State.RUNNING] * 4 + [State.WAITING] * 4
    high = driver.submit(prompt_of(5, 9), 10)
    driver.step()
    assert high.state is State.RUNNING
    assert [each.preemptions for each in low] == [0, 0, 0, 1, 0, 0, 0, 0]
    driver.run()
    assert driver.output[8] == expected_output(prompt_of(5, 9), 10)
    for salt in range(8):
        assert driver.output[salt] == expected_output(prompt_of(5, salt), 40)
    assert (low[4].admitted_s or 0) > (high.admitted_s or 0)


@pytest.mark.parametrize("slots", [0, 40])
def test_an_urgent_one_takes_the_frames_of_less_urgent_ones(slots: int) -> None:
    driver = by_priority(frames=20, rows=8, slots=slots)
    low = [driver.submit(prompt_of(20, salt), 12, priority=3) for salt in range(2)]
    for _ in range(5):
        driver.step()
    high = driver.submit(prompt_of(40, 9), 4)
    steps = 0
    while high.state is State.WAITING:
        driver.step()
        steps += 1
    assert steps <= 6
    assert sum(each.preemptions for each in low) > 0
    driver.run()
    assert driver.output[2] == expected_output(prompt_of(40, 9), 4)
    for salt in range(2):
        assert driver.output[salt] == expected_output(prompt_of(20, salt), 12)


def test_nobody_is_preempted_for_an_equal_or_for_one_that_came_much_later() -> None:
    driver = by_priority(rows=2)
    low = [driver.submit(prompt_of(4, salt), 60, priority=2) for salt in range(2)]
    for _ in range(25):
        driver.step()
    driver.submit(prompt_of(4, 3), 3, priority=2)
    driver.submit(prompt_of(4, 4), 3)  # two levels: as urgent as those that came 20 s before it
    for _ in range(3):
        driver.step()
    assert [each.preemptions for each in low] == [0, 0]
    driver.run()


def test_waiting_makes_up_for_priority() -> None:
    """One of level p is overtaken by those of level q only that come less than (p - q) x ageing after it."""
    driver = by_priority(rows=1)
    draw = random.Random(3)
    came_s: dict[int, tuple[float, int]] = {}
    sequences = []
    for salt in range(120):
        priority = draw.choice([0, 0, 0, 1, 4])
        sequences.append(driver.submit(prompt_of(3, salt), 3, priority=priority))
        came_s[sequences[-1].sequence_id] = driver.now, priority
        for _ in range(draw.choice([1, 2, 3])):
            driver.step()
    driver.run()
    first_s = {each.sequence_id: each.admitted_s or 0.0 for each in sequences}
    overtaken = 0
    for mine, (mine_s, p) in came_s.items():
        for other, (other_s, q) in came_s.items():
            if other_s > mine_s and first_s[other] < first_s[mine]:
                overtaken += 1
                assert p > q
                assert other_s < mine_s + (p - q) * AGEING_S
    assert overtaken > 20


def test_a_stream_of_urgent_ones_starves_nobody() -> None:
    driver = by_priority(rows=2, frames=24)
    low = driver.submit(prompt_of(8, 7), 20, priority=3)
    steps = 0
    while low.state is not State.ENDED:
        driver.submit(prompt_of(8, steps), 6)
        driver.step()
        steps += 1
        assert steps < 200
    assert driver.output[0] == expected_output(prompt_of(8, 7), 20)
    driver.run(limit=5000)


def test_priorities_order_a_tenants_own_requests_and_take_nothing_of_others() -> None:
    driver = by_priority(rows=2)
    other = driver.submit(prompt_of(4), 30, tenant="b", priority=9)
    mine = driver.submit(prompt_of(4, 1), 30, tenant="a", priority=9)
    driver.step()
    waits = driver.submit(prompt_of(4, 2), 4, tenant="b", priority=9)
    urgent = driver.submit(prompt_of(4, 3), 4, tenant="a", priority=-50)
    driver.step()
    driver.step()
    assert (other.preemptions, mine.preemptions) == (0, 1)
    assert (urgent.state, waits.state) == (State.RUNNING, State.WAITING)
    driver.run()
    for salt, count in enumerate((30, 30, 4, 4)):
        assert driver.output[salt] == expected_output(prompt_of(4, salt), count)


def test_an_urgent_search_takes_as_many_places_as_it_has_beams() -> None:
    driver = by_priority(rows=4)
    low = [driver.submit(prompt_of(5, salt), 30, priority=1) for salt in range(4)]
    driver.step()
    (search,) = driver.submit_choices(1, prompt_of(6, 9), 5, beams=BeamSearch(3))
    while search.state is not State.ENDED:
        driver.step()
    assert [each.preemptions for each in low] == [0, 1, 1, 1]
    driver.run()
    for salt in range(4):
        assert driver.output[salt] == expected_output(prompt_of(5, salt), 30)


@pytest.mark.parametrize("seed", range(24))
def test_any_mix_of_priorities_gives_every_sequence_its_own_tokens(seed: int) -> None:
    """Choices, searches, tenants with limits and swap, in small pools: exact outputs, and everybody ends."""
    draw = random.Random(seed)
    tenants = {"a": TenantLimits(max=12, high=10), "b": TenantLimits(min=3, low=3)} if seed % 3 == 0 else None
    driver = by_priority(
        frames=draw.choice([18, 24, 40]),
        rows=draw.choice([3, 6]),
        slots=draw.choice([0, 6, 40]),
        max_batched_tokens=draw.choice([6, 12, 24]),
        max_length=44,
        tenants=tenants,
    )
    swaps = random.Random(seed)
    driver.executor.end_swaps = lambda ticket: swaps.choice([None, True, True, True, False])
    asked: list[tuple[Sequence, list[int], int, int | None]] = []
    searches = []
    for _ in range(30):
        length, limit = draw.randint(1, 20), draw.randint(1, 20)
        prompt, seed_ = prompt_of(length, draw.randint(0, 3)), draw.randint(1, 1000)
        more = {"priority": draw.randint(-3, 3), "tenant": draw.choice("abc") if tenants else "default"}
        kind = draw.random()
        if kind < 0.15:
            searches += driver.submit_choices(1, prompt, min(limit, 6), beams=BeamSearch(2), **more)
        elif kind < 0.4:
            sampling = SamplingParameters(temperature=1.0, seed=seed_)
            choices = driver.submit_choices(draw.randint(2, 4), prompt, limit, sampling=sampling, **more)
            asked += [(choice, prompt, limit, seed_ + i) for i, choice in enumerate(choices)]
        else:
            asked.append((driver.submit(prompt, limit, **more), prompt, limit, None))
        for _ in range(draw.choice([0, 0, 1, 4])):
            driver.step()
    driver.run(limit=20_000)
    for sequence, prompt, limit, own_seed in asked:
        assert driver.output[sequence.sequence_id] == expected_output(prompt, limit, seed=own_seed)
    assert all(search.sequence_id in driver.ended for search in searches)
    driver.scheduler.memory.drop_caches()
    assert driver.scheduler.memory.free_frames == driver.scheduler.memory.frames.total
