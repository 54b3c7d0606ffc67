"""Priorities over HTTP, with the real engine and a tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path)
    options: dict[str, Any] = {"scheduling_policy": "priority", "max_num_seqs": 3, "max_model_len": 4000}
    async with real_house(monkeypatch, folder, **options) as house:
        yield house


async def first_token_after(house: RealHouse, started: list[str], name: str, **body: Any) -> None:
    """Stream one request to its end, and note when its first token came."""
    body = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "temperature": 0} | body
    async with house.session.post(house.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                if name not in started:
                    started.append(name)
                assert "error" not in json.loads(line.removeprefix(b"data: "))


async def test_c18_the_urgent_request_starts_before_any_queued_one(house: RealHouse) -> None:
    """All places run less urgent requests, more of them wait. The urgent one takes a place; all are answered."""
    started: list[str] = []
    low = [
        asyncio.create_task(first_token_after(house, started, f"low-{i}", priority=9, max_tokens=600)) for i in range(9)
    ]
    async with asyncio.timeout(60):
        while len(started) < 3 or house.engine.queue.requests < 6:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    began = len(started)
    await first_token_after(house, started, "urgent", priority=-1, max_tokens=2)
    assert started.index("urgent") <= began
    assert house.engine.scheduler.preemptions > 0
    await asyncio.gather(*low)
    assert len(started) == 10


async def test_a_priority_out_of_range_is_refused(house: RealHouse) -> None:
    async with house.session.post(house.url + "/v1/completions", json={"prompt": "a", "priority": 1001}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "priority")
