"""Forks of running requests: the same tokens up to there, the same frames, and then each its own way."""

import random

import pytest
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output

from mm import TenantLimits
from model.step_plan import SamplingParameters
from service.engine_client import BeamSearch, Limits, QueueState
from service.errors import BadRequest, NotFound, NotStarted, QueueFull
from service.forks import find_parent, fork
from service.questions import FindParent, Fork, Forked
from service.request import Sequence, State

GREEDY = SamplingParameters(temperature=0.0)
LIMITS = Limits(max_model_len=200, max_request_tokens=200, max_queue_requests=100, vocabulary=50)


def forked(driver: Driver, parent: Sequence, *, limits: Limits = LIMITS, **fields: object) -> tuple[int, Forked]:
    """The fork's number and what it goes on from."""
    number = len(driver.output)
    found = find_parent(driver.scheduler, [], FindParent("", [parent.request_id], parent.choice))
    assert found.key == parent.key
    asked = Fork(**{  # type: ignore[arg-type]
        "owner": "", "parent": found.key, "sequence_id": number, "request_id": f"fork-{number}", "sampling": GREEDY,
        "end_ids": [], **fields,
    })  # fmt: skip
    queue = QueueState(len(driver.scheduler.sequences.waiting))
    begun = fork(driver.scheduler, limits, queue, 0, asked, driver.now)
    driver.output[number] = []
    return number, begun


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def test_a_greedy_fork_says_what_its_parent_says() -> None:
    driver = make(page_size=4)
    parent = driver.submit(prompt_of(10), 30)
    steps(driver, 12)
    so_far = list(driver.output[0])
    number, begun = forked(driver, parent)
    assert begun.tokens == prompt_of(10) + so_far
    assert (begun.answer_begin, begun.forked_at, begun.max_tokens) == (10, len(so_far), 30 - len(so_far))
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(10), 30)
    assert so_far + driver.output[number] == driver.output[0]
    assert driver.ended[number].cached_tokens == 10 + len(so_far) - 1, "all but the last token was there"


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13])
def test_all_full_pages_are_shared_and_the_last_is_copied_at_the_first_write(length: int) -> None:
    driver = make(page_size=4)
    parent = driver.submit(prompt_of(length), 40)
    steps(driver, 4)
    memory = driver.scheduler.memory
    before = memory.information()
    number, begun = forked(driver, parent)
    steps(driver, 2)
    child = driver.scheduler.find((0, number))
    assert child is not None
    assert child.state is State.RUNNING
    information = memory.information()
    assert information.shared_frames >= (len(begun.tokens) - 1) // 4
    assert information.active_frames <= before.active_frames + 3, "one copy, and what two steps have grown"
    computed = sum(len(plan.token_ids) - plan.decodes for plan in driver.executor.plans[4:])
    assert computed == 1, "its last token, as that of a prompt"
    driver.run()


def test_a_fork_draws_by_its_own_parameters() -> None:
    driver = make()
    parent = driver.submit(prompt_of(6), 20)
    steps(driver, 8)
    number, begun = forked(driver, parent, sampling=SamplingParameters(temperature=1.0, seed=7), max_tokens=25)
    driver.run()
    assert driver.output[number] == expected_output(begun.tokens, 25, seed=7)
    assert driver.output[0] == expected_output(prompt_of(6), 20)


def test_the_parent_may_be_gone_before_its_fork_has_run() -> None:
    driver = make(rows=1)
    parent = driver.submit(prompt_of(6), 20)
    steps(driver, 8)
    number, begun = forked(driver, parent)
    driver.end(parent)
    driver.run()
    assert driver.output[number] == expected_output(begun.tokens, begun.max_tokens)


def test_a_fork_of_a_fork_and_of_a_parent_that_waits_or_is_in_swap() -> None:
    driver = make(frames=64, slots=40)
    parent = driver.submit(prompt_of(6), 40)
    steps(driver, 6)
    first, _ = forked(driver, parent, sampling=SamplingParameters(temperature=1.0, seed=1), max_tokens=40)
    steps(driver, 5)
    child = driver.scheduler.find((0, first))
    assert child is not None
    second, from_child = forked(driver, child)
    assert from_child.answer_begin == 6
    assert from_child.forked_at == len(driver.output[first])
    assert driver.scheduler.sequences.swap_out([parent])
    third, from_swap = forked(driver, parent)
    driver.scheduler.sequences.recompute(child)
    fourth, from_waiting = forked(driver, child)
    driver.run()
    for number, begun in ((second, from_child), (third, from_swap), (fourth, from_waiting)):
        assert driver.output[number] == expected_output(begun.tokens, begun.max_tokens)
    assert driver.output[0] == expected_output(prompt_of(6), 40)


def test_penalties_and_the_least_length_count_from_the_answers_begin() -> None:
    driver = make()
    sampling = SamplingParameters(temperature=0.0, frequency_penalty=0.5)
    parent = driver.submit(prompt_of(6), 20, sampling=sampling)
    steps(driver, 8)
    least = SamplingParameters(temperature=0.0, frequency_penalty=0.5, min_tokens=3, barred_ids=[1])
    number, begun = forked(driver, parent, sampling=least)
    steps(driver, 1)
    settings = [plan.settings for plan in driver.executor.plans if plan.settings is not None][-1]
    assert settings.prompts.tolist() == [6]
    assert settings.histories[0].tolist() == begun.tokens
    assert settings.parameters[0].min_tokens == begun.forked_at + 3
    driver.run()
    assert driver.output[number] == expected_output(begun.tokens, begun.max_tokens)


