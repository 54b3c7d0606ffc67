"""What a front end asks of the engine's process: facts and actions that are not about a Sequence of its own.

A question is one frozen struct, its answer one value of the type that it names. The same question is asked in one
process and over a link (engine_link.py), so any front end can answer any request: the engine's process owns the state.

    handler ── await ask(Question) ──▶ Answers.answer ──▶ the function given to `on` for its kind

To add one (an action of operators, a limit per key, a fork): a struct here, its name in `AnyQuestion`, and a function
given to `Answers.on` where the state lives (server.py). A refusal is a PagewalkError, raised again where it was asked.
The answer to a question overtakes no token batch that was sent before it, and none that is sent after it overtakes it:
a question that begins Sequences can carry their ids, whose sinks the front end has put in place before it asks.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from model.step_plan import SamplingParameters
from service.engine_client import AnswerForm, EngineSnapshot, OpenRequest, TextWishes
from service.errors import Loading

A = TypeVar("A")


class Question(msgspec.Struct, Generic[A], frozen=True):
    """Something to ask, with an answer of type A."""

    takes_long: ClassVar[bool] = False
    """Whether it may take any time while the engine's process shows signs of life. Others are given up soon."""

    @classmethod
    def answer_type(cls) -> Any:
        """A, as this kind of question names it."""
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        return get_args(base)[0]


class MetricsText(msgspec.Struct, frozen=True):
    """The body of /metrics and its Content-Type."""

    body: bytes
    content_type: str


class TakeSnapshot(Question[EngineSnapshot], frozen=True, tag="snapshot"):
    """The engine between two steps."""


class RenderMetrics(Question[MetricsText], frozen=True, tag="metrics"):
    """All series, those of every front end together."""

    accept: str  # the client's Accept header


class CountGenerating(Question[int], frozen=True, tag="generating"):
    """Requests that generate or wait, of every front end."""


class Enter(Question[None], frozen=True, tag="enter"):
    """Let one more request of a rated tenant in; then it must Leave. Refused with RateLimited."""

    tenant: str


class Spend(Question[None], frozen=True, tag="spend"):
    """Count tokens of a request that is in."""

    tenant: str
    tokens: int


class Leave(Question[None], frozen=True, tag="leave"):
    """A request that was let in is over."""

    tenant: str


class ListRequests(Question[list[OpenRequest]], frozen=True, tag="list_requests"):
    """The requests of an owner that have not ended, whichever front end has them, oldest first."""

    owner: str


class AbortRequest(Question[int], frozen=True, tag="abort_request"):
    """End an owner's requests of these ids; the answer is how many Sequences that ends."""

    owner: str
    request_ids: list[str]


class Parent(msgspec.Struct, frozen=True):
    """What its fork must know of a Sequence."""

    key: tuple[int, int]  # front end, sequence id
    request_id: str
    form: AnswerForm
    sampling: SamplingParameters
    text: TextWishes
    text_begin: int  # where its text begins, in all its tokens


class FindParent(Question[Parent], frozen=True, tag="find_parent"):
    """The choice of an owner's request that is to be forked. Refused with NotFound, NotStarted or BadRequest."""

    owner: str
    request_ids: list[str]
    choice: int | None = None  # its number in the answer; needed where several are open


PARENT_HAS_ENDED = "The request that was to be forked has just ended."


class Forked(msgspec.Struct, frozen=True):
    """What a fork goes on from."""

    tokens: list[int]  # prompt, then all of the answer so far
    answer_begin: int  # where in `tokens` that answer begins
    forked_at: int  # tokens that the parent itself had made
    max_tokens: int


class Fork(Question[Forked], frozen=True, tag="fork"):
    """Begin a Sequence of this front end that goes on from where another one stands now.

    Refused with NotFound, BadRequest or QueueFull. Its tokens may come before the answer.
    """

    owner: str
    parent: tuple[int, int]
    sequence_id: int
    request_id: str
    sampling: SamplingParameters
    end_ids: list[int]
    max_tokens: int | None = None  # None: as many as the parent may still make
    priority: int = 0
    timeout_s: float | None = None
    text: TextWishes = TextWishes()
    client: str = ""


