"""Everything at once over HTTP, in memory that is far too small, while operators act and memory for steps runs out:
every answer is what its request gets alone, no answer is a 5xx, and the books balance whenever they are looked at.

    make soak-mix MINUTES=60        a minute and a half, if not said
"""

import asyncio
import hashlib
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_house import RealHouse, real_house
from short_memory import short_of_memory
from tiny_model import write_tiny_model

from model.cpu_executor import CpuExecutor
from service.errors import PagewalkError

MINUTES = float(os.environ.get("MINUTES", "1.5"))
LONGEST = 192  # tokens of a request
FRAME_BYTES = 2048  # of the tiny model, in float32
POOL = {"kv_cache_memory_bytes": 30 * FRAME_BYTES, "kv_cache_max_memory_bytes": 40 * FRAME_BYTES}
SWAP = {"swap_memory_bytes": 12 * FRAME_BYTES, "swap_max_memory_bytes": 20 * FRAME_BYTES}
SIZES: dict[str, Any] = {"max_model_len": LONGEST, "max_num_seqs": 12, "max_num_batched_tokens": 64}
REQUESTS, AT_ONCE = 40, 16
SLACK = 1.05  # of memory, from the second third of the time to the last
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CONSTRAINTS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "[a-f]{5} is [0-9]{2,9}!"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON, "strict": True}}},
]
KEYS = ["one", "two"]


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body whose answer is the same each time."""
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 60), "seed": draw.randrange(10_000)}
    body |= {"temperature": draw.choice([0, 0.9]), "prefix_cache": draw.random() < 0.8}
    body |= {"return_token_ids": True, "ignore_eos": draw.random() < 0.7, "n": draw.choice([1, 1, 2, 4])}
    kind = draw.randrange(5)
    if kind == 0:
        words = " ".join(draw.choice(["the", "quick", "brown", "fox"]) for _ in range(draw.randint(1, 12)))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}], "logprobs": True}
    begin, count = draw.choice([0, 1, 2]), draw.choice([1, 15, 16, 33, 64])
    body["prompt"] = [5 + (begin + place * 37) % 290 for place in range(count)] + [draw.randrange(5, 300)]
    if kind == 1:
        return "/v1/completions", body | {"ignore_eos": False} | draw.choice(CONSTRAINTS)
    if kind == 2:
        width = draw.randint(body["n"], 4)
        beams = {"use_beam_search": True, "beam_width": max(2, width), "temperature": 0, "max_tokens": 12}
        return "/v1/completions", {name: value for name, value in body.items() if name != "seed"} | beams
    if kind == 3:
        body |= {"logprobs": draw.choice([0, 2]), "echo": draw.random() < 0.3, "stop": draw.choice([["a"], ["th"], []])}
        body |= {"prompt_logprobs": 1} if draw.random() < 0.3 else {}
    return "/v1/completions", body | {"frequency_penalty": draw.choice([0, 0.5]), "min_tokens": draw.choice([0, 3])}


def results(answers: list[Any]) -> dict[int, tuple[list[int], str, str]]:
    """By choice: the tokens, the text, how it ended. Of one whole answer, or of the events of a stream."""
    tokens: dict[int, list[int]] = {}
    texts: Counter[int] = Counter()
    text: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for answer in answers:
        for choice in answer["choices"]:
            i, message = choice["index"], choice.get("message") or choice.get("delta") or choice
            tokens.setdefault(i, []).extend(choice.get("token_ids") or [])
            text[i] = text.get(i, "") + (message.get("content") or message.get("text") or "")
            reasons[i] = choice["finish_reason"] or reasons.get(i, "")
            texts[i] += 1
    return {i: (tokens[i], text[i], reasons[i]) for i in sorted(texts)}


@dataclass
class Mix:
    """The requests, what each gets alone, and what happens to them."""

    house: RealHouse
    draw: random.Random
    asked: list[tuple[str, dict[str, Any]]]
    alone: list[dict[int, tuple[list[int], str, str]]]
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    open: list[str] = field(default_factory=list)  # ids of requests
    happened: Counter[str] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)  # bytes of this process, each second
    names: int = 0
    is_over: bool = False

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.draw.choice(KEYS)}"}

    async def run(self, until: float) -> None:
        """Rounds of all requests, each at least once."""
        async with asyncio.TaskGroup() as helpers:
            helpers.create_task(self.operate())
            helpers.create_task(self.audit())
            while not self.happened["rounds"] or time.monotonic() < until:
                order = self.draw.sample(range(len(self.asked)), len(self.asked))
                async with asyncio.TaskGroup() as clients:
                    for number in order:
                        clients.create_task(self.client(number))
                self.happened["rounds"] += 1
            self.is_over = True

    async def client(self, number: int) -> None:
        async with self.gate:
            self.names += 1
            name = f"mix-{self.names}"
            self.open.append(name)
            try:
                await self.ask(number, name)
            finally:
                self.open.remove(name)

    async def ask(self, number: int, name: str) -> None:
        path, body = self.asked[number]
        way, streams = self.draw.random(), not {"prompt_logprobs", "use_beam_search"} & body.keys()
        more: dict[str, Any] = {"request_id": name, "priority": self.draw.randint(-3, 3)}
        headers = self.headers()
        if way < 0.15:  # it leaves
            await self.leave(path, body | more | {"stream": streams}, headers)
        elif way < 0.25:  # it is told to end by its time
            more["timeout_s"] = 0.01 + self.draw.random() * 0.2
            await self.post(path, body | more, headers, number, late=True)
        elif way < 0.5 and body["n"] == 1 and "use_beam_search" not in body and path == "/v1/completions":
            asked = self.post(path, body | more | {"stream": streams}, headers, number)
            await asyncio.gather(asked, self.fork(name, body, headers))
        else:
            await self.post(path, body | more | {"stream": streams and way < 0.7}, headers, number)

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str], number: int, *, late: bool = False
    ) -> None:
        async with self.house.session.post(self.house.url + path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, (body, text)
        if body.get("stream"):
            *frames, done = [frame for frame in text.split("\n\n") if frame.startswith("data: ")]
            assert done == "data: [DONE]", text[-500:]
            found = results([json.loads(frame.removeprefix("data: ")) for frame in frames])
        else:
            found = results([json.loads(text)])
        alone = self.alone[number]
        for i, (tokens, shown, reason) in found.items():
            if late and (tokens, shown, reason) != alone[i]:
                self.happened["late"] += 1
                assert "use_beam_search" in body or tokens == alone[i][0][: len(tokens)]
            else:
                assert (tokens, shown, reason) == alone[i], f"choice {i} of {body}: alone {alone[i]}"
        assert found.keys() == alone.keys()
        self.happened["answers"] += 1

    async def leave(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            async with (
                asyncio.timeout(self.draw.random() * 0.3),
                self.house.session.post(self.house.url + path, json=body, headers=headers) as response,
            ):
                assert response.status == 200, await response.text()
                await response.read()
        except TimeoutError:
            self.happened["left"] += 1

    async def fork(self, name: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """A second answer from where the first stands, by other parameters."""
        url = f"{self.house.url}/v1/requests/{name}/fork"
        asked = {"max_tokens": 5, "temperature": 1.5, "seed": 3, "ignore_eos": True, "return_token_ids": True}
        for _ in range(10):  # until it has begun, or has ended
            await asyncio.sleep(self.draw.random() * 0.02)
            async with self.house.session.post(url, json=asked, headers=headers) as response:
                answer = await response.json()
            assert response.status < 500 or response.status == 503, answer
            if response.status == 200:
                self.happened["forks"] += 1
                prompt = answer["choices"][0]["prompt_token_ids"]
                assert prompt[: len(body["prompt"])] == body["prompt"]
                assert len(prompt) == len(body["prompt"]) + answer["forked_at"]
                return

    # --- what operators do

    async def operate(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.02)
            path, body = self.some_action()
            status = await self.act(path, body)
            self.happened[f"{path.split('/')[-1] if path.startswith('sequences') else path} {status}"] += 1
            if path.endswith("/pause") and status == 200:
                await asyncio.sleep(0.01)
                await self.act(path.replace("/pause", "/resume"), {})

    def some_action(self) -> tuple[str, dict[str, Any]]:
        draw = self.draw
        of = draw.choice(self.open) if self.open else "nobody"
        begin = draw.choice([0, 1, 2])  # as in some_request
        prefix = [5 + (begin + place * 37) % 290 for place in range(32)]
        actions: list[tuple[str, dict[str, Any]]] = [
            (f"sequences/{of}/swap_out", {}),
            (f"sequences/{of}/swap_in", {}),
            (f"sequences/{of}/pause", {}),
            (f"sequences/{of}/priority", {"priority": draw.randint(-5, 5)}),
            (f"sequences/{of}/oom_score_adj", {"oom_score_adj": draw.randint(-999, 999)}),
            (f"sequences/{of}/madvise", {"advice": draw.choice(["willneed", "cold", "pageout", "dontneed"])}),
            ("page_cache/pin", {"owner": "soak", "tokens": prefix, "ttl_s": 0.2}),
            ("page_cache/unpin", {"owner": "soak"}),
            ("page_cache/drop", {"level": draw.choice([1, 2, 3])}),
            ("watermarks", {"min": 0, "low": draw.randint(1, 3), "high": draw.randint(3, 6)}),
            ("overcommit", {"mode": draw.choice(["heuristic", "always"])}),
            ("resize", {"frames": draw.randint(24, 40), "slots": draw.randint(0, 20)}),
            ("tenants/second", {"high": draw.randint(15, 20), "weight": draw.randint(1, 5)}),
        ]
        return draw.choice(actions)

    async def act(self, path: str, body: dict[str, Any]) -> int:
        url = f"http://127.0.0.1:{self.house.server.admin_port}/admin/v1/{path}"
        headers = {"Authorization": "Bearer root"}
        async with self.house.session.post(url, json=body, headers=headers) as response:
            answer = await response.text()
            assert response.status < 500 or response.status == 503, (path, body, answer)
            return response.status

    async def audit(self) -> None:
        """Each second, between two steps."""
        while not self.is_over:
            await asyncio.sleep(1)
            try:
                await self.house.engine.between_steps(self.house.engine.scheduler.memory.check_invariants)
            except PagewalkError:
                return
            self.happened["audits"] += 1
            self.resident.append(resident_bytes())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def short_of_memory_now_and_then(house: RealHouse, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One step in ten finds no memory for more than a few tokens. Returns the sizes of those."""
    executor = house.engine.executor
    assert isinstance(executor, CpuExecutor)
    refused: list[int] = []

    def is_short(tokens: int) -> bool:
        if is_unlucky := tokens > 3 and draw.random() < 0.1:
            refused.append(tokens)
        return is_unlucky

    short_of_memory(executor, is_short, monkeypatch)
    return refused


