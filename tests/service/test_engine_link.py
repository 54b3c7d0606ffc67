"""The link between the engine's process and a front end: messages, frames, and what happens when either goes wrong."""

import asyncio
import random
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from model.step_plan import SamplingParameters
from service import engine_link, front_ends
from service.checkpoint_file import NotWritten
from service.engine_client import (
    Cancel,
    Ended,
    EngineDied,
    EngineState,
    Finish,
    Limits,
    Message,
    QueueState,
    Scores,
    Sibling,
    Submit,
    TokenBatch,
)
from service.engine_link import (
    Answer,
    Ask,
    EngineLink,
    Failed,
    Frames,
    Goodbye,
    Hello,
    Listening,
    NewKeys,
    NotAFrame,
    Refusal,
    SendReport,
    Serve,
    Serving,
    Status,
    ToEngine,
    ToFrontEnd,
    addresses,
    frame,
)
from service.errors import BadRequest, Loading, NotFound, PagewalkError, QueueFull, ServiceUnavailable
from service.front_end import ApiSettings
from service.front_ends import Desk
from service.http_counts import Report
from service.questions import (
    Answers,
    CountGenerating,
    FindParent,
    Fork,
    Forked,
    MetricsText,
    RenderMetrics,
    SaveCheckpoint,
    TakeSnapshot,
)
from service.served_model import ModelFacts, TokenizerFiles

LIMITS = Limits(
    max_model_len=100, max_request_tokens=100, max_queue_requests=10, vocabulary=50, tenant_request_tokens={"a": 5}
)
FACTS = ModelFacts(("tiny",), "/models/tiny", 1, (2,), SamplingParameters(), "float32", 7)


def submit(sequence_id: int = 1, siblings: int = 0) -> Submit:
    more = [Sibling(sequence_id + 1 + i, i) for i in range(siblings)]
    return Submit(sequence_id, "r", [1, 2], 5, SamplingParameters(seed=2**63), [2], siblings=more)


TO_FRONT_END = [
    Hello(
        3,
        ApiSettings(version="1", api_keys=("k",), unknown_fields="ignore"),
        {"ab" * 32: "batch"},
        addresses([(socket.AF_INET, ("127.0.0.1", 8000)), (socket.AF_INET6, ("::1", 8000, 0, 0))]),
        [],
        "info",
        "json",
        60.0,
    ),
    Serve(FACTS, TokenizerFiles("/models/tiny", {"tokenizer.json": b"{}"}, None, 50), LIMITS, polls=True),
    Status("draining", is_alive=False, queue=QueueState(3, 30, 2), taken=9, taken_tokens=90),
    TokenBatch(1, [1, 2], [3, 4], [Ended(2, "stop", end_token=4)], {0: Scores(-0.5, 1, [3], [-0.5])}),
    EngineDied("gone"),
    Answer(1, b"\x01"),
    Answer(2, refusal=Refusal.of(QueueFull("full", retry_after_s=7))),
    SendReport(),
    NewKeys({"ab" * 32: "batch"}),
    Goodbye(),
]
TO_ENGINE = [
    Listening(),
    Serving(),
    Failed("no"),
    submit(siblings=2),
    Cancel(1),
    Finish(1, 2),
    Ask(1, RenderMetrics("text/plain")),
    Ask(2, TakeSnapshot()),
    Ask(3, FindParent("k", ["r", "cmpl-r"], 2)),
    Ask(4, Fork("k", (2, 9), 5, "f", SamplingParameters(seed=2**63), [2], max_tokens=7, timeout_s=1.5)),
    Report([("/live", "GET", "200", 3)], 1, 2, 3, 4, {"prompt": ([0, 1], 5.0)}, 1.5),
]


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize(("kinds", "messages"), [(ToFrontEnd, TO_FRONT_END), (ToEngine, TO_ENGINE)])
def test_every_message_survives_the_way_however_it_is_cut(kinds: Any, messages: list[Any]) -> None:
    data = b"".join(map(frame, messages))
    assert Frames[Any](kinds).feed(data) == messages
    for size in (1, 3, 100):
        frames = Frames[Any](kinds)
        assert [got for at in range(0, len(data), size) for got in frames.feed(data[at : at + size])] == messages


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff",  # a length beyond all bounds
        b"\x00\x00\x00\x00",  # no message at all
        b"\x00\x00\x00\x01\xc1",  # not MessagePack
        frame({"type": "nonsense"}),
        frame({"type": "cancel", "sequence_id": "one"}),
        frame(Goodbye()),  # a message, but not one that goes this way
        b"GET / HTTP/1.1\r\n\r\n" * 9,
    ],
)
def test_junk_is_no_frame(junk: bytes) -> None:
    with pytest.raises(NotAFrame):
        Frames[Any](ToEngine).feed(junk)


