"""Memory that cannot be had while the server runs: for a step, for a handler, for swap. Whoever is not concerned never
learns of it, and the server lives."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_house import RealHouse, real_house
from short_memory import no_memory, short_of_memory
from tiny_model import write_tiny_model

from mm.backing_store import BackingStore
from mm.page_copies import SwapOrders
from model.config import read_config
from model.cpu_executor import CpuExecutor
from model.kv_pool import frame_bytes

PROMPTS = [[7 * i % 300 + 5 for i in range(begin, begin + 40)] for begin in range(0, 600, 50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
async def house(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, folder, dtype="float32") as started:
        yield started


def executor_of(house: RealHouse) -> CpuExecutor:
    executor = house.engine.executor
    assert isinstance(executor, CpuExecutor)
    return executor


def body(prompt: list[int], tokens: int = 12, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "prefix_cache": False}
    return {"prompt": prompt, "max_tokens": tokens} | fixed | more


async def tokens_of(house: RealHouse, prompt: list[int], tokens: int = 12) -> list[int]:
    answer = await house.post("/v1/completions", body(prompt, tokens))
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def test_steps_that_find_no_memory_are_split_and_no_client_sees_it(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [await tokens_of(house, prompt) for prompt in PROMPTS]
    refused: list[int] = []
    short_of_memory(executor_of(house), lambda tokens: tokens > 8 and not refused.append(tokens), monkeypatch)
    assert await asyncio.gather(*(tokens_of(house, prompt) for prompt in PROMPTS)) == alone
    assert refused


async def test_a_step_without_any_memory_ends_its_requests_with_an_error_and_the_server_serves_on(
    house: RealHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams get an error event, whole answers a 500; then all is as before, and no frame is held."""
    alone = [await tokens_of(house, prompt) for prompt in PROMPTS[:4]]
    async with (
        house.session.post(house.url + "/v1/completions", json=body(PROMPTS[0], 60_000, stream=True)) as stream,
        asyncio.timeout(60),
    ):
        assert (await stream.content.readline()).startswith(b"data: ")
        with monkeypatch.context() as short:
            short_of_memory(executor_of(house), lambda tokens: True, short)
            *_, error, done, end = (await stream.text()).split("\n\n")
            assert "there was no memory to compute this request" in error
            assert (done, end) == ("data: [DONE]", "")
            async with house.session.post(house.url + "/v1/completions", json=body(PROMPTS[1], n=2)) as whole:
                assert whole.status == 500
                assert "there was no memory" in (await whole.json())["error"]["message"]
    async with house.session.get(house.url + "/ready") as ready:
        assert ready.status == 200
    assert [await tokens_of(house, prompt) for prompt in PROMPTS[:4]] == alone


async def test_a_handler_that_finds_no_memory_fails_alone(house: RealHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = house.session.post(house.url + "/v1/completions", json=body(PROMPTS[0], 1000, stream=True))

    def encode(*_: Any) -> None:
        raise MemoryError

    async with stream as others:
        assert (await others.content.readline()).startswith(b"data: ")
        with monkeypatch.context() as short:
            short.setattr("service.completions.completion_prompts", encode)
            async with house.session.post(house.url + "/v1/completions", json=body(PROMPTS[1])) as failed:
                assert failed.status == 500
                assert (await failed.json())["error"]["code"] == 500
        assert len(await tokens_of(house, PROMPTS[1])) == 12
        assert '"finish_reason":"length"' in await others.text()


@pytest.mark.parametrize("fails", ["every copy", "the third copy", "all memory"])
async def test_swap_that_fails_is_seen_by_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Copies that fail, or an area for which there is no memory: who was to be swapped is computed again. After
    one copy that failed others succeed."""
    async with real_house(monkeypatch, folder, dtype="float32") as roomy:
        alone = [await tokens_of(roomy, prompt, 60) for prompt in PROMPTS]
    frame = frame_bytes(read_config(folder), torch.float32, 16)
    small = {"kv_cache_memory_bytes": 12 * frame, "swap_memory_bytes": 40 * frame, "max_model_len": 128}
    if fails == "the third copy":
        monkeypatch.setattr("mm.swapper.FIRST_REST_S", 0.0)  # else it depends on the clock whether others are tried
    if fails == "all memory":
        without = SimpleNamespace(uint8=torch.uint8, empty=lambda *_, **__: no_memory())
        monkeypatch.setattr("mm.backing_store.torch", without)
    async with real_house(monkeypatch, folder, dtype="float32", **small) as house:
        memory, executor = house.engine.scheduler.memory, executor_of(house)
        memory.costs.copy_page_s = 1e-9  # swap is worth it
        moved, move = [], executor._move

        def move_or_fail(orders: SwapOrders, store: BackingStore) -> bool:
            moved.append(fails != "every copy" and len(moved) != 2 and move(orders, store))
            return moved[-1]

        monkeypatch.setattr(executor, "_move", move_or_fail)
        for _ in range(3):
            assert await asyncio.gather(*(tokens_of(house, prompt, 60) for prompt in PROMPTS)) == alone
        assert house.engine.scheduler.preemptions > 0
        assert (memory.counters().swap_failed > 0) == (False in moved) == (fails != "all memory")
        assert (True in moved[3:]) == (fails == "the third copy")
