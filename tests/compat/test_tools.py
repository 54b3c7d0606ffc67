"""Tools with other people's clients, against the demo model with a template that has a place for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from compat_server import Served, serving
from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.compat
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


SCHEMA = GetWeather.model_json_schema() | {"additionalProperties": False}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = Path(__file__).with_name("tools.jinja")
    arguments = ["--max-model-len", "2048", "--chat-template", str(template)]
    with serving(tmp_path_factory.mktemp("tools"), "smollm2", *arguments) as served:
        yield served


def test_openai_parses_calls_and_takes_results(tool_server: Served) -> None:
    client = openai.OpenAI(base_url=tool_server.base_url, api_key=tool_server.key, max_retries=0)
    asked: Any = {
        "model": "served", "tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    parsed = client.chat.completions.parse(messages=ASKED, **asked).choices[0].message
    with client.chat.completions.stream(messages=ASKED, **asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message
    for message in (parsed, streamed):
        (call,) = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert "Paris" in call.function.parsed_arguments.city
    history: Any = [*ASKED, parsed, {"role": "tool", "tool_call_id": parsed.tool_calls[0].id, "content": "rain"}]
    after = client.chat.completions.create(messages=history, **asked | {"tool_choice": "none"})
    assert after.choices[0].message.content


def test_openai_responses_with_a_named_function(tool_server: Served) -> None:
    client = openai.OpenAI(base_url=tool_server.base_url, api_key=tool_server.key, max_retries=0)
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    with client.responses.stream(
        model="served", input=ASKED, tools=tools, tool_choice={"type": "function", "name": "get_weather"},
        temperature=0, max_output_tokens=100,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    GetWeather.model_validate_json(call.arguments)


def test_anthropic_uses_tools(tool_server: Served) -> None:
    client = anthropic.Anthropic(base_url=tool_server.root, api_key=tool_server.key, max_retries=0)
    asked: Any = {
        "model": "served", "max_tokens": 100, "messages": ASKED, "extra_body": {"top_k": 1},
        "tools": [{"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }  # fmt: skip
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
        GetWeather.model_validate(block.input)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "rain"}
    history: Any = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**asked | {"messages": history, "tool_choice": {"type": "none"}})
    assert after.content[0].type == "text"


def test_langchain_binds_tools(tool_server: Served) -> None:
    """Strict, which closes the schema: of an open one the small model goes on with properties of its own."""
    model = ChatOpenAI(
        base_url=tool_server.base_url, api_key=tool_server.key, model="served", temperature=0, max_tokens=100
    )
    binding = model.bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False, strict=True)
    assert [call["name"] for call in binding.invoke(ASKED).tool_calls] == ["GetWeather"]
    structured = model.with_structured_output(GetWeather, method="function_calling", strict=True).invoke(ASKED)
    assert isinstance(structured, GetWeather)
