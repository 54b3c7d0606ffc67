"""Tenants in the request path: limits hold, who meets one holds up nobody else, outputs are those of solo runs."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from real_house import real_house
from scheduler_driver import Driver, make, prompt_of
from simulated_executor import expected_beams, expected_output
from tiny_model import write_tiny_model

from mm import TenantLimits
from mm.tenants import UNLIMITED
from model.step_plan import SamplingParameters
from service.admission import AWAIT_STEPS
from service.engine_client import BeamSearch, Ended, EngineClient, Submit
from service.errors import BadRequest
from service.request import Sequence, State
from service.tenant_settings import read_tenants
from service.token_stream import TokenStream


def usage(driver: Driver, tenant: str) -> int:
    tenants = driver.scheduler.memory.tenants
    return int(tenants.usage[tenants.id(tenant)])


def mapped(driver: Driver, tenant: str) -> int:
    """Frames charged to a tenant that are not idle."""
    tenants = driver.scheduler.memory.tenants
    return usage(driver, tenant) - driver.scheduler.memory.lru.idle_of(tenants.id(tenant))


def test_over_max_only_the_tenants_own_pages_are_reclaimed() -> None:
    driver = make(frames=64, tenants={"a": TenantLimits(max=10, high=10)})
    driver.submit(prompt_of(20, 9), 4, tenant="b")
    driver.run()
    for salt in range(4):
        driver.submit(prompt_of(30, salt), 4, tenant="a")
        driver.run()
        assert usage(driver, "a") <= 10
    driver.submit(prompt_of(20, 9), 4, tenant="b")
    driver.run()
    assert driver.ended[5].cached_tokens == 19, "the other tenant's cached pages are untouched"
    assert driver.scheduler.preemptions == 0


def test_a_tenant_at_its_max_waits_and_others_pass_it_by() -> None:
    """No head-of-line blocking: however many of one tenant wait in front, another's request starts at once."""
    driver = make(frames=200, rows=8, tenants={"a": TenantLimits(max=8, high=8)})
    for salt in range(100):
        driver.submit(prompt_of(20, salt), 6, tenant="a")  # 7 pages at its end: one at a time
    for _ in range(4):
        driver.step()  # those behind the first have met the limit, and have been passed by, more than once
    other = driver.submit(prompt_of(20, 7), 6, tenant="b")
    driver.step()
    assert other.state is State.RUNNING
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, usage(driver, "a"))
    assert most <= 8
    assert list(driver.ended)[0:2] == [0, 100] or list(driver.ended)[0:2] == [100, 0]
    assert [i for i in driver.ended if i != 100] == list(range(100)), "in order within the tenant"
    for salt in range(100):
        assert driver.output[salt] == expected_output(prompt_of(20, salt), 6)


def test_a_throttled_tenant_costs_no_look_at_its_queue() -> None:
    """C21: the work of a step does not grow with the number that wait behind a limit."""
    driver = make(frames=200, rows=8, tenants={"a": TenantLimits(max=8, high=8)})
    for salt in range(500):
        driver.submit(prompt_of(20, salt), 6, tenant="a")
    looked_at: list[Sequence] = []
    original = driver.scheduler._admission._look_up

    def look_up(sequence: Sequence):  # type: ignore[no-untyped-def]
        looked_at.append(sequence)
        return original(sequence)

    driver.scheduler._admission._look_up = look_up  # type: ignore[method-assign]
    for _ in range(4):
        driver.step()
    assert len(looked_at) <= 4
    for sequence in list(driver.scheduler.sequences.waiting.in_order(1000)):
        driver.scheduler.end(sequence, "abort", driver.now)
    driver.run()


