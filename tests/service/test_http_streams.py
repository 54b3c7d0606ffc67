"""Streams, read as bytes, and the same requests answered whole: text, reasons, usage, framing (cases C01-C06)."""

import asyncio
import json
import socket
from typing import Any

import pytest
from http_events import joined, reasons
from http_house import Server, Start, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from service.sse import EventStream

CHARACTERS = (
    "\U0001fae0 \U0001f979 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed \u9f9c\ud7a3 e\u0301!"
)


async def raw_stream(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The whole HTTP answer, as it came through the socket."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_bytes_of_a_stream(server: Server) -> None:
    """Headers, LF framing, one data line per event, DONE last, chunked."""
    answer = await raw_stream(server, {"prompt": "the", "stream": True, "request_id": "r"})
    head, _, body = answer.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] == "r"
    assert headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in headers
    text = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        text += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    assert b"\r" not in text
    frames = text.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames[:-1])
    assert [json.loads(frame[6:])["id"] for frame in frames[:-2]] == ["cmpl-r", "cmpl-r"]


async def test_completion_events(server: Server) -> None:
    answer = await server.complete(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    first, last, usage = answer.events
    fox = tiny_tokenizer().encode(" fox", add_special_tokens=False)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in answer.events}) == 1
    assert first["object"] == "text_completion"
    assert first["choices"] == [
        {
            "index": 0,
            "text": " fox",
            "logprobs": None,
            "finish_reason": None,
            "token_ids": fox,
            "prompt_token_ids": tiny_tokenizer().encode("the", add_special_tokens=False),
        }
    ]
    assert last["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None, "token_ids": [2]}
    ]
    assert usage["choices"] == []
    assert usage["usage"] == (await server.complete()).json["usage"]


