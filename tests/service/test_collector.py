"""What requests leave for the collector of cycles: nothing of ours, so that it may come rarely (process.py)."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_house import real_house
from tiny_model import write_tiny_model

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    """What is found in cycles from now on is kept here."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def test_requests_leave_nothing_of_ours_in_cycles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: list[Any]
) -> None:
    """Whole, streamed, refused, in all forms, of several choices; in the front end and in the engine."""
    write_tiny_model(tmp_path)
    async with real_house(monkeypatch, tmp_path) as house:
        for path, body, status in (
            ("/v1/completions", PROMPT, 200),
            ("/v1/completions", PROMPT | {"stream": True, "n": 3}, 200),
            ("/v1/completions", PROMPT | {"prompt": [1 << 30]}, 400),
            ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True}, 200),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True}, 200),
            ("/v1/messages", CHAT | {"stream": True}, 200),
        ):
            gc.collect()
            kept.clear()  # of the start and of the client
            async with house.session.post(house.url + path, json=body) as response:
                assert response.status == status
                await response.read()
            while house.engine.scheduler.has_work:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            gc.collect()
            ours = Counter(type(one).__qualname__ for one in kept if type(one).__module__.startswith(("service", "mm")))
            assert ours == {}, path
