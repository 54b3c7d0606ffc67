"""Requests of every kind that the API knows, drawn at random, whose answers are the same each time."""

import random
from typing import Any

Asked = tuple[str, dict[str, Any]]
"""A path and a body."""

LONGEST = 320  # tokens of a request
WORDS = ["the", "quick", "brown", "fox", "over", "lazy"]
PERSON = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
NAMED = {"name": "x", "schema": PERSON, "strict": True}
CONSTRAINTS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "[a-f]{5} is [0-9]{2,9}!"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"grammar": 'start: "a" ("b" | "c")+ "!"'}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    {"response_format": {"type": "json_object"}},
]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}


def prefix(draw: random.Random, tokens: int) -> list[int]:
    """One of three beginnings that many prompts share, to so many tokens."""
    begin = draw.choice([0, 1, 2])
    return [5 + (begin + place * 37) % 290 for place in range(tokens)]


def some_request(draw: random.Random, number: int) -> Asked:
    """Of the eight kinds below, each in its turn."""
    kinds = [_chat, _structured, _searched, _scored, _sampled, _with_tools, _response, _message]
    return kinds[number % len(kinds)](draw)


def has_tokens(asked: Asked) -> bool:
    """Whether the answer has the ids of its tokens, and the request may end by its time."""
    return asked[0].endswith("/completions")


def is_forkable(asked: Asked) -> bool:
    path, body = asked
    return path == "/v1/completions" and body["n"] == 1 and "use_beam_search" not in body


def is_savable(asked: Asked) -> bool:
    body = asked[1]
    return has_tokens(asked) and body["n"] == 1 and not {"use_beam_search", "tools", "echo"} & body.keys()


def can_stream(asked: Asked) -> bool:
    return not {"prompt_logprobs", "use_beam_search"} & asked[1].keys()


def _common(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 60), "seed": draw.randrange(10_000)}
    body |= {"temperature": draw.choice([0, 0.8]), "prefix_cache": draw.random() < 0.8}
    return body | {"return_token_ids": True, "ignore_eos": draw.random() < 0.7, "n": draw.choice([1, 1, 2, 4])}


def _prompt(draw: random.Random) -> list[int]:
    return [*prefix(draw, draw.choice([1, 15, 16, 33, 64])), draw.randrange(5, 300)]


def _words(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))


def _chat(draw: random.Random) -> Asked:
    body = _common(draw) | {"messages": [{"role": "user", "content": _words(draw)}], "logprobs": True}
    return "/v1/chat/completions", body | {"presence_penalty": draw.choice([0, 0.5])}


def _structured(draw: random.Random) -> Asked:
    return "/v1/completions", _common(draw) | {"prompt": _prompt(draw), "ignore_eos": False} | draw.choice(CONSTRAINTS)


def _searched(draw: random.Random) -> Asked:
    n = draw.choice([1, 2, 4])
    body = {"prompt": _prompt(draw), "n": n, "beam_width": draw.randint(max(2, n), 4), "use_beam_search": True}
    body |= {"length_penalty": draw.choice([0.0, 1.0]), "early_stopping": draw.choice([False, True, "never"])}
    body |= {"temperature": 0, "max_tokens": draw.randint(1, 12), "return_token_ids": True, "ignore_eos": False}
    return "/v1/completions", body


def _scored(draw: random.Random) -> Asked:
    body = _common(draw) | {"prompt": _prompt(draw), "logprobs": draw.choice([0, 2])}
    body |= {"stop": draw.choice([["a"], ["th"], ["e", "he"]])}
    body |= {"echo": True} if draw.random() < 0.3 else {}
    return "/v1/completions", body | ({"prompt_logprobs": 1} if draw.random() < 0.4 else {})


def _sampled(draw: random.Random) -> Asked:
    fields: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5, "min_tokens": 1}, {"repetition_penalty": 1.2}, {"top_k": 20}, {"top_p": 0.9},
        {"min_p": 0.02}, {"typical_p": 0.9}, {"logit_bias": {"30": 2, "40": -3}}, {"bad_words": ["the", "a"]},
        {"allowed_token_ids": list(range(5, 105))}, {"stop_token_ids": [30, 31]}, {},
    ]  # fmt: skip
    return "/v1/completions", _common(draw) | {"prompt": _prompt(draw)} | draw.choice(fields) | draw.choice(fields)


def _with_tools(draw: random.Random) -> Asked:
    named = {"type": "function", "function": {"name": "f"}}
    body = _common(draw) | {"messages": [{"role": "user", "content": _words(draw)}], "ignore_eos": False}
    body |= {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 90, "n": draw.choice([1, 2])}
    choice = draw.choice(["auto", "required", "none", named])
    return "/v1/chat/completions", body | {"tool_choice": choice, "parallel_tool_calls": False}


def _response(draw: random.Random) -> Asked:
    body: dict[str, Any] = {"input": _words(draw), "temperature": 0, "max_output_tokens": draw.randint(1, 60)}
    kind = draw.randrange(3)
    if kind == 1:
        body["text"] = {"format": {"type": "json_schema"} | NAMED}
    if kind == 2:
        body |= {"tools": [{"type": "function"} | TOOL], "tool_choice": "required", "max_output_tokens": 90}
    return "/v1/responses", body | {"instructions": _words(draw)}


def _message(draw: random.Random) -> Asked:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": _words(draw)}], "temperature": 0}
    body |= {"max_tokens": draw.randint(1, 60), "system": _words(draw), "stop_sequences": draw.choice([["a"], []])}
    if draw.random() < 0.3:
        tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
        body |= {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 90}
    return "/v1/messages", body
