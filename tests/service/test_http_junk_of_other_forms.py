"""C31 for /v1/responses and /v1/messages: every field with every kind of wrong value, and any JSON at all."""

import json
from typing import Any

import pytest
from examples import examples
from http_house import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk_values import VALUES, is_in

from service.anthropic_body import CountBody, MessagesBody
from service.decoding import fields
from service.responses_body import ResponsesBody
from service.schema import Body

TEXTS = ["x", "5", ""]
USER = [{"role": "user", "content": "the"}]
BODIES: dict[str, type[Body]] = {
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "the"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
}
SERVED: dict[str, dict[str, list[Any]]] = {
    "/v1/responses": {
        "input": ["x", "5"], "instructions": TEXTS, "max_output_tokens": [1], "temperature": [0, 1, 1.5], "top_p": [1],
        "text": [{}], "reasoning": [{}], "stream": [True, False], "cache_salt": ["x", "5"], "metadata": [{}],
        "store": [True, False], "user": TEXTS, "prompt_cache_key": TEXTS, "prompt_cache_retention": TEXTS,
        "service_tier": TEXTS, "safety_identifier": TEXTS, "tools": [[]], "parallel_tool_calls": [True, False],
        "top_logprobs": [0], "include": [[]], "background": [False],
    },
    "/v1/messages": {
        "system": [*TEXTS, []], "max_tokens": [1], "stop_sequences": [["x"], []], "temperature": [0, 1], "top_p": [1],
        "top_k": [-1, 0, 1, 2**31, 2**63, 10**12], "stream": [True, False], "metadata": [{}, {"a": {"b": []}}],
        "service_tier": TEXTS, "tools": [[]], "mcp_servers": [[]], "output_config": [{}],
    },
    "/v1/messages/count_tokens": {"system": [*TEXTS, []], "tools": [[]]},
}  # fmt: skip


@pytest.mark.parametrize("path", list(BODIES))
async def test_each_field_with_each_wrong_value(server: Server, path: str) -> None:
    for name in sorted(fields(BODIES[path])):
        for value in VALUES:
            answer = await server.post(path, GOOD[path] | {name: value})
            if is_in(value, SERVED[path].get(name, [])):
                assert answer.status == 200, (name, value, answer.body)
                continue
            expected = 404 if name == "model" and isinstance(value, str) else 400
            assert answer.status == expected, (name, value, answer.body)
            error = answer.json["error"]
            told = name in error["message"] or error.get("param") == name
            assert told or (name == "max_tokens" and "maximum context" in error["message"]), (name, value, answer.body)
    assert server.engine.lines == {}
    assert (await server.complete()).json["choices"][0]["text"] == " fox"


@pytest.mark.parametrize("path", list(BODIES))
async def test_null_means_the_default_everywhere(server: Server, path: str) -> None:
    assert (await server.post(path, dict.fromkeys(fields(BODIES[path])) | GOOD[path])).status == 200


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
anything = st.recursive(
    scalars | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
part = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "tool_use", "tool_result", "image"]) | anything},
    optional={
        "text": st.text(max_size=5),
        "tool_use_id": anything,
        "id": anything,
        "name": anything,
        "input": anything,
    },
)
item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | anything,
        "role": st.sampled_from(["user", "assistant", "system"]) | anything,
        "content": st.text(max_size=9) | st.none() | st.lists(part, max_size=3) | anything,
        "arguments": st.sampled_from(["{}", "[]", "x"]) | anything,
        "call_id": st.text(max_size=3),
        "name": st.text(max_size=3),
        "output": st.text(max_size=3) | anything,
    },
)


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Mostly good bodies with some fields of any value."""
    known = st.sampled_from(sorted(fields(BODIES[path])))
    items = st.lists(item, max_size=4) | anything
    base = st.fixed_dictionaries(
        {key: items if key in ("messages", "input") else st.just(value) for key, value in GOOD[path].items()}
    )
    return st.tuples(base, st.dictionaries(known, anything, max_size=4)).map(lambda both: both[1] | both[0])


@pytest.mark.parametrize("path", list(BODIES))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_no_body_gives_a_5xx(server: Server, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path) | anything)
    raw = json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    answer = await server.post(path, raw)
    assert answer.status in (200, 400, 404)
    if answer.status != 200:
        assert 0 < len(answer.json["error"]["message"]) <= 1000
