"""A front end's loop that polls: when it does, and that it sleeps again."""

import asyncio
import socket

import pytest
from tiny_tokenizer import tiny_tokenizer

from model.step_plan import SamplingParameters
from service import busy_poll, front_end_process, logs
from service.busy_poll import FEW_STREAMS, BusyPoll
from service.engine_client import Ended, Limits, QueueState, Submit, TokenBatch
from service.engine_link import Hello, Serve, Status
from service.front_end import ApiSettings
from service.front_end_process import FrontEndProcess
from service.served_model import ModelFacts, TokenizerFiles
from service.token_stream import TokenStream


class Turns:
    """Stands for the streams of a front end; a turn that polls takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, poll_s: float) -> None:
        monkeypatch.setattr(busy_poll, "POLL_S", poll_s)
        self.now = 0.0
        self.counted = 0
        self.streams = 1
        self.poll = BusyPoll(self._open_streams, lambda: self.now)

    def _open_streams(self) -> int:
        self.counted += 1
        self.now += 1.0
        return self.streams


async def some_turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_loop_polls_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, 10)
    turns.poll.begin()
    assert turns.counted == 1
    await some_turns()
    assert turns.counted == 10
    turns.poll.begin()  # it had gone to sleep
    await some_turns()
    assert turns.counted == 20


async def test_a_further_request_makes_it_longer_but_no_second_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, 10)
    turns.poll.begin()
    await asyncio.sleep(0)
    assert turns.counted == 2
    turns.poll.begin()
    await asyncio.sleep(0)
    assert turns.counted == 3
    await some_turns()
    assert turns.counted == 12


async def test_a_loop_with_much_to_do_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, 10)
    turns.streams = FEW_STREAMS
    turns.poll.begin()
    await asyncio.sleep(0)
    assert turns.counted == 2
    turns.streams += 1
    await some_turns()
    assert turns.counted == 3


# ---------------------------------------------------------------- a front end


async def front_end(monkeypatch: pytest.MonkeyPatch, *, polls: bool) -> FrontEndProcess:
    """One that serves, without a port or an engine; its polls last until they are ended."""
    monkeypatch.setattr(busy_poll, "POLL_S", 1e9)
    monkeypatch.setattr(logs, "configure", lambda level, form: None)
    monkeypatch.setattr(front_end_process, "settle", lambda: None)
    monkeypatch.setattr(TokenizerFiles, "load", lambda self: tiny_tokenizer())
    limits = Limits(max_model_len=100, max_request_tokens=100, max_queue_requests=10, vocabulary=50)
    facts = ModelFacts(("tiny",), "/models/tiny", 1, (2,), SamplingParameters(), "float32", 7)
    process = FrontEndProcess()
    process._meet(Hello(1, ApiSettings(version="1"), {}, [], [], "info", "json", 60.0))
    await process._serve(Serve(facts, TokenizerFiles("", {}, None, 50), limits, polls=polls))
    process._receive(Status("ready", is_alive=True, queue=QueueState(), taken=0, taken_tokens=0))
    return process


def submit(process: FrontEndProcess) -> int:
    client = process._client
    assert client is not None
    number = client.next_sequence_id()
    client.submit(Submit(number, "r", [1], 5, SamplingParameters(), []), TokenStream(lambda: client.cancel(number)))
    return number


async def is_polling(process: FrontEndProcess) -> bool:
    await some_turns()
    return process._busy_poll is not None and process._busy_poll._is_turning


async def test_a_front_end_polls_once_it_has_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await front_end(monkeypatch, polls=True)
    assert not await is_polling(process)
    number = submit(process)
    assert await is_polling(process)
    process._receive(TokenBatch(2, [number], [8], [Ended(number, "stop")]))
    monkeypatch.setattr(busy_poll, "POLL_S", 0.0)
    submit(process)  # its time is over at once
    assert not await is_polling(process)


async def test_a_front_end_polls_once_a_client_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await front_end(monkeypatch, polls=True)
    assert process.doors is not None
    await process.doors.share([(socket.AF_INET, ("127.0.0.1", 0))], [(socket.AF_INET, ("127.0.0.1", 0))])
    with socket.create_connection(("127.0.0.1", process.doors.admin_port)):
        await asyncio.sleep(0.05)
        assert not await is_polling(process)
    with socket.create_connection(("127.0.0.1", process.doors.port)):
        async with asyncio.timeout(10):
            while not await is_polling(process):  # noqa: ASYNC110  (an accepted connection has no event)
                await asyncio.sleep(0.001)
    await process.doors.close()


async def test_a_front_end_polls_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await front_end(monkeypatch, polls=False)
    submit(process)
    assert not await is_polling(process)
