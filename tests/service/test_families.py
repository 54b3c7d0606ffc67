"""n choices of one prompt: each has its own tokens, they share pages by forks, and none holds another up (C17)."""

import random

import numpy as np
import pytest
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output

from mm import OvercommitMode
from model.step_plan import SamplingParameters
from service.request import Sequence, State

PAGE = 4
DRAWN = SamplingParameters(temperature=1.0, seed=7)


def check_greedy(driver: Driver, choices: list[Sequence], prompt: list[int], limit: int) -> None:
    for choice in choices:
        assert driver.output[choice.sequence_id] == expected_output(prompt, limit)
        assert driver.ended[choice.sequence_id].reason == "length"


def computed_tokens(driver: Driver) -> int:
    return sum(len(plan.token_ids) for plan in driver.executor.plans)


@pytest.mark.parametrize("cache", ["on", "off", "already cached"])
@pytest.mark.parametrize("length", [1, 2, 4 * PAGE, 4 * PAGE + 1, 5 * PAGE - 1])
def test_c17_six_choices_equal_one_and_compute_the_prompt_once(length: int, cache: str) -> None:
    driver = make(page_size=PAGE)
    prompt = prompt_of(length)
    if cache == "already cached":
        driver.submit(prompt, 9)
        driver.run()
    before, computed = driver.scheduler.memory.counters(), computed_tokens(driver)
    choices = driver.submit_choices(6, prompt, 9, prefix_cache=cache != "off")
    driver.run()
    check_greedy(driver, choices, prompt, 9)
    after = driver.scheduler.memory.counters()
    assert after.fork - before.fork == 5
    first = 1 if cache == "already cached" else length  # tokens that the first computes of the prompt
    assert computed_tokens(driver) - computed == first + 5 + 6 * 8
    shared_in_part = (length - 1) % PAGE != 0
    assert after.cow_fault - before.cow_fault <= 6 * shared_in_part


@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 1, 5 * PAGE - 1])
def test_c17_the_partly_filled_page_is_copied_before_anybody_writes_into_it(length: int) -> None:
    """Only that page: as often as it has holders, less the last one, who keeps it (and the first has moved on)."""
    driver = make(page_size=PAGE)
    driver.submit_choices(6, prompt_of(length), 30)
    driver.run()
    copies = {4 * PAGE: 5, 4 * PAGE + 1: 0, 5 * PAGE - 1: 5}
    assert driver.scheduler.memory.counters().cow_fault == copies[length]


