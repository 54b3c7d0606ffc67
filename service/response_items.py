"""The output items of a response: a message, reasoning, calls; and the events that bring them.

    message, reasoning   output_item.added, content_part.added, …_text.delta ..., …_text.done, content_part.done,
                         output_item.done
    function_call        output_item.added, function_call_arguments.delta ..., …arguments.done, output_item.done

An item ends where the next begins. A whole response is made of the same items, without the events.
"""

from collections.abc import Callable
from typing import Any, Literal

from service.answer_parts import CallArguments, CallStart, Content, Part, Reasoning

Status = Literal["in_progress", "completed", "incomplete"]
_TEXT_OF = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIX_OF = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of one response, as far as they have come."""

    def __init__(self, request_id: str, event: Callable[..., bytes]) -> None:
        """event(kind, **fields) writes an event and numbers it."""
        self.done: list[dict[str, Any]] = []
        self._request_id = request_id
        self._event = event
        self._open: dict[str, Any] | None = None
        self._said: list[str] = []  # of the open item

    def take(self, part: Part) -> bytes:
        """The events of a part."""
        match part:
            case Content(text):
                return self._text("message", text)
            case Reasoning(text):
                return self._text("reasoning", text)
            case CallStart(_, call_id, name):
                return self._begin("function_call", call_id=call_id, name=name, arguments="")
            case CallArguments(_, text):
                self._said.append(text)
                return self._event("response.function_call_arguments.delta", **self._place, delta=text)

    def end(self, status: Status) -> bytes:
        """The events behind the last part. status: of the last item. A response without any has an empty message."""
        begun = b"" if self._open is not None else self._text("message", "")
        return begun + self._close(status)

    def _text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != kind:
            members: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events = self._begin(kind, **members, content=[])
            events += self._event("response.content_part.added", **self._place, part=_part(kind, ""))
        if text:
            self._said.append(text)
            events += self._event(f"response.{_TEXT_OF[kind]}.delta", **self._place, delta=text, **_logprobs_of(kind))
        return events

    def _begin(self, kind: str, **members: Any) -> bytes:
        events = self._close("completed")
        item_id = f"{_PREFIX_OF[kind]}_{self._request_id}" + (f"_{len(self.done)}" if self.done else "")
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **members}
        return events + self._event("response.output_item.added", output_index=len(self.done), item=self._open)

    def _close(self, status: Status) -> bytes:
        item = self._open
        if item is None:
            return b""
        kind, text = item["type"], "".join(self._said)
        if kind == "function_call":
            item = item | {"arguments": text}
            events = self._event("response.function_call_arguments.done", **self._place, arguments=text)
        else:
            part = _part(kind, text)
            item = item | {"content": [part]}
            done = f"response.{_TEXT_OF[kind]}.done"
            events = self._event(done, **self._place, text=text, **_logprobs_of(kind))
            events += self._event("response.content_part.done", **self._place, part=part)
        item |= {"status": status}
        events += self._event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._open, self._said = None, []
        return events

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.done)}
        return place if self._open["type"] == "function_call" else place | {"content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": _TEXT_OF[kind], "text": text}
    return part if kind == "reasoning" else part | {"annotations": [], "logprobs": []}


def _logprobs_of(kind: str) -> dict[str, Any]:
    """A member that events of a message's text have."""
    return {"logprobs": []} if kind == "message" else {}