async def run_mix(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, seconds: float) -> Counter[str]:
    draw = random.Random(seed)
    asked = [some_request(draw) for _ in range(REQUESTS)]
    alone = []
    async with real_house(monkeypatch, folder, dtype="float32", **SIZES) as roomy:
        for path, body in asked:
            alone.append(results([await roomy.post(path, body)]))
    keys = folder / "keys"
    keys.write_text(f"one\nsecond:sha256:{hashlib.sha256(b'two').hexdigest()}\n")
    doors = {"api_key_file": str(keys), "admin_api_key": "root", "scheduling_policy": "priority"}
    async with real_house(monkeypatch, folder, dtype="float32", **SIZES, **POOL, **SWAP, **doors) as house:
        house.session._timeout = aiohttp.ClientTimeout(total=120)
        house.engine.scheduler.memory.costs.copy_page_s = 1e-9  # swap is worth it
        refused = short_of_memory_now_and_then(house, draw, monkeypatch)
        mix = Mix(house, draw, asked, alone)
        await mix.run(time.monotonic() + seconds)
        counters = house.engine.scheduler.memory.counters()
        happened = mix.happened
        happened |= {"splits": len(refused), "preemptions": house.engine.scheduler.preemptions}
        happened |= {"swapped in": counters.swap_in, "evicted": counters.evict, "copied": counters.cow_fault}
        if (third := len(mix.resident) // 3) > 10:
            before, after = (max(mix.resident[third * i : third * (i + 1)]) for i in (1, 2))
            happened["MiB, second third"], happened["MiB, last third"] = before >> 20, after >> 20
            assert after <= before * SLACK
        await mix.act("page_cache/unpin", {"owner": "soak"})
        async with asyncio.timeout(120):
            while house.engine.scheduler.has_work:  # noqa: ASYNC110 - who left is being cancelled
                await asyncio.sleep(0.01)
    return happened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.mark.slow
async def test_a_round_of_everything_gives_everybody_what_it_has_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = await run_mix(monkeypatch, folder, 5, 0)
    assert min(happened["answers"], happened["splits"], happened["preemptions"]) > 0


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_minutes_of_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the seed; it is printed, with what happened."""
    seed = random.randrange(1 << 32)
    with capsys.disabled():
        print(f"\nseed {seed}, {MINUTES} minutes")  # noqa: T201
    happened = await run_mix(monkeypatch, folder, seed, MINUTES * 60)
    with capsys.disabled():
        print(dict(sorted(happened.items())))  # noqa: T201
    wanted = ("answers", "left", "forks", "splits", "preemptions", "swapped in", "evicted", "copied", "audits")
    assert min(happened[name] for name in wanted) > 0
