"""Keys, limits and /v1/requests with the real engine: what it says of running requests, what an abort frees."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from service.tenant_settings import TenantSettings


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("mine\n")
    return path


@pytest.fixture
async def house(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, keys: Path
) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    tenants = {"default": TenantSettings(max_concurrent_requests=2)}
    options: dict[str, Any] = {"api_key_file": str(keys), "max_num_seqs": 1, "tenants": tenants}
    async with real_house(monkeypatch, folder, max_model_len=4000, **options) as house:
        house.session.headers["Authorization"] = "Bearer mine"
        yield house


async def ask(house: RealHouse, method: str, path: str) -> tuple[int, Any]:
    async with house.session.request(method, house.url + path) as response:
        return response.status, await response.json()


def running(house: RealHouse, request_id: str, **fields: Any) -> "asyncio.Task[tuple[int, str]]":
    body = {"prompt": [5, 6, 7], "max_tokens": 3900, "ignore_eos": True, "request_id": request_id} | fields

    async def post() -> tuple[int, str]:
        async with house.session.post(house.url + "/v1/completions", json=body) as response:
            return response.status, await response.text()

    return asyncio.create_task(post())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def states(house: RealHouse) -> dict[str, list[str]]:
    _, found = await ask(house, "GET", "/v1/requests")
    return {entry["id"]: [sequence["state"] for sequence in entry["sequences"]] for entry in found["data"]}


async def is_seen(house: RealHouse, request_id: str, state: str) -> bool:
    """Whether a choice of the request is in this state."""
    return state in (await states(house)).get(request_id, [])


async def test_what_runs_what_waits_and_what_an_abort_does(house: RealHouse) -> None:
    """One place to run: the second request waits, until the first is aborted; then it runs, and is aborted too."""
    first = running(house, "a", stream=True)
    await until(lambda: is_seen(house, "a", "decode"))
    second = running(house, "b", n=2)
    await until(lambda: is_seen(house, "b", "queued"))
    status, text = await running(house, "c")
    assert (status, json.loads(text)["error"]["type"]) == (429, "RateLimitError")

    _, entry = await ask(house, "GET", "/v1/requests/a")
    (sequence,) = entry["sequences"]
    assert (sequence["prompt_tokens"], sequence["max_tokens"]) == (3, 3900)
    assert 0 < sequence["output_tokens"] < 3900

    assert (await ask(house, "DELETE", "/v1/requests/a"))[1]["aborted"] is True
    _, text = await first
    *_, error, done, _ = text.split("\n\n")
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == (503, "data: [DONE]")
    await until(lambda: is_seen(house, "b", "decode"))
    assert (await ask(house, "DELETE", "/v1/requests/cmpl-b"))[1]["aborted"] is True
    assert (await second)[0] == 503
    assert await states(house) == {}
    metrics = await house.metrics()
    assert metrics['vllm:request_success_total{finished_reason="abort"}'] == 3
    assert (await running(house, "d", max_tokens=2))[0] == 200, "the places of the tenant are free again"


async def test_keys_are_read_again_on_sighup(house: RealHouse, keys: Path) -> None:
    async def is_closed() -> bool:
        return (await ask(house, "GET", "/v1/models"))[0] == 401

    keys.write_text("theirs\n")  # noqa: ASYNC240 - a test may wait for its disk
    os.kill(os.getpid(), signal.SIGHUP)
    await until(is_closed)
    house.session.headers["Authorization"] = "Bearer theirs"
    assert (await ask(house, "GET", "/v1/models"))[0] == 200
