"""Everything at once over a real executor and a tiny model, in memory that is far too small: whatever happens to a
request, what it gives out is what it gives alone."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from golden_engine import Choice, engine, finish, frames_for, prefer, start
from tiny_model import write_tiny_model

from model.step_plan import SamplingParameters
from service.assembly import Assembly
from service.engine_client import BeamSearch

pytestmark = pytest.mark.slow

LONGEST = 128  # tokens of a request
SMALL: dict[str, Any] = {"load_format": "dummy", "max_model_len": LONGEST, "threads": 1, "max_num_seqs": 12}


@dataclass
class Asked:
    """One request, and what it gave alone."""

    prompt: list[int]
    tokens: int
    sampling: SamplingParameters
    count: int
    options: dict[str, Any]
    alone: list[Choice] = field(default_factory=list)

    async def run_alone(self, assembly: Assembly) -> None:
        self.alone = await finish(assembly, self.prompt, self.tokens, self.sampling, count=self.count, **self.options)

    def check(self, choices: list[Choice], cancelled: set[int]) -> None:
        for i, (choice, alone) in enumerate(zip(choices, self.alone, strict=True)):
            if i in cancelled and not choice.ended.done():
                assert choice.tokens == alone.tokens[: len(choice.tokens)]
                continue
            ended, expected = choice.ended.result(), alone.ended.result()
            if ended.reason == "timeout":
                assert "beam_search" in self.options or choice.tokens == alone.tokens[: len(choice.tokens)]
                continue
            assert (choice.tokens, ended.reason) == (alone.tokens, expected.reason)
            assert [score.ids for score in choice.scores] == [score.ids for score in alone.scores]
            assert len(choice.prompt_scores) == len(alone.prompt_scores)
            assert (ended.beam_score is None) == (expected.beam_score is None)
            if ended.beam_score is not None:
                assert ended.beam_score == pytest.approx(expected.beam_score, rel=1e-5, abs=1e-4)


def some_request(draw: random.Random) -> Asked:
    prompt = [
        3 + (position * 37 + draw.randint(0, 3) * 11) % 250 for position in range(draw.choice([1, 15, 16, 33, 64]))
    ]
    options: dict[str, Any] = {"prefix_cache": draw.random() < 0.7, "end_ids": draw.choice([[], list(range(20))])}
    tokens, count = draw.randint(1, 40), draw.choice([1, 1, 2, 4])
    if draw.random() < 0.3:
        width = draw.randint(max(2, count), 4)
        options["beam_search"] = BeamSearch(width, draw.choice([0.0, 1.0, -1.0]), draw.choice([False, True, "never"]))
        return Asked(prompt, min(tokens, 16), SamplingParameters(temperature=0.0), count, options)
    options["prompt_logprobs"] = draw.choice([-1, -1, 1])
    sampling = SamplingParameters(
        temperature=draw.choice([0.0, 0.9]),
        seed=draw.randint(0, 10_000),
        frequency_penalty=draw.choice([0.0, 0.5]),
        logprobs=draw.choice([-1, 0, 2]),
    )
    return Asked(prompt, tokens, sampling, count, options)


async def run_mix(folder: Path, seed: int, requests: int, seconds: float = 0.0) -> None:
    """Ask for `requests` different ones, again and again until `seconds` are over; at least once each."""
    draw = random.Random(seed)
    asked = [some_request(draw) for _ in range(requests)]
    async with engine(folder, "cpu", **SMALL) as roomy:
        for one in asked:
            await one.run_alone(roomy)
    pool = {"kv_cache_memory_bytes": frames_for(LONGEST + 48, folder), "swap_memory_bytes": frames_for(64, folder)}
    async with engine(folder, "cpu", **SMALL, **pool) as assembly:
        await prefer(assembly, swap=True)
        until = time.monotonic() + seconds
        while True:
            draw.shuffle(asked)
            await asyncio.gather(*(ask(assembly, one, random.Random(draw.random())) for one in asked))
            assembly.engine.scheduler.memory.check_invariants()
            if time.monotonic() >= until:
                break
        assert assembly.engine.scheduler.preemptions > 0
        counters = assembly.engine.scheduler.memory.counters()
        assert min(counters.fork, counters.cow_fault, counters.swap_in, counters.evict) > 0


async def ask(assembly: Assembly, one: Asked, draw: random.Random) -> None:
    """With or without a time limit; some of the choices are cancelled. All come at once, so there is never room."""
    limit = {"timeout_s": draw.random()} if draw.random() < 0.15 else {}
    choices = start(assembly, one.prompt, one.tokens, one.sampling, count=one.count, **one.options, **limit)
    cancelled: set[int] = set()
    if draw.random() < 0.2:
        await asyncio.sleep(draw.random() * 0.1)
        cancelled = set(draw.sample(range(one.count), draw.randint(1, one.count)))
        for i in cancelled:
            assembly.client.cancel(choices[i].number)
    await asyncio.gather(*(choice.ended for i, choice in enumerate(choices) if i not in cancelled))
    one.check(choices, cancelled)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("seed", [1, 2])
async def test_any_mix_gives_everybody_what_it_has_alone(folder: Path, seed: int) -> None:
    await run_mix(folder, seed, 30)


@pytest.mark.soak
async def test_a_minute_of_any_mix(folder: Path) -> None:
    await run_mix(folder, random.randrange(1 << 32), 60, seconds=60)