def test_random_bytes_are_refused_or_waited_for() -> None:
    """Never anything but NotAFrame."""
    draw = random.Random(5)
    for _ in range(2000):
        frames = Frames[Any](ToEngine)
        good = frame(draw.choice(TO_ENGINE))
        spoilt = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        with suppress(NotAFrame):
            frames.feed(bytes(spoilt) + draw.randbytes(8))


# ---------------------------------------------------------------- the front end's end


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def engine_link_of(sent: list[Any], clock: Clock) -> EngineLink:
    link = EngineLink(lambda *messages: sent.extend(messages), silence_s=60, clock=clock)
    link.serve(LIMITS)
    return link


def test_what_is_on_its_way_counts_as_waiting() -> None:
    """The limit of the queue holds although the engine is heard of once a step."""
    link = engine_link_of([], Clock())
    message = submit(siblings=2)
    tokens = len(message.prompt_ids)
    link.hear(Status("ready", is_alive=True, queue=QueueState(4, 40, 9), taken=0, taken_tokens=0))
    link.post(0, message)
    assert link.queue == QueueState(7, 40 + tokens, 9)
    link.hear(Status("ready", is_alive=True, queue=QueueState(2, 20, 8), taken=3, taken_tokens=tokens))
    assert link.queue == QueueState(2, 20, 8)


def test_silence_is_no_life() -> None:
    clock = Clock()
    link = engine_link_of([], clock)
    assert link.is_alive
    clock.now += 59
    assert link.is_alive
    clock.now += 1
    assert not link.is_alive
    link.hear(Status("ready", is_alive=True, queue=QueueState(), taken=0, taken_tokens=0))
    assert link.is_alive
    link.hear(Status("ready", is_alive=False, queue=QueueState(), taken=0, taken_tokens=0))
    assert not link.is_alive


async def asked(link: EngineLink, sent: list[Any]) -> "asyncio.Task[MetricsText]":
    task = asyncio.create_task(link.ask(RenderMetrics("a")))
    await asyncio.sleep(0)
    assert isinstance(sent[-1], Ask)
    return task


async def test_an_answer_has_the_type_that_the_question_names() -> None:
    sent: list[Any] = []
    link = engine_link_of(sent, Clock())
    one, two = await asked(link, sent), await asked(link, sent)
    for number in (2, 1):
        link.answered(Answer(number, msgspec.msgpack.encode(MetricsText(b"%d" % number, "text"))))
    assert (await one, await two) == (MetricsText(b"1", "text"), MetricsText(b"2", "text"))
    link.answered(Answer(1, b"late"))


@pytest.mark.parametrize(
    "error", [QueueFull("full", retry_after_s=7), BadRequest("no", param="n"), Loading(), ServiceUnavailable("later")]
)
async def test_a_refusal_is_raised_where_it_was_asked(error: PagewalkError) -> None:
    sent: list[Any] = []
    link = engine_link_of(sent, Clock())
    task = await asked(link, sent)
    link.answered(Answer(1, refusal=Refusal.of(error)))
    with pytest.raises(type(error)) as caught:
        await task
    assert (caught.value.body(), caught.value.headers) == (error.body(), error.headers)


def test_a_refusal_that_only_the_engine_s_process_knows_travels_as_the_next_one_above() -> None:
    error = Refusal.of(NotWritten("the disk is full")).error()
    assert (type(error), str(error), error.status) == (ServiceUnavailable, "the disk is full", 503)


async def test_who_asks_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "ANSWER_S", 0.01)
    link = engine_link_of([], Clock())
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        await link.ask(CountGenerating())


