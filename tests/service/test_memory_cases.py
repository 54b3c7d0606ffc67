"""Memory under pressure, over HTTP with the real executor: cases C11 to C16 and C22.

The network computes in float32, has two layers and large weights: with one layer keys and values depend on their own
token alone, and with small weights answers depend on the last token alone, so wrong pages would go unnoticed. Pools are
small, so that eviction, preemption, swap and chunked prefill all happen within a second; counters say that they did.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from real_house import RealHouse, real_house
from tiny_model import attentive_parameters, write_tiny_model

from mm import content
from service import assembly

B = 16
FRAME_BYTES = B * 2 * 2 * 16 * 4  # tokens x layers x keys and values x head size x float32
LIMIT = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("two-layers"), layers=2)


Open = Any


@pytest.fixture
def open_house(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Open:
    """open_house(frames, slots, **settings): a server over a pool of so many frames."""

    monkeypatch.setattr(assembly, "random_parameters", attentive_parameters)

    def one(frames: int, slots: int = 0, **settings: Any) -> AbstractAsyncContextManager[RealHouse]:
        sizes = {"kv_cache_memory_bytes": frames * FRAME_BYTES, "swap_memory_bytes": slots * FRAME_BYTES}
        small = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": LIMIT}
        return opened(real_house(monkeypatch, folder, **sizes | small | settings), frames)

    return one


@asynccontextmanager
async def opened(house: AbstractAsyncContextManager[RealHouse], frames: int) -> AsyncIterator[RealHouse]:
    async with house as started:
        memory = started.engine.scheduler.memory
        assert memory.frames.total == frames
        memory.costs.copy_page_s = 1e-9  # where there are slots, swap is worth it
        yield started


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 350) for _ in range(count)]


async def ask(house: RealHouse, prompt: list[int], max_tokens: int, **fields: Any) -> tuple[list[int], int]:
    """Greedy, to the full length: the tokens, and how much of the prompt was cached."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": prompt, "max_tokens": max_tokens} | fixed | fields
    if not fields.pop("stream", False):
        answer = await house.post("/v1/completions", body)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens
        return choice["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    events = await house.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
    return tokens, events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


# --- the page cache


async def test_c11_prompt_lengths_around_page_edges_cold_and_cached(open_house: Open) -> None:
    lengths = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 5 * B)
    async with open_house(200) as house:
        for length in lengths:
            prompt = ids(length, length)
            cold, _ = await ask(house, prompt, 2 * B + 1, prefix_cache=False)
            repeats = [await ask(house, prompt, 2 * B + 1) for _ in range(3)]
            assert [tokens for tokens, _ in repeats] == [cold] * 3
            assert [cached for _, cached in repeats] == [0, length - 1, length - 1], "one token is always computed anew"
        twins = await asyncio.gather(*(ask(house, ids(5 * B, 99), 2 * B + 1) for _ in range(2)))
        assert twins[0][0] == twins[1][0] == (await ask(house, ids(5 * B, 99), 2 * B + 1, prefix_cache=False))[0]


async def test_c12_cached_pages_are_tied_to_everything_before_them(open_house: Open) -> None:
    page, x, y = ids(B, 1), ids(B, 2), ids(B, 2)
    y[3] += 1
    prompts = [x + 3 * page, y + 3 * page, 3 * page + x, x + y + 3 * page, page + x + 2 * page, 5 * page]
    async with open_house(200) as house:
        right = [(await ask(house, prompt, 20, prefix_cache=False))[0] for prompt in prompts]
        assert len({tuple(tokens) for tokens in right}) == len(prompts), "else nothing could be told apart"
        assert [(await ask(house, prompt, 20))[0] for prompt in prompts * 2] == right * 2
        salted = [(await ask(house, prompt, 20, cache_salt=salt))[0] for salt in ("a", "b") for prompt in prompts]
        assert salted == right * 2
        assert (await ask(house, prompts[0], 20))[1] == 4 * B - 1, "and yet the cache works"


@pytest.mark.parametrize("kept", [0, 1])
async def test_c12_answers_are_right_whatever_the_hash_is_worth(
    open_house: Open, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Digests are constant, or one byte long: pages are verified token by token, and by what precedes them."""

    digest = content.digest_page
    monkeypatch.setattr(content, "digest_page", lambda before, page: digest(before, page)[:kept].ljust(32, b"0"))
    prompts = [ids(3 * B, beginning) + ids(B, seed) for beginning in (7, 8) for seed in range(3)]
    prompts += [count * prompts[0][:B] + ids(3, 3) for count in (2, 3, 4)]  # one page in several places
    async with open_house(200) as house:
        right = [(await ask(house, prompt, 20, prefix_cache=False))[0] for prompt in prompts]
        for _ in range(2):
            assert [(await ask(house, prompt, 20))[0] for prompt in prompts] == right
        assert kept or house.engine.scheduler.memory.counters().collision > 0


@pytest.mark.parametrize("chunk", [8, B, 40])
async def test_c22_prefill_in_chunks_on_top_of_a_cached_prefix(open_house: Open, chunk: int) -> None:
    """Chunks smaller than a page, as large, and no multiple of it; alone, and mixed with decodes."""
    prefix = ids(5 * B, 1)
    prompts = [prefix + ids(tail, tail) for tail in (1, B - 1, B, B + 1, 3 * chunk)]
    async with open_house(200, max_num_batched_tokens=LIMIT) as house:
        whole = [(await ask(house, prompt, 12, prefix_cache=False))[0] for prompt in prompts]
    async with open_house(200, max_num_batched_tokens=chunk) as house:
        await ask(house, prefix, 1)
        talker = asyncio.create_task(ask(house, ids(4, 5), 200, prefix_cache=False))
        together = await asyncio.gather(*(ask(house, prompt, 12) for prompt in prompts))
        assert [tokens for tokens, _ in together] == whole
        assert min(cached for _, cached in together) >= 4 * B
        again = [await ask(house, prompt, 12) for prompt in prompts]
        assert [tokens for tokens, _ in again] == whole
        assert len((await talker)[0]) == 200


# --- a pool that is too small


def work(count: int, seed: int) -> list[list[int]]:
    """Prompts of up to three pages, which begin alike now and then."""
    draw, beginnings = random.Random(seed), [ids(B + 3, 100 + i) for i in range(3)]
    return [draw.choice(beginnings) + ids(draw.randint(1, B), 1000 * seed + i) for i in range(count)]


async def reference(open_house: Open, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What they get where there is room for all, and no cache."""
    async with open_house(400, max_num_seqs=32) as house:
        answers = await asyncio.gather(*(ask(house, prompt, max_tokens, prefix_cache=False) for prompt in prompts))
        assert house.engine.scheduler.preemptions == 0
    return [tokens for tokens, _ in answers]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [8, 3, 0])
