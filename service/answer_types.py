"""What answers look like, as types. openapi.py describes answers by them; tests decode real answers with them.

Answers are not made from these: answers.py and its siblings put bytes together, since most events carry one token.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from service.engine_client import OpenSequence


class Answered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of an answer. A field that may be UNSET is left out where it was not asked for."""


# ---------------------------------------------------------------- completions and chats


class CachedTokens(Answered, frozen=True, kw_only=True):
    """How many of the prompt's tokens were found in the page cache."""

    cached_tokens: int


class ReasoningTokens(Answered, frozen=True, kw_only=True):
    """Of the output's tokens, those of the reasoning with its marks."""

    reasoning_tokens: int


class Usage(Answered, frozen=True, kw_only=True):
    """Tokens of all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET  # known at the end
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET  # of a model that marks its reasoning


class CacheMiss(Answered, frozen=True, kw_only=True):
    """Why the prompt's tokens from `position` on were computed."""

    reason: str
    position: int
    evicted_at: float | UnsetType = UNSET


class CacheInfo(Answered, frozen=True, kw_only=True):
    """With return_cache_info."""

    cached_tokens: int
    miss: CacheMiss | None


class PromptToken(Answered, frozen=True, kw_only=True):
    """The score of a token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Answered, frozen=True, kw_only=True):
    """Four lists of equal length, one place for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class _Choice(Answered, frozen=True, kw_only=True):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None  # tool_calls: of chats
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cache_info: CacheInfo | UnsetType = UNSET


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    """One continuation of one prompt; choices are numbered prompt by prompt. In events `text` is what is new."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Answered, frozen=True, kw_only=True):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class CompletionEvent(Answered, frozen=True, kw_only=True):
    """An event of a streamed completion; the usage comes last, without choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class ForkedCompletion(Completion, frozen=True, kw_only=True):
    """The answer of a fork, if the request that it was forked from is a completion."""

    forked_from: str
    forked_at: int


class ForkedCompletionEvent(CompletionEvent, frozen=True, kw_only=True):
    """An event of a streamed one."""

    forked_from: str
    forked_at: int


class LikelyToken(Answered, frozen=True, kw_only=True):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(LikelyToken, frozen=True, kw_only=True):
    """A token that came, with the likeliest at its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answered, frozen=True, kw_only=True):
    """One entry for each token."""

    content: list[ChatToken]


class CalledFunction(Answered, frozen=True, kw_only=True):
    """What is called. The arguments are JSON in a string, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Answered, frozen=True, kw_only=True):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answered, frozen=True, kw_only=True):
    """What the model said. The reasoning stands under both of its names."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class CalledFunctionDelta(Answered, frozen=True, kw_only=True):
    """The name and no arguments first, then pieces of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answered, frozen=True, kw_only=True):
    """What is new of the call with this index; its id and type come once."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(Answered, frozen=True, kw_only=True):
    """What is new in an event: the role in the first, text or calls in others, nothing in the last."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(_Choice, frozen=True, kw_only=True):
    """One answer to the chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatEventChoice(_Choice, frozen=True, kw_only=True):
    """What is new of one answer."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(Answered, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionEvent(Answered, frozen=True, kw_only=True):
    """An event of a streamed chat; the usage comes last, without choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatEventChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---------------------------------------------------------------- responses


class OutputText(Answered, frozen=True, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Answered, frozen=True, kw_only=True, tag="reasoning_text"):
    """The text of a reasoning."""

    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answered, frozen=True, kw_only=True, tag="message"):
    """An item of an output: text for the user."""

    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Answered, frozen=True, kw_only=True, tag="reasoning"):
    """An item of an output: what the model thought."""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Answered, frozen=True, kw_only=True, tag="function_call"):
    """An item of an output: a call of one of the request's tools. The arguments are JSON in a string."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseUsage(Answered, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Response(Answered, frozen=True, kw_only=True):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    metadata: dict[str, str]


class ResponseEvent(Answered, frozen=True, kw_only=True):
    """An event of a streamed response: `event:` names its type, and its number counts up."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


# ---------------------------------------------------------------- messages


class TextContent(Answered, frozen=True, kw_only=True, tag="text"):
    """A block of a message: text for the user."""

    text: str


class ThinkingContent(Answered, frozen=True, kw_only=True, tag="thinking"):
    """A block of a message: what the model thought. The signature is empty."""

    thinking: str
    signature: str


class ToolUseContent(Answered, frozen=True, kw_only=True, tag="tool_use"):
    """A block of a message: a use of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(Answered, frozen=True, kw_only=True):
    """In this API the input's tokens are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Answered, frozen=True, kw_only=True):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEventDelta(Answered, frozen=True, kw_only=True):
    """What is new in a block, or at the end why it ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Answered, frozen=True, kw_only=True):
    """An event of a streamed message: `event:` names its type."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: MessageEventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class InputTokens(Answered, frozen=True, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorObject(Answered, frozen=True, kw_only=True):
    """The `error` of /v1/messages."""

    type: str
    message: str


class AnthropicError(Answered, frozen=True, kw_only=True):
    """The body of every answer of /v1/messages with a status of 400 or more."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


# ---------------------------------------------------------------- the rest


class Model(Answered, frozen=True, kw_only=True):
    """A name that the model is served by."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answered, frozen=True, kw_only=True):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class OpenRequestEntry(Answered, frozen=True, kw_only=True):
    """A request that has not ended, with its choices that have not."""

    id: str
    object: Literal["request"]
    age_s: float
    sequences: list[OpenSequence]


class OpenRequestList(Answered, frozen=True, kw_only=True):
    """The answer of /v1/requests."""

    object: Literal["list"]
    data: list[OpenRequestEntry]


class AbortedRequest(Answered, frozen=True, kw_only=True):
    """aborted: whether something of it was still open."""

    id: str
    object: Literal["request"]
    aborted: bool


class Tokenized(Answered, frozen=True, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answered, frozen=True, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


class Version(Answered, frozen=True, kw_only=True):
    """The answer of /version."""

    version: str


class Load(Answered, frozen=True, kw_only=True):
    """Requests that generate or wait."""

    server_load: int
