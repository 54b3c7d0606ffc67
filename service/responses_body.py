"""The body of POST /v1/responses, and the chat that it stands for.

Responses are stateless here: what the model is to know is in `input`. Reasoning items of earlier answers are given to
the chat template, with the message or the calls that they came before.
"""

from typing import Any, ClassVar, Literal

import msgspec

from service.constraint import JsonSchemaFormat, ResponseFormat
from service.errors import BadRequest, quoted
from service.messages import ChatMessage, FunctionCall, ToolCall, object_in
from service.schema import Body, ChatBody
from service.tools import Function, FunctionName, NamedChoice, Tool, ToolChoice

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat -> what this route calls them."""


class InputPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an item's content. What else comes back from earlier answers is not in use."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of `input`. Items of an earlier answer are sent back as they came, hence the fields not in use."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None  # None: a message
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    # unused
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    parsed_arguments: Any = None

    def messages(self, path: str) -> list[ChatMessage]:
        """The message that it is, or none. Raises BadRequest."""
        match self.type:
            case None | "message":
                content = _text(self._needed("content", path))
                return [ChatMessage(role=self._needed("role", path), content=content)]
            case "function_call":
                function = FunctionCall(
                    self._needed("name", path), _checked_object(self._needed("arguments", path), path)
                )
                call = ToolCall(self._needed("call_id", path), function)
                return [ChatMessage(role="assistant", content=None, tool_calls=[call])]
            case "function_call_output":
                content = _text(self._needed("output", path))
                return [ChatMessage(role="tool", content=content, tool_call_id=self._needed("call_id", path))]
            case _:
                return []

    def _needed(self, name: str, path: str) -> Any:
        if (value := getattr(self, name)) is None:
            raise BadRequest(f"{name} is missing - at `{path}`", param="input")
        return value


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _checked_object(arguments: str, path: str) -> str:
    if object_in(arguments) is None:
        raise BadRequest(f"arguments must be a JSON object in a string - at `{path}.arguments`", param="input")
    return arguments


class FlatTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call: a chat's tool without the object around it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> Tool:
        return Tool("function", Function(self.name, self.description, self.parameters, self.strict))


class FlatChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text must be. For json_schema, name and schema are needed."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> ResponseFormat:
        """The same as `response_format`."""
        if self.type != "json_schema":
            return ResponseFormat(self.type)
        return ResponseFormat(self.type, JsonSchemaFormat(self.schema, self.name, self.description, self.strict))


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`verbosity` is taken and unused."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The effort is given to the chat template. `summary`: no model here tells what it thought."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing here is padded."""

    include_obfuscation: bool | None = None


class ResponsesBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    # in use
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    cache_salt: str | None = None
    metadata: dict[str, str] | None = None  # comes back in the answer
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None

    # unused
    store: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    # refused, unless neutral
    previous_response_id: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    NEUTRAL: ClassVar = {
        "max_tool_calls": (),  # of tools that a server calls
        "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning comes as text, nothing of it is encrypted
        "truncation": ("disabled",),
        "background": (False,),
        "conversation": (),
        "prompt": (),
    }

    def check(self) -> None:
        super().check()
        if self.previous_response_id is not None:
            message = "previous_response_id names nothing: responses are not stored here. Send all items in input."
            raise BadRequest(message, param="previous_response_id")
        if not self.input:
            raise BadRequest("input must be a text, or at least one item.", param="input")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens must be at least 1, got {quoted(self.max_output_tokens)}."
            raise BadRequest(message, param="max_output_tokens")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream: true.", param="stream_options")

    def chat(self) -> ChatBody:
        """The chat that this asks for, checked. Raises BadRequest and NotImplementedYet."""
        body = ChatBody(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=None if self.text is None or self.text.format is None else self.text.format.for_chat(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            stream=self.stream,
            cache_salt=self.cache_salt,
            tools=[tool.for_chat() for tool in self.tools or ()] or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        body.check()
        return body

    def _tool_choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, FlatChoice):
            return NamedChoice("function", FunctionName(self.tool_choice.name))
        return self.tool_choice

    def _messages(self) -> list[ChatMessage]:
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        thought = ""
        for i, item in enumerate(self.input or []):
            if item.type == "reasoning":
                thought = _text(item.content or "")
            for message in item.messages(f"$.input[{i}]"):
                if thought and message.role == "assistant":
                    message = msgspec.structs.replace(message, reasoning_content=thought)
                thought = ""
                before = messages[-1] if messages else None
                is_same_turn = message.tool_calls and message.reasoning_content is None
                if is_same_turn and before is not None and before.role == "assistant":
                    calls = [*(before.tool_calls or []), *(message.tool_calls or [])]  # items have one call each
                    messages[-1] = msgspec.structs.replace(before, tool_calls=calls)
                else:
                    messages.append(message)
        return messages
