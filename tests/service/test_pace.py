"""The bound on gaps between tokens: learned from made-up step times on a fake clock, over a simulated executor."""

from collections.abc import Callable

import numpy as np
import pytest
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output

from model.step_plan import StepPlan
from service.pace import LEAST_CHUNK, Fit, Pace, StepBudget, StepWork, TimeLeft

PROMPT, SHORT = 800, 6


def keys_of(plan: StepPlan) -> float:
    work = StepWork.of(plan)
    return work.decode_keys + work.prompt_keys


def like_a_gpu(plan: StepPlan) -> float:
    """Reading the weights takes 4 ms, in which 100 tokens are computed; keys come on top."""
    return max(0.004, 4e-5 * len(plan.token_ids)) + 5e-9 * keys_of(plan)


def like_a_cpu(plan: StepPlan) -> float:
    """Each token costs."""
    return 0.012 + 4e-4 * plan.decodes + 1.5e-3 * (len(plan.token_ids) - plan.decodes) + 1e-8 * keys_of(plan)


def make_timed(step_s: Callable[[StepPlan], float], max_gap_s: float | None, *, rows: int = 12) -> Driver:
    driver = make(
        frames=1200, rows=rows, page_size=16, max_batched_tokens=1024, max_length=PROMPT + 400, max_gap_s=max_gap_s
    )
    driver.turn_s, driver.step_s = 1e-6, step_s
    return driver


def run_beside_decodes(driver: Driver, prompts: int, every: int = 30) -> None:
    """Three Sequences decode; a long prompt comes every so many steps."""
    for i in range(3):
        driver.submit(prompt_of(SHORT, i), (prompts + 1) * every + 40)
    for number in range(prompts):
        for _ in range(every):
            driver.step()
        driver.submit(prompt_of(PROMPT, 10 + number), 4)
    driver.run()


def chunks_of(driver: Driver) -> list[int]:
    """Prompt tokens of the steps in which others decoded."""
    return [n for plan in driver.executor.plans if plan.decodes and (n := len(plan.token_ids) - plan.decodes)]


def assert_right(driver: Driver, prompts: int) -> None:
    for number in range(prompts):
        assert driver.output[3 + number] == expected_output(prompt_of(PROMPT, 10 + number), 4)


@pytest.mark.parametrize(("step_s", "bound"), [(like_a_gpu, 0.010), (like_a_cpu, 0.060)])
def test_the_bound_holds_after_three_long_prompts(step_s, bound) -> None:
    """Afterwards every gap keeps to it, and steps are filled up to it, not just small."""
    driver = make_timed(step_s, bound)
    run_beside_decodes(driver, 3)
    learned = len(driver.gaps_s)
    longest_before = max(driver.gaps_s)
    plans = len(driver.executor.plans)
    for i in range(3):
        driver.submit(prompt_of(SHORT, 3 + i), 130)
    for number in range(3):
        for _ in range(30):
            driver.step()
        driver.submit(prompt_of(PROMPT, 30 + number), 4)
    driver.run()
    assert max(driver.gaps_s[learned:]) <= bound
    assert max(driver.gaps_s[learned:]) > 0.8 * bound
    assert longest_before < 2 * bound, "what is not known is tried in small portions"
    full = [plan for plan in driver.executor.plans[plans:] if plan.decodes and len(plan.token_ids) > plan.decodes]
    assert max(step_s(plan) for plan in full) > 0.8 * bound
    assert_right(driver, 3)


def test_without_a_bound_steps_take_all_they_can() -> None:
    driver = make_timed(like_a_gpu, None)
    run_beside_decodes(driver, 2)
    assert chunks_of(driver) == [PROMPT, PROMPT]
    assert_right(driver, 2)


def test_a_bound_that_nothing_holds_does_not_stop_prompts() -> None:
    """Each step takes the least chunk, all are admitted, and all end with the right tokens."""
    driver = make_timed(like_a_cpu, 0.001)
    run_beside_decodes(driver, 2)
    assert len(driver.ended) == 5
    chunks = chunks_of(driver)
    assert set(chunks) <= {LEAST_CHUNK, PROMPT % LEAST_CHUNK or LEAST_CHUNK}
    assert sum(chunks) == 2 * PROMPT
    assert_right(driver, 2)


def test_a_prompt_alone_is_not_cut() -> None:
    """While nobody decodes, nobody waits for a next token."""
    driver = make_timed(like_a_gpu, 0.005)
    driver.submit(prompt_of(PROMPT), 4)
    driver.run()
    assert len(driver.executor.plans[0].token_ids) == PROMPT


def test_no_more_are_admitted_than_can_decode_in_time() -> None:
    """Each row costs 2 ms on top of 10: ten decode within 30. More wait, and all are served."""
    driver = make_timed(lambda plan: 0.010 + 0.002 * len(plan.token_ids), 0.030, rows=32)
    for i in range(30):
        driver.submit(prompt_of(SHORT, i), 30)
    driver.run()
    decodes = [plan.decodes for plan in driver.executor.plans]
    assert 8 <= max(decodes) <= 10
    assert len(driver.ended) == 30
    assert max(driver.gaps_s) <= 0.045


