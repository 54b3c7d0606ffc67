"""EventStream: when a comment breaks the silence. The loop's clock is the test's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from service import sse
from service.sse import KEEP_ALIVE, EventStream


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


class FakeResponse:
    def __init__(self) -> None:
        self.written: list[bytes] = []

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
    events = EventStream(None, keep_alive_s=15, wake=lambda: woken.append(loop.now))  # type: ignore[arg-type]
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


def test_an_event_is_one_line_and_a_blank_one() -> None:
    error = sse.error_event(sse.PagewalkError("two\nlines"))
    assert error.startswith(b"data: {")
    assert error.endswith(b"}\n\n")
    assert error.count(b"\n") == 2
