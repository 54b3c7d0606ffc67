"""HTTP bodies as msgspec Structs, and every check of a body that needs no tokenizer and no engine.

The Structs declare every field that the API names, so a field is in one of four groups:

    in use          does what the API says
    unused          clients send it and it cannot change an answer: accepted
    not yet         another release serves it: null and its neutral value are accepted, others are NotImplementedYet
    unknown         refused with the nearest known name, since a typo must not change an answer in silence

`null` always means the default. Ranges are checked here, by hand, because a message should say what was sent.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from service.constraint import ResponseFormat, StructuredOutputs, constraint_of
from service.errors import BadRequest, NotImplementedYet, quoted
from service.messages import ChatMessage, check_tool_messages
from service.tools import NamedChoice, Tool, ToolChoice, check_tools

MAX_PROMPTS = 1024
MAX_CHOICES = 64
MAX_BEAMS = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024  # held back text is bounded by the longest stop
MAX_STOP_TOKEN_IDS = 128  # the engine compares every sampled token with them, each step
MAX_BIASES = 1024
MAX_BIAS = 100.0  # larger ones are taken as this
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_LENGTH_PENALTY = 10.0  # a length to this power is still a number
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 128
MAX_PRIORITY = 1000
SEEDS = range(-(2**63), 2**63)


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
        if name := _first_beside(self, self.NEUTRAL):
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
        _check_range("n", self.n, 1, MAX_CHOICES, f"1 to {MAX_CHOICES}")
        self._check_lengths()
        _check_sampling(self)
        _check_token_lists(self)
        _check_beams(self)
        _check_stops(self)
        _check_constraint(self)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if self.spaces_between_special_tokens is False:
            message = "spaces_between_special_tokens can only be true."
            raise BadRequest(message, param="spaces_between_special_tokens")
        _check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.cache_salt is not None and not CACHE_SALT.fullmatch(self.cache_salt):
            message = f"cache_salt must be 1 to {MAX_SALT_CHARACTERS} characters, none of them @, /, \\ or NUL."
            raise BadRequest(message, param="cache_salt")

    @property
    def _least_tokens(self) -> int:
        return 1

    def _check_lengths(self) -> None:
        _check_range("max_tokens", self.max_tokens, self._least_tokens, None, f"at least {self._least_tokens}")
        _check_range("min_tokens", self.min_tokens, 0, None, "at least 0")
        if self.min_tokens is not None and self.asked_tokens is not None and self.min_tokens > self.asked_tokens:
            message = (
                f"min_tokens must be at most max_tokens, {quoted(self.asked_tokens)}, got {quoted(self.min_tokens)}."
            )
            raise BadRequest(message, param="min_tokens")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise BadRequest(f"timeout_s must be above 0, got {quoted(self.timeout_s)}.", param="timeout_s")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1 and cut < 1:
            message = f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {quoted(cut)}."
            raise BadRequest(message, param="truncate_prompt_tokens")
        if cut is None and self.truncation_side == "right":
            raise BadRequest("truncation_side needs truncate_prompt_tokens.", param="truncation_side")


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    # in use
    prompt: str | list[str | int | list[int]] | None = (
        None  # a union may hold one array type: `prompts` checks the rest
    )
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
    def _least_tokens(self) -> int:
        return 0 if self.echo else 1

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            message = f"best_of must be n, {self.choices_per_prompt}, got {quoted(self.best_of)}."
            raise BadRequest(message, param="best_of")

    def check_logprobs(self, limit: int) -> None:
        super().check_logprobs(limit)
        _check_range("logprobs", self.logprobs, 0, limit, f"0 to {limit}")

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
        _check_range("max_completion_tokens", self.max_completion_tokens, 1, None, "at least 1")
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
        _check_range("top_logprobs", self.top_logprobs, 0, limit, f"0 to {limit}")


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
        if name := _first_beside(self, NOT_IN_FORKS):
            raise BadRequest(f"{name} cannot be changed by a fork.", param=name)
        _check_range("choice", self.choice, 0, None, "at least 0")
        if self.top_logprobs and self.logprobs is not True:
            raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")

    def check_logprobs(self, limit: int) -> None:
        super().check_logprobs(limit)
        _check_range("top_logprobs", self.top_logprobs, 0, limit, f"0 to {limit}")
        if not isinstance(self.logprobs, bool):
            _check_range("logprobs", self.logprobs, 0, limit, f"0 to {limit}")


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


def check_token_ids(ids: Sequence[int], vocabulary: int, *, param: str, path: str) -> None:
    """Raises BadRequest if an id is not in 0 ... vocabulary - 1. `path` names the list, as `$.prompt[2]`."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    at = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    message = f"token ids must be in 0 ... {vocabulary - 1}, got {quoted(ids[at])} - at `{path}[{at}]`"
    raise BadRequest(message, param=param)


CACHE_SALT = re.compile(rf"[^@/\\\0]{{1,{MAX_SALT_CHARACTERS}}}")
REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}")


