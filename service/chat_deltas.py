"""The parts of an answer as /v1/chat/completions writes them: the message of a whole answer, the deltas of a stream.

Reasoning stands under both names that clients look for, `reasoning_content` and `reasoning`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from service.answer_parts import CallArguments, CallStart, Content, Part, Reasoning
from service.choice import Delta

_encode = msgspec.json.Encoder().encode


def one_part(part: Part) -> bytes:
    """The delta of a part that comes alone, as nearly all do; empty for the start of a call."""
    match part:
        case Content(text):
            return b'{"content":%s}' % _encode(text)
        case Reasoning(text):
            said = _encode(text)
            return b'{"reasoning_content":%s,"reasoning":%s}' % (said, said)
        case CallArguments(call, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}' % (call, _encode(text))
        case _:
            return b""


def part_deltas(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """One delta for all parts, but that the arguments of a call begin in a new one.

    A call is opened with empty arguments, and no delta has two entries of one call: clients put entries together by
    their index.
    """
    deltas: list[dict[str, Any]] = [{}]
    for part in parts:
        match part:
            case Content(text):
                _add(deltas[-1], "content", text)
            case Reasoning(text):
                _add(deltas[-1], "reasoning_content", text)
                _add(deltas[-1], "reasoning", text)
            case CallStart(call, call_id, name):
                function = {"name": name, "arguments": ""}
                entry = {"index": call, "id": call_id, "type": "function", "function": function}
                deltas[-1].setdefault("tool_calls", []).append(entry)
            case CallArguments(call, text):
                entries = deltas[-1].get("tool_calls", [])
                if entries and "id" in entries[-1]:
                    deltas.append({})
                    entries = []
                if entries and entries[-1]["index"] == call:
                    _add(entries[-1]["function"], "arguments", text)
                else:
                    entry = {"index": call, "function": {"arguments": text}}
                    deltas[-1].setdefault("tool_calls", []).append(entry)
    return deltas


def whole_message(echo: str, delta: Delta) -> dict[str, Any]:
    """The message of a whole answer; its content is null if it is calls and nothing else."""
    message: dict[str, Any] = {"role": "assistant", "content": echo + delta.text}
    reasoning = [part.text for part in delta.parts if isinstance(part, Reasoning)]
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = "".join(reasoning)
    calls = whole_calls(delta.parts)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
            for start, arguments in calls
        ]
    return message


def whole_calls(parts: Sequence[Part]) -> list[tuple[CallStart, str]]:
    """Each call with all of its arguments."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    arguments = [""] * len(starts)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    return list(zip(starts, arguments, strict=True))


def _add(delta: dict[str, Any], name: str, text: str) -> None:
    delta[name] = delta.get(name, "") + text
