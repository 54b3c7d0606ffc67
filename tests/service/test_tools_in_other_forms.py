"""Tools and reasoning in /v1/responses and /v1/messages: the same calls as in chats, in the words of those APIs."""

import json
from typing import Any

import msgspec
import openai
import pytest
from http_events import named_events
from http_house import Server, Start
from tool_chats import CLOCK, FORMATS, NOON, ROME, WEATHER, call_text, model_that, told

from service.answer_types import AnthropicMessage, MessageEvent, Response, ResponseEvent
from service.call_readers import CallFormat

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
BLOCKS: list[Any] = [
    {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"], "description": "The weather of a city."},
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
THOUGHT = "<think>a fox</think>The dog. " + call_text("hermes", ROME, NOON)


async def respond(server: Server, **body: Any) -> Any:
    return await server.post("/v1/responses", {"input": "the", "tools": FLAT} | body)


async def message(server: Server, **body: Any) -> Any:
    asked = {"max_tokens": 300, "messages": [{"role": "user", "content": "the"}], "tools": BLOCKS}
    return await server.post("/v1/messages", asked | body)


# ---------------------------------------------------------------- responses


async def test_items_of_a_response(start: Start) -> None:
    server = await model_that(start, THOUGHT, "hermes", "by itself")
    answer = await respond(server)
    msgspec.json.decode(answer.body, type=Response)
    reasoning, text, first, second = answer.json["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "a fox"}]
    assert text["content"][0]["text"] == "The dog."
    assert [(call["name"], json.loads(call["arguments"])) for call in (first, second)] == [ROME, NOON]
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in answer.json["output"]}) == 4
    assert {item["status"] for item in answer.json["output"]} == {"completed"}
    assert answer.json["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    shown = [{key: value for key, value in tool.items() if value is not None} for tool in answer.json["tools"]]
    assert (shown, answer.json["tool_choice"]) == (FLAT, "auto")


async def test_a_streamed_response_brings_the_same_items(start: Start) -> None:
    server = await model_that(start, THOUGHT, "hermes", "by itself")
    events = named_events((await respond(server, stream=True)).body)
    for _, data in events:
        msgspec.convert(data, ResponseEvent)
    items = [data["item"] for kind, data in events if kind == "response.output_item.done"]
    final = events[-1][1]["response"]
    assert final["output"] == items
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    for i, item in enumerate(items):
        own = [(kind, data) for kind, data in events if data.get("output_index") == i]
        assert own[0][0] == "response.output_item.added"
        assert own[-1][0] == "response.output_item.done"
        text = "".join(data["delta"] for kind, data in own if kind.endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.parametrize("call_format", FORMATS)
async def test_the_official_client_reads_calls(start: Start, call_format: CallFormat) -> None:
    server = await model_that(start, call_text(call_format, ROME), call_format)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="the", tools=FLAT)
        async with client.responses.stream(model="tiny", input="the", tools=FLAT) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        for answer in (final, whole):
            (call,) = answer.output
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments)) == ROME
        assert "response.function_call_arguments.delta" in kinds
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for answer in (whole, final):
            result["call_id"] = answer.output[0].call_id  # type: ignore[union-attr]
            for items in (answer.output, [item.to_dict() for item in answer.output]):
                again: Any = [{"role": "user", "content": "the"}, *items, result]
                assert (await client.responses.create(model="tiny", input=again, tools=FLAT)).status == "completed"


async def test_reasoning_and_calls_of_earlier_responses_reach_the_template(start: Start) -> None:
    server = await model_that(start, "ok", "hermes", "by itself")
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ]
    assert (await respond(server, input=items)).status == 200
    assert "(thought hm)(call clock {})" in told(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"), ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [FLAT[0], FLAT[0]]}, "tools"), ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tools": [WEATHER]}, "tools"), ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"), ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ],
)  # fmt: skip
async def test_tools_that_responses_refuse(start: Start, body: dict[str, Any], param: str) -> None:
    server = await model_that(start, "ok")
    answer = await respond(server, **body)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", param)


# ---------------------------------------------------------------- messages


async def test_blocks_of_a_message(start: Start) -> None:
    server = await model_that(start, THOUGHT, "hermes", "by itself")
    answer = await message(server)
    msgspec.json.decode(answer.body, type=AnthropicMessage)
    thinking, text, first, second = answer.json["content"]
    assert thinking == {"type": "thinking", "thinking": "a fox", "signature": ""}
    assert text == {"type": "text", "text": "The dog."}
    assert [(block["name"], block["input"]) for block in (first, second)] == [ROME, NOON]
    assert (answer.json["stop_reason"], first["id"] == second["id"]) == ("tool_use", False)
    answer = await message(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in answer.json["content"]] == ["thinking", "text", "tool_use"]


async def test_a_streamed_message_brings_the_same_blocks(start: Start) -> None:
    server = await model_that(start, THOUGHT, "hermes", "by itself")
    whole = (await message(server)).json["content"]
    events = named_events((await message(server, stream=True)).body)
    for _, data in events:
        msgspec.convert(data, MessageEvent)
    blocks: list[Any] = []
    for kind, data in events:
        if kind == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"] | {"said": ""})
        elif kind == "content_block_delta":
            assert data["index"] == len(blocks) - 1
            delta = data["delta"]
            blocks[-1]["said"] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
    said = [block["said"] for block in blocks]
    assert said[:2] == [whole[0]["thinking"], whole[1]["text"]]
    assert [json.loads(text) for text in said[2:]] == [ROME[1], NOON[1]]
    assert [kind for kind, _ in events].count("content_block_stop") == 4
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_is_an_empty_object(start: Start) -> None:
    server = await model_that(start, call_text("hermes", ROME))
    for tokens in range(20, 60):
        answer = (await message(server, max_tokens=tokens)).json
        if answer["content"][-1]["type"] == "tool_use":
            break
    assert (answer["content"][-1]["input"], answer["stop_reason"]) == ({}, "max_tokens")


async def test_thinking_may_be_turned_off(start: Start) -> None:
    """The template is told, and what the model thinks all the same is left out."""
    server = await model_that(start, THOUGHT, "hermes", "by itself")
    answer = await message(server, thinking={"type": "disabled"})
    assert [block["type"] for block in answer.json["content"]] == ["text", "tool_use", "tool_use"]
    answer = await message(server, thinking={"type": "adaptive"})
    assert answer.json["content"][0]["type"] == "thinking"


async def test_thoughts_and_uses_of_earlier_turns_reach_the_template(start: Start) -> None:
    server = await model_that(start, "ok", "hermes", "by itself")
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c", "name": "clock", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "noon"}]},
    ]  # fmt: skip
    assert (await message(server, messages=history)).status == 200
    assert "(thought hm)(call clock {})" in told(server)
    counted = await server.post("/v1/messages/count_tokens", {"messages": history, "tools": BLOCKS})
    assert counted.json["input_tokens"] == len(server.engine.submitted[-1].prompt_ids)
    answer = await message(server, messages=history[2:])
    assert (answer.status, answer.json["error"]["message"]) == (400, "no assistant before has made the call c")
