"""Server-sent events: framing, the status line, keep-alive comments.

An event is `data: ` + one line of JSON + a blank line; `event:` lines only on routes whose API has them. The status
line goes out with the first bytes written, so whatever fails before is a plain HTTP error. After `keep_alive_s` of
silence, also before the first event, a comment goes out: proxies and clients give up on a silent connection.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from service.errors import PagewalkError

DATA = b"data: "
END = b"\n\n"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

LAG_BYTES = 16_384
"""A client that leaves more than this unread lags: its tokens wait, are merged, and sent when it has read. (What the
system itself buffers is not counted.)"""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


_SIZES = tuple(b"%x\r\n" % size for size in range(1024))


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP/1.1."""
    size = len(data)
    return b"".join((_SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size, data, b"\r\n"))


def error_event(error: PagewalkError) -> bytes:
    """An error after the status line."""
    return DATA + error.body() + END


def named_event(kind: str, data: bytes) -> bytes:
    """An event of the APIs that name them; `data` is one line."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


class _Response(web.StreamResponse):
    """Its headers go out with the first event in one write: whoever reads them is woken once."""

    _send_headers_immediately = False  # private to aiohttp; a test covers it


class EventStream:
    """The answer of one streamed request. Use it as a context manager: the timer ends with it."""

    __slots__ = (
        "_is_chunked",
        "_keep_alive_s",
        "_loop",
        "_request",
        "_timer",
        "_transport",
        "_wake",
        "_written_s",
        "is_started",
        "response",
    )

    def __init__(self, request: web.Request, *, keep_alive_s: float, wake: Callable[[], None]) -> None:
        """`wake` lets the handler return from whatever it waits on; it then calls `keep_alive`."""
        self.response = _Response(headers=HEADERS)
        self.is_started = False  # the status line is out
        self._transport: asyncio.Transport | None = None  # once it is started
        self._is_chunked = False  # HTTP/1.0 has no chunks
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(keep_alive_s, self._check_silence)

    def __enter__(self) -> "EventStream":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if error is not None and not self.is_started:
            cast(StreamWriter, self._request.writer).chunked = False  # what is answered instead has a length

    async def prepare(self) -> None:
        """Make the head, which goes out with the first event: that has waited long enough when it comes."""
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send whole events in one write; waits while the client lags. Raises ConnectionResetError if it has left."""
        if not self.is_started:
            self.is_started = True
            await self.prepare()
            self._transport = self._request.transport
            if self._transport is not None:
                self._transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, not in a second pass
            self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        await self.response.write(data)
        if not self.is_flowing:
            await self._request.writer.drain()
        self._written_s = self._loop.time()

    @property
    def is_flowing(self) -> bool:
        """Whether the client reads what is sent, so that more can be sent without waiting."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and transport.get_write_buffer_size() < LAG_BYTES

    def write_now(self, data: bytes) -> None:
        """`write` without waiting; only after `is_flowing`.

        Past aiohttp, whose writer takes longer for an event than all else together: its chunks are made here.
        """
        assert self._transport is not None
        self._transport.write(chunk(data) if self._is_chunked else data)
        self._written_s = self._loop.time()

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for a while."""
        if self._loop.time() - self._written_s >= self._keep_alive_s:
            await self.write(KEEP_ALIVE)

    def _check_silence(self) -> None:
        # One timer per stream, set again when it fires: an event costs no timer.
        due = self._written_s + self._keep_alive_s
        if self._loop.time() >= due:
            self._wake()
            due = self._loop.time() + self._keep_alive_s
        self._timer = self._loop.call_at(due, self._check_silence)
