"""aiohttp's server, set up as this service needs it; tests start it through here too.

Two things differ from its defaults. A handler is cancelled when its client leaves: off by default, yet on in aiohttp's
test server, so a test could pass where the real server works on for nobody. And what never reaches the application (not
HTTP at all, an unknown Expect) gets the JSON form of errors like everything else.
"""

import asyncio
import http
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from service.errors import BadRequest, ConfigurationError, InternalError, PagewalkError
from service.front_end import ApiSettings
from service.middleware import PLAIN_HEADERS, error_response, from_http_exception
from service.plain_files import check_file

LINGER_S = 2.0
"""After refusing a body unread, read and drop it for this long, so that the refusal is not lost in a reset."""

BACKLOG = 4096
"""Connections that wait to be accepted; the system's own bound (net.core.somaxconn) is as much or less."""

MAX_LINE_BYTES = 8190
"""Of the request line, and of one header."""

MAX_HEADERS = 100
"""In a request. aiohttp refuses more while it reads them."""

HEAD_TIMEOUT_S = 30.0
"""A new connection must have sent the head of its first request within this."""

KEEP_ALIVE_S = 620.0
"""Of an idle connection, and for the head of a further request. Load balancers keep theirs for 60 to 600 s: no request
of theirs must meet one that is just being closed."""

UNREAD_S = 300.0
"""A client that takes nothing of an answer for this long is as good as gone. The system ends its connection, and what
it held comes free: a socket, a place among the open requests and those of its tenant."""

ACCEPTS_PER_TURN = 128
"""Connections of one listening socket. libuv accepts one a turn of the loop, and a turn takes milliseconds when much is
going on: a probe would wait for seconds behind a burst. How many of those that were accepted begin in a turn is the
turnstile's."""


def make_runner(
    app: web.Application, *, shutdown_timeout_s: float = 5.0, on_connection: Callable[[], None] = lambda: None
) -> web.AppRunner:
    """A runner for `app`. shutdown_timeout_s: how long `cleanup` waits for handlers before it cancels them.
    on_connection: called whenever one is accepted.
    """
    runner = _Runner(
        app,
        handler_cancellation=True,
        access_log=None,  # one line per request is written by the middleware
        lingering_time=LINGER_S,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        max_headers=MAX_HEADERS,
        keepalive_timeout=KEEP_ALIVE_S,
        auto_decompress=False,  # body.py refuses compressed bodies: a few kilobytes of them can stand for gigabytes
        shutdown_timeout=shutdown_timeout_s,
    )
    runner.on_connection = on_connection
    return runner


Address = tuple[int, Any]
"""A family and an address of it, as sockets have them."""


async def addresses_of(host: str, port: int) -> list[Address]:
    """Every address of `host`. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def reserve(addresses: Sequence[Address]) -> list[socket.socket]:
    """Bind addresses without listening, so that several processes of this user can share them (SO_REUSEPORT).

    Port 0 is a free one. As long as the sockets are open, nobody else gets the ports. Raises OSError: also if somebody
    listens there already, even if that one would share.
    """
    held = []
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            _prepare(alone, family)
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            found = alone.getsockname()
        shared = socket.socket(family, socket.SOCK_STREAM)
        held.append(shared)
        _prepare(shared, family)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(found)
    return held


def _prepare(unbound: socket.socket, family: int) -> None:
    if family == socket.AF_INET6:  # as create_server does: the IPv4 address is a socket of its own
        unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


async def listen(
    runner: web.AppRunner,
    addresses: Sequence[Address],
    *,
    share: bool = False,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Answer on these addresses. share: with other processes, which the system deals connections out to.

    Raises OSError.
    """
    for family, address in addresses:
        bound = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=share)
        if sys.platform == "linux":  # connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
        await _Site(runner, bound, backlog=BACKLOG, ssl_context=tls).start()


def tls_context(settings: ApiSettings) -> ssl.SSLContext | None:
    """What the main port speaks, or None for plain HTTP. Raises ConfigurationError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for flag, path in ("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key):
        try:
            check_file(path)  # OpenSSL would wait for a pipe
        except ValueError as error:
            raise ConfigurationError(f"{flag} {error}") from error
    try:
        # a key with a passphrase is refused: there is nobody to type it
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        where = f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}"
        raise ConfigurationError(f"{where}: cannot be used: {error}") from error
    return context


class _Site(web.SockSite):
    """A listening socket. When its loop has accepted a connection, those that have come beside it are accepted, too."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._opening: set[asyncio.Task[None]] = set()
        loop, tls = asyncio.get_running_loop(), self._ssl_context
        self._server = await loop.create_server(self._first, sock=self._sock, ssl=tls, backlog=self._backlog)

    async def stop(self) -> None:
        for task in self._opening:
            task.cancel()
        await super().stop()

    def _first(self) -> RequestHandler:
        """What answers on the connection that the loop has accepted."""
        for _ in range(ACCEPTS_PER_TURN - 1):
            try:
                connection, _ = self._sock.accept()
            except OSError:  # there is no other, as a rule: out of files, and what else there is, the loop deals with
                break
            connection.setblocking(False)
            self._opening.add(task := asyncio.ensure_future(self._open(connection)))
            task.add_done_callback(self._opening.discard)
        return self._handler()

    def _handler(self) -> RequestHandler:
        assert isinstance(self._runner, _Runner)
        assert self._runner.server is not None
        self._runner.on_connection()
        return self._runner.server()

    async def _open(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client has left, or speaks no TLS
            await asyncio.get_running_loop().connect_accepted_socket(self._handler, connection, ssl=self._ssl_context)


class _Runner(web.AppRunner):
    """Puts `_Server` in place of aiohttp's server. The names used here are private to aiohttp; a test covers each."""

    on_connection: Callable[[], None]

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await server.request_handler(request)
            except web.HTTPException as error:  # raised before the middleware: by the router's own Expect handler
                return error_response(from_http_exception(error, request))

        return _Server(
            answer,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            loop=server._loop,
            **server._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(RequestHandler):
    __slots__ = ("_head_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self._check_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _check_head(self) -> None:
        """A connection that has not sent one whole head by now is closed: it holds a socket for nothing."""
        if self._request_count == 0 and self.transport is not None:
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called for requests that cannot be parsed, and for exceptions that no middleware saw."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer is already out")
        error: PagewalkError
        if status < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            error = BadRequest("This is not a valid HTTP request.")
        else:
            self.log_exception("unhandled error", exc_info=exc)
            error = InternalError("The server failed on this request.")
        response = error_response(error)
        response.headers.update(PLAIN_HEADERS)
        response.force_close()
        return response