def test_at_max_the_tenants_own_youngest_is_preempted_and_nobody_elses() -> None:
    driver = make(frames=64, rows=8, tenants={"a": TenantLimits(max=12, high=12)})
    others = [driver.submit(prompt_of(6, 30 + salt), 30, tenant="b") for salt in range(2)]
    mine = [driver.submit(prompt_of(6, salt), 30, tenant="a") for salt in range(3)]
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, usage(driver, "a"))
    assert most <= 12
    assert sum(sequence.preemptions for sequence in mine) > 0
    assert mine[0].preemptions == 0, "the oldest of the tenant gets on"
    assert sum(sequence.preemptions for sequence in others) == 0
    for sequence in (*mine, *others):
        prompt = sequence.tokens[: sequence.prompt_tokens].tolist()
        assert driver.output[sequence.sequence_id] == expected_output(prompt, 30)


def test_above_high_nothing_more_is_admitted_while_the_tenant_runs() -> None:
    driver = make(frames=64, rows=8, tenants={"a": TenantLimits(high=6)})
    first = driver.submit(prompt_of(30, 1), 8, tenant="a")  # 8 pages: above high by itself, and runs all the same
    second = driver.submit(prompt_of(6, 2), 3, tenant="a")
    driver.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    while first.state is not State.ENDED:
        assert second.state is State.WAITING
        driver.step()
    driver.run()
    assert driver.scheduler.preemptions == 0
    assert driver.output[1] == expected_output(prompt_of(6, 2), 3)


def test_memory_within_min_is_not_taken_by_preemption() -> None:
    """The youngest would go, but it is protected; one who is not goes in its place."""
    driver = make(frames=16, rows=4, tenants={"a": TenantLimits(min=8, low=8)})
    driver.submit(prompt_of(6, 1), 26, tenant="b")
    middle = driver.submit(prompt_of(6, 2), 26, tenant="b")
    youngest = driver.submit(prompt_of(6, 3), 26, tenant="a")
    driver.run()
    assert middle.preemptions > 0
    assert youngest.preemptions == 0
    for i in range(3):
        assert driver.output[i] == expected_output(prompt_of(6, i + 1), 26)


def test_memory_within_low_goes_last() -> None:
    driver = make(frames=16, rows=4, tenants={"a": TenantLimits(low=8)})
    driver.submit(prompt_of(6, 1), 40, tenant="b")
    middle = driver.submit(prompt_of(6, 2), 26, tenant="b")
    youngest = driver.submit(prompt_of(6, 3), 26, tenant="a")
    while not middle.preemptions:
        driver.step()
    assert youngest.preemptions == 0
    driver.run()
    for i, count in enumerate((40, 26, 26)):
        assert driver.output[i] == expected_output(prompt_of(6, i + 1), count)


def test_idle_pages_that_a_min_keeps_serve_their_own_tenant() -> None:
    """What others cannot have is as good as free for the tenant itself, in admission, prefill and decode."""
    driver = make(frames=20, rows=4, max_batched_tokens=8, tenants={"a": TenantLimits(min=16, low=16)})
    for salt in range(3):
        driver.submit(prompt_of(50, salt), 14, tenant="a")
        driver.run()
        assert driver.output[salt] == expected_output(prompt_of(50, salt), 14)
    assert driver.scheduler.memory.available_frames == 20 - 16, "to others the idle pages within min are not there"


def test_swap_max_bounds_a_tenants_swap_and_recomputation_takes_over() -> None:
    driver = make(frames=64, rows=8, slots=40, tenants={"a": TenantLimits(max=12, high=12, swap_max=4)})
    for salt in range(4):
        driver.submit(prompt_of(6, salt), 30, tenant="a")
    most = 0
    tenants = driver.scheduler.memory.tenants
    while driver.scheduler.has_work or driver.executor.mover.in_flight:
        driver.step()
        most = max(most, int(tenants.swap_usage[tenants.id("a")]))
    assert most <= 4
    assert driver.scheduler.preemptions > 0
    assert driver.scheduler.memory.counters().preempt_recompute > 0
    for salt in range(4):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_one_that_is_swapped_out_at_its_limit_holds_up_its_own_tenant_alone() -> None:
    """It comes back before any other of its tenant is admitted; other tenants are admitted meanwhile."""
    driver = make(frames=64, rows=8, slots=40, tenants={"a": TenantLimits(max=12, high=12)})
    mine = [driver.submit(prompt_of(6, salt), 30, tenant="a") for salt in range(3)]
    while not driver.scheduler.sequences.swapped:
        driver.step()
    late = driver.submit(prompt_of(6, 8), 3, tenant="a")
    other = driver.submit(prompt_of(6, 9), 30, tenant="b")
    driver.step()
    driver.step()
    assert driver.scheduler.sequences.swapped
    assert other.state is State.RUNNING
    while any(sequence.state is State.SWAPPED for sequence in mine):
        assert late.state is State.WAITING
        driver.step()
    driver.run()
    assert other.preemptions == 0
    for salt in range(3):
        assert driver.output[salt] == expected_output(prompt_of(6, salt), 30)