def check_request_id(request_id: str) -> None:
    """An id goes into a header, a log line and the answer's `id`. Raises BadRequest."""
    if not REQUEST_ID.fullmatch(request_id):
        message = f"request_id must be 1 to {MAX_ID_CHARACTERS} visible ASCII characters."
        raise BadRequest(message, param="request_id")


def _first_beside(body: Body, neutral: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The first of these fields that is neither null nor one of its neutral values."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            return name
    return None


def _check_range(name: str, value: float | None, low: float, high: float | None, words: str) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        raise BadRequest(f"{name} must be {words}, got {quoted(value)}.", param=name)


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise BadRequest(f"{name} must be in (0, 1], got {quoted(value)}.", param=name)


def _check_sampling(body: GenerationBody) -> None:
    _check_range("temperature", body.temperature, 0, 2, "in [0, 2]")
    _check_share("top_p", body.top_p)
    _check_range("top_k", body.top_k, -1, None, "at least -1 (0 and -1 are off)")
    _check_range("min_p", body.min_p, 0, 1, "in [0, 1]")
    _check_share("typical_p", body.typical_p)
    _check_range("presence_penalty", body.presence_penalty, -2, 2, "in [-2, 2]")
    _check_range("frequency_penalty", body.frequency_penalty, -2, 2, "in [-2, 2]")
    if body.repetition_penalty is not None and body.repetition_penalty <= 0:
        message = f"repetition_penalty must be above 0, got {quoted(body.repetition_penalty)}."
        raise BadRequest(message, param="repetition_penalty")
    if body.seed is not None and body.seed not in SEEDS:
        raise BadRequest(f"seed must fit into 64 bits with its sign, got {quoted(body.seed)}.", param="seed")


def _check_token_lists(body: GenerationBody) -> None:
    """Counts and sizes; ids are compared with the vocabulary later."""
    if body.logit_bias is not None and len(body.logit_bias) > MAX_BIASES:
        message = f"logit_bias may have at most {MAX_BIASES} entries, got {len(body.logit_bias)}."
        raise BadRequest(message, param="logit_bias")
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise BadRequest("allowed_token_ids must not be empty: nothing could be sampled.", param="allowed_token_ids")
    words = body.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise BadRequest(f"bad_words may have at most {MAX_BAD_WORDS} items, got {len(words)}.", param="bad_words")
    for i, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            message = f"a bad word must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, got {len(word)}"
            raise BadRequest(f"{message} - at `$.bad_words[{i}]`", param="bad_words")


_BEAM_FIELDS: Mapping[str, tuple[Any, ...]] = {"beam_width": (), "length_penalty": (1.0,), "early_stopping": (False,)}
"""Fields that mean something with beam search only -> values that change nothing without it."""

_NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "seed": (),
    "prompt_logprobs": (),
}
"""Fields that beam search has no use for -> values that it can take, since they say what it does anyway."""


def _check_beams(body: GenerationBody) -> None:
    if not body.use_beam_search:
        if name := _first_beside(body, _BEAM_FIELDS):
            raise BadRequest(f"{name} needs use_beam_search: true.", param=name)
        return
    _check_range("beam_width", body.beam_width, 2, MAX_BEAMS, f"2 to {MAX_BEAMS}")
    _check_range(
        "length_penalty", body.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY,
        f"in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
    )  # fmt: skip
    beams = MAX_BEAMS if body.beam_width is None else body.beam_width
    if body.choices_per_prompt > beams:
        message = f"n must be at most the number of beams, {beams}, got {body.choices_per_prompt}."
        raise BadRequest(message, param="n")
    if name := _first_beside(body, _NOT_WITH_BEAMS):
        raise BadRequest(f"{name} cannot be used with use_beam_search.", param=name)
    if body.top_choices is not None:
        raise BadRequest("logprobs cannot be used with use_beam_search.", param="logprobs")


def _check_constraint(body: GenerationBody) -> None:
    asked = constraint_of(body.response_format, body.structured_outputs)
    if asked is not None and body.use_beam_search:
        raise BadRequest(f"{asked[1]} cannot be used with use_beam_search.", param=asked[1])


def _check_stops(body: GenerationBody) -> None:
    if len(body.stops) > MAX_STOPS:
        raise BadRequest(f"stop may have at most {MAX_STOPS} items, got {len(body.stops)}.", param="stop")
    for i, stop in enumerate(body.stops):
        path = "$.stop" if isinstance(body.stop, str) else f"$.stop[{i}]"
        if not stop:
            raise BadRequest(f"a stop string must not be empty - at `{path}`", param="stop")
        if len(stop) > MAX_STOP_CHARACTERS:
            message = f"a stop string may have at most {MAX_STOP_CHARACTERS} characters, got {len(stop)} - at `{path}`"
            raise BadRequest(message, param="stop")
    count = len(body.stop_token_ids or [])
    if count > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} items, got {count}."
        raise BadRequest(message, param="stop_token_ids")
