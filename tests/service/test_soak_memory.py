"""C44: a server process that has answered thousands of requests holds no more than after hundreds."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from server_process import Process
from tiny_model import write_tiny_model

pytestmark = pytest.mark.soak

ROUNDS = 10
SHORT, STREAMS, WIDE = 600, 120, 60  # of a round: one token each; streams, of which a third is left; four choices each
AT_ONCE = 16
SLACK = 1.05  # of memory, from the second round to the last: what an allocator keeps, and no more


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    keys = tmp_path / "keys"
    keys.write_text("".join(f"key-{i}\n" for i in range(100)))
    arguments = ["--model", str(write_tiny_model(folder)), "--load-format", "dummy", "--threads", "1"]
    arguments += ["--max-model-len", "512", "--kv-cache-memory-bytes", "4MiB", "--api-key-file", str(keys)]
    started = Process(*arguments, "--log-format", "json", "--log-level", "warning", folder=tmp_path)
    try:
        started.until(lambda: started.status("/ready") == 200)
        yield started
    finally:
        started.stop()


class Load:
    """Requests by many keys, with prompts and ids that never come twice."""

    def __init__(self, process: Process, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{process.port}"
        self.session = session
        self.draw = random.Random(44)
        self.gate = asyncio.Semaphore(AT_ONCE)

    async def ask(self, *, leave: bool = False, **fields: object) -> None:
        body = {"prompt": [self.draw.randrange(3, 300) for _ in range(24)], "ignore_eos": True} | fields
        headers = {"Authorization": f"Bearer key-{self.draw.randrange(100)}"}
        async with (
            self.gate,
            self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response,
        ):
            assert response.status == 200
            if leave:
                await response.content.readany()
                response.close()
            else:
                await response.read()

    async def round(self) -> None:
        asked = [self.ask(max_tokens=1) for _ in range(SHORT)]
        asked += [self.ask(max_tokens=200, stream=True, leave=i % 3 == 0) for i in range(STREAMS)]
        asked += [self.ask(max_tokens=8, n=4) for _ in range(WIDE)]
        await asyncio.gather(*asked)

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    async def idle(self) -> dict[str, float]:
        """The metrics once nothing runs."""
        while True:
            found = await self.metrics()
            if all(value == 0 for name, value in found.items() if name.startswith("vllm:num_requests_running")):
                return found
            await asyncio.sleep(0.05)


@pytest.mark.timeout(900)
async def test_memory_after_a_long_time(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    figures: list[tuple[float, float, int]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(process, session)
        for _ in range(ROUNDS):
            await load.round()
            found = await load.idle()
            figures.append((found["process_resident_memory_bytes"], found["process_open_fds"], len(found)))
    with capsys.disabled():
        for memory, files, series in figures:
            print(f"\n{memory / 2**20:.1f} MiB, {files:.0f} files, {series} series", end="")  # noqa: T201
    settled, last = figures[1], figures[-1]
    assert last[0] <= settled[0] * SLACK
    assert last[1] <= settled[1] + AT_ONCE
    assert last[2] == settled[2]
