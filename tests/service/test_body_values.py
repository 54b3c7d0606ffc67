"""What is counted in a body before it is decoded."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
from http_house import Server, Start
from hypothesis import given
from hypothesis import strategies as st
from tool_chats import model_that

from service import body_values
from service.body import OFF_LOOP_BYTES
from service.errors import PayloadTooLarge
from service.prompts import OFF_LOOP_PARTS
from service.tokenization import Tokenizer


def note_threads(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> list[int]:
    """The threads in which the function of this name is called from now on."""
    threads: list[int] = []

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return function(*given, **named)

    monkeypatch.setattr(name, noted)
    return threads


def is_taken(raw: bytes) -> bool:
    try:
        body_values.check_values(raw)
    except PayloadTooLarge:
        return False
    return True


values = st.recursive(
    st.integers(0, 99) | st.booleans() | st.text(st.sampled_from('ab"\\[{,é\u2028'), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('k"\\[,'), max_size=3), inner),
    max_leaves=20,
)


def counted(value: object) -> tuple[int, int]:
    """(strings, objects and arrays; commas), by the value."""
    parts = int(isinstance(value, str | list | dict))
    commas = 0
    if isinstance(value, list | dict):
        commas = max(0, len(value) - 1)
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        for more_parts, more_commas in map(counted, inner):
            parts, commas = parts + more_parts, commas + more_commas
    return parts, commas


@given(value=values, ascii_only=st.booleans())
def test_what_is_counted_is_what_there_is_and_not_what_text_says(value: object, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    parts, commas = counted(value)
    with pytest.MonkeyPatch.context() as patched:
        for most_parts, most_commas in ((parts, commas), (parts - 1, commas), (parts, commas - 1)):
            patched.setattr(body_values, "MAX_PARTS", most_parts)
            patched.setattr(body_values, "MAX_NUMBERS", most_commas)
            assert is_taken(raw) == (parts <= most_parts and commas <= most_commas)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'"' + b'\\"' * 400_000, True),
        (b'{"a' + b"\\" * 400_001, True),
        (b'"' * 600_001, False),
        (b"[" * 90_000 + b'"', True),
    ],
)
def test_broken_text_is_looked_at_once(raw: bytes, expected: bool) -> None:
    """A pattern that begins anew at each quote would take hours."""
    assert is_taken(raw) == expected


@pytest.mark.parametrize(
    "extra",
    [
        '"metadata":{"a":[' + "[]," * 220_000 + "[]]}",
        '"metadata":{' + ",".join(f'"{i}":1' for i in range(210_000)) + "}",
        '"messages":[' + ",".join(['{"role":"user","content":"x"}'] * 60_000) + "]",
        '"stop_token_ids":[' + "5," * 2_000_001 + "5]",
    ],
)
async def test_many_small_values_are_not_decoded(server: Server, monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    threads = note_threads(monkeypatch, "service.body.check_values", body_values.check_values)
    monkeypatch.setattr("service.body.decode", lambda *given: pytest.fail("it was decoded"))
    answer = await server.post("/v1/completions", f'{{"prompt":"a",{extra}}}'.encode())
    assert (answer.status, answer.error["type"]) == (413, "PayloadTooLarge")
    assert threads
    assert threads[0] != threading.get_ident()


def chat_of(parts: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * parts}]}


@pytest.mark.parametrize(
    ("slow", "large", "small"),
    [
        ("service.body.decode", {"prompt": "a", "suffix": " " * OFF_LOOP_BYTES}, {"prompt": "a"}),
        ("service.prompts.check_token_ids", {"prompt": [[5] * 700] * 100}, {"prompt": [5]}),
        ("service.tokenization.Tokenizer.encode", {"prompt": ["the quick fox"] * 1000}, {"prompt": ["the", "fox"]}),
        ("service.prompts.template_messages", chat_of(OFF_LOOP_PARTS + 1), chat_of(2)),
    ],
)
async def test_what_takes_long_of_a_body_is_done_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, slow: str, large: dict[str, Any], small: dict[str, Any]
) -> None:
    """And the same of a small one on it: a thread costs more than that."""
    threads = note_threads(monkeypatch, slow, resolve_name(slow))
    path = "/v1/chat/completions" if "messages" in large else "/v1/completions"
    refused = {"max_tokens": 10**9}  # once the prompts are known: what follows is not looked at here
    await server.post(path, large | refused)
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    await server.post(path, small | refused)
    assert set(threads) == {threading.get_ident()}


async def test_large_bodies_are_decoded_one_after_the_other(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold the interpreter for as long as its decoding takes: the loop has its turn between them."""
    at_once, most = 0, 0
    decode = resolve_name("service.body.decode")

    def slow(*given: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.01)
        at_once -= 1
        return decode(*given)

    monkeypatch.setattr("service.body.decode", slow)
    body = {"prompt": "a" + " " * OFF_LOOP_BYTES, "max_tokens": 1}
    await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(8)))
    assert most == 1


async def test_what_earlier_calls_were_given_counts_as_well(start: Start) -> None:
    """It is JSON in a string, and decoded for the template."""
    server = await model_that(start, "The fox.", context=100_000)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{" + '"a":[],' * 60_000 + '"b":1}'}}
    messages = [{"role": "assistant", "tool_calls": [call, call]}, {"role": "user", "content": "x"}]
    assert (await server.chat(messages=messages)).status == 413
    assert (await server.chat(messages=[messages[0] | {"tool_calls": [call]}, messages[1]])).status == 200


async def test_long_texts_and_many_ids_are_taken(server: Server) -> None:
    """Text full of brackets is one value; a body of many ids has few others."""
    code = json.dumps('{"a": ["b"]},' * 40_000)
    body = f'{{"tokens":[{"5," * 300_000}5]}}'
    assert (await server.post("/detokenize", body.encode())).status == 200
    answer = await server.post("/tokenize", f'{{"prompt":{code}}}'.encode())
    assert answer.error["message"].startswith("This model's maximum context length")


async def test_many_ids_become_text_off_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one: the library's own decoding of all would hold the interpreter, in whichever thread."""
    threads: list[int] = []
    pieces = Tokenizer.pieces

    def noted(self: Tokenizer, ids: list[int], **how: bool) -> list[str]:
        threads.append(threading.get_ident())
        return pieces(self, ids, **how)

    monkeypatch.setattr(Tokenizer, "pieces", noted)
    ids = [5, 9, 7] * 2_000
    few = [await server.post("/detokenize", {"tokens": ids[at : at + 3]}) for at in (0, 3)]
    assert not threads
    answer = await server.post("/detokenize", {"tokens": ids})
    assert answer.json["prompt"] == few[0].json["prompt"] * 2_000
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