async def test_a_checkpoint_may_take_as_long_as_the_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until nothing is heard of it for long."""
    monkeypatch.setattr(engine_link, "ANSWER_S", 0.001)
    sent, clock = [], Clock()
    link = engine_link_of(sent, clock)
    task = asyncio.create_task(link.ask(SaveCheckpoint("s1", "file", "me")))
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert not task.done()
    link.answered(Answer(1, msgspec.msgpack.encode(b"{}")))
    assert await task == b"{}"
    task = asyncio.create_task(link.ask(SaveCheckpoint("s1", "file", "me")))
    await asyncio.sleep(0)
    clock.now += 1000.0
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        await task


async def test_a_lost_link_answers_all_questions() -> None:
    sent: list[Any] = []
    link = engine_link_of(sent, Clock())
    task = await asked(link, sent)
    link.lost()
    with pytest.raises(ServiceUnavailable, match="has stopped"):
        await task
    assert (link.state, link.is_alive) == ("dead", False)


# ---------------------------------------------------------------- the engine's end


@dataclass
class NotedEngine:
    """Notes what it is told (front_ends.EngineSide)."""

    limits: Limits = LIMITS
    state: EngineState = "ready"
    is_alive: bool = True
    queue: QueueState = field(default_factory=QueueState)
    posted: list[Message] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)

    def post(self, front_end: int, message: Message) -> None:
        self.posted.append(message)

    def connect(self, front_end: int, receiver: Any) -> None:
        raise AssertionError("not asked for here")

    def disconnect(self, front_end: int) -> None:
        self.gone.append(front_end)


@dataclass
class Ends:
    """A desk, and the socket of the front end that sits there."""

    engine: NotedEngine
    desk: Desk
    socket: socket.socket
    answers: Answers
    lost: list[str] = field(default_factory=list)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, count: int) -> list[Any]:
        """The next messages."""
        frames, found = Frames[Any](ToFrontEnd), list[Any]()
        while len(found) < count:
            found += frames.feed(await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16))
        return found

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)


@pytest.fixture
async def ends() -> Any:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    engine, answers = NotedEngine(), Answers()
    found = Ends(engine, None, theirs, answers)  # type: ignore[arg-type]
    found.desk = Desk(7, lambda: engine, answers, lambda desk, reason: found.lost.append(reason))
    await asyncio.get_running_loop().create_unix_connection(lambda: found.desk.link, sock=ours)
    yield found
    theirs.close()
    await found.until(lambda: found.lost)


async def test_who_leaves_has_his_sequences_cancelled(ends: Ends) -> None:
    """Those that have not ended, siblings too, once each."""
    await ends.send(frame(submit(1, siblings=2)) + frame(submit(10)) + frame(Cancel(99)))
    await ends.until(lambda: len(ends.engine.posted) == 3)
    ends.desk.deliver(TokenBatch(1, [], [], [Ended(2, "length")]))
    ends.socket.shutdown(socket.SHUT_RDWR)
    await ends.until(lambda: ends.lost)
    assert sorted(ends.engine.posted[3:], key=lambda cancel: cancel.sequence_id) == [Cancel(1), Cancel(3), Cancel(10)]
    assert ends.engine.gone == [7]


async def test_junk_ends_the_link_and_nothing_else(ends: Ends) -> None:
    await ends.send(frame(submit(1)))
    await ends.until(lambda: ends.engine.posted)
    await ends.send(b"\x00\x00\x00\x02hi")
    await ends.until(lambda: ends.lost)
    assert "no message" in ends.lost[0]
    assert ends.engine.posted == [submit(1), Cancel(1)]


async def test_who_does_not_read_is_given_up_and_holds_nobody(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hands its events over at once, and what waits for one front end is bounded."""
    monkeypatch.setattr(front_ends, "MOST_UNSENT_BYTES", 1 << 20)
    batch = TokenBatch(1, list(range(1000)), list(range(1000)))
    for _ in range(1000):  # 4 MB, without a turn of the loop in between
        ends.desk.deliver(batch)
    assert ends.desk.link.unsent_bytes < 2 << 20
    await ends.until(lambda: ends.lost)
    assert "has not read" in ends.lost[0]


async def test_a_step_is_one_message_and_a_changed_state_goes_with_it(ends: Ends) -> None:
    batch = TokenBatch(1, [1], [2])
    ends.desk.deliver(batch)
    ends.desk.deliver(batch)
    ends.engine.queue = QueueState(5, 50, 2)
    ends.desk.deliver(batch)
    ready = Status("ready", is_alive=True, queue=QueueState(), taken=0, taken_tokens=0)
    longer = msgspec.structs.replace(ready, queue=QueueState(5, 50, 2))
    assert await ends.read(5) == [batch, ready, batch, batch, longer]


async def test_what_is_submitted_to_a_dead_engine_fails(ends: Ends) -> None:
    ends.engine.state = "dead"
    await ends.send(frame(submit(1)))
    assert isinstance((await ends.read(1))[0], EngineDied)
    assert ends.engine.posted == []


async def test_forks_are_cancelled_with_their_front_end_but_not_those_that_never_began(ends: Ends) -> None:
    async def fork(front_end: int, question: Fork) -> Forked:
        if question.sequence_id == 5:
            raise NotFound("it has just ended")
        return Forked([1, 2, 3], 1, 2, 9)

    ends.answers.on(Fork, fork)
    for number in (4, 5, 6):
        asked = Fork("", (2, 9), number, "f", SamplingParameters(), [])
        await ends.send(frame(Ask(number, asked)))
    answers = await ends.read(3)
    assert [answer.refusal is None for answer in answers] == [True, False, True]
    ends.desk.deliver(TokenBatch(1, [], [], [Ended(6, "stop")]))
    ends.socket.close()
    await ends.until(lambda: ends.lost)
    assert ends.engine.posted == [Cancel(4)]


async def test_a_question_that_fails_is_an_answer(ends: Ends) -> None:
    """A fault of ours ends neither the link nor the engine's process."""

    async def broken(front_end: int, question: CountGenerating) -> int:
        assert front_end == 7
        raise ValueError("nobody thought of this")

    ends.answers.on(CountGenerating, broken)
    await ends.send(frame(Ask(1, CountGenerating())) + frame(Ask(2, TakeSnapshot())))
    first, second = await ends.read(2)
    assert first.refusal.kind == "InternalError"
    assert "nobody thought" not in first.refusal.message
    assert second.refusal.kind == "Loading"
    assert not ends.lost
