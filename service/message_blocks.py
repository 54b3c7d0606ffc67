"""The content blocks of a message in the form of the Anthropic API: text, thinking, tool_use; and their events.

    content_block_start, content_block_delta ..., content_block_stop

A block ends where the next begins. A whole message is made of the same blocks, without the events. Thinking is signed
with an empty text: there is nothing to check when it comes back.
"""

from collections.abc import Callable
from typing import Any

from service.answer_parts import CallArguments, CallStart, Content, Part, Reasoning
from service.messages import object_in


class ContentBlocks:
    """The blocks of one message, as far as they have come."""

    def __init__(self, event: Callable[..., bytes]) -> None:
        """event(kind, **fields) writes an event."""
        self.done: list[dict[str, Any]] = []
        self._event = event
        self._open: dict[str, Any] | None = None
        self._said: list[str] = []  # of the open block

    def take(self, part: Part) -> bytes:
        """The events of a part."""
        match part:
            case Content(text):
                return self._text({"type": "text", "text": ""}, text, {"type": "text_delta", "text": text})
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._text(block, text, {"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                self._said.append(text)
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def end(self) -> bytes:
        """The events behind the last part. A message without any has an empty text."""
        begun = b"" if self._open is not None else self._begin({"type": "text", "text": ""})
        return begun + self._close()

    def _text(self, block: dict[str, Any], text: str, delta: dict[str, Any]) -> bytes:
        begun = b""
        if self._open is None or self._open["type"] != block["type"]:
            begun = self._begin(block)
        self._said.append(text)
        return begun + self._delta(delta)

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed, self._open = self._close(), block
        return closed + self._event("content_block_start", index=len(self.done), content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=len(self.done), delta=delta)

    def _close(self) -> bytes:
        block = self._open
        if block is None:
            return b""
        events, said = b"", "".join(self._said)
        match block["type"]:
            case "text":
                block["text"] = said
            case "thinking":
                block["thinking"] = said
                events = self._delta({"type": "signature_delta", "signature": ""})
            case "tool_use":
                block["input"] = object_in(said) or {}  # never text in this API: what is cut or malformed is empty
        events += self._event("content_block_stop", index=len(self.done))
        self.done.append(block)
        self._open, self._said = None, []
        return events
