"""Several choices, from the socket to the tiny model and back, with the real engine (C05, C09, C13, C17, C24).

float32: the tiny model's random logits lie close together, and a batch of another size must not decide between them.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_events import ends, joined
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, folder, dtype="float32", max_num_seqs=16) as house:
        yield house


async def texts(house: RealHouse, **fields: Any) -> list[str]:
    answer = await house.post("/v1/completions", {"ignore_eos": True, "max_tokens": 20} | fields)
    return [choice["text"] for choice in answer["choices"]]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [3 + (position * 37 + salt * 11) % 250 for position in range(length)]


@pytest.mark.parametrize("rest", [0, 1, PAGE - 1])
@pytest.mark.parametrize("cache", [False, True])
async def test_c17_greedy_choices_are_equal(house: RealHouse, rest: int, cache: bool) -> None:
    """Whatever the prompt leaves of its last page; and right after, when the prompt is cached."""
    asked = {"prompt": prompt_of(3 * PAGE + rest), "temperature": 0, "prefix_cache": cache}
    alone = (await texts(house, **asked, n=1))[0]
    for _ in range(2):
        assert await texts(house, **asked, n=6) == [alone] * 6


async def test_c17_forks_share_the_prompt(house: RealHouse) -> None:
    """Frames for n = 6 are far fewer than six times those for one."""

    async def taken(n: int) -> float:
        name = 'pagewalk_kv_events_total{kind="alloc"}'
        before = (await house.metrics())[name]
        await texts(house, prompt=prompt_of(40 * PAGE + 5), n=n, prefix_cache=False, temperature=0)
        return (await house.metrics())[name] - before

    alone, together = await taken(1), await taken(6)
    assert alone >= 41
    assert together <= alone + 5 * 3, "each choice needs its own last pages only"


async def test_c17_seeded_choices_repeat_as_a_set(house: RealHouse) -> None:
    """C24 too: they differ from each other, the first is what n = 1 draws, and neighbours change nothing."""
    asked = {"prompt": prompt_of(2 * PAGE + 3), "temperature": 1.0, "seed": 42, "top_k": 0, "top_p": 1}
    alone = await texts(house, **asked)
    drawn = await texts(house, **asked, n=6)
    assert drawn[0] == alone[0]
    assert len(set(drawn)) == 6
    others = [texts(house, prompt=prompt_of(30, salt), temperature=1.0, n=2) for salt in range(4)]
    again, *_ = await asyncio.gather(texts(house, **asked, n=6), *others)
    assert again == drawn
    assert await texts(house, **asked | {"seed": 43}, n=6) != drawn


async def test_c24_requests_without_a_seed_differ(house: RealHouse) -> None:
    asked = {"prompt": prompt_of(20), "temperature": 1.0}
    drawn = [*await texts(house, **asked, n=3), *await texts(house, **asked, n=3)]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_c05_streamed_and_whole_choices_are_equal(house: RealHouse, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "the"}
    if path != "/v1/completions":
        prompt = {"messages": [{"role": "user", "content": "the"}]}
    asked = prompt | {"n": 4, "seed": 5, "temperature": 1, "max_tokens": 30, "stop": ["a", "e"]}
    whole = await house.post(path, asked)
    events = await house.events(path, asked | {"stream_options": {"include_usage": True}})
    choices = whole["choices"]
    expected = {i: choice.get("text", choice.get("message", {}).get("content")) for i, choice in enumerate(choices)}
    assert joined(events) == expected
    assert ends(events) == {i: (choice["finish_reason"], choice["stop_reason"]) for i, choice in enumerate(choices)}
    for usage in (events[-1]["usage"], whole["usage"]):
        usage.pop("prompt_tokens_details")
    assert events[-1]["usage"] == whole["usage"]


async def test_c09_a_client_that_leaves_takes_all_its_choices(house: RealHouse) -> None:
    """Also when some have ended: end tokens come now and then. The fixture then counts every frame."""
    for turn in range(20):
        body = {"prompt": prompt_of(50, turn), "n": 6, "stream": True, "max_tokens": 50_000, "temperature": 1}
        reader, writer = await house.open("/v1/completions", body | {"ignore_eos": turn % 2 == 0})
        for _ in range(turn % 5 + 1):
            await reader.readuntil(b"data: ")
        writer.close()
    async with asyncio.timeout(20):
        while True:
            found = await house.metrics()
            if found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0:
                break
    assert found['pagewalk_kv_frames{state="active"}'] == 0
    async with asyncio.timeout(20):
        await house.engine.drained()  # a step may have been on its way
    assert house.engine.scheduler.has_work is False


@pytest.mark.slow
@pytest.mark.parametrize("swap_sequences", [2, 0], ids=["a little swap", "no swap"])
async def test_c13_pairs_of_choices_in_a_pool_for_three(
    monkeypatch: pytest.MonkeyPatch, folder: Path, swap_sequences: int
) -> None:
    """Every request ends with all its tokens, and those that a seed draws are those that it draws alone."""
    async with real_house(monkeypatch, folder, dtype="float32") as roomy:
        frame = roomy.engine.executor.frame_bytes
        asked = [{"prompt": prompt_of(60, i), "seed": i, "n": 2, "max_tokens": 60, "temperature": 1} for i in range(20)]
        alone = [await texts(roomy, **one) for one in asked[:5]]
    sequence = (120 + PAGE) // PAGE * frame
    small = {
        "kv_cache_memory_bytes": 3 * sequence,
        "swap_memory_bytes": swap_sequences * sequence,
        "max_model_len": 2 * sequence // frame * PAGE,
        "overcommit": "always",
    }
    async with real_house(monkeypatch, folder, dtype="float32", max_num_seqs=8, **small) as house:
        answers = await asyncio.gather(
            *(house.post("/v1/completions", {"ignore_eos": True, **asked[i % 20]}) for i in range(60))
        )
        found = await house.metrics()
        assert found["vllm:num_preemptions_total"] > 0, "the pool was not small enough"
    for i, answer in enumerate(answers):
        assert answer["usage"]["completion_tokens"] == 120
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        if i % 20 < 5:
            assert [choice["text"] for choice in answer["choices"]] == alone[i % 20]


async def test_what_is_counted_for_several_choices(house: RealHouse) -> None:
    before = await house.metrics()
    await texts(house, prompt=[prompt_of(20), prompt_of(30, 1)], n=3)
    after = await house.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 50
    assert grown["vllm:generation_tokens_total"] == 2 * 3 * 20
    assert (grown["vllm:request_params_n_count"], grown["vllm:request_params_n_sum"]) == (2, 6)
    assert grown["vllm:request_prompt_tokens_sum"] == 50
    assert grown['vllm:request_success_total{finished_reason="length"}'] == 6


async def test_a_deadline_ends_a_request_of_the_real_engine(house: RealHouse) -> None:
    """It would run for minutes; how long it did run is the machine's matter."""
    asked = {"prompt": [5] * 20, "max_tokens": 60_000, "ignore_eos": True, "timeout_s": 0.3, "n": 2}
    answer = await house.post("/v1/completions", asked)
    assert [(c["finish_reason"], c["stop_reason"]) for c in answer["choices"]] == [("length", "timeout")] * 2
    assert answer["usage"]["completion_tokens"] < 120_000


async def test_the_limit_of_logprobs_is_a_setting_of_the_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    async with real_house(monkeypatch, folder, max_logprobs=2) as house:
        body = {"prompt": "the", "logprobs": 3}
        async with house.session.post(house.url + "/v1/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "logprobs"
