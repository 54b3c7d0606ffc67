"""POST /v1/messages: a chat in the form of the Anthropic API. Its errors have that form too (errors.anthropic_body).

message_start                                               with the first token
the events of content blocks                                message_blocks.py
message_delta (why it ended, usage), message_stop
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from service.answers import Form, Wishes
from service.anthropic_body import NAMES, CountBody, MessagesBody
from service.body import read_body
from service.choice import Choice, Delta
from service.completions import answer_as_chat
from service.errors import PagewalkError, anthropic_body, told_as
from service.front_end import FRONT_END
from service.generation import Generation
from service.json_answers import json_answer
from service.message_blocks import ContentBlocks
from service.middleware import CALLER
from service.prompts import chat_prompt
from service.sse import named_event


async def create_message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    return await answer_as_chat(request, MessagesBody, MessagesBody.chat, NAMES, lambda _: MessagesForm)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens: how long the prompt of such a message is."""
    model = request.app[FRONT_END].loaded()
    body = await read_body(request, CountBody)
    model.check_name(body.model)
    with told_as(NAMES):
        prompt = await chat_prompt(body.chat(), model, request[CALLER].tenant)
    return json_answer({"input_tokens": len(prompt.ids)})


class MessagesForm(Form):
    """How an answer is written (answers.Form)."""

    def __init__(self, *, request_id: str, created: int, model: str, fingerprint: str, wishes: Wishes) -> None:
        self._request_id = request_id
        self._blocks = ContentBlocks(_event)
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        """How much of the prompt was cached is known at the end: here all of it counts as new."""
        message = self._message | {"usage": _usage(len(choice.prompt.ids), 0, 0)}
        return _event("message_start", message=message)

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        """Nothing for a token without text: an empty delta is no event of this API."""
        return b"".join(map(self._blocks.take, delta.all_parts))

    def closing(self, generation: Generation, *, with_usage: bool) -> bytes:
        return (
            self._blocks.end()
            + _event("message_delta", delta=_end(generation.choices[0]), usage=_usage_of(generation))
            + _event("message_stop")
        )

    def failure(self, error: PagewalkError) -> bytes:
        return named_event("error", anthropic_body(error, self._request_id))

    def whole(self, generation: Generation, said: Sequence[Delta]) -> bytes:
        for part in said[0].all_parts:
            self._blocks.take(part)
        self._blocks.end()
        message = (
            self._message
            | {"content": self._blocks.done}
            | _end(generation.choices[0])
            | {"usage": _usage_of(generation)}
        )
        return msgspec.json.encode(message)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, msgspec.json.encode({"type": kind} | fields))


def _end(choice: Choice) -> dict[str, str | None]:
    """Why it ended, in that API's words."""
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_of(generation: Generation) -> dict[str, int]:
    return _usage(generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """In that API the input's tokens are those that were not cached."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