class SaveCheckpoint(Question[bytes], frozen=True, tag="save_checkpoint"):
    """Write a Sequence to a file while it goes on (checkpoints.py): the JSON that an action answers. May be refused."""

    takes_long: ClassVar[bool] = True  # as its pages and the disk are

    of: str
    path: str
    by: str


class Restored(msgspec.Struct, frozen=True):
    """What a restored Sequence goes on from, and how its answer was to be."""

    request_id: str
    tokens: list[int]  # prompt, then all of the answer so far
    answer_begin: int  # where in `tokens` that answer begins; of a fork, with what it was forked from
    text_begin: int  # where its text begins: of a fork, after that
    max_tokens: int
    form: AnswerForm
    sampling: SamplingParameters
    text: TextWishes


class Restore(Question[Restored], frozen=True, tag="restore"):
    """Begin a Sequence of this front end from a file. Its tokens may come before the answer.

    Refused with NotFound, BadRequest, PermissionDenied or QueueFull.
    """

    takes_long: ClassVar[bool] = True

    path: str
    sequence_id: int
    request_id: str  # "": as it was
    by: str
    client: str = ""


class ViewQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand behind the ? of a view; which of it a view takes, admin.py says."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    offset: Annotated[int, Meta(ge=0, le=2**62)] = 0
    state: str | None = None
    order: str | None = None
    request: str | None = None
    tenant: str | None = None
    event: str | None = None
    after: Annotated[int, Meta(ge=-1, le=2**62)] = -1
    prefix_of: str | None = None
    salt: str = ""


class Look(Question[bytes], frozen=True, tag="look"):
    """A view of the engine's process, for operators: the JSON of its facts (admin_views.py). Refused with NotFound."""

    view: str
    of: str = ""  # a Sequence, a tenant, a frame
    query: ViewQuery = ViewQuery()


class FrameBytes(msgspec.Struct, frozen=True):
    """Every frame and slot in two bytes or one (mm/frame_views.py), and what taking that cost."""

    ts: float
    step: int
    uptime_s: float
    states: bytes
    shares: bytes
    slots: bytes
    cost_s: float


class MapFrames(Question[FrameBytes], frozen=True, tag="map_frames"):
    """The whole pool now."""


class Act(Question[bytes], frozen=True, tag="act"):
    """Something that an operator does: the JSON of what was, and what is now (operations.py). May be refused."""

    action: str  # its path (admin_bodies.BODIES)
    of: str
    body: bytes  # checked, as JSON
    by: str  # whose key; "" where none was asked for


AnyQuestion = (
    TakeSnapshot
    | RenderMetrics
    | CountGenerating
    | Enter
    | Spend
    | Leave
    | ListRequests
    | AbortRequest
    | FindParent
    | Fork
    | SaveCheckpoint
    | Restore
    | Look
    | MapFrames
    | Act
)

Q = TypeVar("Q", bound=Question[Any])

OWN_FRONT_END = 0
"""The number of the front end that shares the engine's process, if there is one."""


class Answerer(Protocol):
    """Whom a front end asks: `Answers` in one process, else the link."""

    async def ask(self, question: Question[A]) -> A:
        """Raises the PagewalkError that refuses it; ServiceUnavailable if nobody answers."""
        ...


class Answers:
    """Who answers what. One in the engine's process."""

    def __init__(self) -> None:
        self._handlers: dict[type[Question[Any]], Callable[[int, Any], Awaitable[Any]]] = {}

    def on(self, kind: type[Q], handler: Callable[[int, Q], Awaitable[Any]]) -> None:
        """From now on `handler(front_end, question)` answers questions of this kind. It may raise a PagewalkError."""
        self._handlers[kind] = handler

    async def answer(self, front_end: int, question: Question[A]) -> A:
        """Raises what the handler raises; Loading while nobody can answer yet."""
        handler = self._handlers.get(type(question))
        if handler is None:
            raise Loading
        answer: A = await handler(front_end, question)
        return answer

    async def ask(self, question: Question[A]) -> A:
        """`answer` for the front end of this process."""
        return await self.answer(OWN_FRONT_END, question)
