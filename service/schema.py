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

from service.errors import BadRequest, NotImplementedYet, quoted

MAX_PROMPTS = 1024
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024  # held back text is bounded by the longest stop
MAX_STOP_TOKEN_IDS = 128  # the engine compares every sampled token with them, each step
MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 128
SEEDS = range(-(2**63), 2**63)


# ---------------------------------------------------------------- messages of a chat


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The only kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an assistant called. `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of an earlier assistant turn."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Clients send answers back as they got them, hence the fields that may only be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as chat templates expect it: content is text, arguments are an object. Raises BadRequest."""
        if self.content is msgspec.UNSET and not (self.role == "assistant" and self.tool_calls):
            raise BadRequest(f"content is missing - at `{path}`", param="messages")
        if isinstance(self.content, list):
            content = "".join(part.text for part in self.content)
        else:
            content = self.content or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "tool":
            if self.tool_call_id is None:
                raise BadRequest(f"a message of role tool needs tool_call_id - at `{path}`", param="messages")
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            if self.role != "assistant":
                raise BadRequest(f"only an assistant has tool_calls - at `{path}`", param="messages")
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
                for call, arguments in zip(self.tool_calls, self._arguments(path), strict=True)
            ]
        return message

    def _arguments(self, path: str) -> list[dict[str, Any]]:
        parsed = []
        for i, call in enumerate(self.tool_calls or []):
            try:
                parsed.append(msgspec.json.decode(call.function.arguments, type=dict[str, Any]))
            except (msgspec.MsgspecError, RecursionError, UnicodeError):
                where = f"{path}.tool_calls[{i}].function.arguments"
                raise BadRequest(
                    f"arguments must be a JSON object in a string - at `{where}`", param="messages"
                ) from None
        return parsed


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
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise NotImplementedYet(f"{name} is not served by this version, got {quoted(value)}.", param=name)


class GenerationBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share."""

    # in use
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    prefix_cache: bool | None = None
    cache_salt: str | None = None
    return_cache_info: bool | None = None

    # unused
    store: Any = None
    metadata: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    verbosity: Any = None

    # not yet
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    typical_p: float | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    timeout_s: float | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None

    NEUTRAL = {
        "min_p": (0.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "repetition_penalty": (1.0,),
        "min_tokens": (0,),
        "logit_bias": (),
        "allowed_token_ids": (),
        "bad_words": (),
        "typical_p": (1.0,),
        "use_beam_search": (False,),
        "beam_width": (),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "timeout_s": (),
        "spaces_between_special_tokens": (True,),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "truncation_side": ("left",),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "priority": (0,),
        "return_tokens_as_token_ids": (False,),
        "echo": (False,),
    }

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def asked_tokens(self) -> int | None:
        """How long the client asked the output to be, or None."""
        return self.max_tokens

    def check(self) -> None:
        super().check()
        self._check_choices()
        self._check_sampling()
        self._check_stops()
        _check_range("max_tokens", self.max_tokens, 1, None, "at least 1")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true.", param="stream_options")
        if self.request_id is not None:
            check_request_id(self.request_id)
        if self.cache_salt is not None and not CACHE_SALT.fullmatch(self.cache_salt):
            message = f"cache_salt must be 1 to {MAX_SALT_CHARACTERS} characters, none of them @, /, \\ or NUL."
            raise BadRequest(message, param="cache_salt")

    def _check_choices(self) -> None:
        _check_range("n", self.n, 1, MAX_CHOICES, f"1 to {MAX_CHOICES}")
        if self.n is not None and self.n > 1:
            raise NotImplementedYet(f"n above 1 is not served by this version, got {self.n}.", param="n")

    def _check_sampling(self) -> None:
        _check_range("temperature", self.temperature, 0, 2, "in [0, 2]")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p must be in (0, 1], got {quoted(self.top_p)}.", param="top_p")
        _check_range("top_k", self.top_k, -1, None, "at least -1 (0 and -1 are off)")
        if self.seed is not None and self.seed not in SEEDS:
            raise BadRequest(f"seed must fit into 64 bits with its sign, got {quoted(self.seed)}.", param="seed")

    def _check_stops(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise BadRequest(f"stop may have at most {MAX_STOPS} items, got {len(self.stops)}.", param="stop")
        for i, stop in enumerate(self.stops):
            path = "$.stop" if isinstance(self.stop, str) else f"$.stop[{i}]"
            if not stop:
                raise BadRequest(f"a stop string must not be empty - at `{path}`", param="stop")
            if len(stop) > MAX_STOP_CHARACTERS:
                message = (
                    f"a stop string may have at most {MAX_STOP_CHARACTERS} characters, got {len(stop)} - at `{path}`"
                )
                raise BadRequest(message, param="stop")
        count = len(self.stop_token_ids or [])
        if count > MAX_STOP_TOKEN_IDS:
            message = f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} items, got {count}."
            raise BadRequest(message, param="stop_token_ids")


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    # in use
    prompt: str | list[str | int | list[int]] | None = (
        None  # a union may hold one array type: `prompts` checks the rest
    )
    add_special_tokens: bool | None = None

    # not yet
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    NEUTRAL = {**GenerationBody.NEUTRAL, "logprobs": (), "best_of": (1,), "suffix": ()}

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

    # not yet
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    NEUTRAL = {
        **GenerationBody.NEUTRAL,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": (),
        "tool_choice": ("none", "auto"),  # without tools both mean none
        "parallel_tool_calls": (True,),
        "chat_template": (),
        "add_special_tokens": (False,),
        "reasoning_effort": (),
        "include_reasoning": (True,),
    }

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        _check_range("max_completion_tokens", self.max_completion_tokens, 1, None, "at least 1")
        check_chat(self)


class TokenizeBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # not yet
    tools: list[Any] | None = None

    NEUTRAL = {"tools": ()}

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("exactly one of prompt and messages is needed.", param="prompt")
        if self.messages is not None:
            check_chat(self)


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
    return [message.for_template(f"$.messages[{i}]") for i, message in enumerate(body.messages or [])]


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


def _check_range(name: str, value: float | None, low: float, high: float | None, words: str) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        raise BadRequest(f"{name} must be {words}, got {quoted(value)}.", param=name)
