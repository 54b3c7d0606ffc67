"""The description of the API is true: of every route, of the bounds of every field, and of real answers."""

import json
import re
from typing import Any, get_type_hints

import jsonschema
import msgspec
import pytest
from http_events import named_events
from http_house import Server, Start, says

from service import answer_types
from service.anthropic_body import PromptBody
from service.api import ROUTES
from service.decoding import decode
from service.errors import BadRequest, ErrorBody
from service.openapi import BODIES, BODY_RANGES, LEFT_OUT, OPERATIONS, RANGES, REQUIRED, document
from service.responses_body import ResponsesBody
from service.schema import Body, ChatBody, CompletionBody, TokenizeBody

API: dict[str, Any] = json.loads(document("1.2.3"))
GOOD: dict[str, dict[str, Any]] = {
    "CompletionBody": {"prompt": "a"},
    "ChatBody": {"messages": [{"role": "user", "content": "a"}]},
    "TokenizeBody": {"prompt": "a"},
    "DetokenizeBody": {"tokens": [1]},
    "ResponsesBody": {"input": "a"},
    "MessagesBody": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "CountBody": {"messages": [{"role": "user", "content": "a"}]},
    "ForkBody": {},
}
NEEDS: dict[str, dict[str, Any]] = {
    "beam_width": {"use_beam_search": True}, "length_penalty": {"use_beam_search": True},
    "min_tokens": {"max_tokens": 2**63 - 1},
}  # fmt: skip
"""What a field needs beside it."""


# ---------------------------------------------------------------- the description


def test_every_route_is_described_and_nothing_else() -> None:
    routes = {(method, path.replace("{id:.+}", "{id}")): access for method, path, _, access in ROUTES}
    assert set(routes) == set(OPERATIONS)
    for key, access in routes.items():
        assert OPERATIONS[key].is_open == (access == "open"), key


