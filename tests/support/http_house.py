"""A real server on a real socket, with a scripted engine behind it, and a client that checks the form of answers."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from scripted_engine import Script, ScriptedEngine
from tiny_tokenizer import END, tiny_tokenizer

from model.step_plan import SamplingParameters
from service.api import make_admin_app, make_app
from service.engine_client import EngineSnapshot, Limits
from service.front_end import ApiSettings, FrontEnd
from service.generation import PromptNumbers
from service.grammars import Grammars
from service.http_server import addresses_of, listen, make_runner
from service.questions import Answers, CountGenerating, MetricsText, RenderMetrics, TakeSnapshot
from service.request_answers import answer_about_requests
from service.served_model import ServedModel

MAX_LENGTH = 512


class CountingMetrics:
    """Counts requests as the real metrics do."""

    def __init__(self) -> None:
        self.inflight = 0
        self.ended: Counter[tuple[str, str, int]] = Counter()
        self.prompts: list[PromptNumbers] = []
        self.refusals: Counter[str] = Counter()

    def http_started(self) -> None:
        self.inflight += 1

    def http_ended(self, route: str, method: str, status: int) -> None:
        self.inflight -= 1
        self.ended[route, method, status] += 1

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def prompt_ended(self, numbers: PromptNumbers) -> None:
        self.prompts.append(numbers)


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose form is checked on the way."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        assert 0 < len(error["message"]) <= 1000
        for word in ("Traceback", "msgspec", "aiohttp", "Error(", ".py"):
            assert word not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream; [DONE] must be the last."""
        frames = self.body.decode().split("\n\n")
        assert frames.pop() == ""
        assert frames.pop() == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]


@dataclass
class Server:
    """A started front end and what stands behind it."""

    front_end: FrontEnd
    engine: ScriptedEngine
    metrics: CountingMetrics
    port: int
    admin_port: int
    session: aiohttp.ClientSession
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        """body: an object, or bytes as they are to go out."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        # a file: aiohttp's client warns of bytes objects above 1 MiB
        return await self.ask("POST", path, data=io.BytesIO(data), headers=headers, **options)

    async def complete(self, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "the"} | body)

    async def chat(self, content: Any = "the", **body: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]} | body)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is about to happen; fails if it does not."""
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - conditions are about objects that set no events
                await asyncio.sleep(0.001)


Start = Callable[..., Awaitable[Server]]
"""Starts a server with changes to the defaults; see `running_server`."""


def says(text: str) -> Script:
    """Every Sequence says this text, then an end token."""
    return lambda submit: [*tiny_tokenizer().encode(text, add_special_tokens=False), END]


def served(engine: ScriptedEngine, **changes: Any) -> ServedModel:
    tokenizer = changes.get("tokenizer", tiny_tokenizer())
    defaults: dict[str, Any] = {
        "names": ("tiny", "org/tiny"),
        "root": "/models/tiny",
        "created": 1_790_000_000,
        "end_ids": (END, 0),
        "defaults": SamplingParameters(temperature=0.5, top_k=40, top_p=0.9),
        "tokenizer": tokenizer,
        "client": engine.client,
        "grammars": Grammars(tokenizer, tokenizer.vocabulary, (END, 0)),
        "dtype": "bfloat16",
        "weights_bytes": 123_456,
    }
    return ServedModel(**defaults | changes)


def _answer_questions(answers: Answers, front_end: FrontEnd, engine: ScriptedEngine) -> None:
    """As server.py does."""

    async def render(_: int, question: RenderMetrics) -> MetricsText:
        return MetricsText(b"# TYPE pagewalk_http_inflight gauge\n", "text/plain; version=0.0.4; charset=utf-8")

    async def generating(_: int, question: CountGenerating) -> int:
        return front_end.generating

    async def snapshot(_: int, question: TakeSnapshot) -> EngineSnapshot:
        return engine.snapshot()

    answers.on(RenderMetrics, render)
    answers.on(CountGenerating, generating)
    answers.on(TakeSnapshot, snapshot)


@asynccontextmanager
async def running_server(
    *,
    settings: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    is_loaded: bool = True,
) -> AsyncIterator[Server]:
    """A server with these changes to the defaults of the tests."""
    bounds = {"max_model_len": MAX_LENGTH, "max_request_tokens": MAX_LENGTH, "max_queue_requests": 2000}
    vocabulary = tiny_tokenizer().vocabulary
    scripted = ScriptedEngine(
        **{"limits": Limits(**bounds | {"vocabulary": vocabulary} | (limits or {})), "script": says(" fox")}
        | (engine or {})
    )
    metrics = CountingMetrics()
    log: list[dict[str, Any]] = []
    answers = Answers()
    answer_about_requests(answers, scripted)
    front_end = FrontEnd(
        ApiSettings(version="1.2.3", **settings or {}), metrics, lambda **numbers: log.append(numbers), answers
    )
    _answer_questions(answers, front_end, scripted)
    if is_loaded:
        front_end.model = served(scripted, **model or {})
    runners = [make_runner(make_app(front_end)), make_runner(make_admin_app(front_end))]
    ports = []
    for runner in runners:
        await runner.setup()
        await listen(runner, await addresses_of("127.0.0.1", 0))
        ports.append(runner.addresses[0][1])
    steps = asyncio.create_task(scripted.run())
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            yield Server(front_end, scripted, metrics, ports[0], ports[1], session, log)
    finally:
        for runner in runners:
            await runner.cleanup()
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps
    assert metrics.inflight == 0
    assert front_end.generating == 0
    assert scripted.client.open_sequences == 0, "a request has left a Sequence behind"
