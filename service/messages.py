"""The messages of a chat as msgspec Structs, and how a chat template gets them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from service.errors import BadRequest, quoted


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The only kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an assistant called. `arguments` is JSON in a string. A client that has parsed it may send that along."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # unused


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of an earlier assistant turn."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # unused: of a call that was put together from a stream


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. Clients send answers back as they got them, hence the fields that may only be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name
    parsed: Any = None  # unused: what a client has made of the content
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
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            if self.role != "assistant":
                raise BadRequest(f"only an assistant has reasoning_content - at `{path}`", param="messages")
            message["reasoning_content"] = reasoning
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
            if (arguments := object_in(call.function.arguments)) is None:
                where = f"{path}.tool_calls[{i}].function.arguments"
                raise BadRequest(f"arguments must be a JSON object in a string - at `{where}`", param="messages")
            parsed.append(arguments)
        return parsed


def object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def check_tool_messages(messages: Sequence[ChatMessage]) -> None:
    """A message of role tool answers a call of an assistant before it. Raises BadRequest, which names the call and no
    place: in other forms than a chat's the message stands elsewhere.
    """
    called: set[str] = set()
    for message in messages:
        called.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in called:
            words = f"no assistant before has made the call {quoted(message.tool_call_id)}"
            raise BadRequest(words, param="messages")
