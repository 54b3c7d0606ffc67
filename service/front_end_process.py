"""A front end as a process of its own: `python -m service.front_end_process FD`, started by front_ends.py.

    connect ──▶ Hello ──▶ listen ──▶ Serve ──▶ make the tokenizer ──▶ requests ──▶ Goodbye ──▶ close, exit 0
                          the link is lost at any time: streams end with an error event, exit 1
One that takes another's place listens when it serves.

FD is its end of the socket pair. It holds nothing that the engine needs: if it dies, the engine's process cancels its
Sequences and starts another. Signals are for the engine's process to act on; this one obeys its messages, and ends when
the link does. It never imports torch.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import structlog
import uvloop

from service import logs
from service.busy_poll import BusyPoll
from service.doors import Doors
from service.engine_client import EngineClient, EngineDied, Submit, TokenBatch
from service.engine_link import (
    Answer,
    EngineLink,
    Failed,
    Goodbye,
    Hello,
    Link,
    Listening,
    NewKeys,
    NewLimits,
    SendReport,
    Serve,
    Serving,
    Status,
    ToFrontEnd,
)
from service.errors import ConfigurationError
from service.front_end import FrontEnd
from service.http_counts import HttpCounts
from service.http_server import tls_context
from service.process import allow_many_sockets, settle
from service.tokenization import TokenizerNotUsable

REPORT_S = 1.0
"""How often the counts are reported: what is lost when the process dies is younger. A report is a sign of life, too."""

EXIT_OK, EXIT_LOST, EXIT_FAILED = 0, 1, 2

log = structlog.get_logger("pagewalk.front_end")

LOST = "the engine has stopped because of an internal error"


class FrontEndProcess:
    """One front end at the end of a link."""

    def __init__(self) -> None:
        self.link: Link[ToFrontEnd] = Link(ToFrontEnd, self._receive, self._lost)
        self.counts = HttpCounts()
        self.doors: Doors | None = None
        self._engine: EngineLink | None = None
        self._client: EngineClient | None = None
        self._busy_poll: BusyPoll | None = None  # where it is worth a core
        self._listens_later: Hello | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, ours: socket.socket) -> int:
        """Serve until told to stop, or until the link is lost; returns the exit code."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, sock=ours)
        try:
            return await self._end
        finally:
            for task in list(self._tasks):
                task.cancel()
            if self.doors is not None:
                await self.doors.close()
            if self.link.transport is not None:
                self._report()
                self.link.transport.close()
            await asyncio.sleep(0)  # lets what is closed be closed

    # --- what comes

    def _receive(self, message: ToFrontEnd) -> None:
        match message:
            case TokenBatch() | EngineDied():
                if self._client is not None:
                    self._client.deliver(message)
            case Status():
                if self._engine is not None:
                    self._engine.hear(message)
            case Answer():
                if self._engine is not None:
                    self._engine.answered(message)
            case NewLimits(limits):
                if self._engine is not None:
                    self._engine.serve(limits)
            case SendReport():
                self._report()
            case NewKeys(keys):
                if self.doors is not None:
                    self.doors.front_end.api_keys.take(keys)
            case Hello():
                with self._telling_failures():  # a certificate that is gone, say
                    self._meet(message)
                    if message.listens_at_once:
                        self._begin(partial(self._listen, message))
                    else:
                        self._listens_later = message
            case Serve():
                if self.doors is not None:
                    self._begin(partial(self._serve, message))
            case Goodbye():
                self._finish(EXIT_OK)

    def _send(self, *messages: Any) -> None:
        self.link.send(*messages)
        if isinstance(messages[0], Submit):
            self._stay_awake()

    def _stay_awake(self) -> None:
        if self._busy_poll is not None:
            self._busy_poll.begin()

    def _lost(self, reason: str) -> None:
        if not self._end.done():
            log.error("the engine's process is gone", reason=reason)
        if self._engine is not None:
            self._engine.lost()
        if self._client is not None:
            self._client.deliver(EngineDied(LOST))
        self._finish(EXIT_LOST)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with self._telling_failures():
            await work()

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Whatever goes wrong in it, the engine's process is told, and this one ends."""
        try:
            yield
        except (OSError, TokenizerNotUsable, ConfigurationError) as error:
            self.link.send(Failed(str(error)))
            self._finish(EXIT_FAILED)
        except Exception as error:
            log.error("front end failed", exc_info=error)
            self.link.send(Failed(f"{type(error).__name__}: {error}"))
            self._finish(EXIT_FAILED)

    # --- the life of the process

    def _meet(self, hello: Hello) -> None:
        logs.configure(hello.log_level, hello.log_format)
        self._engine = EngineLink(self._send, silence_s=hello.silence_s, clock=time.monotonic)
        settings = msgspec.structs.replace(hello.settings, max_generating=allow_many_sockets())
        front_end = FrontEnd(settings, self.counts, logs.log_request, self._engine, known_keys=hello.keys)
        self.doors = Doors(front_end, tls_context(settings), on_connection=self._stay_awake)

    async def _listen(self, hello: Hello) -> None:
        assert self.doors is not None
        await self.doors.share(
            [(each.family, each.address) for each in hello.addresses],
            [(each.family, each.address) for each in hello.admin_addresses],
        )
        self.link.send(Listening())
        self._begin(self._report_regularly)
        self._begin(self.counts.watch_loop)

    async def _serve(self, serve: Serve) -> None:
        assert self._engine is not None
        assert self.doors is not None
        tokenizer = await asyncio.to_thread(serve.tokenizer.load)
        self._engine.serve(serve.limits)
        self.counts.serve(serve.limits.max_model_len)
        self._client = client = EngineClient(self._engine)
        if serve.polls:
            self._busy_poll = BusyPoll(lambda: client.open_sequences)
        self.doors.front_end.model = serve.facts.served(tokenizer, client)
        settle()
        if self._listens_later is not None:
            await self._listen(self._listens_later)
        self.link.send(Serving())

    async def _report_regularly(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(REPORT_S)

    def _report(self) -> None:
        if self.doors is not None:
            self.link.send(self.counts.report(self.doors.front_end.generating))


async def _run(descriptor: int) -> int:
    return await FrontEndProcess().run(socket.socket(fileno=descriptor))


def main() -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal sends them to all processes of a server
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(int(sys.argv[1])))
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)  # a thread that encodes a long prompt would be waited for


if __name__ == "__main__":
    main()
