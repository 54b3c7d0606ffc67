"""The JSON of answers: whole ones, events of streams, usage. One Form per route; both have the same methods.

An event is put together from bytes: what is the same in all events of a choice is encoded once, so that a one-token
event costs one JSON string. What the parts make up is one line of JSON (a test decodes every kind).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from service.chat_deltas import one_part, part_deltas, whole_message
from service.choice import Choice, Delta
from service.errors import PagewalkError
from service.generation import Generation
from service.logprobs import ScoredToken, Spelling, chat_logprobs, completion_logprobs, prompt_logprobs
from service.schema import GenerationBody
from service.sse import DATA, DONE, END, error_event

_encode = msgspec.json.Encoder().encode

PLAIN_CLOSING = b',"logprobs":null,"finish_reason":null}]}' + END
"""The end of nearly all events."""


def usage(generation: Generation) -> dict[str, Any]:
    """The usage of an answer that is complete."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    reasoning = generation.reasoning_tokens
    details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        **details,
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


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants to see beside the text."""

    spelling: Spelling
    top_choices: int | None = None  # likeliest tokens beside each one; None: no log-probabilities
    prompt_top_choices: int | None = None  # the same for the prompt's tokens
    echo: bool = False
    token_ids: bool = False
    cache_info: bool = False

    @classmethod
    def of(cls, body: GenerationBody, spelling: Spelling) -> "Wishes":
        return cls(
            spelling,
            top_choices=body.top_choices,
            prompt_top_choices=body.prompt_logprobs,
            echo=bool(body.echo),
            token_ids=bool(body.return_token_ids),
            cache_info=bool(body.return_cache_info),
        )


class Form(Protocol):
    """How one route writes answers."""

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        """What comes before the first event of a choice, perhaps nothing."""
        ...

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        """One event of a stream."""
        ...

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text, as a JSON string, in events of this choice with nothing but text.

        Only of its further events, without usage. None where an event depends on more than its text, as in forms that
        do not say otherwise.
        """
        return None

    def closing(self, generation: Generation, *, with_usage: bool) -> bytes:
        """What ends a stream. with_usage: the client asked for the usage."""
        ...

    def failure(self, error: PagewalkError) -> bytes:
        """What ends a stream in which something goes wrong after its status line."""
        ...

    def whole(self, generation: Generation, said: Sequence[Delta]) -> bytes:
        """The answer in one piece; said[i] is all of choice i."""
        ...


