"""Who is admitted next while frames are short: whose prompt is cached, and nobody is overtaken without bound."""

import random
from dataclasses import dataclass

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_output

from service.cache_order import FRESH_STEPS, LEAST_GAIN, WINDOW, overtake, preferred
from service.request import Sequence

MOST = 3


@dataclass(eq=False)
class Waiting:
    """One in a queue, with what is cached of it."""

    share: float
    overtaken: int = 0


def of(*shares: float) -> list[Waiting]:
    return [Waiting(share) for share in shares]


def chosen(queue: list[Waiting], first: int = 0, most: int = MOST) -> int:
    return preferred(queue, first, lambda each: each.share, most)


def test_who_has_much_more_cached_goes_first_and_of_equals_the_first_in_turn() -> None:
    assert chosen(of(0.0, 0.9, 0.2, 0.9)) == 1
    assert chosen(of(0.5, 0.5 + LEAST_GAIN, 0.55)) == 0
    assert chosen(of(0.9, 0.0, 0.0), first=1) == 1
    assert chosen(of(0.2, 0.5, 0.9)) == 2


def test_some_do_not_overtake_and_are_not_compared() -> None:
    assert chosen(of(-1.0, 0.9)) == 0, "it was preempted, and comes first"
    assert chosen(of(0.0, -1.0, 0.9)) == 2


def test_nobody_behind_one_that_was_overtaken_enough_passes_it() -> None:
    queue = of(0.0, 0.3, 0.9)
    queue[1].overtaken = MOST
    assert chosen(queue) == 1, "it may itself go on, past who may still be overtaken"
    queue[0].overtaken = MOST
    assert chosen(queue) == 0


def test_only_a_window_is_looked_at() -> None:
    assert chosen(of(*[0.0] * (WINDOW - 1), 1.0)) == WINDOW - 1
    assert chosen(of(*[0.0] * WINDOW, 1.0)) == 0


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_however_they_come_nobody_is_overtaken_more_often_than_that(data: st.DataObject) -> None:
    """An adversary chooses arrivals and what is cached anew each time: everybody is taken in the end, and in bounds."""
    most = data.draw(st.integers(0, 5), "most")
    queue: list[Waiting] = []
    passed_by: dict[int, int] = {}
    everybody: list[Waiting] = []
    for _ in range(data.draw(st.integers(1, 60), "turns")):
        new = [Waiting(0.0) for _ in range(data.draw(st.integers(0, 3)))]
        queue += new
        everybody += new
        for each in queue:
            each.share = data.draw(st.sampled_from([-1.0, 0.0, 0.2, 0.5, 1.0]))
        if queue:
            place = chosen(queue, most=most)
            overtake(queue[:place])
            for each in queue[:place]:
                passed_by[id(each)] = passed_by.get(id(each), 0) + 1
            del queue[place]
    assert all(passed_by.get(id(each), 0) == each.overtaken <= most for each in everybody)


# --- in the scheduler


GROUPS = [prompt_of(24, 7 * group) for group in range(5)]


def tight(**more: object) -> Driver:
    return make(**{"frames": 24, "rows": 3, "page_size": 4, "max_length": 60, **more})  # type: ignore[arg-type]


def in_random_order(driver: Driver, count: int, seed: int) -> list[tuple[Sequence, list[int]]]:
    """Requests that begin with one of five prompts, which do not fit into the pool together."""
    draw = random.Random(seed)
    asked = []
    for number in range(count):
        prompt = [*draw.choice(GROUPS), number % 50, number // 50]
        asked.append((driver.submit(prompt, 4), prompt))
    return asked


def computed(driver: Driver) -> int:
    return sum(len(plan.token_ids) for plan in driver.executor.plans)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_begin_alike_go_together_and_less_is_computed(seed: int) -> None:
    tokens = []
    for most in (0, 8, 32):
        driver = tight(most_overtaken=most)
        asked = in_random_order(driver, 60, seed)
        driver.run(limit=5000)
        for sequence, prompt in asked:
            assert driver.output[sequence.sequence_id] == expected_output(prompt, 4)
            assert sequence.overtaken <= most
        tokens.append(computed(driver))
    assert tokens[1] < 0.9 * tokens[0]
    assert tokens[2] < 0.75 * tokens[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_cached_prompts_starves_nobody(seed: int) -> None:
    """Whoever waits with a prompt of its own is passed by at most so many that came after it."""
    driver, draw = tight(most_overtaken=4), random.Random(seed)
    loners = []
    for turn in range(120):
        driver.submit([*GROUPS[0], turn % 50, draw.randrange(50)], 3)
        if turn % 20 == 10:
            loners.append(driver.submit([40 + turn % 7, turn % 50, *prompt_of(20, turn)], 3))
        driver.step()
    driver.run(limit=5000)
    everybody = sorted(driver.ended)
    assert len(everybody) == 126
    for loner in loners:
        assert loner.overtaken <= 4
        assert driver.output[loner.sequence_id] == expected_output(loner.prompt_ids.tolist(), 3)


def test_a_cached_prompt_that_does_not_fit_holds_up_nobody() -> None:
    driver = tight(most_overtaken=32, frames=20, max_length=64)
    long = prompt_of(56, 3)
    driver.submit(long, 1)
    driver.run()
    running = driver.submit(prompt_of(14, 1), 30)
    driver.step()
    assert driver.scheduler.memory.free_frames < 4
    short = driver.submit([41, 42, *prompt_of(14, 9)], 2)
    driver.submit([*long, *range(6)], 2)
    for _ in range(2):
        driver.step()
    assert short.admitted_s is not None
    assert running.preemptions == 0
    driver.run()


def test_while_frames_are_free_the_order_is_that_of_arrival() -> None:
    driver = make(frames=400, rows=2, page_size=4, max_length=60, most_overtaken=32)
    sequences = [sequence for sequence, _ in in_random_order(driver, 30, 5)]
    driver.run()
    assert all(sequence.overtaken == 0 for sequence in sequences)


def test_what_a_step_looks_up_does_not_grow_with_the_queue() -> None:
    """C21: thousands wait, and a step looks at a window of them, mostly at what it has looked up before."""
    driver = tight(most_overtaken=32)
    in_random_order(driver, 3000, 9)
    memory, looked = driver.scheduler.memory, [0]
    original = memory.lookup

    def counted(*args, **more):  # type: ignore[no-untyped-def]
        looked[-1] += 1
        return original(*args, **more)

    memory.lookup = counted  # type: ignore[method-assign]
    for _ in range(200):
        looked.append(0)
        driver.step()
    assert max(looked) <= 2 * WINDOW
    assert sum(looked) / 200 <= 2 * WINDOW / FRESH_STEPS + 3
