"""The whole server in this process, with a tiny model computed by the real CPU executor, on real sockets."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service import server as server_module
from service.engine import Engine
from service.engine_client import EngineClient
from service.loading import Loaded
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings

PATIENCE_S = 180.0  # only a hang takes as long


@dataclass
class RealHouse:
    """A server that is ready, and what stands behind it."""

    server: Server
    engine: Engine
    session: aiohttp.ClientSession

    @property
    def client(self) -> EngineClient:
        """Of the front end in this process."""
        assert self.server.doors is not None
        return self.server.doors.front_end.loaded().client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            *frames, done, end = (await response.text()).split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    async def open(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a socket of its own, and read nothing."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(f"{head}\r\n\r\n".encode() + data)
        return reader, writer

    async def metrics(self) -> dict[str, float]:
        """Samples by name and the labels that are not the same everywhere, as `name{label="value"}`."""
        async with self.session.get(self.url + "/metrics") as response:
            text = re.sub(r'(engine|model_name)="[^"]*",?', "", await response.text()).replace("{}", "")
        lines = [line.replace(",}", "}").rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def meminfo(self) -> dict[str, Any]:
        async with self.session.get(f"http://127.0.0.1:{self.server.admin_port}/admin/v1/meminfo") as response:
            facts: dict[str, Any] = await response.json()
            return facts


@asynccontextmanager
async def real_house(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> AsyncIterator[RealHouse]:
    """`folder`: a tiny model (tiny_model.py). At the end all memory must be available again, and the books balance."""
    loads: list[Loaded] = []
    load = server_module.load

    async def noted(chosen: Settings, metrics: Metrics) -> Loaded:
        loads.append(await load(chosen, metrics))
        return loads[-1]

    monkeypatch.setattr(server_module, "load", noted)
    chosen: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "threads": 1, "load_format": "dummy"}
    server = Server(Settings(model=str(folder), port=0, admin_port=0, **chosen | settings), "0")
    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.create_task(server.run())
        while not server.is_open and not running.done():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
    try:
        assert not running.done(), running.result()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            yield RealHouse(server, loads[0].assembly.engine, session)
        memory = loads[0].assembly.engine.scheduler.memory
        memory.check_invariants()
        assert memory.available_frames == memory.frames.usable
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await running == 0