class _Envelope:
    """What both forms share: the id, the time, the model's name."""

    prefix: str
    answer_object: str
    event_object: str
    event_member: str  # of a choice, with what is new

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        fingerprint: str,
        wishes: Wishes,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """created: unix time in seconds. fingerprint: names the version and the model's files. more: further members
        of the answer, and of each event.
        """
        self._more = dict(more or {})
        self._fields = {"id": self.prefix + request_id, "created": created, "model": model}
        self._fingerprint = fingerprint
        self._wishes = wishes
        self._is_plain = wishes.top_choices is None
        self._has_only_text = self._is_plain and not wishes.token_ids
        # {"id":…,"object":…,"created":…,"model":…,"choices":[
        self._opening = DATA + _encode(self._envelope(self.event_object))[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}  # per choice

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._fields["id"],
            "object": kind,
            "created": self._fields["created"],
            "model": self._fields["model"],
            **self._more,
        }

    def closing(self, generation: Generation, *, with_usage: bool) -> bytes:
        """The usage is in an event of its own, without a choice."""
        if not with_usage:
            return DONE
        return self._opening + b'],"usage":' + _encode(usage(generation)) + b"}" + END + DONE

    def failure(self, error: PagewalkError) -> bytes:
        return error_event(error) + DONE

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """The member `logprobs` of a choice."""
        raise NotImplementedError

    def _prompt_logprobs(self, choice: Choice) -> msgspec.Raw:
        assert self._wishes.prompt_top_choices is not None
        scores = choice.prompt.scores_by_place()
        return prompt_logprobs(choice.prompt.ids, scores, self._wishes.prompt_top_choices, self._wishes.spelling)

    def _cache_info(self, choice: Choice, delta: Delta) -> bytes:
        """A further member of the last event of a choice."""
        if not self._wishes.cache_info or delta.finish_reason is None:
            return b""
        return b',"cache_info":' + _encode(cache_info(choice))

    def _head(self, choice: Choice) -> bytes:
        """An event up to what is new of this choice."""
        head = self._heads.get(choice.index)
        if head is None:
            member = self.event_member.encode()
            head = self._heads[choice.index] = self._opening + b'{"index":%d,"%s":' % (choice.index, member)
        return head

    def _rest(self, delta: Delta, members: bytes, usage_so_far: bytes | None, more: bytes = b"") -> bytes:
        """The rest of an event after its text. `members` and `more`: further members of the choice and of the event."""
        if self._is_plain and delta.finish_reason is None and usage_so_far is None and not members and not more:
            return PLAIN_CLOSING
        logprobs = b',"logprobs":null'
        if self._wishes.top_choices is not None:
            logprobs = b',"logprobs":' + _encode(self._logprobs(delta.scored))
        if delta.finish_reason is None:
            reason = b',"finish_reason":null'
        else:
            reason = b',"finish_reason":"%s","stop_reason":%s' % (
                delta.finish_reason.encode(),
                _encode(delta.stop_reason),
            )
        so_far = b"" if usage_so_far is None else b',"usage":' + usage_so_far
        return logprobs + reason + members + b"}]" + more + so_far + b"}" + END

    def _whole(self, generation: Generation, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _encode(
            self._envelope(self.answer_object)
            | {"choices": choices, "usage": usage(generation), "system_fingerprint": self._fingerprint}
            | more
        )


class CompletionForm(_Envelope):
    """/v1/completions. With `echo`, the first event of a choice is its prompt."""

    prefix = "cmpl-"
    answer_object = event_object = "text_completion"
    event_member = "text"

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        if not self._wishes.echo:
            return b""
        token_ids = b',"token_ids":[]' if self._wishes.token_ids else b""
        return self._event(choice, self._echo(choice), token_ids + self._prompt_ids(choice), usage_so_far)

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        token_ids = b""
        if self._wishes.token_ids:
            token_ids = b',"token_ids":' + _encode(delta.token_ids)
            if is_first and not self._wishes.echo:
                token_ids += self._prompt_ids(choice)
        return self._event(choice, delta, token_ids + self._cache_info(choice, delta), usage_so_far)

    def _event(self, choice: Choice, delta: Delta, members: bytes, usage_so_far: bytes | None) -> bytes:
        return self._head(choice) + _encode(delta.text) + self._rest(delta, members, usage_so_far)

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return (self._head(choice), PLAIN_CLOSING) if self._has_only_text else None

    def _prompt_ids(self, choice: Choice) -> bytes:
        return b',"prompt_token_ids":' + _encode(choice.prompt.ids) if self._wishes.token_ids else b""

    def _echo(self, choice: Choice) -> Delta:
        """The prompt, as if the choice had said it."""
        prompt = choice.prompt
        if self._wishes.top_choices is None:
            return Delta(prompt.echo, [])
        places = zip(prompt.ids, prompt.scores_by_place(), prompt.offsets, strict=True)
        return Delta(prompt.echo, [], scored=tuple(ScoredToken(*place) for place in places))

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self._wishes.top_choices is None:
            return None
        return completion_logprobs(scored, self._wishes.top_choices, self._wishes.spelling)

    def whole(self, generation: Generation, said: Sequence[Delta]) -> bytes:
        choices = []
        for choice, delta in zip(generation.choices, said, strict=True):
            echo = self._echo(choice) if self._wishes.echo else Delta("", [])
            fields: dict[str, Any] = {
                "index": choice.index,
                "text": echo.text + delta.text,
                "logprobs": self._logprobs([*echo.scored, *delta.scored]),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._wishes.prompt_top_choices is not None:
                fields["prompt_logprobs"] = self._prompt_logprobs(choice)
            if self._wishes.token_ids:
                fields |= {"token_ids": delta.token_ids, "prompt_token_ids": choice.prompt.ids}
            if self._wishes.cache_info:
                fields["cache_info"] = cache_info(choice)
            choices.append(fields)
        return self._whole(generation, choices)


class ChatForm(_Envelope):
    """/v1/chat/completions. The first event of a choice carries the role; what is the prompt's stands beside choices.

    With `echo`, the message begins with the one that it continues.
    """

    prefix = "chatcmpl-"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"
    event_member = "delta"

    def opening(self, choice: Choice, usage_so_far: bytes | None) -> bytes:
        role = b'{"index":%d,"delta":{"role":"assistant","content":%s}' % (choice.index, _encode(choice.prompt.echo))
        token_ids, more = b"", b""
        if self._wishes.token_ids:
            token_ids, more = b',"token_ids":[]', b',"prompt_token_ids":' + _encode(choice.prompt.ids)
        return self._opening + role + self._rest(Delta("", []), token_ids, usage_so_far, more)

    def event(self, choice: Choice, delta: Delta, usage_so_far: bytes | None, *, is_first: bool) -> bytes:
        """One event; more where a call begins, since its arguments begin in the event after the one with its name."""
        head = self._head(choice)
        if len(delta.parts) == 1 and (one := one_part(delta.parts[0])):
            early, content = [], one
        elif delta.parts:
            *early, content = map(_encode, part_deltas(delta.parts))
        elif delta.finish_reason is None or delta.text:
            early, content = [], b'{"content":' + _encode(delta.text) + b"}"
        else:
            early, content = [], b"{}"
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._wishes.token_ids else b""
        before = b"".join(head + one + self._early(usage_so_far) for one in early)
        return before + head + content + self._rest(delta, token_ids + self._cache_info(choice, delta), usage_so_far)

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return (self._head(choice) + b'{"content":', b"}" + PLAIN_CLOSING) if self._has_only_text else None

    def _early(self, usage_so_far: bytes | None) -> bytes:
        """The rest of an event without tokens of its own."""
        members = b',"token_ids":[]' if self._wishes.token_ids else b""
        return self._rest(Delta("", []), members, usage_so_far)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self._wishes.top_choices is None:
            return None
        return chat_logprobs(scored, self._wishes.top_choices, self._wishes.spelling)

    def whole(self, generation: Generation, said: Sequence[Delta]) -> bytes:
        choices = []
        for choice, delta in zip(generation.choices, said, strict=True):
            fields: dict[str, Any] = {
                "index": choice.index,
                "message": whole_message(choice.prompt.echo, delta),
                "logprobs": self._logprobs(delta.scored),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._wishes.token_ids:
                fields["token_ids"] = delta.token_ids
            if self._wishes.cache_info:
                fields["cache_info"] = cache_info(choice)
            choices.append(fields)
        first = generation.choices[0]
        more: dict[str, Any] = {}
        if self._wishes.token_ids:
            more["prompt_token_ids"] = first.prompt.ids
        if self._wishes.prompt_top_choices is not None:
            more["prompt_logprobs"] = self._prompt_logprobs(first)
        return self._whole(generation, choices, **more)
