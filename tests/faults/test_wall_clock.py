"""The wall clock is set while the server runs. Only what is shown to people comes from it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from real_house import PATIENCE_S, RealHouse, real_house
from tiny_model import write_tiny_model


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, write_tiny_model(tmp_path), step_timeout_s=5.0) as started:
        yield started


@pytest.mark.parametrize("hours", [-1, 24])
async def test_a_clock_that_is_set_changes_nothing_but_what_is_shown(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """C42: a stream goes on, a deadline comes when it is due and not before, the server stays alive and ready."""
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True}
    async with asyncio.timeout(PATIENCE_S):
        stream = house.session.post(house.url + "/v1/completions", json=body | {"stream": True, "max_tokens": 800})
        async with stream as answer:
            assert (await answer.content.readline()).startswith(b"data: ")
            now, shift = time.time, hours * 3600
            monkeypatch.setattr(time, "time", lambda: now() + shift)
            in_time = await house.post("/v1/completions", body | {"timeout_s": PATIENCE_S})
            late = await house.post("/v1/completions", body | {"max_tokens": 60_000, "timeout_s": 0.2})
            assert '"finish_reason":"length"' in await answer.text()
    assert in_time["usage"]["completion_tokens"] == 300
    assert 0 < late["usage"]["completion_tokens"] < 60_000
    assert abs(in_time["created"] - now() - shift) < PATIENCE_S
    for path in ("/live", "/ready"):
        async with house.session.get(house.url + path) as probe:
            assert probe.status == 200
