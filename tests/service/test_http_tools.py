"""Tools in chats: what the model is told, what answers look like, whole and streamed, and what is refused."""

import json
from typing import Any

import msgspec
import pytest
from http_events import ends, joined
from http_house import Server, Start
from tiny_tokenizer import END
from tool_chats import CLOCK, FORMATS, NOON, ROME, TOOLS, WEATHER, call_text, model_that, told, tool_tokenizer, writes

from service.answer_types import ChatCompletion, ChatCompletionEvent
from service.call_readers import CallFormat


def said(message: dict[str, Any]) -> Any:
    """(content, [(name, arguments)])."""
    calls = message.get("tool_calls", [])
    assert all(set(call) == {"id", "type", "function"} and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return message["content"], found


def put_together(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that the deltas of a choice make up, by the rules of the API; the form of each delta is checked."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            entries = delta.get("tool_calls", [])
            assert len({entry["index"] for entry in entries}) == len(entries)
            for entry in entries:
                if entry["index"] == len(message["tool_calls"]):
                    assert entry["function"]["arguments"] == ""
                    assert (set(entry), entry["type"]) == ({"index", "id", "type", "function"}, "function")
                    message["tool_calls"].append({key: entry[key] for key in ("id", "type")})
                    message["tool_calls"][-1]["function"] = dict(entry["function"])
                else:
                    assert (set(entry), set(entry["function"])) == ({"index", "function"}, {"arguments"})
                    message["tool_calls"][entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    message["content"] = message["content"] or None
    return message


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("n", [1, 3])
async def test_calls_whole_and_streamed(start: Start, call_format: CallFormat, n: int) -> None:
    server = await model_that(start, call_text(call_format, ROME, NOON), call_format)
    whole = (await server.chat(tools=TOOLS, n=n)).json
    streamed = (await server.chat(tools=TOOLS, n=n, stream=True)).events
    for i, choice in enumerate(whole["choices"]):
        assert said(choice["message"]) == (None, [ROME, NOON])
        assert said(put_together(streamed, i)) == (None, [ROME, NOON])
        assert (choice["finish_reason"], ends(streamed)[i]) == ("tool_calls", ("tool_calls", None))
    first = streamed[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": ""}
    assert '"name": "get_weather"' in told(server)


@pytest.mark.parametrize("call_format", FORMATS)
async def test_content_before_a_call_and_answers_without_one(start: Start, call_format: CallFormat) -> None:
    server = await model_that(start, "The quick. " + call_text(call_format, ROME), call_format)
    whole = (await server.chat(tools=TOOLS)).json["choices"][0]
    streamed = (await server.chat(tools=TOOLS, stream=True)).events
    assert said(whole["message"]) == said(put_together(streamed)) == ("The quick.", [ROME])
    server.engine.script = writes(" the lazy <dog> [x ", call_format)
    whole = (await server.chat(tools=TOOLS)).json["choices"][0]
    streamed = (await server.chat(tools=TOOLS, stream=True)).events
    assert (whole["message"], whole["finish_reason"]) == (
        {"role": "assistant", "content": " the lazy <dog> [x "},
        "stop",
    )
    assert (joined(streamed)[0], ends(streamed)[0]) == (" the lazy <dog> [x ", ("stop", None))


async def test_an_event_for_each_token_though_its_text_is_held_back(start: Start) -> None:
    """Clients measure the time between tokens by events; ids and log-probabilities stay complete."""
    text = call_text("hermes", ROME)
    server = await model_that(start, text)
    tokens = tool_tokenizer().encode(text, add_special_tokens=False)
    asked = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    events = (await server.chat(**asked, stream=True)).events
    ids = [choice["token_ids"] for event in events for choice in event["choices"]]
    assert [one for one in ids if one] == [[token] for token in [*tokens, END]]
    scores = [
        len((choice["logprobs"] or {"content": []})["content"]) for event in events for choice in event["choices"]
    ]
    assert sum(scores) == len(tokens) + 1
    assert all(len(one) == count for one, count in zip(ids, scores, strict=True))
    whole = (await server.chat(**asked)).json["choices"][0]
    assert (whole["token_ids"], len(whole["logprobs"]["content"])) == ([*tokens, END], len(tokens) + 1)


@pytest.mark.parametrize("call_format", FORMATS)
async def test_without_parallel_calls_the_first_ends_the_answer(start: Start, call_format: CallFormat) -> None:
    server = await model_that(start, call_text(call_format, ROME, NOON) + " the end", call_format)
    whole = (await server.chat(tools=TOOLS, parallel_tool_calls=False)).json
    streamed = (await server.chat(tools=TOOLS, parallel_tool_calls=False, stream=True)).events
    assert said(whole["choices"][0]["message"]) == said(put_together(streamed)) == (None, [ROME])
    assert ends(streamed)[0] == ("tool_calls", None)
    assert len(server.engine.finished) == 2
    assert whole["usage"]["completion_tokens"] == server.engine.finished[0].at


async def test_a_call_that_is_cut_ends_with_length(start: Start) -> None:
    server = await model_that(start, call_text("hermes", ROME))
    tokens = len(tool_tokenizer().encode(call_text("hermes", ROME)[:-16], add_special_tokens=False))
    answer = (await server.chat(tools=TOOLS, max_tokens=tokens)).json["choices"][0]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert json.dumps(ROME[1]).replace(" ", "").startswith(call["function"]["arguments"])


async def test_stop_strings_work_beside_calls(start: Start) -> None:
    server = await model_that(start, "The fox. " + call_text("hermes", ROME))
    for stream in (False, True):
        answer = await server.chat(tools=TOOLS, stop=["fox"], stream=stream)
        message = put_together(answer.events) if stream else answer.json["choices"][0]["message"]
        assert message["content"] == "The "
        assert not message.get("tool_calls")
    for stream in (False, True):
        answer = await server.chat(tools=TOOLS, stop=["never said"], stream=stream)
        message = put_together(answer.events) if stream else answer.json["choices"][0]["message"]
        assert said(message) == ("The fox.", [ROME])


async def test_without_tools_nothing_is_taken_apart(start: Start) -> None:
    text = call_text("hermes", ROME)
    server = await model_that(start, text)
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = (await server.chat(**asked)).json["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
        assert "get_weather" not in told(server)


async def test_control_tokens_that_are_no_marks_stay_hidden(start: Start) -> None:
    server = await model_that(start, "[TOOL_CALLS]clock[ARGS]{}", "mistral")
    answer = (await server.chat(tools=TOOLS)).json["choices"][0]
    assert said(answer["message"]) == (None, [NOON])
    server.engine.script = writes("<|im_start|>a fox [ARGS]", "mistral")
    assert (await server.chat(tools=TOOLS)).json["choices"][0]["message"]["content"] == "a fox [ARGS]"
    assert (await server.chat()).json["choices"][0]["message"]["content"] == "a fox "


async def test_beams_have_calls_too(start: Start) -> None:
    server = await model_that(start, call_text("hermes", ROME))
    answer = (await server.chat(tools=TOOLS, use_beam_search=True, n=2, max_tokens=200)).json
    assert [said(choice["message"]) for choice in answer["choices"]] == [(None, [ROME])] * 2


# ---------------------------------------------------------------- what the model is told


async def test_calls_and_results_go_into_the_template(start: Start) -> None:
    server = await model_that(start, "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "well", "reasoning": "well"},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert (await server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})).status == 200
    shown = [
        tool | {"function": {"parameters": {"type": "object", "properties": {}}} | tool["function"]} for tool in TOOLS
    ]
    text = told(server)
    assert json.loads(text.split("\n")[1].removesuffix("<|im_end|>")) == shown
    assert text.endswith(
        '(thought well)(call clock {"a": [1]})<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n'
    )
    tokenized = await server.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert tokenized.json["tokens"] == server.engine.submitted[-1].prompt_ids


# ---------------------------------------------------------------- what is refused


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


DEEP: dict[str, Any] = {}
for _ in range(65):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": []}, "tools", "1 to 128"), ({"tools": [named(f"f{i}") for i in range(129)]}, "tools", "got 129"),
        ({"tools": [named("")]}, "tools", "`$.tools[0]`"),
        ({"tools": [named("a" * 65)]}, "tools", "64"), ({"tools": [named("a b")]}, "tools", "letters"),
        ({"tools": [named("a\n")]}, "tools", "letters"), ({"tools": [named("é")]}, "tools", "letters"),
        ({"tools": [CLOCK, WEATHER, CLOCK]}, "tools", "`$.tools[2]`"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools", "64 levels"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "object"),
        ({"tools": [{"type": "web_search"}]}, "tools", ""), ({"tools": [{}]}, "tools", "type"),
        ({"tools": [{"type": "function"}]}, "tools", "function"), ({"tools": ["f"]}, "tools", "object"),
        ({"tools": [CLOCK | {"x": 1}]}, "tools", "`x`"), ({"tools": {}}, "tools", "array"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": named("f")}, "tool_choice", "none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", ""),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": named("clock")}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
    ],
)  # fmt: skip
async def test_tools_that_are_refused(start: Start, asked: dict[str, Any], param: str, words: str) -> None:
    server = await model_that(start, "ok")
    answer = await server.chat(**asked)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", param)
    assert words in answer.error["message"]
    assert server.engine.submitted == []


async def test_long_tools_are_refused_unrendered(start: Start) -> None:
    server = await model_that(start, "ok")
    for long in ({"description": "a" * 300_000}, {"parameters": {"enum": list(range(60_000))}}):
        answer = await server.chat(tools=[{"type": "function", "function": {"name": "f", **long}}])
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "maximum context length" in answer.error["message"]


async def test_models_without_tools_say_so(start: Start) -> None:
    server = await model_that(start, "ok", None)
    for asked in ({}, {"tool_choice": "auto"}):
        answer = await server.chat(tools=TOOLS, **asked)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "no place for tools" in answer.error["message"]
    assert (await server.chat(tools=TOOLS, tool_choice="none")).status == 200
    server = await start()  # a template that is no model's
    assert (await server.chat(tools=TOOLS)).status == 400


async def test_an_unknown_form_of_calls_is_no_guess(start: Start) -> None:
    from tool_chats import HEAD, TURNS

    from service.chat_template import ChatTemplate
    from service.tokenization import Tokenizer

    backend = tool_tokenizer().backend
    for setting, status in (("auto", 400), ("none", 400), ("hermes", 200)):
        tokenizer = Tokenizer(backend, {}, ChatTemplate(HEAD + TURNS), tool_call_format=setting)
        server = await start(model={"tokenizer": tokenizer})
        answer = await server.chat(tools=[CLOCK])
        assert answer.status == status
        if status == 400:
            assert "--tool-call-format" in answer.error["message"]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "tool", "content": "x"}], "$.messages[0]"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c1"}], "c1"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c2"}, {"role": "assistant", "tool_calls": [
            {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}], "c2"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "$.messages[0]"),
    ],
)  # fmt: skip
async def test_results_that_answer_no_call(start: Start, messages: list[Any], named: str) -> None:
    server = await model_that(start, "ok")
    answer = await server.post("/v1/chat/completions", {"messages": messages})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert named in answer.error["message"]


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize("thinks", ["by itself", "opened"])
async def test_reasoning_is_split_off(start: Start, thinks: Any) -> None:
    mark = "<think>\n" if thinks == "by itself" else ""
    server = await model_that(start, f"{mark}The fox?\n</think>\n\nThe dog.", None, thinks)
    whole = (await server.chat()).json
    message = whole["choices"][0]["message"]
    assert message == {
        "role": "assistant", "content": "The dog.", "reasoning_content": "The fox?", "reasoning": "The fox?",
    }  # fmt: skip
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    events = (await server.chat(**asked)).events
    streamed = put_together(events)
    assert (streamed["content"], streamed["reasoning_content"], streamed["reasoning"]) == (
        "The dog.", "The fox?", "The fox?",
    )  # fmt: skip
    reasoning = f"{mark}The fox?\n</think>"
    tokens = len(tool_tokenizer(None, thinks).encode(reasoning, add_special_tokens=False))
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] in (tokens, tokens + 1)
    assert events[-1]["usage"] == whole["usage"]


