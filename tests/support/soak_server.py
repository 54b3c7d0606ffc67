"""The server of the mix, in processes of its own: starts, requests that may lose their front end, what it holds."""

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from faulty_server import Faults
from server_process import PATIENCE_S, Process, free_port
from soak_requests import LONGEST
from tool_chats import HEAD, MARKS, TURNS

FRAME_BYTES = 4096  # of the tiny model with two layers, in float32
FRAMES, MOST_FRAMES = 40, 52
SLOTS, MOST_SLOTS = 16, 24
SIZES: dict[str, Any] = {"max_model_len": LONGEST, "max_num_seqs": 12, "max_num_batched_tokens": 64}
KEYS = ["one", "two"]
"""Of the tenants `default` and `second`."""
TENANTS = """
[tenants.second]
memory_low = "20%"
memory_high = "50%"
memory_max = "90%"
weight = 50
"""


class FrontEndDied(Exception):
    """The connection broke, and a front end was killed while it was open."""


@dataclass(frozen=True)
class Life:
    """A server from start to end."""

    name: str  # begins the ids of its requests
    front_ends: int = 2
    has_swap: bool = True
    faults: Faults = field(default_factory=Faults)


def write_template(folder: Path) -> Path:
    """Of chats that may have tools."""
    path = folder / "tools.jinja"
    path.write_text(HEAD + f"{{# {MARKS['hermes']} #}}" + TURNS)
    return path


class SoakServer:
    """A server that runs, and how it is spoken to."""

    def __init__(self, process: Process, admin_port: int, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{process.port}"
        self._admin_url = f"http://127.0.0.1:{admin_port}/admin/v1/"
        self._session = session
        self._deaths = 0
        self._is_killing = False

    async def post(
        self, url: str, body: Any, headers: dict[str, str], came: list[bytes] | None = None, pause_s: float = 0
    ) -> tuple[int, str]:
        """Status and text. came: gets the pieces, also when it breaks off; pause_s: before each piece is read.

        Raises FrontEndDied.
        """
        came = [] if came is None else came
        with self._may_lose_its_front_end():
            async with self._session.post(url, json=body, headers=headers) as response:
                while piece := await response.content.readany():
                    came.append(piece)
                    await asyncio.sleep(pause_s)
                return response.status, b"".join(came).decode()

    @contextmanager
    def _may_lose_its_front_end(self) -> Iterator[None]:
        before = -1 if self._is_killing else self._deaths
        try:
            yield
        except (aiohttp.ClientError, ConnectionError):
            if before == self._deaths:
                raise
            raise FrontEndDied from None

    async def act(self, path: str, body: Any, *, again: bool = True) -> tuple[int, str]:
        """An action of operators; again: it is asked for until there is an answer, else it raises FrontEndDied too.

        Raises AssertionError for a 5xx.
        """
        while True:
            try:
                status, text = await self.post(self._admin_url + path, body, {"Authorization": "Bearer root"})
            except FrontEndDied:
                if again:
                    continue
                raise
            assert status < 500 or status == 503, (path, body, text)
            return status, text

    async def delete(self, url: str, headers: dict[str, str]) -> None:
        """Raises FrontEndDied."""
        with self._may_lose_its_front_end():
            async with self._session.delete(url, headers=headers) as response:
                assert response.status < 500, await response.text()

    async def view(self, name: str) -> Any:
        headers = {"Authorization": "Bearer root"}
        while True:
            with suppress(FrontEndDied), self._may_lose_its_front_end():
                async with self._session.get(self._admin_url + name, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

    async def kill_front_end(self, place: int, of: int) -> None:
        """SIGKILL one of so many; returns when another has taken its place."""
        await self._until(lambda: self.process.listening() == of)
        pid = self.process.front_ends()[place]
        self._deaths += 1
        self._is_killing = True
        os.kill(pid, signal.SIGKILL)
        # A zombie may have threads that still hold its sockets: only what has been waited for is gone for good.
        await self._until(lambda: not Path(f"/proc/{pid}").exists())
        self._is_killing = False
        await self._until(lambda: self.process.listening() == of)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.02)

    def resident_bytes(self) -> dict[str, int]:
        """Of each process, by its part."""
        front_ends = [_resident_bytes(pid) for pid in self.process.front_ends()]
        ours = {f"front end {i}": size for i, size in enumerate(front_ends) if size}
        return {"engine": _resident_bytes(self.process.process.pid), **ours, "clients": _resident_bytes(os.getpid())}

    async def until_idle(self) -> None:
        """Nothing runs, and nobody holds a frame. Raises AssertionError if something stays."""
        await self.act("page_cache/unpin", {"owner": "soak"})
        async with asyncio.timeout(PATIENCE_S):
            while (await self.view("sequences"))["sequences"] or (await self.view("audit"))["active"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Drain it. Raises AssertionError if it does not end well, or has logged an error."""
        self.process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self.process.process.wait, PATIENCE_S) == 0, self.process.err.read_text()[-2000:]
        killed = -signal.SIGKILL
        errors = [each for each in self.process.log() if each["level"] in ("error", "critical")]
        assert all(each.get("code") == killed for each in errors), errors


def _resident_bytes(pid: int) -> int:
    """0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@asynccontextmanager
async def running(life: Life, model: Path, folder: Path) -> AsyncIterator[SoakServer]:
    """model: a tiny one with two layers; folder: for keys, settings, logs; checkpoints stay there for the next life."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "keys").write_text(f"one\nsecond:sha256:{hashlib.sha256(b'two').hexdigest()}\n")
    (folder / "settings.toml").write_text(TENANTS)
    pool = {"kv_cache_memory_bytes": FRAMES, "kv_cache_max_memory_bytes": MOST_FRAMES}
    swap = (
        {"swap_memory_bytes": SLOTS, "swap_max_memory_bytes": MOST_SLOTS} if life.has_swap else {"swap_memory_bytes": 0}
    )
    admin_port = free_port()
    settings = SIZES | {name: places * FRAME_BYTES for name, places in (pool | swap).items()}
    settings |= {
        "model": model, "load_format": "dummy", "dtype": "float32", "threads": 1, "front_ends": life.front_ends,
        "config": folder / "settings.toml", "api_key_file": folder / "keys", "admin_api_key": "root",
        "admin_port": admin_port, "checkpoint_dir": folder / "checkpoints", "scheduling_policy": "priority",
        "chat_template": write_template(folder), "log_format": "json", "log_level": "warning",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    program = [str(Path(__file__).parent / "faulty_server.py"), msgspec.json.encode(life.faults).decode()]
    process = Process(*flags, folder=folder, program=program)
    try:
        await asyncio.to_thread(process.until, lambda: process.status("/ready") == 200)
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small_socket)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2048) as session:
            yield SoakServer(process, admin_port, session)
    finally:
        process.stop()


def _small_socket(info: tuple[Any, ...]) -> socket.socket:
    """Little is read ahead, so that a slow reader is one for the server too."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made