def test_c17_six_choices_take_far_fewer_frames_than_six_times_one() -> None:
    """Sharing is to be seen in the accounting, at one moment and over time."""
    driver = make(frames=100, page_size=PAGE, max_batched_tokens=64)
    driver.submit_choices(6, prompt_of(60), 8)
    most = shown = 0
    while driver.scheduler.has_work:
        driver.step()
        information = driver.scheduler.memory.information()
        if information.active_frames > most:
            most, shown = information.active_frames, information.saved_frames
        assert information.saved_frames == information.references - information.active_frames
    alone = -(-67 // PAGE)
    assert most <= alone + 5 * 3
    assert shown >= 5 * (60 // PAGE - 1)
    counters = driver.scheduler.memory.counters()
    assert counters.saved_frame_turns > 2 * counters.mapped_frame_turns


def test_each_choice_draws_what_a_request_with_its_seed_draws() -> None:
    driver = make()
    prompt = prompt_of(9)
    choices = driver.submit_choices(3, prompt, 12, sampling=DRAWN)
    driver.run()
    outputs = [driver.output[choice.sequence_id] for choice in choices]
    assert outputs == [expected_output(prompt, 12, seed=7 + i) for i in range(3)]
    assert len({tuple(output) for output in outputs}) == 3


def test_choices_enter_in_the_step_after_the_prompt_all_at_once() -> None:
    driver = make(rows=8, max_batched_tokens=16)
    driver.submit_choices(6, prompt_of(40), 5)
    driver.run()
    rows = [len(plan.rows) for plan in driver.executor.plans]
    assert rows[:4] == [1, 1, 1, 6]


def test_siblings_who_wait_let_others_go_ahead() -> None:
    """Rule 7: however many wait for the prompt to be computed, others are admitted meanwhile."""
    driver = make(frames=200, rows=8, max_batched_tokens=16)
    family = driver.submit_choices(60, prompt_of(84), 3)
    other = driver.submit([9, 8, 7], 2)
    driver.run()
    assert family[0].admitted_s is not None
    assert other.admitted_s == family[0].admitted_s + 5  # the first step that the prompt leaves room in
    assert all(sibling.admitted_s and sibling.admitted_s > other.admitted_s for sibling in family[1:])
    check_greedy(driver, family, prompt_of(84), 3)


def test_a_family_larger_than_the_rows_takes_its_turns() -> None:
    driver = make(rows=2, frames=40)
    choices = driver.submit_choices(9, prompt_of(10), 6)
    driver.run()
    check_greedy(driver, choices, prompt_of(10), 6)
    assert driver.scheduler.memory.counters().fork == 8  # the last to end is always there to be forked


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("slots", [0, 40])
def test_a_family_larger_than_the_pool_is_preempted_and_comes_back_whole(slots: int, *, cache: bool) -> None:
    driver = make(frames=14, page_size=PAGE, slots=slots)
    prompt = prompt_of(10)
    choices = driver.submit_choices(6, prompt, 30, sampling=DRAWN, prefix_cache=cache)
    driver.run()
    assert driver.scheduler.preemptions > 0
    assert (driver.scheduler.memory.counters().swap_in > 0) == bool(slots)
    for i, choice in enumerate(choices):
        assert driver.output[choice.sequence_id] == expected_output(prompt, 30, seed=7 + i)


def test_a_preempted_choice_forks_again_and_computes_no_prompt() -> None:
    driver = make(frames=64, page_size=PAGE)
    prompt = prompt_of(30)
    choices = driver.submit_choices(3, prompt, 20, sampling=DRAWN, prefix_cache=False)
    for _ in range(8):
        driver.step()
    victim = choices[1]
    driver.scheduler.sequences.recompute(victim)
    before, forks = computed_tokens(driver), driver.scheduler.memory.counters().fork
    driver.run()
    assert driver.scheduler.memory.counters().fork == forks + 1
    left = sum(20 - 1 for _ in choices) - (before - 30 - 2)  # of all decodes
    again = computed_tokens(driver) - before - left
    assert 0 < again < 10
    for i, choice in enumerate(choices):
        assert driver.output[choice.sequence_id] == expected_output(prompt, 20, seed=7 + i)


def test_when_the_first_leaves_before_the_prompt_is_there_another_becomes_the_first() -> None:
    for leave in (0, 1, 3):
        driver = make(max_batched_tokens=8)
        choices = driver.submit_choices(3, prompt_of(30), 5)
        for _ in range(leave):
            driver.step()
        driver.end(choices[0])
        driver.run()
        check_greedy(driver, choices[1:], prompt_of(30), 5)
        assert driver.scheduler.memory.counters().fork == 1


def test_the_end_of_one_choice_touches_that_one_only() -> None:
    """C09: cancelled, stopped, or ended by an end id."""
    driver = make()
    choices = driver.submit_choices(4, prompt_of(9), 20, sampling=DRAWN)
    for _ in range(6):
        driver.step()
    driver.end(choices[0])
    driver.end(choices[2], output=2)
    driver.run()
    for i in (1, 3):
        assert driver.output[choices[i].sequence_id] == expected_output(prompt_of(9), 20, seed=7 + i)
    assert driver.ended[choices[2].sequence_id].output_tokens == 2


def test_c09_closing_six_choices_two_hundred_times_leaves_nothing() -> None:
    driver = make(frames=80)
    draw = random.Random(9)
    for _ in range(200):
        choices = driver.submit_choices(6, prompt_of(draw.randint(1, 20)), draw.randint(1, 20))
        for _ in range(draw.randint(0, 12)):
            driver.step()
        for choice in choices:
            if choice.state is not State.ENDED:
                driver.end(choice)
        driver.run()
    assert not driver.scheduler.sequences.waiting


def test_a_row_that_fails_takes_its_own_choice_only() -> None:
    driver = make()
    choices = driver.submit_choices(3, prompt_of(6), 12)
    driver.executor.fail_rows = lambda plan: [1] if plan.step == 5 else []
    driver.run()
    reasons = [driver.ended[choice.sequence_id].reason for choice in choices]
    assert sorted(reasons) == ["error", "length", "length"]


def test_strict_overcommit_promises_each_choice_what_it_does_not_share() -> None:
    driver = make(frames=24, page_size=PAGE)
    driver.scheduler.memory.ledger.mode = OvercommitMode.STRICT
    choices = driver.submit_choices(6, prompt_of(40), 14)  # 14 pages: 9 or 10 shared, 4 or 5 of their own
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(driver.scheduler.sequences.running))
    assert driver.scheduler.preemptions == 0
    assert most == 3
    check_greedy(driver, choices, prompt_of(40), 14)


def test_c13_many_families_with_a_small_swap_area_or_none_all_end() -> None:
    for slots in (8, 0):
        driver = make(frames=14, page_size=PAGE, rows=6, slots=slots)
        families = [driver.submit_choices(2, prompt_of(6, salt), 24) for salt in range(30)]
        driver.run(limit=20_000)
        assert driver.scheduler.preemptions > 0
        for salt, choices in enumerate(families):
            check_greedy(driver, choices, prompt_of(6, salt), 24)


PENALTIES = SamplingParameters(temperature=0.0, frequency_penalty=0.5)


@pytest.mark.parametrize("slots", [0, 40])
def test_c14_histories_are_whole_after_preemption_swap_and_forks(slots: int) -> None:
    """The executor of the tests compares each row's history with what its frames hold, before it draws."""
    driver = make(frames=14, page_size=PAGE, slots=slots)
    families = [driver.submit_choices(3, prompt_of(7, salt), 20, sampling=PENALTIES) for salt in range(3)]
    driver.run()
    assert driver.scheduler.preemptions > 0
    for salt, choices in enumerate(families):
        check_greedy(driver, choices, prompt_of(7, salt), 20)


# --- time


def test_a_time_limit_ends_each_choice_with_what_it_has() -> None:
    driver = make()
    choices = driver.submit_choices(3, prompt_of(6), 100, timeout_s=10.0)
    other = driver.submit(prompt_of(6, 1), 100)
    driver.run()
    for choice in choices:
        ended, output = driver.ended[choice.sequence_id], driver.output[choice.sequence_id]
        assert ended.reason == "timeout"
        assert ended.output_tokens == len(output)
        assert 5 <= len(output) <= 9
        assert output == expected_output(prompt_of(6), len(output))
    assert driver.output[other.sequence_id] == expected_output(prompt_of(6, 1), 100)


def test_a_time_limit_ends_those_who_wait_and_those_in_swap() -> None:
    driver = make(frames=12, page_size=PAGE, rows=4, slots=40)
    driver.executor.end_swaps = lambda ticket: True if driver.now > 100 else None
    for salt in range(3):
        driver.submit(prompt_of(6, salt), 30, timeout_s=60.0)
    waiting = driver.submit(prompt_of(40, 7), 8, timeout_s=60.0)
    while not driver.scheduler.sequences.swapped:
        driver.step()
    swapped = next(iter(driver.scheduler.sequences.swapped.values()))
    driver.now = 60.0
    driver.step()
    assert driver.ended[waiting.sequence_id].reason == driver.ended[swapped.sequence_id].reason == "timeout"
    assert driver.ended[waiting.sequence_id].output_tokens == 0
    assert driver.ended[swapped.sequence_id].output_tokens == len(driver.output[swapped.sequence_id]) > 0
    driver.run(limit=60)


def test_a_time_limit_that_nobody_reaches_changes_nothing() -> None:
    driver = make()
    choice = driver.submit(prompt_of(6), 10, timeout_s=1_000.0)
    driver.run()
    check_greedy(driver, [choice], prompt_of(6), 10)


# --- everything at once


def test_forks_of_forks_at_any_length_read_their_own_tokens() -> None:
    """Families of every size, over pages of one token and more, enter late, leave early, and are preempted by hand."""
    draw = random.Random(4)
    for page in (1, 2, 5):
        driver = make(frames=60, page_size=page, rows=7, max_batched_tokens=9, max_length=50)
        asked = []
        for _ in range(25):
            prompt, limit = prompt_of(draw.randint(1, 20), draw.randint(0, 2)), draw.randint(1, 20)
            count = draw.randint(1, 5)
            choices = driver.submit_choices(count, prompt, limit, sampling=DRAWN, prefix_cache=draw.random() < 0.5)
            asked.append((choices, prompt, limit))
            for _ in range(draw.randint(0, 6)):
                driver.step()
            running = list(driver.scheduler.sequences.running.values())
            if running and draw.random() < 0.5:
                driver.scheduler.sequences.recompute(draw.choice(running))
        driver.run()
        for choices, prompt, limit in asked:
            for i, choice in enumerate(choices):
                assert driver.output[choice.sequence_id] == expected_output(prompt, limit, seed=7 + i)
        assert np.all(driver.scheduler.memory.tables.lengths == 0)
