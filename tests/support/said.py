"""What an answer of any route says, whole or streamed, in a form that can be compared: ids, times and usage are left
out."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

MOST_APART = 1e-4
"""Between log-probabilities of equal tokens. The compiled CPU kernels give the same whatever else is computed."""


class Differs(AssertionError):
    """An answer is not what the request gets alone."""


@dataclass
class Said:
    """One choice; of /v1/responses and /v1/messages, the whole answer."""

    content: Any = ""  # text, or the items in order
    end: Any = None  # why it is over
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    tokens: list[int] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)  # of its tokens, then of the prompt's likeliest

    def check(self, alone: "Said") -> float:
        """Raises Differs if it says other than `alone`; returns how far log-probabilities are apart at most."""
        ours, theirs = ((one.content, one.end, one.calls, one.tokens) for one in (self, alone))
        are_there = ([score is not None for score in one.scores] for one in (self, alone))
        if ours != theirs or next(are_there) != next(are_there):
            raise Differs(f"{self}, alone {alone}")
        pairs = zip(self.scores, alone.scores, strict=True)
        apart = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
        if apart > MOST_APART:
            raise Differs(f"log-probabilities are {apart} apart: {self}, alone {alone}")
        return apart

    def check_beginning(self, alone: "Said") -> None:
        """Raises Differs if its tokens are not the first of `alone`."""
        if self.tokens != alone.tokens[: len(self.tokens)]:
            raise Differs(f"{self.tokens}, alone {alone.tokens}")

    def check_rest(self, alone: "Said", at: int) -> None:
        """Raises Differs if it is not what `alone` says from its token `at` on."""
        is_rest = self.tokens == alone.tokens[at:] and alone.content.endswith(self.content)
        if not is_rest or self.end != alone.end:
            raise Differs(f"{self} from token {at} on, alone {alone}")


def said(path: str, answer: Any) -> list[Said]:
    """Of a whole answer."""
    if path.endswith("/responses"):
        return [_response(answer)]
    if path.endswith("/messages"):
        return [_message(answer)]
    return _choices([answer])


def said_by_stream(path: str, text: str) -> list[Said]:
    """Of all that came. Raises AssertionError if it is not a stream to its end, without errors."""
    events = events_of(text)
    if path.endswith("/responses"):
        return [_response_of(events)]
    if path.endswith("/messages"):
        return [_message_of(events)]
    assert text.endswith("data: [DONE]\n\n"), text[-500:]
    return _choices(events)


def events_of(text: str) -> list[Any]:
    """The data of each event, but for [DONE]; what is cut off is left out. Raises AssertionError for one of errors."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    if not text.endswith("\n"):
        lines = lines[:-1]
    events = [json.loads(line) for line in lines]
    for event in events:
        assert "error" not in event or event["error"] is None, event
    return events


def said_so_far(text: str) -> list[Said]:
    """Of a stream of completions or of a chat that may have broken off."""
    return _choices(events_of(text))


def _choices(answers: list[Any]) -> list[Said]:
    """Of completions and chats: one whole answer, or the events of a stream."""
    found: dict[int, Said] = {}
    for answer in answers:
        for choice in answer["choices"]:
            one = found.setdefault(choice["index"], Said())
            message = choice.get("message") or choice.get("delta") or choice
            one.content += message.get("content") or message.get("text") or ""
            one.tokens += choice.get("token_ids") or []
            one.scores += _scores(choice)
            for place, call in enumerate(message.get("tool_calls") or []):
                _add_call(one.calls, call.get("index", place), call["function"])
            if choice["finish_reason"] is not None:
                one.end = choice["finish_reason"], choice.get("stop_reason")
    return [found.get(i, Said()) for i in range(max(found, default=-1) + 1)]


def _add_call(calls: list[list[str]], place: int, function: dict[str, Any]) -> None:
    if place == len(calls):
        calls.append([function["name"], ""])
    calls[place][1] += function["arguments"]


def _scores(choice: dict[str, Any]) -> list[float | None]:
    logprobs = choice.get("logprobs") or {}
    found = [entry["logprob"] for entry in logprobs.get("content") or []] + (logprobs.get("token_logprobs") or [])
    prompt = [max(each["logprob"] for each in entry.values()) for entry in choice.get("prompt_logprobs") or [] if entry]
    assert not any(math.isnan(score) for score in found + prompt if score is not None)
    return [*found, *prompt]


def _response(answer: dict[str, Any]) -> Said:
    items = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            items.append((item["name"], item["arguments"]))
        else:
            items.append((item["type"], "".join(part["text"] for part in item["content"])))
    return Said(items, (answer["status"], answer["incomplete_details"]))


def _response_of(events: list[Any]) -> Said:
    """The last event has the whole; the pieces before it must add up to that."""
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    whole = _response(events[-1]["response"])
    pieces = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert pieces == "".join(text for _, text in whole.content)
    return whole


def _message(answer: dict[str, Any]) -> Said:
    items = [
        ("text", block["text"]) if block["type"] == "text" else (block["name"], block["input"])
        for block in answer["content"]
    ]
    return Said(items, (answer["stop_reason"], answer["stop_sequence"]))


def _message_of(events: list[Any]) -> Said:
    blocks: list[Any] = []
    inputs: dict[int, str] = {}
    end: Any = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta" if "text" in event["delta"]:
                blocks[event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "message_delta":
                end = event["delta"]
    assert events[-1]["type"] == "message_stop", events[-1]
    for place, text in inputs.items():
        try:
            blocks[place]["input"] = json.loads(text or "{}")
        except ValueError:  # cut off: then a whole answer has none
            assert end["stop_reason"] == "max_tokens", text
    return _message({"content": blocks} | end)
