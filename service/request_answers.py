"""Answers the questions of front ends about requests as a whole, in the engine's process (questions.py).

What one more may ask for (rate_limits.py), which are open, and how one is ended or forked from elsewhere.
"""

from collections.abc import Iterable
from typing import Protocol

from service.engine_client import OpenRequest
from service.questions import (
    AbortRequest,
    Answers,
    Enter,
    FindParent,
    Fork,
    Forked,
    Leave,
    ListRequests,
    Parent,
    Spend,
)
from service.rate_limits import RateLimits


class RequestBook(Protocol):
    """The engine (engine.py), as far as it is needed here."""

    rates: RateLimits

    def open_requests(self, owner: str) -> list[OpenRequest]: ...
    def abort(self, owner: str, request_ids: Iterable[str]) -> int: ...
    def find_parent(self, asked: FindParent) -> Parent: ...
    async def fork(self, front_end: int, asked: Fork) -> Forked: ...


def answer_about_requests(answers: Answers, engine: RequestBook) -> None:
    """From now on the engine's process answers them."""

    async def enter(front_end: int, question: Enter) -> None:
        engine.rates.enter(question.tenant, front_end)

    async def spend(front_end: int, question: Spend) -> None:
        engine.rates.spend(question.tenant, question.tokens)

    async def leave(front_end: int, question: Leave) -> None:
        engine.rates.leave(question.tenant, front_end)

    async def list_requests(front_end: int, question: ListRequests) -> list[OpenRequest]:
        return engine.open_requests(question.owner)

    async def abort_request(front_end: int, question: AbortRequest) -> int:
        return engine.abort(question.owner, question.request_ids)

    async def find_parent(front_end: int, question: FindParent) -> Parent:
        return engine.find_parent(question)

    async def fork(front_end: int, question: Fork) -> Forked:
        return await engine.fork(front_end, question)

    answers.on(FindParent, find_parent)
    answers.on(Fork, fork)
    answers.on(Enter, enter)
    answers.on(Spend, spend)
    answers.on(Leave, leave)
    answers.on(ListRequests, list_requests)
    answers.on(AbortRequest, abort_request)