def test_who_comes_back_from_swap_leaves_a_frame_to_each_of_its_tenant_that_runs() -> None:
    """Else it takes, again and again, the frame that was just freed for an older one."""
    driver = make(frames=64, rows=8, slots=40, tenants={"a": TenantLimits(max=12, high=12)})
    scheduler, number = driver.scheduler, driver.scheduler.memory.tenants.id("a")
    original, spare = scheduler.sequences.bring_in, []

    def bring_in(sequence: Sequence) -> bool:
        beside = scheduler.sequences.running_by_tenant["a"]
        done = original(sequence)
        spare.append(scheduler.memory.room().left[number] - beside)
        return done

    scheduler.sequences.bring_in = bring_in  # type: ignore[method-assign]
    for salt in range(4):
        driver.submit(prompt_of(6, salt), 30, tenant="a")
    driver.run()
    assert len(spare) > 2
    assert min(spare) >= 0


def test_a_limit_that_is_lowered_while_all_of_a_tenant_are_in_swap_ends_in_no_standstill() -> None:
    """The oldest does not fit beside what younger ones in swap share and so still map: they give that up."""
    driver = make(frames=64, rows=8, slots=60, tenants={"a": TenantLimits(max=24, high=24)})
    sequences, memory = driver.scheduler.sequences, driver.scheduler.memory
    driver.submit(prompt_of(20, 9), 20, tenant="a")
    for salt in range(2):
        driver.submit([*prompt_of(20), salt], 10, tenant="a")
    for _ in range(8):
        driver.step()
    assert len(sequences.running) == 3
    for sequence in list(sequences.running.values()):
        assert sequences.swap_out([sequence])
    memory.tenants.set_limits("a", TenantLimits(max=10, high=10))
    driver.run()
    assert driver.output[0] == expected_output(prompt_of(20, 9), 20)
    for salt in range(2):
        assert driver.output[1 + salt] == expected_output([*prompt_of(20), salt], 10)


def test_waiting_for_pages_that_another_tenant_computes_is_bounded() -> None:
    """The writer stands still at its tenant's limit: who waits for its pages computes them in the end."""
    driver = make(frames=64, max_batched_tokens=8, tenants={"a": TenantLimits(max=20, high=20)})
    tenants = driver.scheduler.memory.tenants
    driver.submit(prompt_of(3, 9), 100, tenant="c")  # so that there is a step to take
    driver.submit(prompt_of(40), 4, tenant="a")
    for _ in range(3):
        driver.step()
    tenants.set_limits("a", TenantLimits(max=1, high=1))
    waiter = driver.submit(prompt_of(40), 4, tenant="b")
    steps = 0
    while waiter.state is State.WAITING and steps < 2 * AWAIT_STEPS:
        driver.step()
        steps += 1
    assert steps == AWAIT_STEPS + 1
    tenants.set_limits("a", TenantLimits(max=20, high=20))
    driver.run()
    assert driver.output[1] == driver.output[2] == expected_output(prompt_of(40), 4)


