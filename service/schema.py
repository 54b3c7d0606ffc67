"""HTTP bodies as msgspec Structs. What their fields may be is checked here and in field_checks.py: all that needs no
tokenizer and no engine.

The Structs declare every field that the API names, so a field is in one of four groups:

    in use          does what the API says
    unused          clients send it and it cannot change an answer: accepted
    not yet         another release serves it: null and its neutral value are accepted, others are NotImplementedYet
    unknown         refused with the nearest known name, since a typo must not change an answer in silence

`null` always means the default.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from service.constraint import ResponseFormat, StructuredOutputs
from service.errors import BadRequest, NotImplementedYet, quoted
from service.field_checks import (
    CACHE_SALT,
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_SALT_CHARACTERS,
    check_beams,
    check_constraint,
    check_lengths,
    check_range,
    check_request_id,
    check_sampling,
    check_stops,
    check_token_lists,
    first_beside,
)
from service.messages import ChatMessage, check_tool_messages
from service.tools import NamedChoice, Tool, ToolChoice, check_tools


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # the API ignores it: nothing here is padded


# ---------------------------------------------------------------- bodies


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every body has."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # fields not served yet -> values that change nothing

    model: str | None = None

    def check(self) -> None:
        """Everything that can be said without a tokenizer. Raises BadRequest or NotImplementedYet."""
        if name := first_beside(self, self.NEUTRAL):
            given = quoted(getattr(self, name))
            raise NotImplementedYet(f"{name} is not served by this version, got {given}.", param=name)


class GenerationBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share."""

    # in use: how many and how long
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    timeout_s: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    # in use: how tokens are drawn (docs/sampling.md)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # in use: where it ends
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    # in use: the answer
    echo: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None

    # in use: the page cache
    prefix_cache: bool | None = None
    cache_salt: str | None = None
    return_cache_info: bool | None = None

    # in use: whose turn it is
    priority: int | None = None

    # unused
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None

    # in use: what the output must be
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def beams(self) -> int | None:
        """How many beams are searched, or None without beam search: as many as there are choices, but 2 at least."""
        if not self.use_beam_search:
            return None
        return max(2, self.choices_per_prompt) if self.beam_width is None else self.beam_width

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def asked_tokens(self) -> int | None:
        """How long the client asked the output to be, or None."""
        return self.max_tokens

    @property
    def top_choices(self) -> int | None:
        """How many of the likeliest tokens are reported beside each token of the output; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def scores_echo(self) -> bool:
        """Whether the answer shows the prompt's tokens with their log-probabilities, as if they were output."""
        return False

    def check_logprobs(self, limit: int) -> None:
        """`limit`: the likeliest tokens that a client may ask for at each place. Raises BadRequest."""
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= limit:
            hint = " All of the vocabulary is never reported." if self.prompt_logprobs == -1 else ""
            message = f"prompt_logprobs must be 0 to {limit}, got {quoted(self.prompt_logprobs)}.{hint}"
            raise BadRequest(message, param="prompt_logprobs")

    def check(self) -> None:
        super().check()
        check_range("n", self.n, 1, MAX_CHOICES, f"1 to {MAX_CHOICES}")
        check_lengths(self)
        check_sampling(self)
        check_token_lists(self)
        check_beams(self)
        check_stops(self)
        check_constraint(self)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if self.spaces_between_special_tokens is False:
            message = "spaces_between_special_tokens can only be true."
            raise BadRequest(message, param="spaces_between_special_tokens")
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.cache_salt is not None and not CACHE_SALT.fullmatch(self.cache_salt):
            message = f"cache_salt must be 1 to {MAX_SALT_CHARACTERS} characters, none of them @, /, \\ or NUL."
            raise BadRequest(message, param="cache_salt")

    @property
    def least_tokens(self) -> int:
        return 1


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    # in use
    prompt: str | list[str | int | list[int]] | None = None  # a union may hold one array: `prompts` checks the rest
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    # not yet
    suffix: str | None = None

    NEUTRAL = {**GenerationBody.NEUTRAL, "suffix": ()}

    @property
    def top_choices(self) -> int | None:
        return self.logprobs

    @property
    def scores_echo(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def least_tokens(self) -> int:
        return 0 if self.echo else 1

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            message = f"best_of must be n, {self.choices_per_prompt}, got {quoted(self.best_of)}."
            raise BadRequest(message, param="best_of")

    def check_logprobs(self, limit: int) -> None:
        super().check_logprobs(limit)
        check_range("logprobs", self.logprobs, 0, limit, f"0 to {limit}")

    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """(path, prompt) of each: all texts or all token ids, none empty; ids are not checked against a vocabulary."""
        prompt = self.prompt
        if prompt is None:
            raise BadRequest("prompt is missing.", param="prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            message = "prompt must be a string, or a list of strings, of token ids or of lists of token ids: not mixed."
            raise BadRequest(message, param="prompt")
        if kinds == {int}:
            prompt = [prompt]  # type: ignore[list-item]  # one prompt, as token ids
        if not prompt:
            raise BadRequest("prompt must not be empty.", param="prompt")
        if len(prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt may have at most {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt")
        is_single = isinstance(self.prompt, str) or kinds == {int}
        prompts: list[tuple[str, str | list[int]]] = []
        for i, one in enumerate(prompt):
            path = "$.prompt" if is_single else f"$.prompt[{i}]"
            if not one:
                raise BadRequest(f"prompt must not be empty - at `{path}`", param="prompt")
            prompts.append((path, one))  # type: ignore[arg-type]  # one kind, as just checked
        return prompts


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    # in use
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # not yet
    chat_template: str | None = None

    NEUTRAL = {**GenerationBody.NEUTRAL, "chat_template": ()}

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_names(self) -> frozenset[str]:
        """The tools that it may call."""
        if isinstance(self.tool_choice, NamedChoice):
            return frozenset({self.tool_choice.function.name})
        return frozenset(tool.function.name for tool in self.offered_tools)

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def most_calls(self) -> int | None:
        """How many calls a choice may have; None: any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedChoice) else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_choices(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        check_range("max_completion_tokens", self.max_completion_tokens, 1, None, "at least 1")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.echo and not self.continue_final_message:
            raise BadRequest("echo needs continue_final_message: true.", param="echo")
        check_chat(self)
        check_tools(self.tools, self.tool_choice)
        if self.use_beam_search and (self.must_call or any(tool.function.strict for tool in self.offered_tools)):
            param = "tool_choice" if self.must_call else "tools"
            raise BadRequest("A call cannot be required, nor strict, with use_beam_search.", param=param)

    def check_logprobs(self, limit: int) -> None:
        super().check_logprobs(limit)
        check_range("top_logprobs", self.top_logprobs, 0, limit, f"0 to {limit}")


class ForkBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/requests/{id}/fork: what is to be other than in the request that is forked."""

    # in use
    choice: int | None = None
    logprobs: int | bool | None = None  # as the route of that request has it
    top_logprobs: int | None = None

    @property
    def top_choices(self) -> int | None:
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs

    def check(self) -> None:
        super().check()
        if name := first_beside(self, NOT_IN_FORKS):
            raise BadRequest(f"{name} cannot be changed by a fork.", param=name)
        check_range("choice", self.choice, 0, None, "at least 0")
        if self.top_logprobs and self.logprobs is not True:
            raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")

    def check_logprobs(self, limit: int) -> None:
        super().check_logprobs(limit)
        check_range("top_logprobs", self.top_logprobs, 0, limit, f"0 to {limit}")
        if not isinstance(self.logprobs, bool):
            check_range("logprobs", self.logprobs, 0, limit, f"0 to {limit}")


NOT_IN_FORKS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "use_beam_search": (False,), "beam_width": (), "length_penalty": (1.0,), "early_stopping": (False,),
    "echo": (False,), "prompt_logprobs": (), "truncate_prompt_tokens": (), "truncation_side": ("left",),
    "prefix_cache": (True,), "cache_salt": (), "response_format": (), "structured_outputs": (),
}  # fmt: skip
"""Fields that belong to the prompt, or to the whole answer -> values that change nothing."""


class TokenizeBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        return self.tools or []

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("exactly one of prompt and messages is needed.", param="prompt")
        if self.messages is not None:
            check_chat(self)
        elif self.tools is not None:
            raise BadRequest("tools need messages.", param="tools")
        check_tools(self.tools, None)


class DetokenizeBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int] | None = None

    def check(self) -> None:
        super().check()
        if self.tokens is None:
            raise BadRequest("tokens is missing.", param="tokens")


# ---------------------------------------------------------------- checks that several bodies share

TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def check_chat(body: ChatBody | TokenizeBody) -> None:
    """The fields that make a prompt out of messages. Raises BadRequest."""
    if not body.messages:
        raise BadRequest("messages must have at least one message.", param="messages")
    # absent means true for the first, so a client that wants the second must say both
    if body.continue_final_message and body.add_generation_prompt is not False:
        message = "add_generation_prompt must be false when continue_final_message is true."
        raise BadRequest(message, param="continue_final_message")
    for name in body.chat_template_kwargs or {}:
        if name in TEMPLATE_NAMES:
            message = f"chat_template_kwargs must not contain {quoted(name)}: it has a field of its own."
            raise BadRequest(message, param="chat_template_kwargs")


def template_messages(body: ChatBody | TokenizeBody) -> list[dict[str, Any]]:
    """The messages as the chat template wants them. Raises BadRequest."""
    messages = body.messages or []
    check_tool_messages(messages)
    return [message.for_template(f"$.messages[{i}]") for i, message in enumerate(messages)]
