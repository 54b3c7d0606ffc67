"""POST /v1/responses: another form of a chat. Stateless: nothing is kept once it is answered.

Events carry an `event:` line and are numbered:

    response.created, .in_progress      with the first token
    the events of output items          response_items.py
    response.completed                  (or .incomplete, for length)
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from service.answers import Form, Wishes, usage
from service.choice import Choice, Delta
from service.completions import answer_as_chat
from service.errors import PagewalkError
from service.generation import Generation
from service.response_items import OutputItems
from service.responses_body import NAMES, ResponsesBody
from service.sse import named_event


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    return await answer_as_chat(
        request, ResponsesBody, ResponsesBody.chat, NAMES, lambda body: partial(ResponsesForm, asked=body)
    )


class _NumberedEvents:
    """Writes events, and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._next} | fields
        self._next += 1
        return named_event(kind, msgspec.json.encode(event))


class ResponsesForm(Form):
    """How an answer is written (answers.Form)."""

    def __init__(
        self, *, request_id: str, created: int, model: str, fingerprint: str, wishes: Wishes, asked: ResponsesBody
    ) -> None:
        self._event = _NumberedEvents()
        self._items = OutputItems(request_id, self._event)
        self._response: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": _format_of(asked)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": asked.metadata or {},
        }

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        """Nothing for a token without text: an empty delta is no event of this API."""
        return b"".join(map(self._items.take, delta.all_parts))

    def closing(self, generation: Generation, *, with_usage: bool) -> bytes:
        events = self._items.end(_status_of(generation))
        response = self._ended(generation)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: PagewalkError) -> bytes:
        told = {"code": "server_error", "message": str(error)}
        return self._event("error", code=error.type, message=str(error), param=error.param) + self._event(
            "response.failed", response=self._response | {"status": "failed", "error": told}
        )

    def whole(self, generation: Generation, said: Sequence[Delta]) -> bytes:
        for part in said[0].all_parts:
            self._items.take(part)
        self._items.end(_status_of(generation))
        return msgspec.json.encode(self._ended(generation))

    def _ended(self, generation: Generation) -> dict[str, Any]:
        """The whole response, once the choice is over."""
        status = _status_of(generation)
        is_cut = status == "incomplete"
        numbers = usage(generation)
        return self._response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.done,
            "usage": {
                "input_tokens": numbers["prompt_tokens"],
                "input_tokens_details": numbers["prompt_tokens_details"],
                "output_tokens": numbers["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens or 0},
                "total_tokens": numbers["total_tokens"],
            },
        }


def _status_of(generation: Generation) -> Literal["completed", "incomplete"]:
    return "incomplete" if generation.choices[0].finish_reason == "length" else "completed"


def _format_of(asked: ResponsesBody) -> Any:
    given = None if asked.text is None else asked.text.format
    return {"type": "text"} if given is None else given
