"""The engine's messages between two processes: what travels, its frames, and the front end's end of it.

    engine's process (front_ends.py)                                        front end (front_end_process.py)
        ── Hello, Serve, NewLimits, Status, TokenBatch, EngineDied, Answer, SendReport, NewKeys, Goodbye ──▶
        ◀── Listening, Serving, Failed, Submit, Cancel, Finish, Ask, Report ──

A frame is four bytes of length, big-endian, and one MessagePack object whose `type` says which message it is. The link
is a pair of connected Unix sockets, made before the front end is started: nobody else can connect to it, and each side
sees at once that the other is gone, however it ended. Frames that make no sense end the link.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from service import errors, logs
from service.engine_client import (
    Cancel,
    EngineDied,
    EngineState,
    Finish,
    Limits,
    Message,
    QueueState,
    Submit,
    TokenBatch,
)
from service.errors import InternalError, PagewalkError, ServiceUnavailable
from service.front_end import ApiSettings
from service.http_counts import Report
from service.questions import AnyQuestion, Question
from service.served_model import ModelFacts, TokenizerFiles

LONGEST_FRAME = 1 << 28
"""Bytes. Longer ones are no frames: the longest prompt, of a million ids, takes 5 MB."""

ANSWER_S = 10.0
"""How long a question may wait for its answer; one that takes long: how often it is seen whether the engine lives."""

# ---------------------------------------------------------------- from the engine's process


class Address(msgspec.Struct, frozen=True, array_like=True):
    """One that a front end listens on, as the system's resolver gave it."""

    family: int
    address: tuple[str | int, ...]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message: listen there, say Listening, and answer from now on. No model is there yet.

    One that takes another's place listens only when it serves, if others answer meanwhile: else clients would be told
    that the model loads.
    """

    front_end: int
    settings: ApiSettings
    keys: dict[str, str]  # KeyRing.known: the file may be broken, or gone, when a front end is replaced
    addresses: list[Address]
    admin_addresses: list[Address]
    log_level: str
    log_format: logs.Format
    silence_s: float  # without a Status for this long, the engine's process is stuck
    listens_at_once: bool = True


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """The model is loaded: make its tokenizer, and say Serving."""

    facts: ModelFacts
    tokenizer: TokenizerFiles
    limits: Limits
    polls: bool = False  # rather than to sleep while a first token is about to come (busy_poll.py)


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Several times a second, and when it has changed: a front end that hears nothing knows that something is wrong."""

    state: EngineState
    is_alive: bool
    queue: QueueState
    taken: int  # choices that this front end has submitted, as far as they have arrived
    taken_tokens: int  # of their prompts


class Refusal(msgspec.Struct, frozen=True):
    """A PagewalkError on its way to where the question was asked. kind: its class, or the nearest above it that is in
    errors.py: others are not known to every process.
    """

    kind: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: PagewalkError) -> "Refusal":
        known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return cls(known.__name__, str(error), error.param, getattr(error, "retry_after_s", None))

    def error(self) -> PagewalkError:
        kind = getattr(errors, self.kind, InternalError)
        error: PagewalkError = kind(self.message)
        error.param = self.param
        if self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s  # type: ignore[attr-defined]
        return error


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To the Ask with this number: a value of the question's answer type, encoded, or a refusal."""

    number: int
    value: bytes = b""
    refusal: Refusal | None = None


class NewLimits(msgspec.Struct, frozen=True, tag="new_limits"):
    """What one request can hold has changed."""

    limits: Limits


class NewKeys(msgspec.Struct, frozen=True, tag="new_keys"):
    """The file of API keys has changed, and is good."""

    keys: dict[str, str]  # KeyRing.known


class SendReport(msgspec.Struct, frozen=True, tag="send_report"):
    """Somebody looks at the metrics: send a Report now."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Finish what is being sent, close, and exit."""


ToFrontEnd = Hello | Serve | Status | TokenBatch | EngineDied | Answer | NewLimits | SendReport | NewKeys | Goodbye

# ---------------------------------------------------------------- from a front end


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Clients are answered."""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The tokenizer is loaded: requests can be taken."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The front end cannot go on, and why. Its process ends."""

    message: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`number` is the front end's own; the Answer carries it."""

    number: int
    question: AnyQuestion


ToEngine = Listening | Serving | Failed | Submit | Cancel | Finish | Ask | Report

# ---------------------------------------------------------------- frames

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


class NotAFrame(Exception):
    """The other side has sent what makes no sense."""


