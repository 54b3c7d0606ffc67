"""Calls that must come, made by the real engine with a tiny random model: every one is of a tool, and valid."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model
from tool_chats import FORMATS, HEAD, MARKS, TURNS

from service.call_readers import CallFormat

TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 9}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"plan_trip": TRIP, "take_note": NOTE}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in SCHEMAS.items()]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "tools": TOOLS, "max_tokens": 600}


@pytest.fixture(params=FORMATS)
def call_format(request: pytest.FixtureRequest) -> CallFormat:
    found: CallFormat = request.param
    return found


@pytest_asyncio.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call_format: CallFormat) -> AsyncIterator[RealHouse]:
    template = tmp_path / "tools.jinja"
    template.write_text(HEAD + f"{{# {MARKS[call_format]} #}}" + TURNS)
    model = tmp_path / "model"
    model.mkdir()
    async with real_house(
        monkeypatch, write_tiny_model(model), max_num_seqs=8, max_model_len=4096, chat_template=str(template)
    ) as running:
        yield running


def checked(message: dict[str, Any]) -> list[str]:
    """Names of the calls, whose arguments are valid; there is nothing but calls."""
    assert message["content"] is None
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in message["tool_calls"]]


async def test_required_calls_of_several_choices(house: RealHouse) -> None:
    one = ASKED | {"parallel_tool_calls": False, "n": 4}
    for seed in range(3):
        answer = await house.post("/v1/chat/completions", one | {"tool_choice": "required", "seed": seed})
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "tool_calls"
            assert len(checked(choice["message"])) == 1


async def test_a_named_call_whole_and_streamed(house: RealHouse) -> None:
    body = ASKED | {"tool_choice": {"type": "function", "function": {"name": "take_note"}}, "seed": 5}
    answer = await house.post("/v1/chat/completions", body)
    assert checked(answer["choices"][0]["message"]) == ["take_note"]
    events = await house.events("/v1/chat/completions", body)
    entries = [entry for event in events for entry in event["choices"][0]["delta"].get("tool_calls", [])]
    streamed = "".join(entry["function"]["arguments"] for entry in entries)
    assert streamed == answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_official_client_parses_arguments(house: RealHouse) -> None:
    class PlanTrip(pydantic.BaseModel):
        city: Literal["Rome", "Oslo"]
        days: int = pydantic.Field(ge=1, le=9)

    asked: Any = {
        "model": "tiny", "messages": ASKED["messages"], "max_tokens": 600, "tool_choice": "required",
        "tools": [openai.pydantic_function_tool(PlanTrip)], "parallel_tool_calls": False,
    }  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="any", max_retries=0) as client:
        models = await client.models.list()
        asked["model"] = models.data[0].id
        parsed = await client.chat.completions.parse(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    for answer in (parsed, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, PlanTrip)


async def test_the_demo_model_calls_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 has not learned to call tools; held to the form, it finds the arguments."""
    template = Path(__file__).parents[1] / "compat" / "tools.jinja"
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    weather = {"name": "get_weather", "description": "The weather of a city.", "parameters": schema, "strict": True}
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "max_tokens": 80,
        "tools": [{"type": "function", "function": weather}], "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    async with real_house(
        monkeypatch, Path("smollm2"), load_format="auto", chat_template=str(template), max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
    ) as house:  # fmt: skip
        (choice,) = (await house.post("/v1/chat/completions", body))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert choice["finish_reason"] == "tool_calls"
