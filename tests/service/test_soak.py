"""C21 and C43: a server process with a tiny model, under load. Times are printed, never asserted."""

import asyncio
import io
import json
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import prober
import pytest
from server_process import Process
from tiny_model import write_tiny_model

pytestmark = pytest.mark.soak

BURST, LEAVING = 5_000, 4_000
PROMPT_TOKENS = 2_000
ON_THE_CPU = ["--device", "cpu", "--threads", "1"]
SERVER_FILES = 4_096  # the server may open: fewer than there are requests
STREAMS, STREAM_TOKENS = 10, 3_000
LONG_PROMPTS, LONG_TOKENS = 64, 4_000
OPEN_STREAMS = 10_000
CROWD_STREAMS, CROWD_TOKENS, CROWD_QUEUE, ROUNDS = 500, 200, 5_000, 6
TIMEOUT_S = 150  # of one test: only a hang takes as long


@pytest.fixture(params=[0, 2], ids=["one process", "two front ends"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """Ready to serve. The client's sockets need as many files as the server's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < BURST + 500:
        pytest.skip(f"this user may open {hard} files: too few for {BURST} sockets")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    arguments = ["--model", str(write_tiny_model(folder)), "--load-format", "dummy", *ON_THE_CPU]
    arguments += ["--kv-cache-memory-bytes", "128MiB", "--front-ends", str(request.param)]
    started = Process(*arguments, "--log-format", "json", folder=tmp_path)
    resource.prlimit(started.process.pid, resource.RLIMIT_NOFILE, (SERVER_FILES, SERVER_FILES))
    try:
        started.until(lambda: started.status("/ready") == 200)
        yield started
    finally:
        started.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Client:
    """Asks over connections of its own, and remembers what probes found."""

    def __init__(self, process: Process, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.url = f"http://127.0.0.1:{process.port}"
        self.session = session
        self.probed: dict[str, dict[str, Any]] = {}

    async def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name and labels, as they stand in the text."""
        async with self.session.get(self.url + "/metrics") as response:
            lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    async def post(self, path: str, body: bytes) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.json()

    def report(self, case: str, **figures: Any) -> None:
        figures |= self.probed
        with self.capsys.disabled():
            print(f"\n{case}", *(f"    {name}: {value}" for name, value in figures.items()), sep="\n")  # noqa: T201


def _ms(times_s: list[float]) -> float:
    return round(max(times_s) * 1e3, 1)


@asynccontextmanager
async def client_of(
    process: Process, capsys: pytest.CaptureFixture[str], probes: dict[str, float]
) -> AsyncIterator[Client]:
    """A client; meanwhile processes of their own ask these paths, each so many seconds after its last answer."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        client = Client(process, session, capsys)
        probers = {path: prober.start(process.port, path, every_s) for path, every_s in probes.items()}
        try:
            yield client
        finally:
            for path, child in probers.items():
                child.terminate()
                client.probed[path] = json.loads(child.communicate(timeout=90)[0])
    assert all(set(probed["statuses"]) == {"200"} for probed in client.probed.values()), client.probed


# ---------------------------------------------------------------- C21


class Asked:
    """One request of the burst, on a socket of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 0
        self.retry_after = ""
        self.tokens = 0
        self.place = -1  # among those that were answered 200
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, port: int, common: str, order: Iterator[int]) -> None:
        prompt = f"[{5 + self.number // 300},{5 + self.number % 300},{common}]"
        body = f'{{"prompt":{prompt},"max_tokens":4,"ignore_eos":true,"temperature":0}}'
        reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write((head + body).encode())
        answer = await reader.read()
        self.writer.close()
        lines, _, content = answer.partition(b"\r\n\r\n")
        self.status = int(lines[9:12])
        headers = dict(line.split(": ", 1) for line in lines.decode().split("\r\n")[1:])
        self.retry_after = headers.get("Retry-After", "")
        if self.status == 200:
            self.place = next(order)
            self.tokens = json.loads(content)["usage"]["completion_tokens"]


async def test_thousands_of_waiting_requests(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is served in order of arrival, or refused with 429 and Retry-After; who leaves leaves nothing behind."""
    common = ",".join(str(5 + i % 300) for i in range(PROMPT_TOKENS - 2))
    asked = [Asked(number) for number in range(BURST)]
    order = iter(range(BURST))
    async with asyncio.timeout(TIMEOUT_S), client_of(process, capsys, {"/health": 1.0, "/metrics": 1.0}) as client:
        before = await client.metrics()
        began = time.perf_counter()
        tasks = []
        for one in asked:
            tasks.append(asyncio.create_task(one.ask(process.port, common, order)))
            if one.number % 50 == 0:
                await asyncio.sleep(0.05)  # 1,000 a second
        sent_s = time.perf_counter() - began
        long_queue = await client.metrics()
        unanswered = [number for number, task in enumerate(tasks) if not task.done() and asked[number].writer]
        leaving = set(random.Random(21).sample(unanswered, min(LEAVING, len(unanswered) * 4 // 5)))
        for number in leaving:
            tasks[number].cancel()
            writer = asked[number].writer
            assert writer is not None
            writer.transport.abort()
        stayed = [one for one in asked if one.number not in leaving]
        await asyncio.gather(*(tasks[one.number] for one in stayed))
        served_s = time.perf_counter() - began
        while _open(after := await client.metrics()):  # noqa: ASYNC110 - the engine reads the last ends before a step
            await asyncio.sleep(0.05)
    assert {one.status for one in stayed} <= {200, 429}
    served = [one for one in stayed if one.status == 200]
    refused = [one for one in stayed if one.status == 429]
    assert all(one.tokens == 4 for one in served)
    assert all(int(one.retry_after) > 0 for one in refused)
    quarter = max(len(served) // 4, 1)
    assert max(one.place for one in served[:quarter]) < min(one.place for one in served[-quarter:]), "first come"

    def total(name: str, **labels: str) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(v for k, v in after.items() if k.startswith(name + "{") and all(w in k for w in wanted))

    assert total("pagewalk_kv_frames", state="active") == total("pagewalk_kv_frames", state="copying") == 0
    answers = {
        status: total("pagewalk_http_requests_total", route="/v1/completions", status=status)
        for status in ("200", "429", "499")
    }
    assert answers["200"] + answers["429"] >= len(stayed)
    assert BURST - len(leaving) <= sum(answers.values()) <= BURST, "of those who left, some were never read"
    assert total("vllm:request_success_total", finished_reason="error") == 0
    assert total("vllm:request_success_total", finished_reason="abort") <= answers["499"]
    assert process.process.poll() is None
    client.report(
        "C21",
        requests=BURST,
        answers=answers,
        left=len(leaving),
        longest_queue=sum(v for k, v in long_queue.items() if k.startswith("vllm:num_requests_waiting{")),
        sent=f"{sent_s:.1f} s",
        all_served=f"{served_s:.1f} s",
        loop_lag=_longest(before, after, "pagewalk_event_loop_lag_seconds_bucket"),
        schedule=f"{_schedule_us(before, long_queue):.0f} us a step with the queue, "
        f"{_schedule_us(long_queue, after):.0f} us after",
    )


def _open(samples: dict[str, float]) -> float:
    """Sequences that run or wait, and HTTP requests but for this scrape."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    sequences = sum(value for name, value in samples.items() if name.startswith(names))
    return sequences + samples["pagewalk_http_inflight"] - 1


def _schedule_us(before: dict[str, float], after: dict[str, float]) -> float:
    """Mean host time of `schedule` between two scrapes."""
    total, count = (
        after[name] - before.get(name, 0)
        for name in (f'pagewalk_step_seconds_{part}{{phase="schedule"}}' for part in ("sum", "count"))
    )
    return total / max(count, 1) * 1e6


# ---------------------------------------------------------------- C43


def _json(**body: Any) -> bytes:
    """A short answer to a long question, encoded before the clock runs: this takes the client's loop."""
    return json.dumps(body | {"max_tokens": 2, "ignore_eos": True}).encode()


class Stream:
    """One stream, and the longest time without news."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.longest_gap_s = 0.0
        self.is_done = False
        self.usage: Any = None

    async def run(self, client: Client, number: int) -> None:
        body = {
            "prompt": [5 + number] * 20,
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        last = None
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                if last is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                if line == b"data: [DONE]\n":
                    self.is_done = True
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                self.usage = event.get("usage")
                for choice in event["choices"]:
                    self.token_ids += choice["token_ids"]


async def test_the_event_loop_is_never_blocked(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams lose nothing while large texts, a long chat and many long prompts arrive; hopeless ones get 400."""
    text = "The quick brown fox jumps over the lazy dog.  Two spaces,\n\n    an indented line of code. "
    texts = {size: (text * (size // len(text) + 1))[:size] for size in (200_000, 2_000_000, 20_000_000)}
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "the fox"} for i in range(5_000)]
    bodies = {f"{size / 1e6:g} MB": _json(prompt=prompt) for size, prompt in texts.items()}
    chat = _json(messages=turns)
    long = [_json(prompt=[5 + i, *[6 + j % 300 for j in range(LONG_TOKENS)]]) for i in range(LONG_PROMPTS)]
    async with asyncio.timeout(TIMEOUT_S), client_of(process, capsys, {"/health": 0.05, "/metrics": 1.0}) as client:
        before = await client.metrics()
        streams = [Stream() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(stream.run(client, number)) for number, stream in enumerate(streams)]
        while not all(stream.token_ids for stream in streams):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        answers: dict[str, tuple[int, Any]] = {}
        for name, body in bodies.items():
            answers[name] = await client.post("/v1/completions", body)
        answers["chat"] = await client.post("/v1/chat/completions", chat)
        long_answers = await asyncio.gather(*(client.post("/v1/completions", body) for body in long))
        running = sum(not task.done() for task in tasks)
        await asyncio.gather(*tasks)
        after = await client.metrics()
    assert [(status, body["usage"]["completion_tokens"]) for status, body in long_answers] == [(200, 2)] * LONG_PROMPTS
    assert {name: status for name, (status, _) in answers.items()} == {
        "0.2 MB": 200, "2 MB": 400, "20 MB": 400, "chat": 200,
    }  # fmt: skip
    for name in ("2 MB", "20 MB"):
        assert "maximum context length" in answers[name][1]["error"]["message"]
    for stream in streams:
        assert (len(stream.token_ids), stream.is_done) == (STREAM_TOKENS, True)
        assert stream.usage["completion_tokens"] == STREAM_TOKENS
    client.report(
        "C43",
        chat_prompt=f"{answers['chat'][1]['usage']['prompt_tokens']} tokens",
        streams_left_at_the_end=running,
        longest_gap=f"{_ms([stream.longest_gap_s for stream in streams])} ms",
        longest_step=_longest(before, after, "pagewalk_step_seconds_bucket", 'phase="wait"'),
        loop_lag=_longest(before, after, "pagewalk_event_loop_lag_seconds_bucket"),
    )


def _longest(before: dict[str, float], after: dict[str, float], name: str, label: str = "") -> str:
    """The bound of the highest bucket of a histogram that something fell into between two scrapes."""
    counts = {
        key.split('le="')[1].split('"')[0]: count - before.get(key, 0)
        for key, count in after.items()
        if key.startswith(name + "{") and label in key
    }
    return f"{next(bound for bound, count in counts.items() if count == counts['+Inf'])} s or less"


# ---------------------------------------------------------------- a crowd


@pytest.fixture(params=[0, 2], ids=["one process", "two front ends"])
def roomy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """A server that runs 512 Sequences at once, and queues the rest."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CROWD_STREAMS + CROWD_QUEUE + 500:
        pytest.skip(f"a process of this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    arguments = ["--model", str(write_tiny_model(folder)), "--load-format", "dummy", *ON_THE_CPU]
    arguments += ["--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "512", "--max-queue-requests", "6000"]
    started = Process(*arguments, "--front-ends", str(request.param), "--log-format", "json", folder=tmp_path)
    try:
        started.until(lambda: started.status("/ready") == 200)
        yield started
    finally:
        started.stop()


class Crowd:
    """Streams of which some are read slowly and some are left, and as many short requests as the queue takes."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw = port, random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def open(self, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps({"ignore_eos": True, **body})
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
        writer.write(f"{head}\r\n\r\n{data}".encode())
        return reader, writer

    async def stream(self, number: int) -> None:
        reader, writer = await self.open(prompt=[5 + number % 300] * 20, max_tokens=CROWD_TOKENS, stream=True)
        kind = ("fast", "slow", "leaves")[number % 3]
        bytes_left = self.draw.randrange(20_000) if kind == "leaves" else 1 << 30
        text = b""
        while bytes_left > 0 and (more := await reader.read(2_000)):
            bytes_left -= len(more)
            text = text[-20:] + more
            if kind == "slow":
                await asyncio.sleep(0.1)
        writer.close()
        self.ends["left" if bytes_left <= 0 else "whole" if b"data: [DONE]" in text else "broken"] += 1

    async def short(self, number: int) -> None:
        reader, writer = await self.open(prompt=[5 + number % 300, 5 + number // 300] * 10, max_tokens=2)
        if self.draw.random() < 0.1:
            await asyncio.sleep(self.draw.random())
            writer.transport.abort()
            self.ends["left"] += 1
            return
        answer = await reader.read()
        writer.close()
        self.ends["answered" if answer.startswith(b"HTTP/1.1 200") else answer[9:12].decode() or "broken"] += 1

    async def run(self) -> None:
        tasks = [asyncio.create_task(self.stream(number)) for number in range(CROWD_STREAMS)]
        for number in range(CROWD_QUEUE):
            tasks.append(asyncio.create_task(self.short(number)))
            if number % 50 == 0:
                await asyncio.sleep(0.05)  # 1,000 a second
        await asyncio.gather(*tasks)


def _resident_mb(process: Process) -> dict[str, int]:
    """Memory of each process of the server that is its own."""
    found = {}
    for pid in (process.process.pid, *process.front_ends()):
        status = Path(f"/proc/{pid}/status").read_text()
        name = "engine" if pid == process.process.pid else f"front end {len(found)}"
        found[name] = int(status.split("RssAnon:")[1].split()[0]) // 1024
    return found


@pytest.mark.timeout(5 * TIMEOUT_S)
async def test_a_crowd_with_slow_readers_and_leavers(roomy: Process, capsys: pytest.CaptureFixture[str]) -> None:
    """500 streams, 5,000 requests in the queue: each is answered whole, or its client left; nothing stays of either."""
    resident = [_resident_mb(roomy)]
    longest_queue = 0.0
    async with asyncio.timeout(4 * TIMEOUT_S), client_of(roomy, capsys, {"/health": 0.05}) as client:
        before = await client.metrics()
        for seed in range(ROUNDS):
            crowd = Crowd(roomy.port, seed)
            running = asyncio.create_task(crowd.run())
            while not running.done():
                await asyncio.wait([running], timeout=0.5)
                waiting = [v for k, v in (await client.metrics()).items() if k.startswith("vllm:num_requests_waiting{")]
                longest_queue = max(longest_queue, *waiting)
            await running
            assert set(crowd.ends) <= {"whole", "answered", "left"}, crowd.ends
            while (after := await client.metrics())["pagewalk_http_inflight"] > 1:  # noqa: ASYNC110 - 1: this scrape
                await asyncio.sleep(0.05)
            resident.append(_resident_mb(roomy))
        (admin,) = [line["admin"] for line in roomy.log() if line["event"] == "ready"]
        async with client.session.get(admin + "v1/audit") as response:
            books = await response.json()
    assert books["balanced"], books["discrepancies"]
    assert books["active"] == 0
    client.report(
        "a crowd",
        ends_of_the_last_round=dict(crowd.ends),
        longest_queue=longest_queue,
        anonymous_memory_mb=resident,
        loop_lag=_longest(before, after, "pagewalk_event_loop_lag_seconds_bucket"),
    )


# ---------------------------------------------------------------- open streams


def test_ten_thousand_streams_hold() -> None:
    """C21: two front ends, a token a second for each stream, and then all at once: every stream comes to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < OPEN_STREAMS + 500:
        pytest.skip(f"a process of this user may open {hard} files: {OPEN_STREAMS} streams need {OPEN_STREAMS + 500}")
    size = ["--streams", str(OPEN_STREAMS), "--tokens", "5", "--step-ms", "1000", "--front-ends", "2"]
    command = [sys.executable, "-m", "bench.front_end", *size]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 0, result.stderr
    assert [run["tokens"] for run in json.loads(result.stdout)["runs"]] == [5 * OPEN_STREAMS] * 2