def test_schemas_are_schemas_and_references_lead_somewhere() -> None:
    components = API["components"]["schemas"]
    for schema in components.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(API)):
        assert name in components
    names = [operation["operationId"] for methods in API["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_every_open_struct_of_a_body_refuses_unknown_fields() -> None:
    for body in BODIES:
        assert API["components"]["schemas"][body.__name__]["additionalProperties"] is False


async def test_it_is_served_and_printed(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    from service.__main__ import run

    server = await start(settings={"api_keys": ("k",)})
    assert (await server.get("/openapi.json")).json == API
    assert run(["openapi"]) == 0
    assert json.loads(capsys.readouterr().out)["paths"] == API["paths"]


async def test_a_server_without_keys_asks_for_none(server: Server) -> None:
    """Its description, too: a tool that goes by it finds no door that ought to be closed."""
    served = (await server.get("/openapi.json")).json
    for path, methods in served["paths"].items():
        for method, operation in methods.items():
            described = API["paths"][path][method]
            answers = {status: answer for status, answer in described["responses"].items() if status != "401"}
            assert operation == described | {"security": [], "responses": answers}, (method, path)


async def test_the_page_works_offline_and_runs_its_own_script_only(server: Server) -> None:
    answer = await server.get("/docs")
    assert answer.headers["Content-Type"].startswith("text/html")
    policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    page = answer.body.decode()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert not re.search(r"\son\w+=|style=|innerHTML", page)


# ---------------------------------------------------------------- bounds


def bounds_of(body: type[Body]) -> dict[str, dict[str, Any]]:
    found = {name: dict(bounds) for name, bounds in RANGES.items() if name in body.__struct_fields__}
    found |= {name: dict(bounds) for name, bounds in BODY_RANGES.get(body.__name__, {}).items()}
    return {name: bounds for name, bounds in found.items() if name not in LEFT_OUT.get(body.__name__, ())}


def edges(bounds: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values just within, and just outside."""
    within: list[Any] = []
    outside: list[Any] = []
    for name, value in bounds.items():
        match name:
            case "minimum":
                within.append(value)
                outside.append(value - 1)
            case "maximum":
                within.append(value)
                outside.append(value + 1)
            case "exclusiveMinimum":
                outside.append(value)
            case "maxProperties":
                within.append({str(i): 0 for i in range(value)})
                outside.append({str(i): 0 for i in range(value + 1)})
            case "pattern":
                within += ["a", "a" * 128]
                outside += ["", "a" * 129]
    return within, outside


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bounds_are_those_that_are_checked(body: type[Body]) -> None:
    good = GOOD[body.__name__]
    for field, bounds in bounds_of(body).items():
        within, outside = edges(bounds)
        beside = {name: value for name, value in NEEDS.get(field, {}).items() if name in body.__struct_fields__}
        for value in outside:
            with pytest.raises(BadRequest) as refused:
                check(body, good | beside | {field: value})
            assert refused.value.param == field, (field, value)
        for value in within:
            extra = {"echo": True} if (field, value) == ("max_tokens", 0) else {}
            extra |= {"min_tokens": 0} if field == "max_tokens" else {}
            extra = {name: of for name, of in extra.items() if name in body.__struct_fields__}
            if field == "truncate_prompt_tokens" and value == 0:
                continue
            check(body, good | beside | extra | {field: value})


def check(body: type[Body], fields: dict[str, Any]) -> None:
    decoded, _ = decode(json.dumps(fields).encode(), body)
    if isinstance(decoded, CompletionBody):
        decoded.prompts()  # that there is one is seen here
    if isinstance(decoded, ResponsesBody | PromptBody):
        decoded.chat()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_lists_have_the_bounds_that_are_checked(body: type[Body]) -> None:
    items: dict[str, Any] = {"stop_sequences": "x", "stop_token_ids": 1, "bad_words": "x"}
    for field, item in items.items():
        if field in body.__struct_fields__:
            most = RANGES[field]["maxItems"]
            check(body, GOOD[body.__name__] | {field: [item] * most})
            with pytest.raises(BadRequest, match="at most"):
                check(body, GOOD[body.__name__] | {field: [item] * (most + 1)})


@pytest.mark.parametrize("body", [body for body in BODIES if "tools" in body.__struct_fields__])
def test_tools_have_the_bounds_that_are_checked(body: type[Body]) -> None:
    def tools(count: int) -> list[Any]:
        if body is ChatBody or body is TokenizeBody:
            return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
        kind = {"input_schema": {}} if issubclass(body, PromptBody) else {"type": "function"}
        return [{"name": f"f{i}", **kind} for i in range(count)]

    good = GOOD[body.__name__] if body is not TokenizeBody else GOOD["ChatBody"]
    bounds = bounds_of(body)["tools"]
    for count in (bounds.get("minItems", 0), bounds["maxItems"]):
        check(body, good | {"tools": tools(count)})
    for count in [bounds["maxItems"] + 1] + [0] * ("minItems" in bounds):
        with pytest.raises(BadRequest, match="1 to 128"):
            check(body, good | {"tools": tools(count)})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_required_fields_are_required(body: type[Body]) -> None:
    for field in REQUIRED.get(body.__name__, ()):
        rest = {name: value for name, value in GOOD[body.__name__].items() if name != field}
        for fields in (rest, rest | {field: None}):
            with pytest.raises(BadRequest) as refused:
                check(body, fields)
            assert refused.value.param == field


# ---------------------------------------------------------------- answers

PROMPT, MESSAGES = {"prompt": ["the", "a"], "max_tokens": 20}, {"messages": [{"role": "user", "content": "the"}]}
WISHES: dict[str, Any] = {"return_token_ids": True, "return_cache_info": True, "n": 2, "seed": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    ("/v1/completions", PROMPT | WISHES | {"logprobs": 2, "echo": True, "stop": [" fox"]}),
    ("/v1/completions", PROMPT | {"max_tokens": 1}),
    ("/v1/chat/completions", MESSAGES),
    ("/v1/chat/completions", MESSAGES | WISHES | {"logprobs": True, "top_logprobs": 2, "stop": [" fox"]}),
    ("/v1/responses", {"input": "the", "instructions": "x", "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "the", "max_output_tokens": 1, "temperature": 0.5, "reasoning": {}}),
    ("/v1/messages", MESSAGES | {"max_tokens": 20}),
    ("/v1/messages", MESSAGES | {"max_tokens": 20, "stop_sequences": [" fox"]}),
]


def strict(data: bytes | str, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_answers_and_events_are_as_described(server: Server, path: str, body: dict[str, Any]) -> None:
    """Decoded by the types that the description is made from: no field too many, none missing, none of another type."""
    server.engine.script = says(" quick \U0001fae0 fox")
    operation = OPERATIONS["POST", path]
    answer = await server.post(path, body)
    assert answer.status == 200, answer.body
    strict(answer.body, operation.answer)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if "compl" in path else {}
    streamed = await server.post(path, body | {"stream": True} | usage)
    assert streamed.status == 200, streamed.body
    if "completions" in path:
        for event in streamed.events:
            strict(json.dumps(event), operation.event)
    else:
        for _, data in named_events(streamed.body):
            strict(json.dumps(data), operation.event)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answers_with_scores_of_the_prompt(server: Server, path: str) -> None:
    body = (PROMPT if path == "/v1/completions" else MESSAGES) | {"prompt_logprobs": 2, "return_token_ids": True}
    strict((await server.post(path, body)).body, OPERATIONS["POST", path].answer)


async def test_the_other_answers(start: Start) -> None:
    import asyncio

    server = await start(engine={"is_manual": True})
    running = asyncio.create_task(server.complete())
    await server.until(lambda: len(server.engine.lines) == 1)
    request_id = server.engine.submitted[0].request_id
    for (method, path), operation in OPERATIONS.items():
        if operation.body is None and operation.answer is not None and operation.media_type == "application/json":
            found = path.replace("{id}", "tiny" if "models" in path else request_id)
            answer = await server.ask(method, found)
            assert answer.status == 200, path
            strict(answer.body, operation.answer)
    assert (await running).status == 503  # it was deleted on the way
    for path, body in (
        ("/tokenize", {"prompt": "the", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", MESSAGES),
    ):
        strict((await server.post(path, body)).body, OPERATIONS["POST", path].answer)


async def test_errors_are_as_described(server: Server) -> None:
    for path in ("/v1/completions", "/nothing", "/v1/responses"):
        strict((await server.post(path, b"{")).body, ErrorBody)
    strict((await server.post("/v1/messages", b"{")).body, answer_types.AnthropicError)


def test_types_of_answers_are_strict() -> None:
    for kind in vars(answer_types).values():
        if isinstance(kind, type) and issubclass(kind, answer_types.Answered):
            assert kind.__struct_config__.forbid_unknown_fields, kind
            assert get_type_hints(kind) is not None
