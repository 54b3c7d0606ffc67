"""The tools of a chat as bodies name them, and every check of them that needs no model."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from service.call_readers import NAME_PATTERN
from service.errors import BadRequest, quoted

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 64  # levels of a tool's parameters
_NAME = re.compile(NAME_PATTERN)


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is a JSON schema; strict: arguments are held to it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises BadRequest."""
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools.", param="tool_choice")
        return
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise BadRequest(f"tools must have 1 to {MAX_TOOLS} entries, got {len(tools)}.", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, path = tool.function.name, f"$.tools[{i}]"
        if not _NAME.fullmatch(name):
            words = "a name must be 1 to 64 letters, digits, _ or -, got"
            raise BadRequest(f"{words} {quoted(name)} - at `{path}`", param="tools")
        if name in names:
            raise BadRequest(f"two tools are called {name} - at `{path}`", param="tools")
        names.add(name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            words = f"parameters must be a schema of type object, got {quoted(kind, 40)}"
            raise BadRequest(f"{words} - at `{path}`", param="tools")
        if _depth(tool.function.parameters) > MAX_SCHEMA_DEPTH:
            words = f"a schema may have at most {MAX_SCHEMA_DEPTH} levels"
            raise BadRequest(f"{words} - at `{path}`", param="tools")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        words = f"tool_choice names {quoted(choice.function.name)}, which is none of the tools."
        raise BadRequest(words, param="tool_choice")


def _depth(value: Any) -> int:
    """Levels of objects and lists. No recursion: clients choose the depth."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth)
            inner = item.values() if isinstance(item, dict) else item
            waiting.extend((child, depth + 1) for child in inner)
    return deepest