def frame(message: Any) -> bytes:
    """One message, ready to be sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class Frames(Generic[M]):
    """Takes bytes as they come, and gives whole messages."""

    def __init__(self, kinds: Any) -> None:
        """kinds: the union of all messages M that may come."""
        self._decode: Callable[[memoryview], M] = msgspec.msgpack.Decoder(kinds).decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are complete with `data`. Raises NotAFrame; then nothing more can be read."""
        self._rest += data
        messages, at, end = [], 0, len(self._rest)
        with memoryview(self._rest) as view:
            while end - at >= 4:
                length = int.from_bytes(view[at : at + 4], "big")
                if length > LONGEST_FRAME:
                    raise NotAFrame(f"a frame of {length} bytes")
                if end - at - 4 < length:
                    break
                try:
                    messages.append(self._decode(view[at + 4 : at + 4 + length]))
                except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                    raise NotAFrame(f"a frame that is no message: {error}") from None
                at += 4 + length
        del self._rest[:at]
        return messages


class Link(asyncio.Protocol, Generic[M]):
    """One end of the socket pair."""

    def __init__(self, kinds: Any, receive: Callable[[M], None], lost: Callable[[str], None]) -> None:
        """receive(message) is called for each. lost(reason) is called once, when nothing can come any more."""
        self._frames = Frames[M](kinds)
        self._receive = receive
        self._lost = lost
        self._reason = "the other side has closed"
        self.transport: asyncio.Transport | None = None

    def send(self, *messages: Any) -> None:
        """Never waits: what the other side has not read yet is kept here (`unsent_bytes`). Ignored after the end."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(map(frame, messages)))

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def abort(self, reason: str) -> None:
        """Give up: `lost(reason)` follows."""
        self._reason = reason
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, not when the next step is planned

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except NotAFrame as error:
            self.abort(str(error))
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self._reason if exc is None else str(exc))


# ---------------------------------------------------------------- the front end's end

A = TypeVar("A")


class EngineLink:
    """The engine as a front end in another process sees it (engine_client.EnginePort, questions.Answerer)."""

    def __init__(self, send: Callable[..., None], *, silence_s: float, clock: Callable[[], float]) -> None:
        """send(*messages) puts them on the way. clock: seconds."""
        self.limits = Limits(max_model_len=1, max_request_tokens=1, max_queue_requests=0, vocabulary=1)  # until `serve`
        self._send = send
        self._silence_s = silence_s
        self._clock = clock
        self._status = Status("loading", is_alive=True, queue=QueueState(), taken=0, taken_tokens=0)
        self._heard_s = clock()
        self._sent = self._sent_tokens = 0  # choices submitted, and tokens of their prompts
        self._asked: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._last_number = 0

    def serve(self, limits: Limits) -> None:
        self.limits = limits

    @property
    def state(self) -> EngineState:
        return self._status.state

    @property
    def is_alive(self) -> bool:
        """What the engine says, unless nothing is heard of its process."""
        return self._status.is_alive and self._clock() - self._heard_s < self._silence_s

    @property
    def queue(self) -> QueueState:
        """As last heard of, with what was on its way then. What other front ends have sent since is not known."""
        status = self._status
        return status.queue.with_more(self._sent - status.taken, self._sent_tokens - status.taken_tokens)

    def post(self, front_end: int, message: Message) -> None:
        if isinstance(message, Submit):
            self._sent += 1 + len(message.siblings)
            self._sent_tokens += len(message.prompt_ids)
        self._send(message)

    async def ask(self, question: Question[A]) -> A:
        """Raises the refusal; ServiceUnavailable if no answer comes."""
        self._last_number += 1
        number = self._last_number
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked[number] = question.answer_type(), future
        self._send(Ask(number, question))  # type: ignore[arg-type]
        try:
            while True:
                await asyncio.wait([future], timeout=ANSWER_S)
                if future.done():
                    return future.result()
                if not (question.takes_long and self.is_alive):
                    raise ServiceUnavailable("The engine does not answer.")
        finally:
            self._asked.pop(number, None)
            future.cancel()

    # --- what has come

    def hear(self, status: Status) -> None:
        self._status, self._heard_s = status, self._clock()

    def answered(self, answer: Answer) -> None:
        kind, future = self._asked.pop(answer.number, (None, None))
        if future is None or future.done():
            return  # it was given up
        if answer.refusal is not None:
            future.set_exception(answer.refusal.error())
        else:
            future.set_result(msgspec.msgpack.decode(answer.value, type=kind))

    def lost(self) -> None:
        """The engine's process is gone."""
        self._status = msgspec.structs.replace(self._status, state="dead", is_alive=False)
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(ServiceUnavailable("The engine has stopped."))


def addresses(found: Sequence[tuple[int, Any]]) -> list[Address]:
    return [Address(family, tuple(address)) for family, address in found]
