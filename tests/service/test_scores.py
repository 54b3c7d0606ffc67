"""Log-probabilities of sampled tokens and of prompts: each once, in order, whatever happens to the Sequence."""

import random

import numpy as np
import pytest
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output, log_probabilities, log_probs

from model.step_plan import SamplingParameters
from service.engine_client import Scores

THREE = SamplingParameters(temperature=0.0, logprobs=3)


def scores_at(tokens: list[int], place: int, likeliest: int) -> Scores:
    """Of tokens[place], after those before it."""
    found = log_probs([log_probabilities(tokens[:place])], [tokens[place]], likeliest)
    return Scores(
        float(found.chosen[0]), int(found.ranks[0]), found.ids[0].tolist(), [float(value) for value in found.values[0]]
    )


def check(driver: Driver, number: int, prompt: list[int], likeliest: int) -> None:
    tokens = prompt + driver.output[number]
    expected = [scores_at(tokens, place, likeliest) for place in range(len(prompt), len(tokens))]
    assert driver.scores[number] == expected


def check_prompt(driver: Driver, number: int, prompt: list[int], likeliest: int) -> None:
    assert driver.prompt_scores[number] == [scores_at(prompt, place, likeliest) for place in range(1, len(prompt))]


def test_every_token_has_its_scores_and_others_have_none() -> None:
    driver = make()
    for likeliest in (3, -1, 0, 7):
        driver.submit(prompt_of(5 + likeliest), 20, sampling=SamplingParameters(temperature=0.0, logprobs=likeliest))
    driver.run()
    for number, likeliest in enumerate((3, -1, 0, 7)):
        if likeliest < 0:
            assert number not in driver.scores
        else:
            check(driver, number, prompt_of(5 + likeliest), likeliest)


def test_rows_with_scores_decode_in_the_steady_path_too() -> None:
    driver = make()
    driver.submit(prompt_of(5), 30, sampling=THREE)
    driver.submit(prompt_of(6), 30)
    steady = 0
    while driver.scheduler.has_work:
        driver.step()
        steady += bool(driver.scheduler._submitted and driver.scheduler._submitted[-1].steady)
    assert steady > 20
    check(driver, 0, prompt_of(5), 3)


@pytest.mark.parametrize("slots", [0, 40])
def test_scores_survive_preemption_also_of_tokens_in_flight(slots: int) -> None:
    driver = make(frames=12, page_size=4, rows=4, slots=slots)
    for salt in range(3):
        driver.submit(prompt_of(6, salt), 30, sampling=THREE)
    driver.run()
    assert driver.scheduler.preemptions > 0
    for salt in range(3):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)
        check(driver, salt, prompt_of(6, salt), 3)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 60])
def test_a_prompt_is_scored_chunk_by_chunk_before_its_first_token(length: int) -> None:
    driver = make(max_batched_tokens=16)
    driver.submit(prompt_of(3, 1), 30)
    driver.step()
    driver.submit(prompt_of(length), 4, prompt_logprobs=2)
    driver.run()
    if length > 1:
        check_prompt(driver, 1, prompt_of(length), 2)
    assert driver.output[1] == expected_output(prompt_of(length), 4)


def test_only_the_first_choice_is_scored_and_the_others_fork_it() -> None:
    driver = make()
    driver.submit_choices(3, prompt_of(20), 5, prompt_logprobs=1)
    driver.run()
    check_prompt(driver, 0, prompt_of(20), 1)
    assert set(driver.prompt_scores) == {0}
    assert driver.scheduler.memory.counters().fork == 2


def test_who_is_scored_reads_nothing_from_the_cache_and_fills_it() -> None:
    driver = make(page_size=4)
    for options in ({}, {"prompt_logprobs": 0}, {}):
        driver.submit(prompt_of(21), 3, **options)
        driver.run()
    assert [driver.ended[i].cached_tokens for i in range(3)] == [0, 0, 20]
    assert driver.ended[1].miss is not None
    assert driver.ended[1].miss.reason == "disabled"
    check_prompt(driver, 1, prompt_of(21), 0)
    fresh = make(page_size=4)
    fresh.submit(prompt_of(21), 3, prompt_logprobs=0)
    fresh.run()
    fresh.submit(prompt_of(21), 3)
    fresh.run()
    assert fresh.ended[1].cached_tokens == 20


def test_a_prompt_preempted_at_any_step_is_scored_to_its_end_and_nothing_twice() -> None:
    """The driver holds that scores come in order and each once."""
    for moment in range(1, 9):
        driver = make(max_batched_tokens=8, page_size=4)
        sequence = driver.submit(prompt_of(50), 6, prompt_logprobs=2, sampling=THREE)
        for _ in range(moment):
            driver.step()
        driver.scheduler.sequences.recompute(sequence)
        driver.run()
        check_prompt(driver, 0, prompt_of(50), 2)
        check(driver, 0, prompt_of(50), 3)


def test_who_was_scored_uses_the_cache_when_it_comes_back() -> None:
    driver = make(page_size=4)
    sequence = driver.submit(prompt_of(30), 12, prompt_logprobs=0)
    for _ in range(6):
        driver.step()
    driver.scheduler.sequences.recompute(sequence)
    before = len(driver.executor.plans)
    driver.run()
    assert len(driver.executor.plans[before].token_ids) <= 5
    check_prompt(driver, 0, prompt_of(30), 0)


def test_scores_of_a_failed_step_are_not_given_out() -> None:
    driver = make(max_batched_tokens=8)
    driver.submit(prompt_of(30), 5, prompt_logprobs=1)
    driver.executor.fail_rows = lambda plan: [0] if plan.step == 2 else []
    driver.run()
    assert driver.ended[0].reason == "error"
    assert len(driver.prompt_scores[0]) == 8  # of the first chunk


def test_scores_of_one_step_go_to_the_right_tokens_in_any_mix() -> None:
    draw = random.Random(2)
    driver = make(frames=30, rows=6, max_batched_tokens=12)
    asked = []
    for _ in range(30):
        likeliest, scored = draw.choice([-1, 0, 4]), draw.choice([-1, -1, 3])
        prompt = prompt_of(draw.randint(1, 25), draw.randint(0, 3))
        sampling = SamplingParameters(temperature=0.0, logprobs=likeliest)
        asked.append((driver.submit(prompt, draw.randint(1, 20), sampling=sampling, prompt_logprobs=scored), prompt))
        for _ in range(draw.randint(0, 4)):
            driver.step()
    driver.run()
    assert driver.scheduler.preemptions > 0
    for sequence, prompt in asked:
        if sequence.sampling.logprobs >= 0:
            check(driver, sequence.sequence_id, prompt, sequence.sampling.logprobs)
        if sequence.prompt_logprobs >= 0 and len(prompt) > 1:
            check_prompt(driver, sequence.sequence_id, prompt, sequence.prompt_logprobs)
    assert np.all(driver.scheduler.memory.tables.lengths == 0)