async def test_c13_swap_that_is_full_or_missing(open_house: Open, slots: int) -> None:
    """A pool for about three, swap for two, for less than one, for none: all end with their own tokens, none stands."""
    prompts = work(60, slots + 1)
    alone = await reference(open_house, prompts, 30)
    async with open_house(12, slots) as house:
        together = await asyncio.gather(*(ask(house, prompt, 30) for prompt in prompts))
        assert [tokens for tokens, _ in together] == alone
        counters = house.engine.scheduler.memory.counters()
        assert house.engine.scheduler.preemptions > 0
        assert (counters.swap_out > 0) == (slots > 0)
        if slots < 8:
            assert counters.preempt_recompute > 0


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 40])
async def test_c14_preempted_requests_come_back_whole(open_house: Open, slots: int) -> None:
    """A pool of 1.3 requests for 24, half of them streamed: exactly the tokens asked for, and those of a lonely run."""
    prompts = work(24, 5)
    alone = await reference(open_house, prompts, 70)
    async with open_house(10, slots) as house:
        together = await asyncio.gather(
            *(ask(house, prompt, 70, stream=number % 2 == 0) for number, prompt in enumerate(prompts))
        )
        assert [tokens for tokens, _ in together] == alone
        metrics = await house.metrics()
        assert metrics["vllm:num_preemptions_total"] > 0
        assert metrics["vllm:num_preemptions_total"] < 10 * len(prompts), "bounded: the oldest always gets on"


async def test_c15_a_request_that_can_never_fit_is_refused_and_holds_up_nobody(open_house: Open) -> None:
    """Too large by its prompt, or by what it may grow to: at once, with both numbers; what fits exactly runs."""
    async with open_house(10) as house:
        for length, output, param in ((200, 1, "prompt"), (100, 61, "max_tokens"), (1, 160, "max_tokens")):
            body = {"prompt": ids(length, 1), "max_tokens": output}
            async with house.session.post(house.url + "/v1/completions", json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param)
            assert (
                f"holds 160 tokens of one request. However, you requested {length + output} tokens" in error["message"]
            )
        largest = asyncio.create_task(ask(house, ids(100, 1), 60))
        small = [asyncio.create_task(ask(house, ids(4, seed), 3)) for seed in range(8)]
        assert len((await largest)[0]) == 60
        for each in small:
            assert len((await each)[0]) == 3


async def test_c16_the_books_balance_whenever_the_server_is_idle(open_house: Open) -> None:
    """Shared prefixes, streams, clients that leave, outputs of one token, preemption and swap: ten busy times over."""
    async with open_house(14, 6) as house:
        memory, draw = house.engine.scheduler.memory, random.Random(3)
        for turn in range(10):
            prompts = work(10, 50 + turn)
            asked = [
                asyncio.create_task(ask(house, prompt, draw.choice([1, 7, 40]), stream=draw.random() < 0.5))
                for prompt in prompts
            ]
            leavers = [await house.open("/v1/completions", {"prompt": prompts[i], "max_tokens": 90}) for i in range(3)]
            await asyncio.sleep(draw.random() / 50)
            for _, writer in leavers:
                writer.close()
            await asyncio.gather(*asked)
            while house.engine.scheduler.has_work or house.engine.queue.requests:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
            facts = await house.meminfo()
            assert facts["free"] + facts["cached"] + facts["copying"] == facts["total"] == 14
            assert facts["references"] == facts["address_spaces"] == 0
            while memory.swapper.in_flight:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
            memory.check_invariants()
            memory.drop_caches()
            facts = await house.meminfo()
            assert (facts["free"], facts["host_free"]) == (14, facts["host_total"])
        assert house.engine.scheduler.preemptions > 0


async def test_a_client_learns_when_its_page_was_evicted_and_nothing_of_whom_for(open_house: Open) -> None:
    """The id of the other request stays with operators, who find it in the shadow of the page."""
    async with open_house(8) as house:
        await ask(house, ids(4 * B, 1), 1)
        await ask(house, ids(6 * B, 2), 20, request_id="somebody-else")
        shadows = house.engine.scheduler.memory.shadows
        assert {shadow.evicted_for for shadow in shadows._shadows.values()} == {"somebody-else"}
        body = {"prompt": ids(4 * B, 1), "max_tokens": 1, "return_cache_info": True}
        answer = await house.post("/v1/completions", body)
        miss = answer["choices"][0]["cache_info"]["miss"]
        assert miss["reason"] == "evicted"
        assert set(miss) == {"reason", "position", "evicted_at"}
        assert "somebody-else" not in json.dumps(answer)
