"""POST /v1/responses: the official client reads what we write, whole and streamed; what we cannot do is refused."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from http_events import named_events
from http_house import Server, Start, says

SAID = " quick \U0001fae0 fox"


@pytest.fixture
def talking(server: Server) -> Server:
    server.engine.script = says(SAID)
    return server


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=10) as client:
        yield client


async def respond(server: Server, **body: Any) -> Any:
    return await server.post("/v1/responses", {"input": "the"} | body)


async def test_a_whole_response(talking: Server) -> None:
    answer = await respond(talking, instructions="be a", max_output_tokens=50, metadata={"a": "b"})
    assert answer.status == 200
    body = answer.json
    assert body["id"] == "resp_" + answer.headers["X-Request-Id"]
    assert (body["object"], body["status"], body["incomplete_details"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in item["content"]] == [("output_text", SAID)]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert (body["metadata"], body["store"]) == ({"a": "b"}, False)


async def test_what_is_cut_by_the_length_is_incomplete(talking: Server) -> None:
    body = (await respond(talking, max_output_tokens=1)).json
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    *_, (kind, last) = named_events((await respond(talking, max_output_tokens=1, stream=True)).body)
    assert kind == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_the_same_prompt_as_a_chat(talking: Server) -> None:
    """Instructions and items become the messages of a chat: no second way to a prompt."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    assert (await respond(talking, input=items, instructions="s")).status == 200
    messages = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "cd")]
    chat = [{"role": role, "content": text} for role, text in messages]
    assert (await talking.post("/v1/chat/completions", {"messages": chat})).status == 200
    first, second = talking.engine.submitted
    assert first.prompt_ids == second.prompt_ids


async def test_calls_of_earlier_turns_reach_the_template(start: Start) -> None:
    from tiny_tokenizer import CONTROL, tiny_tokenizer

    from service.chat_template import ChatTemplate
    from service.tokenization import Tokenizer

    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.x }}){% endfor %}"
        "{% endfor %}"
    )
    assert CONTROL
    tokenizer = Tokenizer(tiny_tokenizer().backend, {}, ChatTemplate(source))
    server = await start(model={"tokenizer": tokenizer})
    items = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    assert (await respond(server, input=items)).status == 200
    text = tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert text == "[user]q[assistant](c1 f 1)(c2 g 2)[tool]one[tool]two"


async def test_events_in_order(talking: Server) -> None:
    answer = await respond(talking, stream=True)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = named_events(answer.body)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert (kinds[:4], kinds[-4:]) == (head, tail)
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(data["delta"] for _, data in events[4:-4])
    assert text == events[-4][1]["text"] == events[-1][1]["response"]["output"][0]["content"][0]["text"] == SAID
    whole = (await respond(talking)).json
    assert events[-1][1]["response"]["usage"] == whole["usage"]


async def test_the_official_client(talking: Server) -> None:
    async with client_of(talking) as client:
        answer = await client.responses.create(model="tiny", input="the", max_output_tokens=50)
        assert (answer.output_text, answer.status) == (SAID, "completed")
        pieces, final = "", None
        async for event in await client.responses.create(model="tiny", input="the", stream=True):
            if event.type == "response.output_text.delta":
                pieces += event.delta
            if event.type == "response.completed":
                final = event.response
        assert final is not None
        assert pieces == final.output_text == SAID
        async with client.responses.stream(model="tiny", input="the") as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == SAID
        history: Any = [{"role": "user", "content": "the"}, *answer.output, {"role": "user", "content": "the"}]
        again = await client.responses.create(model="tiny", input=history)
        assert again.output_text == SAID


async def test_a_failure_in_the_stream(talking: Server) -> None:
    talking.engine.fail_after = 1
    events = named_events((await respond(talking, stream=True)).body)
    assert [kind for kind, _ in events[-2:]] == ["error", "response.failed"]
    assert events[-1][1]["response"]["status"] == "failed"
    assert "not finite" in events[-2][1]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "at least one item"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"role": "user"}]}, "input", "content is missing - at `$.input[0]`"),
        ({"input": [{"content": "a"}]}, "input", "role is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", "output is missing"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}]}, "input",
            "arguments must be a JSON object in a string - at `$.input[0].arguments`",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]}, "input", "input_image"),
        ({"input": [{"role": "user", "content": "refuse me"}]}, "input", "refuses these messages"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 10_000}, "max_output_tokens", "maximum context length"),
        ({"temperature": 3}, "temperature", "[0, 2]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream: true"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning_effort"),
        ({"max_tokens": 5}, "max_tokens", "unknown field"),
        ({"model": "no"}, "model", "does not exist"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_as_this_route_has_it(
    server: Server, body: dict[str, Any], param: str, words: str
) -> None:
    answer = await respond(server, **body)
    assert answer.status in (400, 404)
    assert (answer.error["param"], words in answer.error["message"]) == (param, True), answer.error
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"background": True},
        {"include": ["message.output_text.logprobs"]}, {"top_logprobs": 3}, {"truncation": "auto"},
        {"conversation": "c"}, {"prompt": {"id": "p"}}, {"max_tool_calls": 1},
    ],
)  # fmt: skip
async def test_what_is_not_served_yet_says_so(server: Server, body: dict[str, Any]) -> None:
    answer = await respond(server, **body)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (
        400,
        "NotImplementedError",
        next(iter(body)),
    )
    assert answer.headers["x-should-retry"] == "false"


async def test_fields_that_change_nothing_are_taken(talking: Server) -> None:
    fields: dict[str, Any] = {
        "store": False, "user": "u", "prompt_cache_key": "k", "service_tier": "auto", "safety_identifier": "s",
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled", "background": False,
        "include": [], "text": {"format": {"type": "text"}, "verbosity": "low"}, "top_logprobs": 0,
    }  # fmt: skip
    assert (await respond(talking, **fields)).status == 200
    assert (await respond(talking, **dict.fromkeys(fields))).status == 200