def test_what_cannot_be_forked_says_why() -> None:
    driver = make(rows=8)
    with pytest.raises(NotFound, match="No request nothing of yours"):
        find_parent(driver.scheduler, [], FindParent("", ["nothing"]))
    waits = driver.submit(prompt_of(20), 4)
    with pytest.raises(NotStarted, match="has not got its first token"):
        find_parent(driver.scheduler, [], FindParent("", [waits.request_id]))
    search = driver.submit_choices(1, prompt_of(4), 12, beams=BeamSearch(2))[0]
    choices = driver.submit_choices(3, prompt_of(5), 12, sampling=SamplingParameters(temperature=1.0), first_choice=6)
    steps(driver, 5)
    with pytest.raises(BadRequest, match="beam search"):
        find_parent(driver.scheduler, [], FindParent("", [search.request_id]))
    name = choices[0].request_id
    with pytest.raises(BadRequest, match="3 choices") as caught:
        find_parent(driver.scheduler, [], FindParent("", [name]))
    assert caught.value.param == "choice"
    with pytest.raises(NotFound, match="Choice 9"):
        find_parent(driver.scheduler, [], FindParent("", [name], 9))
    with pytest.raises(NotFound):
        find_parent(driver.scheduler, [], FindParent("somebody", [name], 7))
    assert find_parent(driver.scheduler, [], FindParent("", [name], 7)).key == choices[1].key
    with pytest.raises(BadRequest, match="maximum context length"):
        forked(driver, choices[1], max_tokens=200)
    with pytest.raises(BadRequest, match="min_tokens must be at most max_tokens"):
        forked(driver, choices[1], max_tokens=2, sampling=SamplingParameters(min_tokens=3))
    full = Limits(max_model_len=200, max_request_tokens=200, max_queue_requests=0, vocabulary=50)
    with pytest.raises(QueueFull):
        forked(driver, choices[1], limits=full)
    driver.run()
    late = Fork(
        owner="", parent=choices[1].key, sequence_id=9, request_id="f", sampling=GREEDY, end_ids=[], max_tokens=1
    )
    with pytest.raises(NotFound, match="has just ended"):
        fork(driver.scheduler, LIMITS, QueueState(), 0, late, driver.now)


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_of_forks_under_any_pressure_gives_everybody_its_own_tokens(seed: int) -> None:
    """Forks of forks and of choices, in pools that are too small, swaps that fail, parents that are cancelled."""
    draw = random.Random(seed)
    driver = make(
        frames=draw.choice([16, 24, 48]),
        rows=draw.choice([3, 6]),
        slots=draw.choice([0, 6, 40]),
        page_size=draw.choice([1, 4]),
        max_length=60 if seed % 2 else 40,
        tenants={"a": TenantLimits(max=14, high=12)} if seed % 4 == 0 else None,
    )
    longest = min(driver.scheduler.settings.max_length, driver.scheduler.memory.max_tokens)
    limits = Limits(max_model_len=longest, max_request_tokens=longest, max_queue_requests=1000, vocabulary=50)
    swaps = random.Random(seed)
    driver.executor.end_swaps = lambda ticket: swaps.choice([None, True, True, True, False])
    asked: dict[int, tuple[list[int], int, int | None]] = {}
    open_: list[Sequence] = []
    cancelled: set[int] = set()
    for _ in range(12):
        length = draw.randint(1, longest // 2)
        limit = draw.randint(1, longest - length)
        own = draw.randint(1, 1000)
        sampling = SamplingParameters(temperature=1.0, seed=own)
        choices = driver.submit_choices(
            draw.choice([1, 1, 3]), prompt_of(length, draw.randint(0, 2)), limit, sampling=sampling
        )
        for i, choice in enumerate(choices):
            asked[choice.sequence_id] = choice.tokens.tolist(), limit, own + i
            open_.append(choice)
        steps(driver, draw.randint(0, 6))
        for _ in range(draw.randint(0, 3)):
            parent = draw.choice(open_)
            if parent.state is State.ENDED or len(driver.scheduler.sequences.tokens_of(parent)) == parent.prompt_tokens:
                continue
            own_seed = draw.choice([None, draw.randint(1, 1000)])
            sampling = GREEDY if own_seed is None else SamplingParameters(temperature=1.0, seed=own_seed)
            number, begun = forked(driver, parent, limits=limits, sampling=sampling)
            asked[number] = begun.tokens, begun.max_tokens, own_seed
            child = driver.scheduler.find((0, number))
            assert child is not None
            open_.append(child)
            steps(driver, draw.randint(0, 3))
            if draw.random() < 0.3 and parent.state is not State.ENDED:
                driver.end(parent)
                cancelled.add(parent.sequence_id)
    driver.run(limit=10_000)
    for number, (prompt, limit, own_seed) in asked.items():
        expected = expected_output(prompt, limit, seed=own_seed)
        if number in cancelled:
            assert driver.output[number] == expected[: len(driver.output[number])]
        else:
            assert driver.output[number] == expected, number
