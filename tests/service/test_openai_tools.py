"""The official client of OpenAI and tools: it must put together what we stream, and read whole answers."""

import json
from typing import Any

import openai
import pytest
from http_house import Start
from tool_chats import FORMATS, NOON, ROME, TOOLS, call_text, model_that

from service.call_readers import CallFormat

ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "tools": TOOLS}


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=10)


@pytest.mark.parametrize("call_format", FORMATS)
async def test_calls_of_a_chat(start: Start, call_format: CallFormat) -> None:
    server = await model_that(start, "The fox. " + call_text(call_format, ROME, NOON), call_format)
    async with client_of(server.url) as client:
        whole = await client.chat.completions.create(**ASKED)
        async with client.chat.completions.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    for choice in (whole.choices[0], final.choices[0]):
        assert (choice.message.content, choice.finish_reason) == ("The fox.", "tool_calls")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [ROME, NOON]
    assert kinds.count("tool_calls.function.arguments.done") == 2


async def test_a_turn_with_a_result(start: Start) -> None:
    """What the client got goes back as it is, with the tool's answer."""
    server = await model_that(start, "<think>a fox</think>" + call_text("hermes", NOON), "hermes", "by itself")
    async with client_of(server.url) as client:
        first = (await client.chat.completions.create(**ASKED)).choices[0].message
        assert first.tool_calls
        result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noon"}
        async with client.chat.completions.stream(**ASKED) as stream:
            streamed: Any = (await stream.get_final_completion()).choices[0].message
        for message in (first, first.model_dump(), streamed, streamed.model_dump()):
            calls = (
                message["tool_calls"] if isinstance(message, dict) else [call.to_dict() for call in message.tool_calls]
            )
            result["tool_call_id"] = calls[0]["id"]
            messages = [*ASKED["messages"], message, result]
            again = await client.chat.completions.create(**ASKED | {"messages": messages})
            assert again.choices[0].message.tool_calls


async def test_reasoning_beside_the_content(start: Start) -> None:
    server = await model_that(start, "a fox</think>The dog.", "hermes", "opened")
    async with client_of(server.url) as client:
        whole = (await client.chat.completions.create(**ASKED)).choices[0].message
        assert (whole.content, getattr(whole, "reasoning_content", None)) == ("The dog.", "a fox")
        content = reasoning = ""
        async for chunk in await client.chat.completions.create(**ASKED, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
        assert (content, reasoning) == ("The dog.", "a fox")
