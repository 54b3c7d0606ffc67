"""C31 for tools: whatever stands in tools, schemas and calls of earlier turns, the answer is a 400 or a 200."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from examples import examples
from http_house import Server, running_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_chats import FORMATS, tool_tokenizer, writes

from service.call_readers import CallFormat

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["object", "string", "integer", "number", "array", "boolean", "null", "x"]


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "<tool_call>", 'q"\\/\n', "é"])
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), max_size=3) | anything,
            "properties": st.dictionaries(names, inner, max_size=3) | anything,
            "required": st.lists(names, max_size=2) | anything,
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "anyOf": st.lists(inner, max_size=3),
            "enum": st.lists(scalars, max_size=3) | anything,
            "pattern": st.text(max_size=6),
            "minimum": st.integers() | anything,
            "maxLength": st.integers(),
            "$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/x", "x"]),
            "$defs": st.dictionaries(names, inner, max_size=2),
            "description": anything,
        },
    )


schema = st.recursive(anything | schemas(anything), schemas, max_leaves=6)
tool = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries(
        {"name": st.sampled_from(["f", "g", "a-b_9"])},
        optional={"parameters": schema | schema.map(lambda given: {"type": "object", "properties": {"x": given}}),
                  "description": st.text(max_size=9) | anything, "strict": st.booleans() | anything},
    )},
)  # fmt: skip
body = st.fixed_dictionaries(
    {"tools": st.lists(tool, min_size=1, max_size=3, unique_by=lambda given: given["function"]["name"])},
    optional={
        "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
        "parallel_tool_calls": st.booleans(),
        "response_format": st.just({"type": "json_object"}),
        "stream": st.booleans(),
    },
)


@pytest_asyncio.fixture(params=FORMATS)
async def tool_server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    call_format: CallFormat = request.param
    tokenizer = tool_tokenizer(call_format)
    async with running_server(
        model={"tokenizer": tokenizer}, engine={"script": writes("ok", call_format)},
        limits={"vocabulary": tokenizer.vocabulary, "max_model_len": 9000, "max_request_tokens": 9000},
    ) as started:  # fmt: skip
        yield started


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=body)
async def test_no_tools_give_a_5xx(tool_server: Server, asked: dict[str, Any]) -> None:
    answer = await tool_server.chat(**asked)
    assert answer.status in (200, 400), answer.body
    if answer.status == 400:
        assert answer.error["param"] in ("tools", "tool_choice", "response_format", "messages")
    assert tool_server.engine.lines == {}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(anything | st.fixed_dictionaries({"id": st.text(max_size=3), "type": st.just("function"),
       "function": st.fixed_dictionaries({"name": st.text(max_size=5), "arguments": st.text(max_size=5)
       | anything.map(json.dumps)})}), max_size=3), reasoning=anything)  # fmt: skip
async def test_no_calls_of_earlier_turns_give_a_5xx(tool_server: Server, calls: list[Any], reasoning: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": calls, "reasoning_content": reasoning}]
    answer = await tool_server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status in (200, 400), answer.body
