"""C10 and C41: storms of clients that leave, and impatient ones at a start; one process, and two front ends beside it.

The pool holds a few of the requests, so that preemption and swap are at work while their clients go.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from server_process import PATIENCE_S, Process
from tiny_model import write_tiny_model

CLIENTS = 400
LONGEST_STAY_S = 3.0
GREEDY = {"prompt": "the quick", "max_tokens": 12, "temperature": 0}
FRAMES = 40  # of 16 tokens: some 640 tokens, where a request wants up to 200 for each of its choices

kinds = pytest.mark.parametrize("front_ends", [0, 2], ids=["one process", "two front ends"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def server(model: Path, tmp_path: Path, front_ends: int) -> Iterator[Process]:
    small = [
        "--dtype",
        "bfloat16",
        "--kv-cache-memory-bytes",
        f"{FRAMES}KiB",
        "--swap-memory-bytes",
        f"{FRAMES // 2}KiB",
    ]
    small += ["--max-model-len", "300", "--max-num-seqs", "12", "--max-num-batched-tokens", "64"]
    tiny = ["--model", str(model), "--load-format", "dummy", "--threads", "1", "--overcommit", "always"]
    process = Process(*tiny, *small, "--front-ends", str(front_ends), "--log-format", "json", folder=tmp_path)
    yield process
    process.stop()


# ---------------------------------------------------------------- C10


@dataclass
class Storm:
    """Clients that come at once, and leave when they like."""

    port: int
    draw: random.Random
    statuses: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def body(self, number: int) -> dict[str, Any]:
        prefix = [5 + number % 4] * 40  # shared with others
        prompt = prefix + [6 + self.draw.randrange(200) for _ in range(self.draw.randint(1, 40))]
        body = {"prompt": prompt, "max_tokens": self.draw.choice([1, 5, 40, 150]), "n": self.draw.randint(1, 4)}
        return body | {"stream": self.draw.random() < 0.7, "ignore_eos": True, "request_id": f"storm-{number}"}

    async def client(self, number: int) -> None:
        """Some leave at a random time, some with the end of their first choice, some abort as well, twice."""
        body, stay_s, way = self.body(number), self.draw.random() * LONGEST_STAY_S, number % 5
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            async with asyncio.timeout(PATIENCE_S if way == 0 else stay_s):
                self.send(writer, "POST", "/v1/completions", body)
                head = await reader.readuntil(b"\r\n\r\n")
                self.statuses[int(head[9:12])] += 1
                await (reader.readuntil(b'"finish_reason":"length"') if way == 0 else reader.read())
                self.ends["read"] += 1
        except (TimeoutError, asyncio.IncompleteReadError):
            self.ends["left"] += 1
        if way == 1:
            for _ in range(2):
                await self.abort(number)
        if way == 2:
            writer.transport.abort()  # a reset, not a goodbye
        writer.close()

    async def abort(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.send(writer, "DELETE", f"/v1/requests/storm-{number}", {})
        self.statuses[int((await reader.read())[9:12])] += 1
        writer.close()

    @staticmethod
    def send(writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode())

    async def run(self) -> None:
        await asyncio.gather(*(self.client(number) for number in range(CLIENTS)))


@pytest.mark.slow
@kinds
def test_c10_a_storm_of_clients_that_leave_holds_nothing_and_changes_no_answer(server: Process) -> None:
    """Preempted, swapped, forked and shared: whatever state they are left in, all memory comes back."""
    server.until(lambda: server.status("/ready") == 200)
    before = json.loads(server.ask("POST", "/v1/completions", GREEDY))["choices"]
    storm = Storm(server.port, random.Random(10))
    asyncio.run(storm.run())
    assert not {status for status in storm.statuses if status >= 500}, storm.statuses
    assert storm.ends["read"] > CLIENTS // 10
    assert storm.ends["left"] > CLIENTS // 10
    server.until(lambda: json.loads(server.ask("GET", "/load")) == {"server_load": 0})
    server.until(lambda: server.gauge("vllm:num_requests_running") == server.gauge("vllm:num_requests_waiting") == 0)
    found = server.metrics()
    frames = {state: found[f'pagewalk_kv_frames{{state="{state}"}}'] for state in ("active", "cached", "free")}
    assert frames["active"] == 0
    assert frames["free"] + frames["cached"] == FRAMES
    assert server.gauge("vllm:num_preemptions_total") > 0, "the pool was not small enough"
    assert json.loads(server.ask("POST", "/v1/completions", GREEDY))["choices"] == before
    assert not [line for line in server.log() if line["level"] in ("error", "critical")]


# ---------------------------------------------------------------- C41


@kinds
def test_c41_live_at_once_ready_after_a_generation_and_503_until_then(server: Process) -> None:
    """Probes and requests from the first moment on: never anything else, and never back."""
    seen: dict[str, list[int]] = {"/live": [], "/ready": [], "/v1/models": [], "POST": []}
    server.until(lambda: server.status("/live") is not None)
    end = time.monotonic() + PATIENCE_S
    while 200 not in seen["/ready"]:
        assert time.monotonic() < end
        for path in ("/live", "/v1/models"):
            seen[path].append(server.status(path) or 0)
        response = server.open("POST", "/v1/completions", {"prompt": "the", "max_tokens": 1})
        with suppress(ConnectionError):
            response.read()
        seen["POST"].append(response.status)
        if response.status == 503:
            assert int(response.headers["Retry-After"]) > 0
        seen["/ready"].append(server.status("/ready") or 0)  # last: it says what a request would meet from now on
        time.sleep(0.05)
    assert set(seen["/live"]) == {200}
    assert seen["/ready"][:-1] == [503] * (len(seen["/ready"]) - 1)
    assert seen["POST"][0] == seen["/v1/models"][0] == 503
    assert set(seen["POST"]) <= {200, 503}
    assert sorted(seen["POST"], reverse=True) == seen["POST"], "503 after 200"
    for _ in range(6):  # whichever front end answers
        assert server.open("POST", "/v1/completions", {"prompt": "the", "max_tokens": 1}).status == 200
