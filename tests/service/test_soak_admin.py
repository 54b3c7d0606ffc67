"""What it costs to watch a server: with a page open and metrics scraped each second. Printed, never asserted."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

pytestmark = pytest.mark.soak

WATCHED_S = 20.0
FRAMES = 100_000


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    """A pool of 100,000 small frames."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": FRAMES << 10, "max_num_seqs": 500, "max_num_batched_tokens": 512}
    async with real_house(monkeypatch, folder, max_model_len=4000, **sizes) as house:
        yield house


async def test_watching_costs_the_engine_little(house: RealHouse) -> None:
    """The map and the pulse as streams, the list of sequences every 2 s, the metrics every second, under load."""
    admin = f"http://127.0.0.1:{house.server.admin_port}/admin/v1/"
    is_over = False

    async def load() -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 3900, "ignore_eos": True}
        while not is_over:
            with suppress(aiohttp.ClientError):
                async with house.session.post(house.url + "/v1/completions", json=body) as response:
                    await response.read()

    async def stream(path: str) -> int:
        seen = 0
        async with house.session.get(admin + path) as response:
            async for line in response.content:
                seen += line.startswith(b"data: ")
                if is_over:
                    break
        return seen

    async def poll(url: str, interval_s: float) -> None:
        while not is_over:
            async with house.session.get(url) as response:
                await response.read()
            await asyncio.sleep(interval_s)

    work = [asyncio.create_task(load()) for _ in range(4)]
    await asyncio.sleep(2)
    before, begun = await house.metrics(), time.monotonic()
    watching = [
        asyncio.create_task(each)
        for each in (
            stream("frames/stream?interval=0.5"),
            stream("pulse/stream?interval=1"),
            poll(admin + "sequences", 2),
            poll(house.url + "/metrics", 1),
        )
    ]
    await asyncio.sleep(WATCHED_S)
    after, seconds = await house.metrics(), time.monotonic() - begun
    is_over = True
    for task in (*work, *watching):
        task.cancel()
    await asyncio.gather(*work, *watching, return_exceptions=True)
    shares = {
        at: (after[name] - before[name]) / seconds
        for at in ("views", "metrics")
        if (name := f'pagewalk_looking_seconds_total{{at="{at}"}}')
    }
    steps = after['pagewalk_step_seconds_count{phase="commit"}'] - before['pagewalk_step_seconds_count{phase="commit"}']
    percent = {at: f"{share:.3%}" for at, share in shares.items()}
    print(json.dumps({"watching": percent, "steps": steps}))  # noqa: T201
    assert steps > 0
    assert shares["views"] > 0
    while house.engine.scheduler.has_work:  # noqa: ASYNC110 - what was left ends
        await asyncio.sleep(0.1)


async def test_an_idle_server_takes_little_of_a_core(house: RealHouse) -> None:
    await asyncio.sleep(2)  # the audit of an idle engine is over
    used, begun = time.process_time(), time.monotonic()
    await asyncio.sleep(10)
    share = (time.process_time() - used) / (time.monotonic() - begun)
    print(json.dumps({"idle": f"{share:.3%} of a core"}))  # noqa: T201
    assert not house.engine.scheduler.has_work