async def test_chat_events(server: Server) -> None:
    """The role once, with empty content; then content without role; the reason with an empty delta."""
    answer = await server.chat(stream=True, return_token_ids=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": " fox"}, {}]
    assert reasons(answer.events) == [None, None, "stop"]
    assert "stop_reason" in answer.events[-1]["choices"][0]
    assert [len(event["choices"][0]["token_ids"]) for event in answer.events] == [0, 1, 1]
    assert [("prompt_token_ids" in event) for event in answer.events] == [True, False, False]
    assert {event["object"] for event in answer.events} == {"chat.completion.chunk"}
    assert all("usage" not in event for event in answer.events)


async def test_role_waits_for_the_first_token(start: Start) -> None:
    """Time to first byte must not be mistaken for time to first token."""
    server = await start(engine={"is_manual": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    await server.until(lambda: len(server.engine.lines) == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    server.engine.tick()
    assert (await reader.readuntil(b"fox")).count(b"data: ") == 2
    server.engine.tick()
    await reader.readuntil(b"[DONE]")
    writer.close()


async def test_one_event_a_step_even_without_text(server: Server) -> None:
    """Clients measure the time between tokens by events."""
    server.engine.script = says("\U0001fae0")
    tokens = tiny_tokenizer().encode("\U0001fae0", add_special_tokens=False)
    assert len(tokens) == 4
    events = (await server.complete(stream=True)).events
    assert [event["choices"][0]["text"] for event in events] == ["", "", "", "\U0001fae0", ""]
    _role, *events = (await server.chat(stream=True)).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"content": ""}] * 3 + [{"content": "\U0001fae0"}, {}]


@pytest.mark.parametrize("max_tokens", range(1, 41))
async def test_c01_characters_of_several_tokens(server: Server, max_tokens: int) -> None:
    """C01: no U+FFFD but for a cut character at the very end, and then in both answers."""
    server.engine.script = says(CHARACTERS)
    whole = (await server.complete(max_tokens=max_tokens)).json
    events = (await server.complete(max_tokens=max_tokens, stream=True)).events
    text = whole["choices"][0]["text"]
    assert joined(events) == {0: text}
    ids = tiny_tokenizer().encode(CHARACTERS, add_special_tokens=False)[:max_tokens]
    assert text == tiny_tokenizer().decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "found"),
    [
        (["k l m"], "k l m"),
        (["f g", "d e f"], "d e f"),  # the earliest in the text wins
        (["h i j k", "h i", "h i j"], "h i"),
        (["c", " d"], "c"),
        (["x y"], "x y"),
        (["q r s t u v w x y zz", "z:"], "z:"),
        ([" b c d e f g h i j k l m n o p"], " b c d e f g h i j k l m n o p"),
    ],
)
async def test_c02_stop_strings(server: Server, stops: list[str], found: str, include: bool) -> None:
    """C02: over token borders, held back, cut off or included, equal in both answers."""
    said = " a b c d e f g h i j k l m n o p q r s t u v w x y z: done"
    server.engine.script = says(said)
    asked = {"stop": stops, "include_stop_str_in_output": include, "max_tokens": 200}
    choice = (whole := (await server.complete(**asked)).json)["choices"][0]
    events = (await server.complete(**asked, stream=True, stream_options={"include_usage": True})).events
    before, _, _ = said.partition(found)
    assert choice["text"] == before + (found if include else "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)
    assert joined(events) == {0: choice["text"]}
    assert events[-2]["choices"][0]["stop_reason"] == found
    assert events[-1]["usage"] == whole["usage"]
    assert [finish.at for finish in server.engine.finished] == [whole["usage"]["completion_tokens"]] * 2
    ids = tiny_tokenizer().encode(said, add_special_tokens=False)
    needed = next(n for n in range(1, 200) if found in tiny_tokenizer().decode(ids[:n], skip_special_tokens=False))
    assert whole["usage"]["completion_tokens"] == needed


async def test_tokens_made_past_a_stop_are_not_counted(start: Start) -> None:
    """The engine is steps ahead of a front end that lags."""
    server = await start(engine={"is_manual": True})
    server.engine.script = says(" a b c d e f g h")
    asked = asyncio.create_task(server.complete(stop="c", return_token_ids=True))
    await server.until(lambda: len(server.engine.lines) == 1)
    for _ in range(6):
        server.engine.tick()  # without giving the handler a turn
    choice = (answer := (await asked).json)["choices"][0]
    assert choice["text"] == " a b "
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == server.engine.finished[0].at


async def test_c02_a_stop_in_the_last_token_is_a_stop(server: Server) -> None:
    server.engine.script = says(" a b")
    answer = (await server.complete(stop="b", max_tokens=2)).json
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "b"
    assert server.engine.finished == []  # it has ended by its length at the same time


async def test_c02_text_held_back_for_a_stop_comes_at_the_end(server: Server) -> None:
    server.engine.script = says(" a b c")
    for asked in ({}, {"max_tokens": 3}):
        events = (await server.complete(stop=["b c d"], stream=True, **asked)).events
        assert joined(events) == {0: " a b c"}


async def test_end_tokens_and_stop_tokens(server: Server) -> None:
    """stop_reason is null for an end token and the id for the client's own; ignore_eos keeps the client's."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(" a b", add_special_tokens=False)
    server.engine.script = lambda _: [ids[0], 2, ids[1], 0]

    async def ask(**body: Any) -> tuple[Any, ...]:
        answer = (await server.complete(**body, max_tokens=4)).json
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]

    assert await ask() == (" a", "stop", None, 2)
    assert await ask(stop_token_ids=[2]) == (" a", "stop", None, 2)
    assert await ask(ignore_eos=True) == (" a b", "length", None, 4)
    assert await ask(ignore_eos=True, stop_token_ids=[2]) == (" a", "stop", 2, 2)
    assert await ask(stop_token_ids=[ids[0]]) == ("", "stop", ids[0], 1)
    assert await ask(stop_token_ids=[ids[0]], include_stop_str_in_output=True) == (" a", "stop", ids[0], 1)
    assert await ask(ignore_eos=True, skip_special_tokens=False) == (" a<|im_end|> b<|endoftext|>", "length", None, 4)


async def test_c03_leading_and_double_spaces(server: Server) -> None:
    """C03."""
    said = "  two  spaces\n\n    indented\n"
    server.engine.script = says(said)
    assert (await server.complete(max_tokens=99)).json["choices"][0]["text"] == said
    assert joined((await server.complete(max_tokens=99, stream=True)).events) == {0: said}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_c04_usage_and_reasons(server: Server, path: str, options: Any) -> None:
    """C04: exactly one reason, in the last event with a choice; the usage event comes after it, only if asked for."""
    server.engine.cached_tokens = 1
    prompt: dict[str, Any] = (
        {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the"}]}
    )
    for max_tokens, reason in ((1, "length"), (5, "stop")):
        asked = prompt | {"max_tokens": max_tokens}
        whole = (await server.post(path, asked)).json
        events = (await server.post(path, asked | {"stream": True, "stream_options": options})).events
        assert [found for found in reasons(events) if found is not None] == [reason]
        assert whole["choices"][0]["finish_reason"] == reason
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        with_usage = [event for event in events if "usage" in event]
        if options and options["include_usage"]:
            assert with_usage == events[-1:]
            assert events[-1]["choices"] == []
            assert events[-1]["usage"] == whole["usage"]
        else:
            assert with_usage == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_events_are_the_same_whatever_else_is_asked_for(server: Server, path: str) -> None:
    """Those with nothing but text are written in a shorter way than those with ids."""
    asked = {"prompt": "count"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "count"}]}
    body = {**asked, "max_tokens": 12, "ignore_eos": True, "stream": True, "seed": 1}
    plain = (await server.post(path, body)).events
    with_ids = (await server.post(path, body | {"return_token_ids": True})).events
    for event in with_ids:
        event.pop("prompt_token_ids", None)
        for choice in event["choices"]:
            del choice["token_ids"]
            choice.pop("prompt_token_ids", None)
    for event in (*plain, *with_ids):
        del event["id"], event["created"]
    assert len(plain) > 10
    assert plain == with_ids


async def test_continuous_usage_grows_to_the_final_numbers(server: Server) -> None:
    server.engine.script = says(" a b c")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await server.complete(prompt=["the", "a"], stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*range(1, 9), 8]
    assert {event["usage"]["prompt_tokens"] for event in events} == {events[-1]["usage"]["prompt_tokens"]}


async def test_c05_several_prompts_interleave_by_index(server: Server) -> None:
    """Numbered in prompt order, one reason each, usage over all. With n above 1: test_http_choices.py."""
    tokenizer = tiny_tokenizer()
    replies = {"a": " fox", "b": " the lazy dog", "c": ""}
    server.engine.script = lambda submit: [
        *tokenizer.encode(replies[tokenizer.decode(submit.prompt_ids, False)], add_special_tokens=False),
        2,
    ]
    whole = (await server.complete(prompt=["a", "b", "c"], max_tokens=20)).json
    asked = {"prompt": ["a", "b", "c"], "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    events = (await server.complete(**asked)).events
    assert [choice["text"] for choice in whole["choices"]] == list(replies.values())
    assert joined(events) == dict(enumerate(replies.values()))
    assert sorted(choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]) == [
        0,
        1,
        2,
    ]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 3


async def test_a_stream_interval_lets_tokens_share_events_but_for_the_first_and_the_last(start: Start) -> None:
    """Nothing is lost by it: text, ids, entries, usage and reason are those of the whole answer, choice by choice."""
    server = await start(settings={"stream_interval": 3}, engine={"script": says(" a b c d e f g h")})
    asked: dict[str, Any] = {"prompt": ["the", "a"], "max_tokens": 30, "return_token_ids": True, "logprobs": 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = (await server.complete(**asked)).json
    *events, usage = (await server.complete(**asked, stream=True, stream_options=options)).events
    assert joined(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [len(part["token_ids"]) for part in parts] == [1, 3, 3, 2]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [token for part in parts for token in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    _role, *chat = (await server.chat(stream=True)).events
    deltas = [event["choices"][0]["delta"] for event in chat]
    assert deltas == [{"content": " a"}, {"content": " b c d"}, {"content": " e f g"}, {"content": " h"}]


@pytest.mark.parametrize("stop", ["c", "d", "e", "h", "zz"])
async def test_a_stop_string_cuts_the_same_whatever_the_stream_interval(start: Start, stop: str) -> None:
    """Tokens that were made past it, since it was looked for late, are neither sent nor counted."""
    server = await start(settings={"stream_interval": 4}, engine={"script": says(" a b c d e f g h")})
    whole = (await server.complete(max_tokens=30, stop=stop)).json
    *events, usage = (
        await server.complete(max_tokens=30, stop=stop, stream=True, stream_options={"include_usage": True})
    ).events
    assert joined(events) == {0: whole["choices"][0]["text"]}
    assert reasons(events)[-1] == whole["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == whole["choices"][0]["stop_reason"]
    assert usage["usage"] == whole["usage"]


async def test_silence_is_broken_by_comments_before_and_between_events(start: Start) -> None:
    """C06: a comment, never an empty event; it carries the status line when nothing else has."""
    server = await start(settings={"sse_keep_alive_s": 0.02}, engine={"is_manual": True})
    asked = asyncio.create_task(raw_stream(server, {"prompt": "the", "stream": True}))
    await server.until(lambda: len(server.engine.lines) == 1)
    await asyncio.sleep(0.1)
    server.engine.tick()
    await asyncio.sleep(0.1)
    server.engine.tick()
    answer = await asked
    before, middle, after = answer.partition(b"fox")
    assert answer.startswith(b"HTTP/1.1 200")
    assert middle
    assert b": keep-alive\n\n" in before
    assert b": keep-alive\n\n" in after
    assert b"data: \n" not in answer


async def test_a_failure_after_the_first_event_is_an_event(server: Server) -> None:
    server.engine.script = says(" a b c d e f")
    server.engine.fail_after = 3
    answer = await server.complete(stream=True)
    assert answer.status == 200
    *events, error = answer.events
    assert joined(events) == {0: " a b c"}
    assert reasons(events) == [None, None, None]
    assert set(error) == {"error"}
    assert error["error"]["type"] == "InternalServerError"
    assert error["error"]["code"] == 500
    assert "not finite" in error["error"]["message"]


async def test_a_failure_before_the_first_event_is_an_http_error(server: Server) -> None:
    server.engine.fail_after = 0
    for stream in (False, True):
        answer = await server.complete(stream=stream)
        assert answer.status == 500
        assert answer.error["type"] == "InternalServerError"


async def test_the_head_is_made_while_the_first_token_is_computed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prepare = asyncio.Event(), EventStream.prepare

    async def note(events: EventStream) -> None:
        await prepare(events)
        made.set()

    monkeypatch.setattr(EventStream, "prepare", note)
    server = await start(engine={"is_manual": True})
    streamed = asyncio.create_task(server.complete(stream=True))
    async with asyncio.timeout(10):
        await made.wait()
    assert list(server.engine.lines.values())
    while server.engine.lines:
        server.engine.tick()
    assert (await streamed).status == 200


async def test_a_failure_of_one_choice_ends_the_request_and_all_of_it(server: Server) -> None:
    server.engine.script = says(" a b c d e f")
    server.engine.fail_after = 2
    answer = await server.complete(prompt=["a", "b"], stream=True)
    assert "error" in answer.events[-1]
    assert server.engine.lines == {}


async def test_the_engine_dies_amid_streams(start: Start) -> None:
    server = await start(engine={"is_manual": True})
    streamed = asyncio.create_task(server.complete(stream=True))
    whole = asyncio.create_task(server.complete())
    await server.until(lambda: len(server.engine.lines) == 2)
    server.engine.tick()
    await asyncio.sleep(0.02)
    server.engine.die()
    assert (await streamed).events[-1]["error"]["type"] == "ServiceUnavailableError"
    assert (await whole).status == 503
    assert (await server.complete()).status == 503


async def test_a_slow_client_holds_nobody_back_and_gets_everything(start: Start) -> None:
    """What waits goes out in one write, merged into few events; the engine never waits for the socket."""
    count = 40_000
    tokenizer = tiny_tokenizer()
    fox = tokenizer.encode(" fox", add_special_tokens=False)
    server = await start(
        engine={"is_manual": True, "script": lambda _: fox * count},
        limits={"max_model_len": 2 * count, "max_request_tokens": 2 * count},
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", server.port))
    asked = {"prompt": "the", "stream": True, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    asked |= {"stream_options": {"include_usage": True}, "request_id": "r" * 128}
    data = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + data)
    await server.until(lambda: len(server.engine.lines) == 1)
    for step in range(count):
        server.engine.tick()
        if step % 4 == 0:
            await asyncio.sleep(0)
    assert server.engine.lines == {}  # all made, nothing read
    reader, writer = await asyncio.open_connection(sock=connection)
    answer = await reader.read()
    writer.close()
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events[:-1]) == count
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == " fox" * count
    assert events[-1]["usage"]["completion_tokens"] == count
    assert any(len(event["choices"][0]["token_ids"]) > 1000 for event in events[:-1])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.text(st.sampled_from('ab \n\r\x00\x85\u2028"\\\\\U0001fae0é龜'), max_size=24),
    stops=st.lists(st.text(st.sampled_from("ab \U0001fae0"), min_size=1, max_size=5), max_size=4),
    max_tokens=st.integers(1, 40),
    include=st.booleans(),
    chat=st.booleans(),
)
async def test_streamed_and_whole_answers_are_equal(
    server: Server, said: str, stops: list[str], max_tokens: int, include: bool, chat: bool
) -> None:
    """Rule 5 of the cases: the same text, reason and usage."""
    server.engine.script = says(said)
    asked = {"stop": stops, "max_tokens": max_tokens, "include_stop_str_in_output": include, "return_token_ids": True}
    ask = server.chat if chat else server.complete
    whole = (await ask(**asked)).json
    events = (await ask(**asked, stream=True, stream_options={"include_usage": True})).events
    choice = whole["choices"][0]
    assert joined(events) == {0: choice["message"]["content"] if chat else choice["text"]}
    last = events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert events[-1]["usage"] == whole["usage"]
    assert [id_ for event in events[:-1] for id_ in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]


async def test_obfuscation_is_taken_and_adds_nothing(server: Server) -> None:
    """Clients ask for padded events; here none are, so the field changes no event."""
    plain = await server.chat(stream=True, stream_options={"include_usage": True})
    padded = await server.chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True})
    assert [event | {"id": "", "created": 0} for event in plain.events] == [
        event | {"id": "", "created": 0} for event in padded.events
    ]
