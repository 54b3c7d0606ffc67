"""What goes on, as server-sent events, for pages that are watched: every frame, time lines, steps, the trace.

    frames/stream   the whole pool once, two bytes a frame; then what has changed since
    pulse/stream    the view `pulse`, again and again
    steps/stream    the steps since the event before; trace/stream: the events of memory

The front end asks the engine's process each `interval`, and compares for itself: the engine keeps nothing for those who
watch, and what it costs does not grow with them, since all of a front end share what was asked last. Where an answer is
dear (a very large pool), the interval is longer, so that watching takes a two-hundredth of the engine's time at most.
"""

import asyncio
import math
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from mm.frame_views import Bytes
from service.admin import VIEWS, look, query_of, seconds_of
from service.errors import PagewalkError, QueueFull
from service.front_end import FRONT_END, FrontEnd
from service.json_answers import json_answer
from service.middleware import Handler
from service.questions import FrameBytes, MapFrames, ViewQuery
from service.sse import DATA, END, HEADERS, EventStream, error_event

MOST_STREAMS = 64
"""Of one front end at once."""

LEAST_INTERVAL_S, INTERVAL_S, MOST_INTERVAL_S = 0.1, 0.5, 60.0

COSTS_AT_LEAST = 200
"""An answer is asked for again after this many times what it took the engine, if that is longer than the interval."""


class Watching:
    """What the streams of one application have in common."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.streams = 0
        self._map: FrameBytes | None = None
        self._asked_s = -math.inf
        self._asking = asyncio.Lock()

    async def frames(self, front_end: FrontEnd, max_age_s: float) -> FrameBytes:
        """Every frame and slot, not older than max_age_s. Raises ServiceUnavailable."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._map is None or now - self._asked_s >= max_age_s:
                self._map = await front_end.engine.ask(MapFrames())
                self._asked_s = now
            return self._map


WATCHING = web.AppKey("watching", Watching)


def watch(app: web.Application) -> None:
    """Let an application have streams: they end when it does."""
    app[WATCHING] = Watching()

    async def end(app: web.Application) -> None:
        app[WATCHING].is_over.set()

    app.on_shutdown.append(end)


# ---------------------------------------------------------------- the map of frames


async def frame_map(request: web.Request) -> web.Response:
    """GET /admin/v1/frames/map: the whole pool now."""
    query_of(request, ())
    front_end = request.app[FRONT_END]
    front_end.loaded()
    found = await request.app[WATCHING].frames(front_end, LEAST_INTERVAL_S)
    return json_answer(whole(found))


def whole(found: FrameBytes) -> dict[str, object]:
    """Every frame and slot."""
    return _head(found, "whole") | {
        "states": _text(found.states),
        "shares": _text(found.shares),
        "slot_states": _text(found.slots),
    }


def changes(before: FrameBytes, found: FrameBytes) -> dict[str, object] | None:
    """What has changed; all of it where that is shorter, or the pool has another size. None: nothing."""
    if len(before.states) != len(found.states) or len(before.slots) != len(found.slots):
        return whole(found)
    states, shares, slots = (np.frombuffer(each, np.uint8) for each in (found.states, found.shares, found.slots))
    at = np.flatnonzero((states != _bytes(before.states)) | (shares != _bytes(before.shares))).astype("<u4")
    slots_at = np.flatnonzero(slots != _bytes(before.slots)).astype("<u4")
    if not len(at) and not len(slots_at):
        return None
    if 6 * len(at) + 5 * len(slots_at) > 2 * len(states) + len(slots):
        return whole(found)
    return _head(found, "delta") | {
        "at": _text(at.tobytes()),
        "states": _text(states[at].tobytes()),
        "shares": _text(shares[at].tobytes()),
        "slots_at": _text(slots_at.tobytes()),
        "slot_states": _text(slots[slots_at].tobytes()),
    }


def _head(found: FrameBytes, kind: str) -> dict[str, object]:
    head = {"ts": found.ts, "step": found.step, "uptime_s": found.uptime_s}
    return head | {"kind": kind, "frames": len(found.states), "slots": len(found.slots)}


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