def test_nobody_waits_for_pages_that_a_sequence_in_swap_was_computing() -> None:
    """Its tenant's limit may keep it there for ever."""
    driver = make(frames=64, slots=40, max_batched_tokens=8, tenants={"a": TenantLimits(max=20, high=20)})
    tenants = driver.scheduler.memory.tenants
    writer = driver.submit(prompt_of(40), 4, tenant="a")
    driver.step()
    driver.step()
    assert driver.scheduler.sequences.swap_out([writer])
    tenants.set_limits("a", TenantLimits(max=1, high=1))
    waiter = driver.submit(prompt_of(40), 4, tenant="b")
    driver.step()
    assert waiter.state is State.RUNNING
    tenants.set_limits("a", TenantLimits(max=20, high=20))
    driver.run()
    assert driver.output[0] == driver.output[1] == expected_output(prompt_of(40), 4)


def test_steady_decode_stops_at_a_limit() -> None:
    """The fast path of a step must see that the next page is one too many for a tenant, though the pool has room."""
    driver = make(frames=64, rows=8, tenants={"a": TenantLimits(max=9, high=9)})
    for salt in range(2):
        driver.submit(prompt_of(5, salt), 29, tenant="a")
    steady = 0
    while driver.scheduler.has_work:
        driver.step()
        steady += driver.scheduler._steady is not None
        assert usage(driver, "a") <= 9
    assert steady > 10
    assert driver.scheduler.preemptions > 0
    for salt in range(2):
        assert driver.output[salt] == expected_output(prompt_of(5, salt), 29)


def test_an_isolated_tenant_finds_nothing_of_others_and_they_nothing_of_it() -> None:
    driver = make(frames=64, tenants={"a": TenantLimits(isolate=True)})
    for tenant in ("b", "a", "a", "c"):
        driver.submit(prompt_of(20), 3, tenant=tenant)
        driver.run()
    assert [driver.ended[i].cached_tokens for i in range(4)] == [0, 0, 19, 19]


def largest(driver: Driver, tenant: str) -> int:
    return min(driver.scheduler.settings.max_length, driver.scheduler.memory.max_tokens_of(tenant))


def adversaries(seed: int, slots: int) -> Driver:
    """Three tenants in a pool that none of them fits into beside the others; one without limits."""
    kinds = [
        {
            "a": TenantLimits(max=9, high=6),
            "b": TenantLimits(min=4, low=6),
            "c": TenantLimits(max=7, high=7, swap_max=3),
        },
        {"a": TenantLimits(min=5, low=5), "b": TenantLimits(min=5, low=5, max=12, high=8), "c": TenantLimits(low=3)},
        {
            "a": TenantLimits(max=6, high=6),
            "b": TenantLimits(max=6, high=6, isolate=True),
            "c": TenantLimits(weight=500),
        },
    ]
    return make(frames=18, rows=8, slots=slots, max_batched_tokens=12, max_length=60, tenants=kinds[seed % 3])


@pytest.mark.parametrize("slots", [0, 6, 40])
@pytest.mark.parametrize("seed", range(6))
def test_an_adversarial_load_of_several_tenants_neither_locks_nor_starves_anybody(seed: int, slots: int) -> None:
    """Every Sequence wants all that its tenant may ever hold, shares beginnings with others, and copies fail at random.

    Everybody ends, with exactly its own output; no max is ever exceeded; the oldest of each tenant is never preempted
    for its own tenant's sake; preemptions of one Sequence are bounded.
    """
    driver, draw = adversaries(seed, slots), random.Random(seed)
    driver.executor.end_swaps = lambda ticket: draw.choice([None, True, True, True, slots < 20])
    asked: list[tuple[Sequence, list[int], int]] = []
    for _ in range(60):
        tenant = draw.choice(["a", "a", "b", "c", "d"])
        room = largest(driver, tenant)
        length = draw.randint(1, room - 1)
        prompt = [draw.randrange(3)] * min(length, 6) + [draw.randrange(50) for _ in range(max(0, length - 6))]
        limit = room - length if draw.random() < 0.5 else draw.randint(1, room - length)
        asked.append((driver.submit(prompt, limit, tenant=tenant), prompt, limit))
        for _ in range(draw.choice([0, 0, 0, 1, 5])):
            step_within_limits(driver)
    steps = 0
    while driver.scheduler.has_work or driver.executor.mover.in_flight:
        step_within_limits(driver)
        steps += 1
        assert steps < 20_000, "no end: a livelock"
    for sequence, prompt, limit in asked:
        assert driver.output[sequence.sequence_id] == expected_output(prompt, limit)
    assert driver.scheduler.preemptions > 0
    assert max(sequence.preemptions for sequence, _, _ in asked) <= 3 * len(asked)
    memory = driver.scheduler.memory
    memory.drop_caches()
    assert memory.free_frames == memory.frames.total


