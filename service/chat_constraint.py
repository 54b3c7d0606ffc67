"""What the answer to a chat is held to: by `tool_choice`, strict tools, `response_format` or `structured_outputs`.

Calls and reasoning stand beside what a client asks for, so the constraint of a chat is a grammar of the whole answer
(answer_grammar.py). Only where there is neither, it is the client's own.
"""

import re
from typing import Any

import msgspec

from service.answer_grammar import CallableTool, calls_only, calls_or_structured, text_and_calls, thoughtful
from service.answer_parts import Reading
from service.constraint import MAX_CONSTRAINT_BYTES, Constraint, checked, constraint_of
from service.errors import BadRequest
from service.json_schemas import SchemaRefused, check_schema
from service.schema import ChatBody
from service.tokenization import Tokenizer
from service.tools import Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def schema_bytes(body: ChatBody) -> int:
    """Of the schemas that calls are held to, as JSON: `chat_constraint` takes time in proportion."""
    held = (tool.function.parameters for tool in body.offered_tools if _is_held(body, tool))
    return sum(len(msgspec.json.encode(schema)) for schema in held if schema is not None)


def chat_constraint(body: ChatBody, reading: Reading | None, tokenizer: Tokenizer) -> tuple[Constraint, str] | None:
    """The constraint, and the field that asks for it; None for an answer that is free. Raises BadRequest."""
    asked = constraint_of(body.response_format, body.structured_outputs)
    call_format = tokenizer.call_format
    token_of = tokenizer.grammar_token
    if not body.offered_tools or call_format is None:
        if asked is None or reading is None or reading.thinking is None:
            return asked
        answer, param = [f"answer: {_structured(asked[0])}"], asked[1]
    elif body.must_call:
        _check_alone(asked, "tool_choice")
        answer, param = calls_only(call_format, _tools(body), body.most_calls, token_of), "tool_choice"
    elif any(tool.function.strict for tool in body.offered_tools):
        _check_alone(asked, "strict tools")
        answer, param = text_and_calls(call_format, _tools(body), token_of), "tools"
    elif asked is not None:
        param = asked[1]
        answer = calls_or_structured(call_format, _tools(body), body.most_calls, _structured(asked[0]), token_of)
    else:
        return None
    thinking = None if reading is None else reading.thinking
    text = thoughtful(answer, thinking, reading is not None and reading.is_thinking, token_of)
    return checked(Constraint("lark", text), param), param


def _check_alone(asked: tuple[Constraint, str] | None, other: str) -> None:
    if asked is not None:
        raise BadRequest(f"{asked[1]} cannot be used with {other}.", param=asked[1])


def _tools(body: ChatBody) -> list[CallableTool]:
    """Those that may be called. Raises BadRequest."""
    if (size := schema_bytes(body)) > MAX_CONSTRAINT_BYTES:  # before anything looks into them
        message = f"The parameters of tools may have at most {MAX_CONSTRAINT_BYTES} bytes together, got {size}."
        raise BadRequest(message, param="tools")
    names = body.callable_names
    tools = [tool for tool in body.offered_tools if tool.function.name in names]
    return [_tool(tool, is_held=_is_held(body, tool)) for tool in tools]


def _is_held(body: ChatBody, tool: Tool) -> bool:
    """Schemas count where a call must come, and of strict tools."""
    return body.must_call or bool(tool.function.strict)


def _tool(tool: Tool, *, is_held: bool) -> CallableTool:
    name, given = tool.function.name, tool.function.parameters
    if not is_held:
        return CallableTool(name, ANY_OBJECT)
    if given is None:
        return CallableTool(name, NO_ARGUMENTS)
    try:
        check_schema(given)
    except SchemaRefused as error:
        raise BadRequest(f"The parameters of the tool {name} cannot be kept to: {error}.", param="tools") from None
    return CallableTool(name, ANY_OBJECT | given)


def _structured(constraint: Constraint) -> str:
    """The constraint as a piece of a rule. Raises BadRequest."""
    match constraint.kind:
        case "json_object":
            return '%json {"type": "object"}'
        case "json_schema":
            text = constraint.text.strip()
            return f"%json {'{}' if text == 'true' else text}"
        case "regex":
            slashed = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", constraint.text, flags=re.DOTALL)
            return f"/{slashed.replace(chr(10), chr(92) + 'n')}/"
        case "choice":
            strings = msgspec.json.decode(constraint.text, type=list[str])
            return "(" + " | ".join(msgspec.json.encode(string).decode() for string in strings) + ")"
        case "lark":
            raise BadRequest("A grammar cannot be used with tools.", param="structured_outputs")
