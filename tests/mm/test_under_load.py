"""Pools that are far too small, copies that fail, forks: every Sequence ends, and with exactly its own output."""

from collections import Counter
from random import Random

import pytest
from memory_house import House
from memory_load import Job, Load, alone

from mm import CostEstimates, SwapBounds, Watermarks

P = 4
SWAPS = CostEstimates(copy_page_s=1e-6, prefill_token_s=1e-3)
RECOMPUTES = CostEstimates(copy_page_s=1.0, prefill_token_s=1e-6)


def jobs_of(count: int, *, seed: int = 0, forks: int = 0, prompt: int = 12, output: int = 20) -> list[Job]:
    """Prompts that share beginnings now and then; outputs of fixed lengths."""
    draw, beginnings = Random(seed), [[i] * 6 for i in range(3)]
    return [
        Job(str(i), draw.choice(beginnings) + draw.choices(range(50), k=draw.randint(1, prompt)), output, forks)
        for i in range(count)
    ]


def check_outputs(load: Load) -> None:
    for job in load.ended:
        assert job.tokens[len(job.prompt) :] == alone(job.prompt, job.count)


def check_books_of_an_idle_house(house: House) -> None:
    """C16: free + idle cached = total; after a flush, free = total; every slot that is used holds a cached page."""
    while house.mover.in_flight:
        house.finish(house.mover.in_flight[next(iter(house.mover.in_flight))])
    house.check()
    now = house.memory.information()
    assert now.free_frames + now.cached_frames == now.total_frames
    assert now.references == now.sequence_slots == now.rows == now.committed_frames == 0
    house.memory.drop_caches()
    assert house.memory.free_frames == now.total_frames
    assert house.memory.swap.free_slots == now.total_slots
    house.check()


@pytest.mark.parametrize("costs", [SWAPS, RECOMPUTES], ids=["swap", "recompute"])
def test_preempted_sequences_come_back_whole(costs: CostEstimates) -> None:
    """C14: a pool of 1.3 Sequences for 24 of them: each ends with exactly what it produces alone."""
    house = House(frames=12, rows=8, slots=40, costs=costs, watermarks=Watermarks(0, 1, 2))
    load = Load(house, jobs_of(24))
    load.run(most_steps=4_000)
    assert len(load.ended) == 24
    check_outputs(load)
    counters = house.memory.counters()
    assert (counters.preempt_swap if costs is SWAPS else counters.preempt_recompute) > 5
    check_books_of_an_idle_house(house)


@pytest.mark.parametrize("slots", [18, 5, 0])
def test_swap_that_is_full_or_missing_falls_back_to_recomputation(slots: int) -> None:
    """C13: a pool for three, swap for two or for none, 60 requests of two continuations each: all end."""
    house = House(frames=27, rows=12, slots=slots, costs=SWAPS, watermarks=Watermarks(0, 1, 3))
    load = Load(house, jobs_of(60, forks=1, seed=slots), seed=slots)
    load.run(most_steps=6_000)
    assert len(load.ended) >= 60
    check_outputs(load)
    if slots < 18:
        assert house.memory.counters().preempt_recompute > 0
    check_books_of_an_idle_house(house)


def test_the_books_balance_after_each_of_many_busy_times() -> None:
    """C16: a mix with forks and failures, ten times over, idle and flushed in between."""
    house = House(frames=30, rows=10, slots=12, costs=SWAPS, swap_bounds=SwapBounds(8, 8))
    for seed in range(10):
        load = Load(house, jobs_of(12, seed=seed, forks=seed % 3, output=1 + 3 * seed), seed=seed, failures=0.3)
        load.run(most_steps=4_000)
        check_outputs(load)
        check_books_of_an_idle_house(house)


@pytest.mark.parametrize("seed", range(6))
def test_an_adversarial_load_neither_locks_nor_starves_anybody(seed: int) -> None:
    """The oldest always gets on, so everybody becomes the oldest, and ends after a bounded number of preemptions.

    Copies fail half of the time, every Sequence needs nearly the whole pool at its end, and swap is nearly always full.
    """
    house = House(frames=14, rows=10, slots=10, watermarks=Watermarks(0, 2, 4), costs=[SWAPS, RECOMPUTES][seed % 2])
    jobs = jobs_of(20, seed=seed, prompt=20, output=26)
    load = Load(house, jobs, seed=seed, failures=0.5)
    load.run(most_steps=6_000)
    assert len(load.ended) == 20
    check_outputs(load)
    assert max(job.preemptions for job in load.ended) <= 3 * len(jobs)  # a swap-out that fails is ordered again
    by_end = sorted(load.ended, key=lambda job: job.ended_step)
    assert int(by_end[0].name) < 10
    check_books_of_an_idle_house(house)


def test_a_request_that_needs_the_whole_pool_ends_and_so_do_those_behind_it() -> None:
    """C15, what memory has to do with it: largest first, then small ones; nobody waits for ever."""
    house = House(frames=10, rows=6, slots=4)
    assert house.memory.max_tokens == 40
    largest = Job("0", list(range(20)), 20)
    load = Load(house, [largest, *[Job(str(i), [i, i], 3) for i in range(1, 8)]])
    load.run(most_steps=1_000)
    assert len(load.ended) == 8
    check_outputs(load)


def test_the_same_trace_gives_the_same_decisions() -> None:
    """Replay: every event of the flight recorder comes out the same, though each process has its own secret."""

    def record() -> list[object]:
        house = House(frames=20, rows=8, slots=10, costs=CostEstimates(1e-4, 1e-4))
        load = Load(house, jobs_of(20, forks=1, seed=3), seed=3)
        load.run(most_steps=4_000)
        return list(house.memory.find_events(100_000))

    first, second = record(), record()
    assert len(first) > 500
    assert first == second
    kinds = Counter(event.kind for event in first)  # type: ignore[attr-defined]
    assert {"allocate", "copy", "share", "fork", "preempt", "evict", "swap_out", "swap_in", "complete"} <= kinds.keys()