def step_within_limits(driver: Driver) -> None:
    driver.step()
    tenants = driver.scheduler.memory.tenants
    for number, limits in enumerate(tenants.limits):
        if limits.max < UNLIMITED and not tenants.foreign:  # a charge that is passed on may exceed it for a while
            assert mapped_at_most(driver, number) <= limits.max


def mapped_at_most(driver: Driver, tenant: int) -> int:
    memory = driver.scheduler.memory
    return int(memory.tenants.usage[tenant]) - memory.lru.idle_of(tenant)


# --- through the client, computed by the real executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


async def ask(client: EngineClient, prompt: list[int], max_tokens: int, **more: Any) -> tuple[list[int], Ended]:
    number = client.next_sequence_id()
    stream = TokenStream(lambda: client.cancel(number))
    sampling = SamplingParameters(temperature=0.0)
    client.submit(Submit(number, f"request-{number}", prompt, max_tokens, sampling, [], **more), stream)
    tokens: list[int] = []
    async for chunk in stream:
        tokens += chunk.tokens
        if chunk.ended is not None:
            return tokens, chunk.ended
    raise AssertionError("the stream ended without saying how")


LIMITS = {
    "a": {"memory_max": "30%", "memory_high": "20%"},
    "b": {"memory_min": "25%", "weight": 300},
    "c": {"memory_max": "20%", "swap_max": "10%", "isolate": True},
}


@pytest.mark.parametrize("swap_bytes", [0, 20_000])
async def test_tenants_over_tight_limits_get_the_tokens_of_solo_runs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, swap_bytes: int
) -> None:
    """Settings, engine, executor: 32 frames of 4 tokens for four tenants at once; the house audits at the end."""
    frame = 4 * 2 * 16 * 4  # tokens x keys and values x head size x float32, of one layer and one head
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": 4,
        "kv_cache_memory_bytes": 32 * frame,
        "swap_memory_bytes": swap_bytes,
        "max_model_len": 96,
        "tenants": read_tenants(LIMITS),
    }
    async with real_house(monkeypatch, folder, **settings) as house:
        client, memory, draw = house.client, house.engine.scheduler.memory, random.Random(1)
        assert memory.frames.total == 32
        memory.costs.copy_page_s = 1e-9  # swap is always worth it
        longest = {tenant: client.limits.request_tokens(tenant) for tenant in "abcd"}
        assert longest == {
            "a": 9 * 4,
            "b": 96,
            "c": 6 * 4,
            "d": 24 * 4,
        }
        work = []
        for _ in range(40):
            tenant = draw.choice("aabcd")
            prompt = [7] * draw.randint(1, 8) + [draw.randrange(5, 300) for _ in range(draw.randint(0, 8))]
            work.append((tenant, prompt, min(longest[tenant] - len(prompt), draw.choice([4, 20, 60]))))
        alone = [(await ask(client, prompt, most, prefix_cache=False))[0] for _, prompt, most in work]
        before = house.engine.scheduler.preemptions
        assert before == 0
        together = await asyncio.gather(*(ask(client, prompt, most, tenant=tenant) for tenant, prompt, most in work))
        assert [tokens for tokens, _ in together] == alone
        assert {ended.reason for _, ended in together} == {"length"}
        assert house.engine.scheduler.preemptions > 0
        memory.check_invariants()
        memory.drop_caches()  # what min keeps for b counts as taken to others


