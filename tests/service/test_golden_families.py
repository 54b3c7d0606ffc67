"""Choices and beams over the real model: a choice has the tokens of a request alone, a search those of transformers."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_engine import GREEDY, Choice, engine, finish, frames_for, generate, prefer

from model.step_plan import SamplingParameters
from service.assembly import Assembly
from service.engine_client import BeamSearch

pytestmark = pytest.mark.slow

PAGE = 16


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Searched:
    """One search of tests/golden/beams.json."""

    prompt: list[int]
    max_tokens: int
    width: int
    length_penalty: float
    early_stopping: Any
    results: list[dict[str, Any]]

    @property
    def options(self) -> BeamSearch:
        return BeamSearch(self.width, self.length_penalty, self.early_stopping)

    def check(self, choices: list[Choice]) -> None:
        assert [choice.tokens for choice in choices] == [result["tokens"] for result in self.results]
        scores = [choice.ended.result().beam_score for choice in choices]
        assert scores == pytest.approx([result["score"] for result in self.results], abs=1e-3)


@pytest.fixture(scope="module")
def searches() -> tuple[list[Searched], list[int]]:
    path = Path(__file__).parents[1] / "golden" / "beams.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Searched(**entry) for entry in content["entries"]], content["end_ids"]


def small_pool(folder: Path, tokens: int, *, is_swapping: bool) -> dict[str, Any]:
    pool = frames_for(tokens, folder)
    swap = pool if is_swapping else 0
    return {"kv_cache_memory_bytes": pool, "max_model_len": tokens, "swap_memory_bytes": swap}


async def test_c17_six_greedy_choices_equal_one(smollm2_folder: Path, golden: list[Any], device: str) -> None:
    """For every place that the prompt may leave in its last page; right after, when it is cached; without the cache."""
    entry = next(entry for entry in golden if len(entry.prompt) >= 4 * PAGE)
    async with engine(smollm2_folder, device) as assembly:
        for length in (3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1):
            alone = await generate(assembly, entry.prompt[:length], 10)
            for cache in (True, False):
                choices = await finish(assembly, entry.prompt[:length], 10, count=6, prefix_cache=cache)
                assert [choice.tokens for choice in choices] == [alone] * 6


async def test_choices_beside_others_equal_transformers(smollm2_folder: Path, golden: list[Any], device: str) -> None:
    entries = [entry for entry in golden if len(entry.prompt) < 100][::2]
    async with engine(smollm2_folder, device, max_num_batched_tokens=64) as assembly:
        families = [finish(assembly, entry.prompt, len(entry.tokens), count=2) for entry in entries]
        for entry, choices in zip(entries, await asyncio.gather(*families), strict=True):
            for choice in choices:
                entry.check(choice.tokens)


async def test_choices_draw_what_requests_with_their_seeds_draw_also_when_preempted(
    smollm2_folder: Path, golden: list[Any], device: str
) -> None:
    prompts = [entry.prompt for entry in golden if 30 <= len(entry.prompt) <= 60][:2]
    # Of 20 tokens: among all 49,152 there is an edge near nearly every number that is drawn, and rounding may decide.
    seeds = [SamplingParameters(temperature=0.8, top_k=20, seed=42 + i) for i in range(3)]
    async with engine(smollm2_folder, device) as assembly:
        alone = [[(await finish(assembly, prompt, 30, one))[0].tokens for one in seeds] for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone[0]}) == 3
    for is_swapping in (False, True):
        pool = small_pool(smollm2_folder, 128, is_swapping=is_swapping)
        async with engine(smollm2_folder, device, **pool) as assembly:
            await prefer(assembly, swap=is_swapping)
            families = await asyncio.gather(*(finish(assembly, prompt, 30, seeds[0], count=3) for prompt in prompts))
            assert assembly.engine.scheduler.preemptions > 0
            assert (assembly.engine.scheduler.memory.counters().swap_in > 0) == is_swapping
        assert [[choice.tokens for choice in choices] for choices in families] == alone


async def test_beams_equal_transformers(
    smollm2_folder: Path, searches: tuple[list[Searched], list[int]], device: str
) -> None:
    """C17 (c): several at a time, for all widths, penalties and ways to stop early."""
    entries, end_ids = searches
    async with engine(smollm2_folder, device) as assembly:
        for first in range(0, len(entries), 3):
            some = entries[first : first + 3]
            results = await asyncio.gather(*(search(assembly, entry, end_ids) for entry in some))
            for entry, choices in zip(some, results, strict=True):
                entry.check(choices)


async def search(assembly: Assembly, entry: Searched, end_ids: list[int]) -> list[Choice]:
    return await finish(
        assembly, entry.prompt, entry.max_tokens, count=entry.width, beam_search=entry.options, end_ids=end_ids
    )


@pytest.mark.parametrize("is_swapping", [False, True], ids=["recomputed", "swapped"])
async def test_beams_in_a_small_pool_beside_others(
    smollm2_folder: Path,
    golden: list[Any],
    searches: tuple[list[Searched], list[int]],
    device: str,
    *,
    is_swapping: bool,
) -> None:
    """They are preempted as a family, and lose nothing; greedy neighbours are transformers' own."""
    entries = [entry for entry in searches[0] if entry.max_tokens > 1][::4]
    greedy = [entry for entry in golden if 30 <= len(entry.prompt) <= 80]
    async with engine(smollm2_folder, device, **small_pool(smollm2_folder, 288, is_swapping=is_swapping)) as assembly:
        await prefer(assembly, swap=is_swapping)
        neighbours = [
            asyncio.create_task(generate(assembly, entry.prompt, len(entry.tokens), GREEDY)) for entry in greedy
        ]
        results = await asyncio.gather(*(search(assembly, entry, searches[1]) for entry in entries))
        outputs = await asyncio.gather(*neighbours)
        assert assembly.engine.scheduler.preemptions > 0
    for entry, choices in zip(entries, results, strict=True):
        entry.check(choices)
    for entry, output in zip(greedy, outputs, strict=True):
        entry.check(output)


async def test_scores_of_tokens_and_prompts_are_those_of_the_whole_text(
    smollm2_folder: Path, golden: list[Any], device: str
) -> None:
    """What a prompt is scored with is what its tokens are sampled with: chunked, cached, beside others."""
    entry = next(entry for entry in golden if 60 <= len(entry.prompt) <= 100)
    asking = SamplingParameters(temperature=0.0, logprobs=3)
    async with engine(smollm2_folder, device, max_num_batched_tokens=32) as assembly:
        (sampled,) = await finish(assembly, entry.prompt, 16, asking)
        whole = entry.prompt + sampled.tokens
        first, *siblings = await finish(assembly, whole, 2, asking, count=3, prompt_logprobs=3)
        for choice in (first, *siblings):
            assert len(choice.scores) == 2
        assert [choice.prompt_scores for choice in siblings] == [[], []]
        assert len(first.prompt_scores) == len(whole) - 1
        again = first.prompt_scores[len(entry.prompt) - 1 :]
        for token, before, after in zip(sampled.tokens, sampled.scores, again, strict=True):
            assert before.ids[0] == token  # greedy
            assert before.chosen == before.values[0]
            assert before.rank == after.rank == 1
            assert before.ids == after.ids
            assert before.values == pytest.approx(after.values, abs=1e-4)
