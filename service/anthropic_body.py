"""The body of POST /v1/messages (the Anthropic API's form), and the chat that it stands for.

A last message of the assistant is one to go on with, as that API has it. `cache_control` marks are taken and unused:
every prompt is looked up in the page cache anyway. Whether the model thinks is up to its chat template: `thinking` is
given to it as `enable_thinking`.
"""

from typing import Any, ClassVar, Literal

import msgspec

from service.errors import BadRequest, NotImplementedYet, quoted
from service.field_checks import MAX_STOPS
from service.messages import ChatMessage, FunctionCall, ToolCall
from service.schema import Body, ChatBody
from service.tools import Function, FunctionName, NamedChoice, Tool, ToolChoice

NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
"""Fields of a chat -> what this route calls them."""


class TextBlock(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Text. `citations` come back from answers of other servers; here they say nothing."""

    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class PlainText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same, where nothing but text may stand."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", forbid_unknown_fields=True):
    """What the assistant thought in an earlier turn. Nothing signs it."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", forbid_unknown_fields=True):
    """What the assistant called in an earlier turn."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result", forbid_unknown_fields=True):
    """What a tool gave back."""

    tool_use_id: str
    content: str | list[PlainText] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]

    def for_chat(self, path: str) -> list[ChatMessage]:
        """As messages of a chat: results of tools come first, each as a message of its own. Raises BadRequest."""
        if isinstance(self.content, str):
            return [ChatMessage(role=self.role, content=self.content)]
        texts, thoughts, calls, messages = [], [], [], []
        for i, block in enumerate(self.content):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock() if self.role == "assistant":
                    thoughts.append(block.thinking)
                case ToolUseBlock() if self.role == "assistant":
                    arguments = msgspec.json.encode(block.input).decode()
                    calls.append(ToolCall(block.id, FunctionCall(block.name, arguments)))
                case ToolResultBlock() if self.role == "user":
                    result = joined(block.content or "")
                    messages.append(ChatMessage(role="tool", content=result, tool_call_id=block.tool_use_id))
                case _:
                    words = f"a message of role {self.role} has no such block - at `{path}.content[{i}]`"
                    raise BadRequest(words, param="messages")
        if texts or calls or not messages:
            thought = "".join(thoughts) or None
            message = ChatMessage(
                role=self.role, content="".join(texts), tool_calls=calls or None, reasoning_content=thought
            )
            messages.append(message)
        return messages


def joined(content: str | list[PlainText]) -> str:
    """The text of a content that has only text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


class InputTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model may use."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None

    def for_chat(self) -> Tool:
        return Tool("function", Function(self.name, self.description, self.input_schema, self.strict))


class InputToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """any: some tool must be used; tool: the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> ToolChoice:
        """Raises BadRequest."""
        if (self.name is not None) != (self.type == "tool"):
            raise BadRequest("tool_choice has a name if its type is tool, and only then.", param="tool_choice")
        match self.type:
            case "tool":
                return NamedChoice("function", FunctionName(self.name or ""))
            case "any":
                return "required"
            case choice:
                return choice


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model shall think. A budget of tokens for it is not kept here, so it is refused."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: int | None = None

    def check(self) -> None:
        if self.budget_tokens is not None or self.type == "enabled":
            words = "A budget of tokens for thinking is not kept by this version: ask for thinking of type adaptive."
            raise NotImplementedYet(words, param="thinking")


class PromptBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a message and a count of its tokens have in common."""

    # in use
    messages: list[InputMessage] | None = None
    system: str | list[PlainText] | None = None

    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None

    def check(self) -> None:
        super().check()
        if self.thinking is not None:
            self.thinking.check()
        if not self.messages:
            raise BadRequest("messages must have at least one message.", param="messages")

    def chat(self) -> ChatBody:
        """The chat that this asks for, checked. Raises BadRequest and NotImplementedYet."""
        messages = [] if not self.system else [ChatMessage(role="system", content=joined(self.system))]
        for i, message in enumerate(self.messages or []):
            messages += message.for_chat(f"$.messages[{i}]")
        goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
        body = ChatBody(
            model=self.model,
            messages=messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=[tool.for_chat() for tool in self.tools or ()] or None,
            tool_choice=None if self.tool_choice is None else self.tool_choice.for_chat(),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            chat_template_kwargs=None if self.thinking is None else {"enable_thinking": self._thinks},
            include_reasoning=self._thinks,
            **self._options(),
        )
        body.check()
        return body

    @property
    def _thinks(self) -> bool:
        return self.thinking is None or self.thinking.type != "disabled"

    def _options(self) -> dict[str, Any]:
        """Further fields of the chat."""
        return {}


class CountBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    # in use
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    # unused
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    # refused, unless neutral
    container: str | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    output_config: dict[str, Any] | None = None

    NEUTRAL: ClassVar = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": ({},),
    }

    def check(self) -> None:
        super().check()
        if self.max_tokens is None:
            raise BadRequest("max_tokens is missing.", param="max_tokens")
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            raise BadRequest(f"temperature must be in [0, 1], got {quoted(self.temperature)}.", param="temperature")
        if len(self.stop_sequences or ()) > MAX_STOPS:
            message = f"stop_sequences may have at most {MAX_STOPS} items, got {len(self.stop_sequences or ())}."
            raise BadRequest(message, param="stop_sequences")

    def _options(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }
