"""More requests at once than the queue takes, over HTTP, with the real engine and a tiny model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

MOST = 6


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    bounds: dict[str, Any] = {"max_queue_requests": MOST, "max_queue_tokens": 100, "max_num_seqs": 2}
    async with real_house(monkeypatch, write_tiny_model(tmp_path), max_model_len=4000, **bounds) as house:
        yield house


async def ask(house: RealHouse, prompt: list[int], tokens: int, **more: Any) -> tuple[int, Any, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | more
    async with house.session.post(house.url + "/v1/completions", json=body) as response:
        return response.status, response.headers, await response.json()


async def full(house: RealHouse, prompt: list[int], count: int) -> list["asyncio.Task[Any]"]:
    """Both places taken by long requests, and `count` that wait."""
    running = [asyncio.create_task(ask(house, [5, 6], 3000)) for _ in range(2)]
    async with asyncio.timeout(60):
        while len(house.engine.scheduler.sequences.running) < 2:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(ask(house, prompt, 1)) for _ in range(count)]
        while house.engine.queue.requests < count:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    return [*running, *waiting]


async def test_c21_the_surplus_is_refused_at_once_and_the_rest_is_served(house: RealHouse) -> None:
    tasks = await full(house, [5], 0)
    flood = await asyncio.gather(*(ask(house, [5, number], 2) for number in range(60)))
    assert set(Counter(status for status, _, _ in flood)) <= {200, 429}
    refused = [(headers, answer) for status, headers, answer in flood if status == 429]
    assert len(refused) >= 60 - MOST - 1
    for headers, answer in refused:
        assert 1 <= int(headers["Retry-After"]) <= 120
        assert answer["error"]["type"] == "RateLimitError"
        assert f"the limit is {MOST}" in answer["error"]["message"]
    assert all(status == 200 for status, _, _ in await asyncio.gather(*tasks))
    metrics = await house.metrics()
    assert metrics['pagewalk_refusals_total{reason="queue_requests"}'] == len(refused)


async def test_ready_says_whether_one_more_would_wait(house: RealHouse) -> None:
    async def is_ready() -> int:
        async with house.session.get(house.url + "/ready") as response:
            return response.status

    assert await is_ready() == 200
    tasks = await full(house, [5], MOST)
    assert await is_ready() == 503
    await asyncio.gather(*tasks)
    assert await is_ready() == 200


async def test_prompt_tokens_that_wait_are_bounded(house: RealHouse) -> None:
    tasks = await full(house, [5] * 30, 3)
    status, headers, answer = await ask(house, [5] * 30, 1)
    assert (status, "90 prompt tokens are waiting, the limit is 100" in answer["error"]["message"]) == (429, True)
    assert "Retry-After" in headers
    tasks.append(asyncio.create_task(ask(house, [5] * 10, 1)))
    assert all(status == 200 for status, _, _ in await asyncio.gather(*tasks))


async def test_a_deadline_in_the_queue_ends_what_has_held_nothing(house: RealHouse) -> None:
    tasks = await full(house, [5], 0)
    admitted = house.engine.scheduler.sequences.admissions.requests
    status, _, answer = await ask(house, [9] * 64, 5, timeout_s=0.01)
    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "length", "timeout")
    assert house.engine.scheduler.sequences.admissions.requests == admitted, "it has never had a row"
    assert house.engine.queue.requests == 0
    await asyncio.gather(*tasks)
