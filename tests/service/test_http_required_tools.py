"""Calls that must come, and strict tools: which grammar the engine is given, and what is refused."""

import json
import threading
from typing import Any

import msgspec
import pytest
from http_house import Server, Start
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizer import END
from tool_chats import CLOCK, FORMATS, NOON, ROME, TOOLS, WEATHER, call_text, model_that, tool_tokenizer

from service.call_readers import CallFormat
from service.chat_constraint import chat_constraint
from service.engine_client import Submit
from service.lark import prepared_lark
from service.tokenization import Tokenizer

STRICT = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def submitted(server: Server) -> Submit:
    return server.engine.submitted[-1]


def admits(submit: Submit, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the constraint of a Submit takes the whole text."""
    constraint = submit.constraint
    assert constraint is not None
    if constraint.kind == "json_schema":
        source = LLMatcher.grammar_from_json_schema(constraint.text)
    else:
        source = LLMatcher.grammar_from_lark(prepared_lark(constraint.text, {}))
    prepared = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocabulary, eos_token=[END])
    made = LLMatcher(prepared, source, log_level=0)
    return all(map(made.consume_token, tokenizer.encode(text, add_special_tokens=False))) and made.is_accepting()


def spelled(call_format: CallFormat, name: str, arguments: str) -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
    }[call_format]


@pytest.mark.parametrize("call_format", FORMATS)
async def test_a_call_that_must_come(start: Start, call_format: CallFormat) -> None:
    server, tokenizer = await model_that(start, call_text(call_format, ROME), call_format), tool_tokenizer(call_format)
    weather, clock = spelled(call_format, "get_weather", '{"city": "Rome"}'), spelled(call_format, "clock", "{}")
    for choice, good, bad in (
        ("required", [weather, clock], ["The fox.", spelled(call_format, "get_weather", "{}")]),
        (named("clock"), [clock], [weather, "The fox."]),
    ):
        answer = await server.chat(tools=TOOLS, tool_choice=choice)
        assert answer.status == 200
        assert all(admits(submitted(server), tokenizer, text) for text in good)
        assert not any(admits(submitted(server), tokenizer, text) for text in bad)
    assert not admits(submitted(server), tokenizer, spelled(call_format, "clock", '{"x": 1}')), "it has no parameters"


@pytest.mark.parametrize("call_format", FORMATS)
async def test_many_tools_whose_names_begin_alike(start: Start, call_format: CallFormat) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(128)]
    server, tokenizer = await model_that(start, "ok", call_format), tool_tokenizer(call_format)
    server.engine.limits = msgspec.structs.replace(
        server.engine.limits, max_model_len=40_000, max_request_tokens=40_000
    )
    assert (await server.chat(tools=tools, tool_choice="required")).status == 200
    for name in ("f1", "f12", "f127"):
        assert admits(submitted(server), tokenizer, spelled(call_format, name, "{}"))
    for name in ("f", "f128", "f01"):
        assert not admits(submitted(server), tokenizer, spelled(call_format, name, "{}"))


async def test_at_most_one_where_calls_may_not_be_parallel(start: Start) -> None:
    server, tokenizer = await model_that(start, call_text("hermes", ROME)), tool_tokenizer()
    two = "\n".join([spelled("hermes", "clock", "{}")] * 2)
    await server.chat(tools=TOOLS, tool_choice="required")
    assert admits(submitted(server), tokenizer, two)
    await server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not admits(submitted(server), tokenizer, two)
    answer = (await server.chat(tools=TOOLS, tool_choice=named("get_weather"))).json["choices"][0]
    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == ("tool_calls", 1)


@pytest.mark.parametrize("call_format", FORMATS)
async def test_strict_tools_are_held_to_their_schemas_once_a_call_begins(start: Start, call_format: CallFormat) -> None:
    server, tokenizer = await model_that(start, "The fox.", call_format), tool_tokenizer(call_format)
    assert (await server.chat(tools=[STRICT, CLOCK])).status == 200
    mark = "<|python_tag|>" if call_format == "llama3" else ""
    for text in ("The fox.", "The fox. " + mark + spelled(call_format, "get_weather", '{"city": "Rome"}')):
        assert admits(submitted(server), tokenizer, text), text
    assert not admits(submitted(server), tokenizer, "The " + mark + spelled(call_format, "get_weather", '{"x": 1}'))
    assert admits(submitted(server), tokenizer, "The " + mark + spelled(call_format, "clock", '{"x": 1}')), "not strict"
    await server.chat(tools=TOOLS)
    assert submitted(server).constraint is None


@pytest.mark.parametrize("call_format", FORMATS)
async def test_a_response_format_beside_tools(start: Start, call_format: CallFormat) -> None:
    server, tokenizer = await model_that(start, '{"a": 1}', call_format), tool_tokenizer(call_format)
    answer = await server.chat(tools=TOOLS, response_format=FORMAT)
    assert answer.json["choices"][0]["message"]["content"] == '{"a": 1}'
    mark = "<|python_tag|>" if call_format == "llama3" else ""
    for text in ('{"a": 1}', mark + spelled(call_format, "clock", "{}")):
        assert admits(submitted(server), tokenizer, text), text
    for text in ("The fox.", '{"a": "x"}'):
        assert not admits(submitted(server), tokenizer, text), text


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": FORMAT}, '{"a": 1}', "{}"),
        ({"response_format": {"type": "json_object"}}, '{"b": 1}', "[]"),
        ({"structured_outputs": {"regex": "a/b\\/[/c]+"}}, "a/b/c/c", "ab"),
        ({"structured_outputs": {"choice": ["the fox", "a \"dog\""]}}, "a \"dog\"", "the"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thinks", ["by itself", "opened"])
async def test_reasoning_is_free_before_a_structured_answer(
    start: Start, asked: dict[str, Any], good: str, bad: str, thinks: Any
) -> None:
    mark = "<think>" if thinks == "by itself" else ""
    server = await model_that(start, f"{mark}a fox</think>{good}", None, thinks)
    tokenizer = tool_tokenizer(None, thinks)
    message = (await server.chat(**asked)).json["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (good, "a fox")
    for between in ("", "\n\n"):
        assert admits(submitted(server), tokenizer, f"{mark}a fox</think>{between}{good}")
    assert not admits(submitted(server), tokenizer, f"{mark}a fox</think>{bad}")
    assert admits(submitted(server), tokenizer, good) == (thinks == "by itself")


async def test_a_grammar_is_of_the_whole_answer(start: Start) -> None:
    server = await model_that(start, "the fox", None, "opened")
    answer = await server.chat(structured_outputs={"grammar": 'start: "the fox"'})
    assert answer.json["choices"][0]["message"] == {"role": "assistant", "content": "the fox"}


def with_parameters(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters} | more}


NO_KEYWORD = {"type": "object", "properties": {"a": {"not": {}}}}
LONG = {"type": "object", "properties": {"a": {"enum": ["b" * 140_000]}}}


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": [with_parameters({"type": "string"})]}, "tools", "type object"),
        ({"tools": [with_parameters(NO_KEYWORD)], "tool_choice": "required"}, "tools", "`$.properties.a`"),
        ({"tools": [with_parameters(NO_KEYWORD, strict=True)]}, "tools", "the tool f"),
        ({"tools": [with_parameters({"type": "object", "required": 5}, strict=True)]}, "tools", "cannot be kept to"),
        ({"tools": [STRICT], "response_format": FORMAT}, "response_format", "strict"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "response_format", "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs", "tools"),
        ({"tools": [STRICT], "use_beam_search": True, "n": 2}, "tools", "beam"),
        ({"tools": TOOLS, "tool_choice": named("clock"), "use_beam_search": True, "n": 2}, "tool_choice", "beam"),
    ],
)  # fmt: skip
async def test_what_cannot_be_held_to(start: Start, asked: dict[str, Any], param: str, words: str) -> None:
    server = await model_that(start, "ok")
    answer = await server.chat(**asked)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", param)
    assert words in answer.error["message"]
    assert server.engine.submitted == []


async def test_tools_that_are_too_long_for_a_grammar(start: Start) -> None:
    server = await start(
        model={"tokenizer": tool_tokenizer()}, limits={"max_model_len": 300_000, "max_request_tokens": 300_000}
    )
    answer = await server.chat(tools=[with_parameters(LONG, strict=True)])
    assert (answer.status, answer.error["param"], "bytes" in answer.error["message"]) == (400, "tools", True)
    assert (await server.chat(tools=[with_parameters(LONG)])).status == 200


# ---------------------------------------------------------------- the other forms


async def test_calls_that_must_come_in_other_forms(start: Start) -> None:
    server, tokenizer = await model_that(start, call_text("hermes", NOON)), tool_tokenizer()
    flat = [{"type": "function", **CLOCK["function"]}]
    blocks = [{"name": "clock", "input_schema": {"type": "object"}}]
    user = [{"role": "user", "content": "the"}]
    for path, body in (
        ("/v1/responses", {"input": "the", "tools": flat, "tool_choice": "required"}),
        ("/v1/responses", {"input": "the", "tools": flat, "tool_choice": {"type": "function", "name": "clock"}}),
        ("/v1/messages", {"messages": user, "max_tokens": 99, "tools": blocks, "tool_choice": {"type": "any"}}),
        ("/v1/messages",
         {"messages": user, "max_tokens": 99, "tools": blocks, "tool_choice": {"type": "tool", "name": "clock"}}),
    ):  # fmt: skip
        answer = await server.post(path, body)
        assert answer.status == 200, answer.body
        assert admits(submitted(server), tokenizer, spelled("hermes", "clock", "{}"))
        assert not admits(submitted(server), tokenizer, "the")
    assert msgspec.json.decode(msgspec.json.encode(submitted(server)), type=Submit) == submitted(server)
    assert json.loads(answer.body)["stop_reason"] == "tool_use"


def with_schema_of(size: int) -> dict[str, Any]:
    """A strict tool whose schema has about so many bytes."""
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(size // 10)}}
    return {"type": "function", "function": {"name": "wide", "parameters": schema, "strict": True}}


async def test_large_schemas_are_read_off_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    server = await model_that(start, "The fox.", "hermes", context=60_000)

    def noted(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return chat_constraint(*given)

    monkeypatch.setattr("service.completions.chat_constraint", noted)
    for size in (1_000, 20_000):
        assert (await server.chat(tools=[with_schema_of(size)], max_tokens=5)).status == 200
    small, large = threads
    assert small == threading.get_ident() != large


async def test_schemas_that_are_too_large_are_not_even_looked_into(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await model_that(start, "The fox.", "hermes", context=1_000_000)
    monkeypatch.setattr("service.chat_constraint.check_schema", lambda schema: pytest.fail("it was looked into"))
    answer = await server.chat(tools=[with_schema_of(140_000)], max_tokens=5)
    assert (answer.status, answer.json["error"]["param"]) == (400, "tools")
    assert "131072 bytes" in answer.json["error"]["message"]
