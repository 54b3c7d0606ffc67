"""What the events of a stream add up to, by choice."""

import json
from typing import Any


def joined(events: list[Any]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def reasons(events: list[Any]) -> list[Any]:
    """The finish reasons of all events with a choice, null ones too."""
    return [choice["finish_reason"] for event in events for choice in event["choices"]]


def ends(events: list[Any]) -> dict[int, tuple[str, Any]]:
    """(finish_reason, stop_reason) of each choice; each must have exactly one."""
    found: dict[int, tuple[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in found, "an event after the last one of its choice"
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    return found


def logprobs(events: list[Any]) -> dict[int, dict[str, list[Any]]]:
    """The arrays of each choice's logprobs, concatenated: four of completions, `content` of chats."""
    found: dict[int, dict[str, list[Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            arrays = found.setdefault(choice["index"], {})
            for name, entries in (choice["logprobs"] or {}).items():
                arrays.setdefault(name, []).extend(entries)
    return found


def named_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of each frame; every frame has exactly these two lines, and their kinds agree."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        first, second = frame.split("\n")
        kind, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == kind
        found.append((kind, data))
    return found
