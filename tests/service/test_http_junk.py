"""C31: every field with every kind of wrong value, and any JSON at all. An answer below 500, and an engine unharmed."""

import json
from typing import Any

import pytest
from examples import examples
from http_house import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk_values import VALUES, is_in

from service.decoding import fields
from service.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

TEXTS = ["x", "5", ""]
UNUSED: dict[str, list[Any]] = {
    "store": [True, False], "metadata": [{}, {"a": {"b": []}}], "user": TEXTS, "prompt_cache_key": TEXTS,
    "service_tier": TEXTS, "safety_identifier": TEXTS, "verbosity": TEXTS,
}  # fmt: skip
LARGE = [2**31, 2**63, 10**12]
NUMBERS: dict[str, list[Any]] = {
    "temperature": [0, 1, 1.5], "top_p": [1], "top_k": [-1, 0, 1, *LARGE], "min_p": [0, 1], "typical_p": [1],
    "presence_penalty": [-1, 0, 1, 1.5], "frequency_penalty": [-1, 0, 1, 1.5], "repetition_penalty": [1, 1.5, *LARGE],
    "min_tokens": [0, 1], "timeout_s": [1, 1.5, *LARGE], "prompt_logprobs": [0, 1],
    "truncate_prompt_tokens": [-1, 1, *LARGE], "priority": [0], "length_penalty": [1],
}  # fmt: skip
FLAGS: dict[str, list[Any]] = {
    "include_stop_str_in_output": [True, False], "ignore_eos": [True, False], "skip_special_tokens": [True, False],
    "stream": [True, False], "return_token_ids": [True, False], "prefix_cache": [True, False],
    "return_cache_info": [True, False], "return_tokens_as_token_ids": [True, False], "use_beam_search": [True, False],
    "early_stopping": [False], "spaces_between_special_tokens": [True],
}  # fmt: skip
SHARED: dict[str, list[Any]] = {
    "n": [1], "max_tokens": [1], "seed": [-1, 0, 1, 2**31, 10**12], "stop": ["x", "5", ["x"], []],
    "stop_token_ids": [[], [1]], "logit_bias": [{}], "allowed_token_ids": [[1]], "bad_words": [[], ["x"]],
    "request_id": ["x", "5"], "cache_salt": ["x", "5"], **NUMBERS, **FLAGS, **UNUSED,
}  # fmt: skip
SERVED: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": SHARED
    | {
        "prompt": ["x", "5", [1], ["x"]], "add_special_tokens": [True, False], "best_of": [1], "logprobs": [0, 1],
        "echo": [True, False],
    },
    "/v1/chat/completions": SHARED
    | {
        "max_completion_tokens": [1], "chat_template_kwargs": [{}, {"a": {"b": []}}], "logprobs": [True, False],
        "add_generation_prompt": [True, False], "continue_final_message": [False], "top_logprobs": [0],
        "parallel_tool_calls": [True, False], "add_special_tokens": [True, False], "include_reasoning": [True, False],
        "echo": [False],
    },
    "/tokenize": {
        "prompt": ["x", "5", ""], "add_special_tokens": [True, False], "return_token_strs": [True, False],
        "add_generation_prompt": [True, False], "continue_final_message": [True, False],
        "chat_template_kwargs": [{}, {"a": {"b": []}}],
    },
    "/detokenize": {"tokens": [[], [1]]},
}  # fmt: skip
BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/tokenize": TokenizeBody,
          "/detokenize": DetokenizeBody}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_each_field_with_each_wrong_value(server: Server, path: str) -> None:
    """Accepted where the table says so, else a 400 (404 for the model) that names the field."""
    for name in sorted(fields(BODIES[path])):
        for value in VALUES:
            answer = await server.post(path, GOOD[path] | {name: value})
            if is_in(value, SERVED[path].get(name, [])):
                assert answer.status == 200, (name, value, answer.body)
                continue
            expected = 404 if name == "model" and isinstance(value, str) else 400
            assert answer.status == expected, (name, value, answer.body)
            named = {
                ("/tokenize", "messages"): (name, "prompt"),  # they exclude each other
                ("/v1/chat/completions", "max_completion_tokens"): (name, "max_tokens"),  # as the length rule says
            }.get((path, name), (name,))
            assert answer.error["param"] in named, (name, value, answer.body)
    assert server.engine.lines == {}
    assert (await server.complete()).json["choices"][0]["text"] == " fox"


@pytest.mark.parametrize("path", list(BODIES))
async def test_each_field_with_numbers_that_are_none(server: Server, path: str) -> None:
    for name in sorted(fields(BODIES[path])):
        for literal in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "1.", "0x10", "9" * 400):
            good = json.dumps({key: value for key, value in GOOD[path].items() if key != name})
            body = good[:-1] + ("," if len(good) > 2 else "") + f'"{name}":{literal}}}'
            answer = await server.post(path, body.encode())
            if literal != "9" * 400:
                assert (answer.status, answer.error["type"]) == (400, "BadRequestError"), (name, literal)
            elif name in ("top_k", "truncate_prompt_tokens"):
                assert answer.status == 200
            else:  # JSON, if a large number
                assert (answer.status, len(answer.error["message"]) < 400) == (400, True), name


@pytest.mark.parametrize("path", list(BODIES))
async def test_null_means_the_default_everywhere(server: Server, path: str) -> None:
    nulls = dict.fromkeys(fields(BODIES[path]))
    answer = await server.post(path, nulls | GOOD[path])
    assert answer.status == 200
    default = await server.post(path, GOOD[path])
    for body in (answer.json, default.json):
        for volatile in ("id", "created"):
            body.pop(volatile, None)
    if "completions" in path:
        first, second = server.engine.submitted
        assert (first.max_tokens, first.end_ids) == (second.max_tokens, second.end_ids)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
anything = st.recursive(
    scalars | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"]) | anything,
        "content": st.text(max_size=9)
        | st.none()
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=3)
        | anything,
        "name": anything,
        "tool_calls": anything,
        "tool_call_id": st.text(max_size=3),
    },
)


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Mostly good bodies with some fields of any value."""
    known = st.sampled_from(sorted(fields(BODIES[path])))
    good = {"messages": st.lists(message, max_size=4) | anything, "prompt": st.text(max_size=9) | anything}
    base = st.fixed_dictionaries({key: good.get(key, st.just(value)) for key, value in GOOD[path].items()})
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
        assert answer.error["message"]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60), path=st.sampled_from(list(BODIES)))
async def test_no_bytes_give_a_5xx(server: Server, raw: bytes, path: str) -> None:
    assert (await server.post(path, raw)).status == 400
