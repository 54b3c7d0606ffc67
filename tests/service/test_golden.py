"""The promise of exactness: greedy tokens are transformers' own, in float32, whatever the engine does around them.

The whole engine runs: scheduler, memory manager, executor, one step ahead. Only HTTP is left out.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_engine import engine, frames_for, generate, prefer

from model.step_plan import SamplingParameters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(threads)


async def test_alone(smollm2_folder: Path, golden: list[Any], device: str) -> None:
    """One after the other: every prompt shorter than a chunk, so decode is a batch of one."""
    async with engine(smollm2_folder, device) as assembly:
        for entry in [entry for entry in golden if len(entry.prompt) < 100][::3]:
            entry.check(await generate(assembly, entry.prompt, len(entry.tokens)))


async def test_all_at_once(smollm2_folder: Path, golden: list[Any], device: str) -> None:
    async with engine(smollm2_folder, device) as assembly:
        outputs = await asyncio.gather(*(generate(assembly, e.prompt, len(e.tokens)) for e in golden))
        for entry, output in zip(golden, outputs, strict=True):
            entry.check(output)


@pytest.mark.parametrize(("chunk", "half"), [(32, 0), (64, 1)])
async def test_in_random_order_with_small_chunks(
    smollm2_folder: Path, golden: list[Any], device: str, chunk: int, half: int
) -> None:
    """Requests arrive while others run, and prompts are prefilled piece by piece beside their decodes."""
    entries = [entry for entry in golden if len(entry.prompt) <= 600]
    random.Random(1).shuffle(entries)
    entries = entries[half::2]
    async with engine(smollm2_folder, device, max_num_batched_tokens=chunk) as assembly:

        async def arrive(place: int, entry: Any) -> list[int]:
            while assembly.engine.snapshot().step < 2 * place:  # noqa: ASYNC110  (a step has no event)
                await asyncio.sleep(0.005)
            return await generate(assembly, entry.prompt, len(entry.tokens))

        outputs = await asyncio.gather(*(arrive(place, entry) for place, entry in enumerate(entries)))
        for entry, output in zip(entries, outputs, strict=True):
            entry.check(output)


@pytest.mark.parametrize("is_swapping", [False, True], ids=["recomputed", "swapped"])
async def test_in_a_pool_so_small_that_sequences_are_preempted(
    smollm2_folder: Path, golden: list[Any], device: str, is_swapping: bool
) -> None:
    entries = [entry for entry in golden if 30 <= len(entry.prompt) <= 140]
    pool = frames_for(320, smollm2_folder)
    settings = {"kv_cache_memory_bytes": pool, "max_model_len": 320, "swap_memory_bytes": pool if is_swapping else 0}
    async with engine(smollm2_folder, device, **settings) as assembly:
        memory = assembly.engine.scheduler.memory
        await prefer(assembly, swap=is_swapping)
        outputs = await asyncio.gather(*(generate(assembly, e.prompt, len(e.tokens)) for e in entries))
        assert assembly.engine.scheduler.preemptions > 0
        assert (memory.counters().swap_in > 0) == is_swapping
        for entry, output in zip(entries, outputs, strict=True):
            entry.check(output)


async def test_equal_seeds_draw_equal_tokens_whatever_runs_beside(smollm2_folder: Path, device: str) -> None:
    """C24: alone, five times at once, among differently seeded neighbours."""
    prompt = [504, 3575, 282]
    drawn = SamplingParameters(temperature=0.8, seed=42)
    async with engine(smollm2_folder, device) as assembly:
        alone = await generate(assembly, prompt, 12, drawn)
        others = [SamplingParameters(temperature=1.0, top_p=0.9, seed=seed) for seed in range(8)]
        together = await asyncio.gather(*(generate(assembly, prompt, 12, s) for s in [drawn, *others, drawn, drawn]))
        assert together[0] == together[-1] == together[-2] == alone
        assert len({tuple(output) for output in together[1:-2]}) > 1
