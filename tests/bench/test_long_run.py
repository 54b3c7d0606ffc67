"""The long mixed load: it finds what is wrong, and a short one finds nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench import offline
from bench.long_run import Clients, Open, Sample, Watch, measure, settings_of, settle
from mm import MemoryManager
from service.engine_client import Ended, EngineDied, TokenBatch

TINY = ["--shape", "tiny", "--device", "cpu"]
SAMPLE = Sample(0.0, 0, 0, 900.0, 10, 5, 0, 100, 8, 0, 1, 1, 1)


def clients() -> Clients:
    limits = SimpleNamespace(max_request_tokens=500, max_model_len=400, max_running=4)
    assembly: Any = SimpleNamespace(
        engine=SimpleNamespace(post=lambda *_: None),
        config=SimpleNamespace(vocabulary=300),
        client=SimpleNamespace(limits=limits),
    )
    return Clients(assembly, seed=1)


def watch(samples: list[Sample]) -> Watch:
    assembly: Any = SimpleNamespace()
    made = Watch(assembly, clients())
    made.samples = samples
    return made


async def test_a_short_run_finds_nothing_wrong() -> None:
    """Every kind of request was asked, and the books balance afterwards."""
    args = settings_of([*TINY, "--minutes", "0.05", "--every", "0.5"])
    answer = await measure(args)
    assert answer["problems"] == []
    assert answer["tokens"] > 0
    assert sum(answer["ended"].values()) > 0
    assert answer["last"]["free_frames"] == answer["frames"]
    assert answer["samples"] > 2


def test_a_token_after_the_end_is_a_problem() -> None:
    ours = clients()
    ours.open[1] = Open(max_tokens=2)
    ours.deliver(TokenBatch(1, [1, 1], [5, 6], [Ended(1, "length")]))
    assert ours.problems == []
    ours.deliver(TokenBatch(2, [1], [7], []))
    assert ours.problems == ["sequence 1 got a token after its end"]


def test_an_answer_that_is_too_short_is_a_problem() -> None:
    ours = clients()
    ours.open[1] = Open(max_tokens=3)
    ours.deliver(TokenBatch(1, [1, 1], [5, 6], [Ended(1, "length")]))
    assert ours.problems == ["sequence 1 ended by length with 2 of 3 tokens"]


def test_errors_and_a_dead_engine_are_problems() -> None:
    ours = clients()
    ours.open[1] = Open(max_tokens=3)
    ours.deliver(TokenBatch(1, [], [], [Ended(1, "error", "not finite")]))
    ours.deliver(EngineDied("gone"))
    assert ours.problems == ["sequence 1: not finite", "the engine died: gone"]


async def test_what_is_still_held_is_a_problem() -> None:
    memory = MemoryManager(frames=20, max_rows=2, max_pages=8)
    memory.create("forgotten").grow(20)
    scheduler = SimpleNamespace(memory=memory, has_work=False)
    assembly: Any = SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler))
    found = await settle(assembly, clients())
    assert "1 rows are still held" in found
    assert "2 frames are still held" in found


def test_slopes_are_those_of_the_second_half() -> None:
    """Growth at the start is no leak. The last sample is of an idle engine."""
    grown = [100, 5000, 9000, 9000, 9010, 9020, 9030, 9040, 0]
    samples = [replace(SAMPLE, steps=500 * i, resident_bytes=size) for i, size in enumerate(grown)]
    slopes = watch(samples).slopes()
    assert slopes["resident_bytes"] == pytest.approx(20.0)
    assert slopes["open_files"] == 0


def test_too_few_samples_have_no_slope() -> None:
    assert watch([SAMPLE]).slopes() == {}
    assert watch([SAMPLE] * 6).slopes() == {}, "no step in between"


def test_pool_and_swap_area_are_too_small_unless_they_are_given() -> None:
    args = settings_of(TINY)
    assert 0 < args.swap_memory_bytes < args.kv_cache_memory_bytes
    assert settings_of([*TINY, "--pool", "1.0"]).kv_cache_memory_bytes > args.kv_cache_memory_bytes
    assert settings_of([*TINY, "--kv-cache-memory-bytes", "5000000"]).kv_cache_memory_bytes == 5_000_000
    assert offline.SHAPES["tiny"]["hidden_size"] == 128


@pytest.mark.soak
async def test_two_minutes_of_any_load_leave_nothing_behind() -> None:
    """And all that memory can do has happened."""
    answer = await measure(settings_of([*TINY, "--minutes", "2", "--every", "2"]))
    assert answer["problems"] == []
    happened = answer["counters"]
    wanted = {"swap_out", "swap_in", "preempt_swap", "preempt_recompute", "cow_fault", "prefix_hit", "evict", "refault"}
    assert wanted <= set(happened)
    assert answer["slopes_a_1000_steps"]["open_files"] == pytest.approx(0, abs=0.2)
    assert answer["slopes_a_1000_steps"]["resident_bytes"] < 1 << 20