async def test_what_never_fits_into_a_tenants_max_is_refused_at_the_door(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """With the true numbers; what fits exactly runs, and what others' min leaves bounds the rest."""
    frame = 4 * 2 * 16 * 4
    settings: dict[str, Any] = {
        "dtype": "float32",
        "page_size": 4,
        "kv_cache_memory_bytes": 32 * frame,
        "max_model_len": 500,
        "tenants": read_tenants({"a": {"memory_max": "25%"}, "b": {"memory_min": "50%"}}),
    }
    async with real_house(monkeypatch, folder, **settings) as house:
        client = house.client
        with pytest.raises(BadRequest, match=r"yours holds 32 tokens of one request. However, you requested 33 tokens"):
            await ask(client, [5] * 20, 13, tenant="a")
        tokens, _ = await ask(client, [5] * 20, 12, tenant="a")
        assert len(tokens) == 12
        with pytest.raises(BadRequest, match=r"holds 64 tokens of one request"):
            await ask(client, [5] * 20, 45, tenant="anybody")
        assert len((await ask(client, [5] * 20, 44, tenant="anybody"))[0]) == 44
        assert len((await ask(client, [5] * 20, 108, tenant="b"))[0]) == 108
        async with house.session.post(
            house.url + "/v1/completions", json={"prompt": [5] * 20, "max_tokens": 45}
        ) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "max_tokens")
        assert "KV memory holds 64 tokens" in error["message"]
        house.engine.scheduler.memory.drop_caches()


def test_who_did_not_fit_is_looked_at_again_when_nothing_runs_though_less_is_free() -> None:
    """What others leave in the cache below their min is not free for it any more: it fits all the same."""
    driver = make(frames=20, rows=16, max_batched_tokens=64, tenants={"b": TenantLimits(min=10, low=10)})
    for number in range(6):
        driver.submit([number + 1] * 3, 7, tenant="b")
    driver.step()
    late = driver.submit(prompt_of(35, 3), 3, tenant="a")
    assert late.limit <= driver.scheduler.memory.max_tokens_of("a")
    driver.run()
    assert driver.output[6] == expected_output(prompt_of(35, 3), 3)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_search_that_has_all_of_its_tenants_max_ends_with_what_it_has(is_alone: bool) -> None:
    """Nobody's end would ever make room for it, however long others run."""
    driver = make(frames=200, rows=12, max_batched_tokens=64, tenants={"a": TenantLimits(max=10, high=10)})
    (choice,) = driver.submit_choices(1, prompt_of(9), 30, beams=BeamSearch(4), tenant="a")
    for number in range(60):
        if not is_alone:
            keep_two_running(driver, number)
        driver.step()
        if choice.sequence_id in driver.ended:
            break
    ended = driver.ended[choice.sequence_id]
    assert ended.reason == "length"
    assert 0 < ended.output_tokens < 30
    driver.run()


def test_a_preempted_search_above_its_tenants_high_comes_back_whole() -> None:
    """Its own beams that stand still meanwhile are not others that run."""
    driver = make(frames=200, rows=12, max_batched_tokens=64, tenants={"a": TenantLimits(max=24, high=6)})
    (choice,) = driver.submit_choices(1, prompt_of(21), 12, beams=BeamSearch(4), tenant="a")
    for _ in range(8):
        driver.step()
    (group,) = driver.scheduler._beams.groups
    for beam in list(group.family.with_row.values()):
        driver.scheduler.sequences.recompute(beam)
    for number in range(100):
        keep_two_running(driver, number)
        driver.step()
        if choice.sequence_id in driver.ended:
            break
    assert driver.output[choice.sequence_id] == expected_beams(prompt_of(21), 12, BeamSearch(4))[0].tokens
    driver.run()


def keep_two_running(driver: Driver, salt: int) -> None:
    """Two Sequences of tenant b at any time."""
    if sum(sequence.tenant == "b" for sequence in driver.scheduler.sequences.running.values()) < 2:
        driver.submit(prompt_of(5, salt), 20, tenant="b")
