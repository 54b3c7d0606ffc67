"""POST /v1/messages: a chat in the Anthropic API's form, whole and streamed, with its errors in that form too.

The official client reads it in tests/compat.
"""

import json
from typing import Any

import pytest
from http_events import named_events
from http_house import Answer, Server, Start, says

SAID = " quick \U0001fae0 fox"
USER = [{"role": "user", "content": "the"}]


@pytest.fixture
def talking(server: Server) -> Server:
    server.engine.script = says(SAID)
    return server


async def message(server: Server, **body: Any) -> Answer:
    return await server.post("/v1/messages", {"max_tokens": 50, "messages": USER} | body)


def error_of(answer: Answer) -> dict[str, Any]:
    """The error, whose form is checked."""
    body = json.loads(answer.body)
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == answer.headers["X-Request-Id"] == answer.headers["Request-Id"]
    return body["error"]


async def test_a_whole_message(talking: Server) -> None:
    talking.engine.cached_tokens = 3
    answer = await message(talking, system="be brief", metadata={"user_id": "u"})
    assert answer.status == 200
    body = answer.json
    assert body["id"] == "msg_" + answer.headers["Request-Id"]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": SAID}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    prompt = len(talking.engine.submitted[0].prompt_ids)
    assert body["usage"] | {"output_tokens": 0} == {
        "input_tokens": prompt - 3, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0, "output_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_reasons(talking: Server, stream: bool) -> None:
    for fields, expected in (
        ({}, ("end_turn", None)),
        ({"max_tokens": 1}, ("max_tokens", None)),
        ({"stop_sequences": ["fox", "zzz"]}, ("stop_sequence", "fox")),
    ):
        answer = await message(talking, stream=stream, **fields)
        if stream:
            found = next(data["delta"] for kind, data in named_events(answer.body) if kind == "message_delta")
        else:
            found = answer.json
        assert (found["stop_reason"], found["stop_sequence"]) == expected


async def test_events_in_order(talking: Server) -> None:
    events = named_events((await message(talking, stream=True)).body)
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(data["delta"]["text"] for _, data in events[2:-3]) == SAID
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    whole = (await message(talking)).json
    assert events[-2][1]["usage"] == whole["usage"]
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


async def test_the_same_prompt_as_a_chat(talking: Server) -> None:
    text = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    await message(talking, system=text, messages=[{"role": "user", "content": text}])
    chat = [{"role": "system", "content": "ab"}, {"role": "user", "content": "ab"}]
    await talking.post("/v1/chat/completions", {"messages": chat})
    first, second = talking.engine.submitted
    assert first.prompt_ids == second.prompt_ids


async def test_a_last_message_of_the_assistant_is_continued(talking: Server) -> None:
    history = [*USER, {"role": "assistant", "content": "A quick"}]
    assert (await message(talking, messages=history)).status == 200
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    await talking.post("/v1/chat/completions", {"messages": history} | fields)
    first, second = talking.engine.submitted
    assert first.prompt_ids == second.prompt_ids


async def test_blocks_of_tools_from_earlier_turns(start: Start) -> None:
    from tiny_tokenizer import tiny_tokenizer

    from service.chat_template import ChatTemplate
    from service.tokenization import Tokenizer

    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.x }}){% endfor %}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer(tiny_tokenizer().backend, {}, ChatTemplate(source))
    server = await start(model={"tokenizer": tokenizer})
    history = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "t"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}, {"type": "text", "text": "go"}],
        },
    ]
    assert (await message(server, messages=history)).status == 200
    text = tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert text == "[user]q[assistant]t(c f 1)[tool]r[user]go"


async def test_tokens_are_counted_without_generating(talking: Server) -> None:
    counted = await talking.post("/v1/messages/count_tokens", {"messages": USER, "system": "s"})
    await message(talking, system="s")
    assert counted.json == {"input_tokens": len(talking.engine.submitted[0].prompt_ids)}
    assert len(talking.engine.submitted) == 1