def test_steps_get_larger_when_the_machine_gets_faster() -> None:
    """A fit forgets: what was learned in a slow hour does not bind later."""
    slow = {"factor": 4.0}
    driver = make_timed(lambda plan: like_a_gpu(plan) * slow["factor"], 0.040)
    run_beside_decodes(driver, 2)
    before = max(chunks_of(driver))
    slow["factor"] = 1.0
    run_beside_decodes(driver, 4)
    assert max(chunks_of(driver)) > 1.5 * before


def test_a_fit_finds_what_made_the_times() -> None:
    generator = np.random.default_rng(2)
    fit = Fit(3)
    truth = np.array([0.004, 0.0001, 2e-8])
    for _ in range(300):
        features = np.array([1.0, generator.integers(1, 200), generator.integers(1000, 200_000)])
        fit.observe(features, float(truth @ features))
    features = np.array([1.0, 100, 100_000])
    assert float(fit.coefficients @ features) == pytest.approx(float(truth @ features), rel=0.06)


def test_a_part_that_costs_nothing_is_never_negative() -> None:
    generator = np.random.default_rng(3)
    fit = Fit(2)
    for _ in range(50):
        tokens = int(generator.integers(1, 100))
        fit.observe(np.array([1.0, tokens]), 0.01 - 2e-5 * tokens)
    assert (fit.coefficients >= 0).all()


def test_one_step_that_took_far_too_long_changes_little() -> None:
    fit = Fit(2)
    for tokens in range(1, 100):
        fit.observe(np.array([1.0, tokens]), 0.01)
    before = float(fit.coefficients @ np.array([1.0, 50]))
    fit.observe(np.array([1.0, 50]), 5.0)
    assert float(fit.coefficients @ np.array([1.0, 50])) < 1.1 * before


@pytest.mark.parametrize(("of_token", "of_key"), [(1e-5, 0.0), (0.0, 1e-9), (1e-5, 1e-9)])
@pytest.mark.parametrize("start", [0, 5000])
def test_a_grant_fills_the_time_and_no_more(of_token, of_key, start) -> None:
    """One token more would exceed it."""
    count = TimeLeft(0.0100037, of_token, of_key).grant(start, 1 << 20)

    def cost(n: int) -> float:
        return of_token * n + of_key * n * (start + n / 2)

    assert cost(count) <= 0.0100037 < cost(count + 1)


def test_only_the_first_prompt_of_a_step_gets_tokens_that_do_not_fit() -> None:
    budget = StepBudget(100, TimeLeft(seconds=0.0, of_token=1e-3, of_key=0.0))
    assert budget.grant(0, 80) == LEAST_CHUNK
    budget.take(0, LEAST_CHUNK)
    assert budget.grant(0, 80) == 0


def test_a_pace_without_experience_begins_small() -> None:
    """And at most doubles from there."""
    pace = Pace(0.1)
    assert pace.budget(1000, decodes=1, decode_keys=10).grant(0, 900) == 2 * LEAST_CHUNK
    pace.observe(StepWork(1, 10, 2 * LEAST_CHUNK, 500.0), 1e-4)
    assert pace.budget(1000, decodes=1, decode_keys=10).grant(0, 900) == 4 * LEAST_CHUNK


def test_a_large_step_is_cut_to_a_size_that_is_launched_at_once() -> None:
    """Also where its prompt would end there. What is small, or would be left with next to nothing, is not cut."""
    left = TimeLeft(seconds=1.0, of_token=1e-3, of_key=0.0, tokens=32, sizes=(512, 640, 1024))
    assert [left.grant(0, most) for most in (480, 481, 607, 608, 900, 5000)] == [480, 480, 480, 608, 608, 992]
    left.take(0, 480)
    assert left.grant(0, 100) == 100
    left.take(0, 100)
    assert [left.grant(0, most) for most in (20, 28, 400)] == [20, 28, 28]
    crowded = TimeLeft(seconds=1.0, of_token=1e-3, of_key=0.0, tokens=505, sizes=(512, 640))
    assert crowded.grant(0, 100) == 100


def test_prompts_beside_decodes_fill_steps_of_the_sizes() -> None:
    sizes = (64, 96, 128, 192)
    driver = make(
        frames=1200, rows=12, page_size=16, max_batched_tokens=256, max_length=PROMPT + 400, max_gap_s=0.010,
        step_sizes=sizes,
    )  # fmt: skip
    driver.turn_s, driver.step_s = 1e-6, like_a_gpu
    run_beside_decodes(driver, prompts=4)
    assert_right(driver, prompts=4)
    mixed = [len(plan.token_ids) for plan in driver.executor.plans if plan.decodes < len(plan.rows) and plan.decodes]
    assert set(mixed) & set(sizes)
    assert all(tokens <= sizes[0] or tokens in sizes for tokens in mixed)
