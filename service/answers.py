"""The JSON of answers: whole ones, events of streams, usage. One Form per route; both have the same methods.

An event is put together from bytes: what is the same in all events of a choice is encoded once, so that a one-token
event costs one JSON string. What the parts make up is one line of JSON (a test decodes every kind).
"""

import time
from typing import Any, Protocol

import msgspec

from service.choice import Choice, Delta
from service.generation import Generation
from service.sse import DATA, END

_encode = msgspec.json.Encoder().encode


def usage(generation: Generation) -> dict[str, Any]:
    """The usage of an answer that is complete."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The usage so far. How much of the prompt was cached is reported with the end of a Sequence, so not here."""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
    )


def cache_info(choice: Choice) -> dict[str, Any]:
    """What the page cache did for a choice that has ended.

    {"cached_tokens": 32, "miss": {"reason": "evicted", "position": 32, "evicted_at": 1790000000.1}}

    position: the first prompt token that was computed. evicted_at, a unix time in seconds, comes with reason "evicted"
    only. A client learns about pages that it could have been served, and of nobody else: that the same prompt is cached
    under a salt of others is told as if it were not.
    """
    ended = choice.ended
    assert ended is not None, "sent before the end of the choice was known"
    miss: dict[str, Any] | None = None
    if ended.miss is not None:
        miss = {"reason": ended.miss.told_reason, "position": ended.miss.position}
        if ended.miss.evicted_s is not None:
            age_s = time.monotonic() - ended.miss.evicted_s
            miss["evicted_at"] = round(time.time() - age_s, 3)
    return {"cached_tokens": ended.cached_tokens, "miss": miss}


class Form(Protocol):
    """How one route writes answers."""

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        """What comes before the first event of a choice, perhaps nothing."""
        ...

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        """One event of a stream."""
        ...

    def usage_event(self, generation: Generation) -> bytes:
        """The event that carries the usage and no choice."""
        ...

    def whole(self, generation: Generation, texts: list[str], token_ids: list[list[int]]) -> bytes:
        """The answer in one piece; texts[i] and token_ids[i] belong to choice i."""
        ...


class _Envelope:
    """What both forms share: the id, the time, the model's name."""

    prefix: str
    answer_object: str
    event_object: str

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        fingerprint: str,
        with_token_ids: bool,
        with_cache_info: bool,
    ) -> None:
        """created: unix time in seconds. fingerprint: names the version and the model's files."""
        self._fields = {"id": self.prefix + request_id, "created": created, "model": model}
        self._fingerprint = fingerprint
        self._with_token_ids = with_token_ids
        self._with_cache_info = with_cache_info
        # {"id":…,"object":…,"created":…,"model":…,"choices":[
        self._opening = DATA + _encode(self._envelope(self.event_object))[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}  # per choice

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._fields["id"],
            "object": kind,
            "created": self._fields["created"],
            "model": self._fields["model"],
        }

    def usage_event(self, generation: Generation) -> bytes:
        return self._opening + b'],"usage":' + _encode(usage(generation)) + b"}" + END

    def _cache_info(self, choice: Choice, delta: Delta) -> bytes:
        """A further member of the last event of a choice."""
        if not self._with_cache_info or delta.finish_reason is None:
            return b""
        return b',"cache_info":' + _encode(cache_info(choice))

    def _whole(self, generation: Generation, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _encode(
            self._envelope(self.answer_object)
            | {"choices": choices, "usage": usage(generation), "system_fingerprint": self._fingerprint}
            | more
        )


def _closing(delta: Delta, members: bytes, usage_so_far: bytes | None, more: bytes = b"") -> bytes:
    """The rest of an event after its text. `members` and `more`: further members of the choice and of the event."""
    if delta.finish_reason is None:
        reason = b',"logprobs":null,"finish_reason":null'
    else:
        reason = b',"logprobs":null,"finish_reason":"%s","stop_reason":%s' % (
            delta.finish_reason.encode(),
            _encode(delta.stop_reason),
        )
    so_far = b"" if usage_so_far is None else b',"usage":' + usage_so_far
    return reason + members + b"}]" + more + so_far + b"}" + END


class CompletionForm(_Envelope):
    """/v1/completions."""

    prefix = "cmpl-"
    answer_object = event_object = "text_completion"

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        return b""

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        head = self._heads.get(choice.index)
        if head is None:
            head = self._heads[choice.index] = self._opening + b'{"index":%d,"text":' % choice.index
        token_ids = b""
        if self._with_token_ids:
            token_ids = b',"token_ids":' + _encode(delta.token_ids)
            if is_first:
                token_ids += b',"prompt_token_ids":' + _encode(choice.prompt_ids)
        return head + _encode(delta.text) + _closing(delta, token_ids + self._cache_info(choice, delta), usage_so_far)

    def whole(self, generation: Generation, texts: list[str], token_ids: list[list[int]]) -> bytes:
        choices = []
        for choice, text, ids in zip(generation.choices, texts, token_ids, strict=True):
            fields: dict[str, Any] = {
                "index": choice.index,
                "text": text,
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._with_token_ids:
                fields |= {"token_ids": ids, "prompt_token_ids": choice.prompt_ids}
            if self._with_cache_info:
                fields["cache_info"] = cache_info(choice)
            choices.append(fields)
        return self._whole(generation, choices)


class ChatForm(_Envelope):
    """/v1/chat/completions. The first event of a choice carries the role; prompt ids stand beside the choices."""

    prefix = "chatcmpl-"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""}' % choice.index
        token_ids, more = b"", b""
        if self._with_token_ids:
            token_ids, more = b',"token_ids":[]', b',"prompt_token_ids":' + _encode(choice.prompt_ids)
        return self._opening + role + _closing(Delta("", []), token_ids, usage_so_far, more)

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        head = self._heads.get(choice.index)
        if head is None:
            head = self._heads[choice.index] = self._opening + b'{"index":%d,"delta":' % choice.index
        if delta.finish_reason is None or delta.text:
            content = b'{"content":' + _encode(delta.text) + b"}"
        else:
            content = b"{}"
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        return head + content + _closing(delta, token_ids + self._cache_info(choice, delta), usage_so_far)

    def whole(self, generation: Generation, texts: list[str], token_ids: list[list[int]]) -> bytes:
        choices = []
        for choice, text, ids in zip(generation.choices, texts, token_ids, strict=True):
            fields: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._with_token_ids:
                fields["token_ids"] = ids
            if self._with_cache_info:
                fields["cache_info"] = cache_info(choice)
            choices.append(fields)
        more = {"prompt_token_ids": generation.choices[0].prompt_ids} if self._with_token_ids else {}
        return self._whole(generation, choices, **more)