async def test_reasoning_that_is_not_wanted(start: Start) -> None:
    server = await model_that(start, "<think>a fox</think>The dog.", None, "by itself")
    whole = (await server.chat(include_reasoning=False)).json
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "The dog."}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    streamed = put_together((await server.chat(include_reasoning=False, stream=True)).events)
    assert ("reasoning" in streamed, streamed["content"]) == (False, "The dog.")


async def test_reasoning_then_calls(start: Start) -> None:
    server = await model_that(start, "The fox?</think>" + call_text("hermes", ROME), "hermes", "opened")
    whole = (await server.chat(tools=TOOLS)).json["choices"][0]
    streamed = put_together((await server.chat(tools=TOOLS, stream=True)).events)
    for message in (whole["message"], streamed):
        assert said(message) == (None, [ROME])
        assert message["reasoning_content"] == "The fox?"
    assert whole["finish_reason"] == "tool_calls"


async def test_reasoning_cut_short_is_all_reasoning(start: Start) -> None:
    server = await model_that(start, "The quick brown fox jumps</think>over", None, "opened")
    whole = (await server.chat(max_tokens=3)).json
    message = whole["choices"][0]["message"]
    assert (message["content"], whole["choices"][0]["finish_reason"]) == ("", "length")
    assert message["reasoning_content"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_a_model_without_reasoning_reports_none(server: Server) -> None:
    whole = (await server.chat()).json
    assert "completion_tokens_details" not in whole["usage"]
    assert set(whole["choices"][0]["message"]) == {"role", "content"}


async def test_answers_are_of_the_types_that_are_described(start: Start) -> None:
    text = "<think>a fox</think>The dog. " + call_text("hermes", ROME)
    server = await model_that(start, text, "hermes", "by itself")
    msgspec.json.decode((await server.chat(tools=TOOLS)).body, type=ChatCompletion)
    asked = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "return_token_ids": True}
    for event in (await server.chat(tools=TOOLS, **asked)).events:
        msgspec.convert(event, ChatCompletionEvent)
