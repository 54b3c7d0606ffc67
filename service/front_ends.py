"""Front ends that are processes: started, fed, watched and replaced by the engine's process.

    FrontEnds ──starts──▶ process n          a link each (engine_link.py): the engine's events go out as they come, one
        └── Desk n ◀────link────▶            write a step; messages and questions come in

1. The engine never waits for a front end: what one has not read is kept, up to `MOST_UNSENT_BYTES`, and one that reads
   nothing more, or gives no sign of life for `SILENCE_S`, is killed.
2. A front end that ends, for whatever reason, loses its own streams and no others: its Sequences are cancelled, and
   another process takes its place. One that keeps failing is tried again ever more slowly.
3. Every process has a front end number of its own, also a replacement: nothing meant for a dead one reaches it.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import structlog

from service.engine_client import (
    Cancel,
    EngineDied,
    EnginePort,
    Event,
    Finish,
    Limits,
    QueueState,
    Submit,
    TokenBatch,
)
from service.engine_link import (
    Answer,
    Ask,
    Failed,
    Goodbye,
    Hello,
    Link,
    Listening,
    NewKeys,
    NewLimits,
    Refusal,
    SendReport,
    Serve,
    Serving,
    Status,
    ToEngine,
)
from service.errors import InternalError, PagewalkError
from service.http_counts import HttpCounts, Report
from service.questions import Answers, Fork, Question, Restore

STATUS_S = 0.25
SILENCE_S = 30.0
"""A front end reports every second; one that does not for so long hangs, and its streams with it."""

MOST_UNSENT_BYTES = 64 << 20
"""A step of 1,024 Sequences is about 10 KB: minutes of it."""

REPORT_WAIT_S = 1.0
"""How long /metrics waits for the counts of front ends. After that it shows those of a second ago."""

STEADY_S = 10.0
"""A front end that lived as long is replaced at once; after a shorter life the next one waits."""

LONGEST_PAUSE_S = 10.0
GOODBYE_S = 6.0
"""For what handlers may still send (doors.FLUSH_S), and the exit."""

log = structlog.get_logger("pagewalk.front_ends")


class EngineSide(EnginePort, Protocol):
    """What the engine offers to those who bring front ends."""

    def connect(self, front_end: int, receiver: "Desk") -> None: ...
    def disconnect(self, front_end: int) -> None: ...


class Desk:
    """The engine's process' end of one front end (engine.FrontEnd)."""

    def __init__(
        self,
        number: int,
        engine: Callable[[], EngineSide | None],
        answers: Answers,
        lost: "Callable[[Desk, str], None]",
    ) -> None:
        """engine: None while the model loads. lost(desk, reason) is called once, when the link has ended."""
        self.number = number
        self.link: Link[ToEngine] = Link(ToEngine, self._receive, self._lost)
        self.report = Report()
        self.listens, self.serves = asyncio.Event(), asyncio.Event()
        self.failure: str | None = None  # in its own words
        self.heard_s = self.began_s = time.monotonic()
        self.process: asyncio.subprocess.Process | None = None
        self._engine = engine
        self._answers = answers
        self._tell_lost = lost
        self._open: set[int] = set()  # Sequences that have not ended
        self._taken = self._taken_tokens = 0  # choices that have come in, and tokens of their prompts
        self._last_status: Status | None = None
        self._told_limits: Limits | None = None
        self._reported = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()

    # --- to the front end

    def deliver(self, event: Event) -> None:
        """One write, whatever a step brings; and the status, if it has changed."""
        self.link.send(event)
        if isinstance(event, TokenBatch):
            self._open.difference_update([ended.sequence_id for ended in event.ended])
        else:
            self._open.clear()
        if (status := self.status()) != self._last_status:
            self._last_status = status
            self.link.send(status)
        if self.link.unsent_bytes > MOST_UNSENT_BYTES:
            self.link.abort(f"it has not read {self.link.unsent_bytes} bytes")

    def status(self) -> Status:
        engine = self._engine()
        if engine is None:
            return Status("loading", is_alive=True, queue=QueueState(), taken=0, taken_tokens=0)
        return Status(engine.state, engine.is_alive, engine.queue, self._taken, self._taken_tokens)

    def tell_status(self) -> None:
        """Also when nothing has changed: silence would mean that this process is stuck."""
        self._last_status = self.status()
        engine = self._engine()
        if engine is not None and self._told_limits not in (None, engine.limits):
            self.told_limits(engine.limits)
            self.link.send(NewLimits(engine.limits))
        self.link.send(self._last_status)

    def told_limits(self, limits: Limits) -> None:
        """The front end knows these."""
        self._told_limits = limits

    async def fresh_report(self) -> None:
        """Ask for the counts, and wait for them, though not for long."""
        self._reported.clear()
        self.link.send(SendReport())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reported.wait(), REPORT_WAIT_S)

    # --- from the front end

    def _receive(self, message: ToEngine) -> None:
        self.heard_s = time.monotonic()
        engine = self._engine()
        match message:
            case Submit() | Cancel() | Finish():
                if engine is None:
                    self.link.abort("it submits before there is a model")
                    return
                if isinstance(message, Submit):
                    self._submit(message, engine)
                else:
                    engine.post(self.number, message)
            case Ask():
                task = asyncio.ensure_future(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Report():
                self.report = message
                self._reported.set()
            case Listening():
                self.listens.set()
            case Serving():
                self.serves.set()
            case Failed():
                self.failure = message.message

    def _submit(self, message: Submit, engine: EngineSide) -> None:
        ids = message.sequence_ids
        self._taken += len(ids)
        self._taken_tokens += len(message.prompt_ids)
        if engine.state == "dead":
            self.link.send(EngineDied("the engine has stopped"))
            return
        self._open.update(ids)
        engine.post(self.number, message)

    async def _answer(self, asked: Ask) -> None:
        try:
            question: Question[Any] = asked.question
            if isinstance(question, (Fork, Restore)):
                self._open.add(question.sequence_id)
            value = await self._answers.answer(self.number, question)
            answer = Answer(asked.number, msgspec.msgpack.encode(value))
        except PagewalkError as refusal:
            if isinstance(asked.question, (Fork, Restore)):
                self._open.discard(asked.question.sequence_id)
            answer = Answer(asked.number, refusal=Refusal.of(refusal))
        except Exception as error:  # one question that fails is no reason to end
            log.error("a question failed", question=type(asked.question).__name__, exc_info=error)
            answer = Answer(asked.number, refusal=Refusal.of(InternalError("The server failed on this request.")))
        self.link.send(answer)

    def _lost(self, reason: str) -> None:
        for task in self._answering:
            task.cancel()
        if (engine := self._engine()) is not None:
            for sequence_id in self._open:
                engine.post(self.number, Cancel(sequence_id))
            engine.disconnect(self.number)
        self._open.clear()
        self._tell_lost(self, reason)


class FrontEnds:
    """All of them."""

    def __init__(self, hello: Callable[[int], Hello], count: int, answers: Answers, counts: HttpCounts) -> None:
        """hello(number): the first message to a front end. counts: gets what front ends have counted that end."""
        self.desks: dict[int, Desk] = {}  # those whose link is up
        self._unburied: list[Desk] = []  # whose process has not been seen to end
        self._hello = hello
        self.count = count
        self._answers = answers
        self._counts = counts
        self._engine: EngineSide | None = None
        self._serve: Serve | None = None
        self._last_number = 1  # 0 and 1 are the engine's process' own (loading.py)
        self._pause_s = 0.0
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[Desk] | None = None  # the first that ends while all are waited for

    @property
    def generating(self) -> int:
        """Requests that generate or wait, as last reported."""
        return sum(desk.report.generating for desk in self.desks.values())

    def reports(self) -> list[Report]:
        return [desk.report for desk in self.desks.values()]

    async def fresh_reports(self) -> None:
        """Ask all for their counts."""
        await asyncio.gather(*(desk.fresh_report() for desk in self.desks.values()))

    def tell_keys(self, keys: dict[str, str]) -> None:
        """API keys, as KeyRing.known has them. Who starts later gets them with its Hello."""
        for desk in self.desks.values():
            desk.link.send(NewKeys(keys))

    async def open(self) -> None:
        """Start all; return when they listen. Raises FrontEndFailed if one ends before."""
        await asyncio.gather(*(self._start() for _ in range(self.count)))
        self._keep(self._watch())
        await self._all("listens")

    async def serve(self, engine: EngineSide, message: Serve) -> None:
        """The model is loaded; return when all can take requests. Raises FrontEndFailed if one ends before."""
        self._engine, self._serve = engine, message
        for desk in self.desks.values():
            self._introduce(desk)
        await self._all("serves")

    def tell_status(self) -> None:
        """The engine's state has changed."""
        for desk in self.desks.values():
            desk.tell_status()

    async def close(self) -> None:
        """Let them send what they have, and end. Idempotent."""
        self._is_closing = True
        for desk in self.desks.values():
            desk.link.send(Goodbye())
        desks, self._unburied = self._unburied, []
        ends = [asyncio.ensure_future(desk.process.wait()) for desk in desks if desk.process is not None]
        if ends:
            await asyncio.wait(ends, timeout=GOODBYE_S)
        for desk in desks:
            _kill(desk)
        if ends:
            await asyncio.wait(ends)
            await asyncio.sleep(0)  # lets asyncio close what belonged to them
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- one process

    async def _start(self) -> None:
        self._last_number += 1
        ours, theirs = socket.socketpair()
        desk = Desk(self._last_number, lambda: self._engine, self._answers, self._ended)
        try:
            desk.process = await _spawn(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.desks[desk.number] = desk  # before the link: it may be lost at once
        self._unburied.append(desk)
        await asyncio.get_running_loop().create_unix_connection(lambda: desk.link, sock=ours)
        listens_at_once = self._serve is None or not any(other.listens.is_set() for other in self.desks.values())
        desk.link.send(msgspec.structs.replace(self._hello(desk.number), listens_at_once=listens_at_once))
        desk.tell_status()
        self._introduce(desk)

    def _introduce(self, desk: Desk) -> None:
        """Let it meet the engine, if there is one."""
        if self._engine is not None and self._serve is not None:
            self._engine.connect(desk.number, desk)
            desk.link.send(msgspec.structs.replace(self._serve, limits=self._engine.limits))
            desk.told_limits(self._engine.limits)
            desk.tell_status()

    def _ended(self, desk: Desk, reason: str) -> None:
        """Its link is down, so it is over, whether or not it knows."""
        self.desks.pop(desk.number, None)
        self._counts.add(desk.report, is_over=True)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(desk)
        self._keep(self._bury(desk, reason))

    async def _bury(self, desk: Desk, reason: str) -> None:
        """See the process end, and start another."""
        assert desk.process is not None
        if not self._is_closing:
            try:  # it may have ended by itself, and its code says how
                code = await asyncio.wait_for(desk.process.wait(), 0.5)
            except TimeoutError:
                _kill(desk)
                code = await desk.process.wait()
            if self._is_closing:
                return
            self._unburied.remove(desk)
            lived_s = time.monotonic() - desk.began_s
            self._pause_s = 0.0 if lived_s >= STEADY_S else min(LONGEST_PAUSE_S, 2 * self._pause_s + 0.1)
            log.error(
                "a front end has ended, another takes its place",
                pid=desk.process.pid,
                code=code,
                reason=desk.failure or reason,
                lived_s=round(lived_s, 1),
                streams=desk.report.generating,
            )
            await asyncio.sleep(self._pause_s)
            await self._replace()

    async def _replace(self) -> None:
        """Start another, however often the system refuses it."""
        while not self._is_closing:
            try:
                await self._start()
                return
            except OSError as error:
                log.error("no front end can be started", reason=str(error), again_s=LONGEST_PAUSE_S)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _watch(self) -> None:
        """Tell the state regularly, and end those that hang."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(STATUS_S)
            now = time.monotonic()
            stood_still_s, last_s = now - last_s - STATUS_S, now
            for desk in list(self.desks.values()):
                desk.tell_status()
                desk.heard_s += stood_still_s  # what came while this process stood still has not been read yet
                if now - desk.heard_s > SILENCE_S:
                    desk.link.abort(f"no sign of life for {SILENCE_S:.0f} s")

    async def _all(self, what: str) -> None:
        """Wait for an event of every front end. Raises FrontEndFailed for the first that ends."""
        self._lost = asyncio.get_running_loop().create_future()
        waiting = asyncio.gather(*(getattr(desk, what).wait() for desk in self.desks.values()))
        both: tuple[asyncio.Future[Any], ...] = (waiting, self._lost)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                desk = self._lost.result()
                raise FrontEndFailed(desk.failure or "it has ended without a word")
        finally:
            await give_up(waiting)
            self._lost.cancel()
            self._lost = None

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def give_up(work: "asyncio.Future[Any]") -> None:
    """Cancel what nobody waits for any more, let it end, and look at how: asyncio would complain that nobody has."""
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


class FrontEndFailed(Exception):
    """A front end could not start. The message is what it said."""


async def _spawn(descriptor: int) -> asyncio.subprocess.Process:
    """-P and PYTHONPATH: it finds the very modules that this process runs, whatever the folder is that it starts in."""
    paths = os.pathsep.join(str(path or os.getcwd()) for path in sys.path)  # noqa: PTH109 - text, as sys.path has it
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "service.front_end_process", str(descriptor)),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env={**os.environ, "PYTHONPATH": paths},
    )


def _kill(desk: Desk) -> None:
    if desk.process is not None and desk.process.returncode is None:
        with suppress(ProcessLookupError):
            desk.process.send_signal(signal.SIGKILL)