async def test_a_failure_in_the_stream(talking: Server) -> None:
    talking.engine.fail_after = 1
    *_, (kind, data) = named_events((await message(talking, stream=True)).body)
    assert (kind, data["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 10_000}, "maximum context length"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type image are not served"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {}}]}]},
            "user",
        ),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "refuses these messages"),
        ({"temperature": 1.5}, "temperature must be in [0, 1]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences may have at most 16"),
        ({"stop_sequences": [""]}, "must not be empty - at `$.stop_sequences[0]`"),
        ({"top_p": 3}, "top_p"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "no place for tools"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "letters"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": "tool"}}, "has a name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "has a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "user"),
        ({"stop": ["x"]}, "unknown field `stop`"),
    ],
)
async def test_what_is_wrong_is_said_in_that_form(server: Server, body: dict[str, Any], words: str) -> None:
    answer = await message(server, **body)
    assert answer.status == 400
    error = error_of(answer)
    assert (error["type"], words in error["message"]) == ("invalid_request_error", True), error
    assert server.engine.submitted == []


async def test_errors_that_no_handler_made_have_that_form_too(start: Start) -> None:
    server = await start(settings={"api_keys": ("good",), "body_limit_bytes": 1000})
    good = {"X-Api-Key": "good"}
    for answer, status, kind in (
        (await message(server), 401, "authentication_error"),
        (await server.post("/v1/messages", b"{", headers=good), 400, "invalid_request_error"),
        (await server.post("/v1/messages", b" " * 2000, headers=good), 413, "request_too_large"),
        (await server.post("/v1/messages", {"model": "no"}, headers=good), 400, "invalid_request_error"),
        (await server.ask("GET", "/v1/messages", headers=good), 405, "invalid_request_error"),
        (await server.post("/v1/messages/nothing", {}, headers=good), 404, "not_found_error"),
    ):
        assert (answer.status, error_of(answer)["type"]) == (status, kind)
    answer = await server.post("/v1/messages", {"model": "no", "max_tokens": 1, "messages": USER}, headers=good)
    assert (answer.status, error_of(answer)["type"]) == (404, "not_found_error")
    server.engine.state = "draining"
    answer = await server.post("/v1/messages", {}, headers=good)
    assert (answer.status, error_of(answer)["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Api-Key": "good"}, 200), ({"Authorization": "Bearer good"}, 200), ({"X-Api-Key": "bad"}, 401),
        ({"X-Api-Key": ""}, 401), ({"X-Api-Key": "good", "Authorization": "Bearer bad"}, 401),
    ],
)  # fmt: skip
async def test_keys_may_come_in_that_apis_header(start: Start, headers: dict[str, str], status: int) -> None:
    server = await start(settings={"api_keys": ("good",)})
    answer = await server.post("/v1/messages", {"max_tokens": 5, "messages": USER}, headers=headers)
    assert answer.status == status


async def test_unknown_fields_may_be_ignored_here_too(start: Start) -> None:
    server = await start(settings={"unknown_fields": "ignore"})
    answer = await message(server, stop=["x"])
    assert (answer.status, answer.headers["X-Ignored-Fields"]) == (200, "stop")
    answer = await server.post("/v1/responses", {"input": "the", "max_tokens": 5})
    assert (answer.status, answer.headers["X-Ignored-Fields"]) == (200, "max_tokens")


async def test_silence_is_broken_by_comments(start: Start) -> None:
    """Also before the first event; an error after that is an event of this API."""
    server = await start(settings={"sse_keep_alive_s": 0.01}, engine={"is_manual": True})
    body = json.dumps({"max_tokens": 5, "messages": USER, "stream": True})
    headers = {"Content-Type": "application/json"}
    async with server.session.post(f"{server.url}/v1/messages", data=body, headers=headers) as response:
        assert (await response.content.readuntil(b"\n\n")) == b": keep-alive\n\n"
        server.engine.fail_after = 0
        server.engine.tick()
        rest = await response.read()
    (event,) = [frame for frame in rest.decode().split("\n\n") if frame and not frame.startswith(":")]
    assert event.startswith("event: error\n")