# ---------------------------------------------------------------- streams

Next = Callable[[], Awaitable[bytes | None]]
"""The next event's data, None if there is nothing new."""


async def stream_frames(request: web.Request) -> web.StreamResponse:
    """GET /admin/v1/frames/stream."""
    interval_s = _interval(request, ())[0]
    front_end, watching = request.app[FRONT_END], request.app[WATCHING]
    sent: FrameBytes | None = None
    pace = Pace(interval_s)

    async def next_event() -> bytes | None:
        nonlocal sent
        found = await watching.frames(front_end, 0.9 * interval_s)
        pace.last_cost_s = found.cost_s
        event = whole(found) if sent is None else changes(sent, found)
        sent = found
        return None if event is None else msgspec.json.encode(event)

    return await _stream(request, next_event, pace)


async def stream_pulse(request: web.Request) -> web.StreamResponse:
    """GET /admin/v1/pulse/stream."""
    interval_s, _ = _interval(request, ())

    async def next_event() -> bytes:
        return await look(request, "pulse", ViewQuery())

    return await _stream(request, next_event, Pace(interval_s))


def stream_new(view: str, list_name: str, number: str) -> Handler:
    """GET /admin/v1/{view}/stream: what a view lists, as it comes; `number` is what grows in the list."""

    async def stream(request: web.Request) -> web.StreamResponse:
        interval_s, query = _interval(request, VIEWS[view])
        after = query.after

        async def next_event() -> bytes | None:
            nonlocal after
            body = await look(request, view, msgspec.structs.replace(query, after=after))
            facts: dict[str, Any] = msgspec.json.decode(body)
            if not facts[list_name]:
                return None
            after = facts[list_name][-1][number]
            return body

        return await _stream(request, next_event, Pace(interval_s))

    return stream


def or_stream(show: Handler, stream: Handler) -> Handler:
    """A view, as a stream for who accepts that."""

    async def answer(request: web.Request) -> web.StreamResponse:
        wants_stream = "text/event-stream" in request.headers.get("Accept", "")
        return await (stream(request) if wants_stream else show(request))

    return answer


STREAMS: dict[str, Handler] = {
    "pulse": stream_pulse,
    "steps": stream_new("steps", "steps", "step"),
    "trace": stream_new("trace", "events", "number"),
}
"""Views that can be streamed: under their path and /stream, or by the Accept header."""


class Pace:
    """How long a stream waits between two events."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.last_cost_s = 0.0

    @property
    def seconds(self) -> float:
        return max(self._interval_s, COSTS_AT_LEAST * self.last_cost_s)


def _interval(request: web.Request, names: tuple[str, ...]) -> tuple[float, ViewQuery]:
    """?interval= in seconds, and what else is asked. Raises BadRequest."""
    query = query_of(request, names, beside=("interval",))
    return seconds_of(request, "interval", INTERVAL_S, LEAST_INTERVAL_S, MOST_INTERVAL_S), query


async def _stream(request: web.Request, next_event: Next, pace: Pace) -> web.StreamResponse:
    """Until the client or the server leaves. Raises Loading, QueueFull and whatever refuses the first event."""
    front_end, watching = request.app[FRONT_END], request.app[WATCHING]
    front_end.loaded()
    if request.method == "HEAD":
        return web.Response(headers=HEADERS)
    if watching.streams >= MOST_STREAMS:
        raise QueueFull(f"{MOST_STREAMS} streams are open: close some", retry_after_s=1)
    watching.streams += 1
    try:
        with EventStream(request, keep_alive_s=front_end.settings.sse_keep_alive_s, wake=lambda: None) as out:
            while not watching.is_over.is_set():
                try:
                    data = await next_event()
                except PagewalkError as error:
                    if not out.is_started:
                        raise
                    await out.write(error_event(error))
                    break
                await (out.keep_alive() if data is None else out.write(DATA + data + END))
                with suppress(TimeoutError):
                    await asyncio.wait_for(watching.is_over.wait(), pace.seconds)
            return out.response
    finally:
        watching.streams -= 1
