"""EventStream: when a comment breaks the silence. The loop's clock is the test's."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request

from service import sse
from service.sse import KEEP_ALIVE, LAG_BYTES, EventStream


class FakeTimer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at, self.callback, self.is_cancelled = at, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """Time and timers of an event loop; time moves by `move` only."""

    def __init__(self) -> None:
        self.now, self.timers = 1000.0, list[FakeTimer]()

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(at, callback))
        return self.timers[-1]

    def call_later(self, after: float, callback: Callable[[], None]) -> FakeTimer:
        return self.call_at(self.now + after, callback)

    def move(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now and not timer.is_cancelled]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.callback()


class FakeTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.unsent, self.is_gone = 0, False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0, "uvloop would write in a second pass over all streams"

    def is_closing(self) -> bool:
        return self.is_gone


class FakeWriter:
    """Its `drain` waits until the client has read."""

    def __init__(self, transport: FakeTransport) -> None:
        self.transport, self.waits = transport, 0

    async def drain(self) -> None:
        self.waits += 1
        self.transport.unsent = 0


class FakeResponse:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.headers: dict[str, str] = {"Transfer-Encoding": "chunked"}

    async def prepare(self, request: Any) -> None:
        self.written.append(b"status line")

    async def write(self, data: bytes) -> None:
        self.written.append(data)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: fake)
    return fake


def make(loop: FakeLoop) -> tuple[EventStream, FakeResponse, list[float]]:
    woken: list[float] = []
    transport = FakeTransport()
    request: Any = SimpleNamespace(transport=transport, writer=FakeWriter(transport))
    events = EventStream(request, keep_alive_s=15, wake=lambda: woken.append(loop.now))
    events.response = response = FakeResponse()  # type: ignore[assignment]
    return events, response, woken


def run(coroutine: Any) -> None:
    """Run what waits for nothing."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_comment_follows_fifteen_seconds_of_silence(loop: FakeLoop) -> None:
    events, response, woken = make(loop)
    loop.move(14)
    run(events.keep_alive())
    assert (response.written, woken) == ([], [])
    loop.move(1)
    assert woken == [1015]
    run(events.keep_alive())
    assert response.written == [b"status line", KEEP_ALIVE]


def test_events_put_the_comment_off(loop: FakeLoop) -> None:
    events, response, woken = make(loop)
    for _ in range(10):
        loop.move(10)
        run(events.write(b"event"))
        run(events.keep_alive())
    assert response.written == [b"status line"] + [b"event"] * 10
    assert woken == []
    loop.move(15)
    assert woken == [1115]


def test_comments_go_on_and_end_with_the_stream(loop: FakeLoop) -> None:
    events, response, woken = make(loop)
    with events:
        for _ in range(3):
            loop.move(15)
            run(events.keep_alive())
    loop.move(60)
    assert response.written == [b"status line"] + [KEEP_ALIVE] * 3
    assert len(woken) == 3


@pytest.mark.parametrize(
    ("headers", "sent"), [({"Transfer-Encoding": "chunked"}, b"b\r\nhello\n\nworl\r\n"), ({}, b"hello\n\nworl")]
)
def test_what_is_written_at_once_is_a_chunk_where_there_are_chunks(
    loop: FakeLoop, headers: dict[str, str], sent: bytes
) -> None:
    """HTTP/1.0 has none. It counts as news, so no comment follows soon."""
    events, response, _ = make(loop)
    response.headers = headers
    assert not events.is_flowing, "the status line must be out"
    run(events.write(b"first"))
    loop.move(10)
    assert events.is_flowing
    events.write_now(b"hello\n\nworl")
    assert events._request.transport.written == [sent]  # type: ignore[union-attr]
    loop.move(10)
    run(events.keep_alive())
    assert response.written == [b"status line", b"first"]


@pytest.mark.parametrize("size", [1, 1023, 1024, 70_000])
def test_a_chunk_says_how_long_it_is(size: int) -> None:
    first, _, rest = sse.chunk(b"x" * size).partition(b"\r\n")
    assert (int(first, 16), rest) == (size, b"x" * size + b"\r\n")


def test_a_client_that_lags_or_has_left_is_waited_for(loop: FakeLoop) -> None:
    events, _, _ = make(loop)
    run(events.write(b"first"))
    transport: Any = events._request.transport
    transport.unsent = LAG_BYTES
    assert not events.is_flowing
    run(events.write(b"second"))
    assert events._request.writer.waits == 1  # type: ignore[attr-defined]
    transport.unsent = LAG_BYTES - 1
    assert events.is_flowing
    run(events.write(b"third"))
    assert events._request.writer.waits == 1, "it reads"  # type: ignore[attr-defined]
    transport.is_gone = True
    assert not events.is_flowing


def test_an_event_is_one_line_and_a_blank_one() -> None:
    error = sse.error_event(sse.PagewalkError("two\nlines"))
    assert error.startswith(b"data: {")
    assert error.endswith(b"}\n\n")
    assert error.count(b"\n") == 2


async def test_the_headers_go_out_with_the_first_event_in_one_write() -> None:
    """With aiohttp's own writer: it would send them alone, and whoever reads them would be woken twice."""
    written: list[bytes] = []

    class Transport(FakeTransport):
        def __init__(self) -> None:
            super().__init__()
            self.written = written

        def writelines(self, parts: list[bytes]) -> None:
            self.write(b"".join(parts))

        def get_extra_info(self, name: str) -> None: ...

    transport: Any = Transport()
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.transport = transport
    writer = StreamWriter(protocol, loop)
    request = make_mocked_request("POST", "/", transport=transport, writer=writer)
    with EventStream(request, keep_alive_s=15, wake=lambda: None) as events:
        await events.write(b"data: a\n\n")
        await events.write(b"data: b\n\n")
    assert [part.count(b"HTTP/1.1 200 OK") for part in written] == [1, 0]
    assert [part.count(b"data: ") for part in written] == [1, 1]
