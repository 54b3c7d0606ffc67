"""What bodies are served and refused, and with which words (cases C15, C19, C20, C23-C25, C30, C32)."""

import gzip
import json
from typing import Any

import pytest
from http_house import MAX_LENGTH, Server, Start
from tiny_tokenizer import CONTROL, tiny_tokenizer

from model.step_plan import SamplingParameters
from service.tokenization import Tokenizer

BOTH = ["/v1/completions", "/v1/chat/completions"]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "the"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "the"}]}
    return prompt | fields


# ---------------------------------------------------------------- what reaches the engine


async def test_sampling_fields_reach_the_engine(server: Server) -> None:
    asked = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "seed": -1, "max_tokens": 9}
    for path in BOTH:
        assert (await server.post(path, body_for(path, **asked))).status == 200
        submit = server.engine.submitted[-1]
        assert submit.sampling == SamplingParameters(temperature=0.7, top_k=5, top_p=0.8, seed=2**64 - 1)
        assert submit.max_tokens == 9
        assert submit.end_ids == [2, 0]


async def test_defaults_are_the_models(server: Server) -> None:
    for fields in ({}, {"temperature": None, "top_p": None, "top_k": None, "seed": None}):
        await server.complete(**fields)
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 0.9)


async def test_requests_without_a_seed_draw_differently(server: Server) -> None:
    for _ in range(20):
        await server.complete()
    assert len({submit.sampling.seed for submit in server.engine.submitted}) == 20


@pytest.mark.parametrize(
    ("given", "top_k"), [(-1, 0), (0, 0), (1, 1), (tiny_tokenizer().vocabulary, 0), (10**9, 0), (10**30, 0)]
)
async def test_c23_top_k_off_or_too_large_is_off(server: Server, given: int, top_k: int) -> None:
    """C23."""
    assert (await server.complete(top_k=given)).status == 200
    assert server.engine.submitted[-1].sampling.top_k == top_k


@pytest.mark.parametrize(("given", "served"), [(0, 0.0), (1e-8, 0.0), (1e-5, 1e-5), (2, 2.0), (1, 1.0)])
async def test_c23_temperatures_near_zero_are_greedy(server: Server, given: float, served: float) -> None:
    assert (await server.complete(temperature=given)).status == 200
    assert server.engine.submitted[-1].sampling.temperature == served


@pytest.mark.parametrize(("seed", "served"), [(0, 0), (-1, 2**64 - 1), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63)])
async def test_c24_seeds_are_64_bits(server: Server, seed: int, served: int) -> None:
    """C24."""
    assert (await server.complete(seed=seed)).status == 200
    assert server.engine.submitted[-1].sampling.seed == served


async def test_add_special_tokens_and_control_tokens(server: Server) -> None:
    """C34: a completion may write control tokens; a chat cannot."""
    tokenizer = tiny_tokenizer()
    await server.complete(prompt=CONTROL[1])
    assert server.engine.submitted[-1].prompt_ids == [1]
    await server.chat("".join(CONTROL))
    ids = server.engine.submitted[-1].prompt_ids
    assert [ids.count(token) for token in (0, 1, 2)] == [0, 2, 1]
    assert tokenizer.decode(ids, False) == (
        "<|im_start|>user\n<|endoftext|><|im_start|><|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_request_ids(server: Server) -> None:
    """Echoed, made if absent or unfit for a header, overridden by the field."""
    answer = await server.complete()
    assert answer.json["id"] == "cmpl-" + answer.headers["X-Request-Id"]
    assert len(answer.headers["X-Request-Id"]) == 32
    chat = body_for("/v1/chat/completions")
    answer = await server.post("/v1/chat/completions", chat, headers={"X-Request-Id": "mine-1"})
    assert (answer.json["id"], answer.headers["X-Request-Id"]) == ("chatcmpl-mine-1", "mine-1")
    other = {"prompt": "the", "request_id": "other"}
    answer = await server.post("/v1/completions", other, headers={"X-Request-Id": "mine-1"})
    assert (answer.json["id"], answer.headers["X-Request-Id"]) == ("cmpl-other", "other")
    assert server.engine.submitted[-1].request_id == "other"
    for odd in ("a" * 129, "a b"):
        assert (await server.get("/version", headers={"X-Request-Id": odd})).headers["X-Request-Id"] != odd
        assert (await server.complete(request_id=odd)).error["param"] == "request_id"
    assert (await server.get("/nothing", headers={"X-Request-Id": "mine-2"})).headers["X-Request-Id"] == "mine-2"


async def test_no_body_is_told_apart_from_a_broken_one(server: Server) -> None:
    for path in (*BOTH, "/tokenize", "/v1/responses"):
        assert (await server.post(path, b"")).error["message"] == "the body is empty: a JSON object is needed."
    assert "not valid JSON" in (await server.post("/tokenize", b"{")).error["message"]


async def test_a_field_of_another_route_is_told_where_it_belongs(server: Server) -> None:
    for path, field, other in (
        ("/v1/completions", "messages", "/v1/chat/completions"),
        ("/v1/chat/completions", "prompt", "/v1/completions"),
        ("/v1/chat/completions", "input", "/v1/responses"),
        ("/v1/responses", "messages", "/v1/chat/completions"),
    ):
        error = (await server.post(path, {field: "the"})).error
        assert (error["message"], error["param"]) == (f"unknown field `{field}`. It belongs to {other}.", field)


async def test_models_by_name(server: Server) -> None:
    assert (await server.complete(model="org/tiny")).json["model"] == "org/tiny"
    assert (await server.complete(model=None)).json["model"] == "tiny"
    for path in ["/v1/completions", "/v1/chat/completions"]:
        answer = await server.post(path, body_for(path, model="gpt-4"))
        assert answer.status == 404
        assert answer.error["type"] == "NotFoundError"
        assert answer.error["param"] == "model"


async def test_who_asks_for_another_model_is_told_which_there_are(server: Server) -> None:
    """In every form of errors, and at most 200 characters of them."""
    chat, model = {"messages": [{"role": "user", "content": "the"}]}, {"model": "gpt-4"}
    answers = [
        await server.complete(**model),
        await server.chat(stream=True, **model),
        await server.post("/v1/responses", {"input": "the"} | model),
        await server.post("/v1/messages", chat | {"max_tokens": 5} | model),
        await server.post("/tokenize", {"prompt": "the"} | model),
        await server.get("/v1/models/gpt-4"),
    ]
    told = {(answer.status, answer.json["error"]["message"]) for answer in answers}
    assert told == {(404, "The model `gpt-4` does not exist: this server has `tiny`, `org/tiny`.")}


async def test_of_many_names_of_models_the_first_ones_are_told(start: Start) -> None:
    server = await start(model={"names": tuple(f"{i:03}" + "n" * 60 for i in range(300))})
    told = (await server.get("/v1/models/" + "x" * 300)).error["message"]
    assert "this server has `000nnn" in told
    assert "`002nnn" in told
    assert len(told) < 500


async def test_unused_fields_are_accepted(server: Server) -> None:
    asked = {
        "store": True, "metadata": {"a": [1]}, "user": "u", "prompt_cache_key": "k", "service_tier": "auto",
        "safety_identifier": "s", "verbosity": "low",
    }  # fmt: skip
    for path in BOTH:
        assert (await server.post(path, body_for(path, **asked))).status == 200


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("path", BOTH)
async def test_a_priority_needs_a_server_that_goes_by_it(start: Start, path: str) -> None:
    first_come = await start()
    answer = await first_come.post(path, body_for(path, priority=-1))
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", "priority")
    by_priority = await start(limits={"takes_priority": True})
    assert (await by_priority.post(path, body_for(path, priority=-1))).status == 200
    assert [submit.priority for submit in first_come.engine.submitted + by_priority.engine.submitted] == [-1]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (BOTH[0], "suffix", "x"), (BOTH[1], "chat_template", "x"),
    ],
)  # fmt: skip
async def test_fields_of_later_releases_are_refused_by_name(server: Server, path: str, field: str, value: Any) -> None:
    """A field that changes the result is never ignored in silence, and clients are told not to retry."""
    answer = await server.post(path, body_for(path, **{field: value}))
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "NotImplementedError", field)
    assert answer.headers["x-should-retry"] == "false"
    assert (await server.post(path, body_for(path, **{field: None}))).status == 200
    assert len(server.engine.submitted) == 1


async def test_neutral_values_are_accepted(server: Server) -> None:
    asked = {
        "n": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_tokens": 0,
        "typical_p": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
        "spaces_between_special_tokens": True, "truncation_side": "left",
        "response_format": {"type": "text"}, "priority": 0, "return_tokens_as_token_ids": False, "echo": False,
    }  # fmt: skip
    assert (await server.complete(**asked, best_of=1)).status == 200
    chat = {"logprobs": False, "top_logprobs": 0, "tool_choice": "auto", "parallel_tool_calls": True}
    assert (await server.chat(**asked, **chat, add_special_tokens=False, include_reasoning=True)).status == 200


async def test_unknown_fields_are_refused_with_the_nearest_name(server: Server) -> None:
    answer = await server.complete(temprature=0.1)
    assert (answer.status, answer.error["param"]) == (400, "temprature")
    assert "`temperature`" in answer.error["message"]
    for unlike in ("foo", "tokens", "timeout_seconds", "x_penalty_of_nothing"):
        assert "Did you mean" not in (await server.complete(**{unlike: 1})).error["message"], unlike
    answer = await server.complete(guided_json={})
    assert "structured_outputs" in answer.error["message"]
    answer = await server.complete(**{"x" * 100_000: 1})
    assert len(answer.error["message"]) < 500
    answer = await server.complete(stream=True, stream_options={"include_usages": True})
    assert answer.error["param"] == "stream_options"
    assert (await server.chat(prompt="x")).error["param"] == "prompt"


async def test_unknown_fields_may_be_ignored_by_a_setting(start: Start) -> None:
    server = await start(settings={"unknown_fields": "ignore"})
    answer = await server.complete(temprature=0.1, other=None)
    assert answer.status == 200
    assert answer.headers["X-Ignored-Fields"] == "temprature, other"
    assert "X-Ignored-Fields" not in (await server.complete()).headers
    # what is known is checked all the same, and a lost constraint is never ignored
    assert (await server.complete(temprature=0.1, top_p=3)).error["param"] == "top_p"
    assert (await server.complete(guided_regex="a+")).status == 400


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"top_p": 3}, "top_p", "(0, 1]"), ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"temperature": 2.5}, "temperature", "[0, 2]"), ({"temperature": 1e30}, "temperature", "[0, 2]"),
        ({"top_k": -2}, "top_k", "-2"), ({"top_k": 2.5}, "top_k", "int"), ({"top_k": "5"}, "top_k", "str"),
        ({"max_tokens": "16"}, "max_tokens", "`$.max_tokens`"), ({"max_tokens": 16.5}, "max_tokens", "number"),
        ({"max_tokens": 16.0}, "max_tokens", "number"), ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"seed": 2**64}, "seed", "64 bits"), ({"seed": "7"}, "seed", "str"),
        ({"n": 0}, "n", "1 to 64"), ({"n": 129}, "n", "1 to 64"), ({"n": 5_000_000}, "n", "1 to 64"),
        ({"stop": ""}, "stop", "`$.stop`"), ({"stop": ["a", ""]}, "stop", "`$.stop[1]`"),
        ({"stop": ["a", 1]}, "stop", "`$.stop[1]`"), ({"stop": ["a"] * 17}, "stop", "17"),
        ({"stop": ["a"] * 10_000}, "stop", "10000"), ({"stop": "a" * 2**20}, "stop", "1048576"),
        ({"stop_token_ids": [1] * 300_000}, "stop_token_ids", "300000"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": False, "stream_options": {}}, "stream_options", "stream"),
        ({"stream": 1}, "stream", "int"),
        ({"cache_salt": ""}, "cache_salt", "1 to 128"), ({"cache_salt": "x" * 129}, "cache_salt", "1 to 128"),
        ({"cache_salt": "a@b"}, "cache_salt", "@"), ({"cache_salt": "a/b"}, "cache_salt", "/"),
        ({"cache_salt": "a\\b"}, "cache_salt", "NUL"), ({"cache_salt": "a\0b"}, "cache_salt", "NUL"),
        ({"cache_salt": 1}, "cache_salt", "int"), ({"prefix_cache": "no"}, "prefix_cache", "str"),
        ({"return_cache_info": 1}, "return_cache_info", "int"),
    ],
)  # fmt: skip
async def test_values_out_of_range(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    for path in BOTH:
        answer = await server.post(path, body_for(path, **fields))
        assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", param)
        assert words in answer.error["message"]
    assert server.engine.submitted == []


VOCABULARY = tiny_tokenizer().vocabulary


@pytest.mark.parametrize("bad", [VOCABULARY, VOCABULARY + 1, -1, 10**18, 2**63, "12", "abc", 1.5, True])
async def test_c25_ids_out_of_the_vocabulary(server: Server, bad: Any) -> None:
    """C25: refused before the engine sees them, with the place."""
    for fields, param in (
        ({"prompt": [1, bad]}, "prompt"),
        ({"prompt": [[1], [1, bad]]}, "prompt"),
        ({"stop_token_ids": [1, bad]}, "stop_token_ids"),
        ({"stop_token_ids": [1, bad], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [1, bad]}, "allowed_token_ids"),
    ):
        answer = await server.complete(**fields)
        assert (answer.status, answer.error["param"]) == (400, param)
    answer = await server.post("/detokenize", {"tokens": [1, bad]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")
    assert server.engine.submitted == []


async def test_c25_ids_at_the_edge_of_the_vocabulary(server: Server) -> None:
    top = VOCABULARY - 1
    assert (await server.complete(prompt=[0, top], stop_token_ids=[top])).status == 200
    answer = await server.complete(prompt=[[1], [1, VOCABULARY]])
    assert "`$.prompt[1][1]`" in answer.error["message"]


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
async def test_empty_prompts_are_refused_by_one_rule(server: Server, prompt: Any) -> None:
    """C19."""
    answer = await server.complete(prompt=prompt)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert "must not be empty" in answer.error["message"]
    assert server.engine.submitted == []


@pytest.mark.parametrize("prompt", ["\0", " ", "\n\t ", "\u202e"])
async def test_odd_but_not_empty_prompts_are_served(server: Server, prompt: str) -> None:
    assert (await server.complete(prompt=prompt)).status == 200
    assert tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids, False) == prompt
    assert (await server.chat(prompt)).status == 200


async def test_missing_and_mixed_prompts(server: Server) -> None:
    for prompt in (None, ["a", 1], [1, "a"], [[1], 1], ["a", [1]], [1, [1]], {}, 1, True, [True], [1.0], [["a"]]):
        answer = await server.complete(prompt=prompt)
        assert (answer.status, answer.error["param"]) == (400, "prompt"), prompt
    assert (await server.post("/v1/completions", {})).error["param"] == "prompt"


async def test_number_of_prompts_is_limited(server: Server) -> None:
    assert (await server.complete(prompt=["a"] * 1025)).error["param"] == "prompt"
    assert (await server.complete(prompt=["a"] * 100_000)).error["param"] == "prompt"
    answer = await server.complete(prompt=["a"] * 1024, max_tokens=1)
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(1024))


async def test_one_text_that_cannot_fit_spares_the_others_the_encoding(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode_async

    async def noted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        encoded.append(text)
        return await encode(self, text, **more)

    monkeypatch.setattr("service.tokenization.Tokenizer.encode_async", noted)
    long = "a b " * MAX_LENGTH
    answer = await server.complete(prompt=["a", long, *["b"] * 1000], max_tokens=1)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert encoded == ["a", long]


async def test_an_echo_alone_takes_a_step_and_its_refusal_says_so(server: Server) -> None:
    answer = await server.complete(prompt=[5] * MAX_LENGTH, max_tokens=0, echo=True)
    assert f"({MAX_LENGTH} in the prompt, 1 for the step that an echo takes)" in answer.error["message"]
    assert (await server.complete(prompt=[5] * (MAX_LENGTH - 1), max_tokens=0, echo=True)).status == 200


async def test_a_hopeless_text_is_refused_before_it_is_tokenized(server: Server, monkeypatch: Any) -> None:
    """C30, C43: 20 MB cost no tokenizer's time."""

    async def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr("service.tokenization.Tokenizer.encode_async", never)
    monkeypatch.setattr("service.tokenization.Tokenizer.render_chat_async", never)
    huge = "x" * 20_000_000
    for answer, param in (
        (await server.complete(prompt=huge), "prompt"),
        (await server.complete(prompt=huge, truncate_prompt_tokens=5), "prompt"),
        (await server.chat(huge), "messages"),
        (await server.post("/tokenize", {"prompt": huge}), "prompt"),
    ):
        assert (answer.status, answer.error["param"]) == (400, param)
        assert f"maximum context length is {MAX_LENGTH} tokens" in answer.error["message"]


async def test_more_messages_than_tokens_are_refused(server: Server) -> None:
    message = {"role": "user", "content": ""}
    answer = await server.post("/v1/chat/completions", {"messages": [message] * (MAX_LENGTH + 1)})
    assert answer.status == 400
    assert f"maximum context length is {MAX_LENGTH} tokens" in answer.error["message"]
    assert "513 messages" in answer.error["message"]
    assert answer.error["param"] == "messages"


async def test_a_chat_that_is_too_long_by_itself_is_the_messages_fault(server: Server) -> None:
    answer = await server.chat("a " * MAX_LENGTH, max_tokens=5)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "maximum context length" in answer.error["message"]


# ---------------------------------------------------------------- lengths (C15, C20)


@pytest.mark.parametrize("prompt", [MAX_LENGTH - 2, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1])
@pytest.mark.parametrize("asked", [None, 1, 2])
async def test_completions_at_the_length_limit(server: Server, prompt: int, asked: int | None) -> None:
    answer = await server.complete(prompt=[5] * prompt, max_tokens=asked, ignore_eos=True)
    needed = prompt + (1 if asked is None else asked)
    if needed <= MAX_LENGTH:
        usage = answer.json["usage"]
        assert usage["completion_tokens"] == (asked or min(16, MAX_LENGTH - prompt))
        assert usage["total_tokens"] <= MAX_LENGTH
        assert answer.json["choices"][0]["finish_reason"] == "length"
    else:
        blamed = "max_tokens" if prompt < MAX_LENGTH else "prompt"
        assert (answer.status, answer.error["param"]) == (400, blamed)
        for words in (f"maximum context length is {MAX_LENGTH} tokens. However, you requested {needed}", str(prompt)):
            assert words in answer.error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("over", [-1, 0, 1, 10**12])
async def test_chat_at_the_length_limit(server: Server, field: str, over: int) -> None:
    body = body_for("/v1/chat/completions")
    prompt = (await server.post("/tokenize", body)).json["count"]
    asked = MAX_LENGTH - prompt + over
    answer = await server.chat(**{field: asked}, ignore_eos=True)
    if over <= 0:
        assert answer.json["usage"]["completion_tokens"] == asked
        assert answer.json["usage"]["total_tokens"] == MAX_LENGTH + over
    else:
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        assert str(prompt + asked) in answer.error["message"]


async def test_chat_takes_the_rest_of_the_window(server: Server) -> None:
    answer = await server.chat(ignore_eos=True)
    assert answer.json["usage"]["total_tokens"] == MAX_LENGTH
    assert answer.json["choices"][0]["finish_reason"] == "length"
    answer = await server.chat(max_completion_tokens=3, max_tokens=5, ignore_eos=True)
    assert answer.json["usage"]["completion_tokens"] == 3


async def test_types_are_named_in_words_of_json(server: Server) -> None:
    answer = await server.complete(max_tokens=100.0)
    assert answer.error["message"] == "Expected integer or null, got number - at `$.max_tokens`"


async def test_what_the_whole_pool_cannot_hold_is_refused(start: Start) -> None:
    """C15: with both numbers; absent max_tokens takes what the pool has; small requests go on."""
    server = await start(limits={"max_request_tokens": 100})
    for fields, needed in (({"prompt": [5] * 101}, 102), ({"prompt": [5] * 10, "max_tokens": 91}, 101)):
        answer = await server.complete(**fields)
        assert answer.status == 400
        assert "100 tokens" in answer.error["message"]
        assert str(needed) in answer.error["message"]
    assert (await server.chat(ignore_eos=True)).json["usage"]["total_tokens"] == 100
    assert (await server.complete(prompt=[5] * 10, max_tokens=90)).status == 200


# ---------------------------------------------------------------- odd text (C30)


@pytest.mark.parametrize("lone", [r"\ud83d y", r"\udc00", r"\ud83d\ud83d", r"\ud83dA"])
@pytest.mark.parametrize(
    ("template", "param"),
    [
        ('{"prompt": "x LONE"}', "prompt"), ('{"prompt": ["a", "LONE"]}', "prompt"),
        ('{"prompt": "a", "stop": ["LONE"]}', "stop"), ('{"prompt": "a", "model": "LONE"}', "model"),
        ('{"prompt": "a", "user": "LONE"}', "user"), ('{"prompt": "a", "metadata": {"LONE": 1}}', "metadata"),
    ],
)  # fmt: skip
async def test_lone_surrogates_are_refused_by_name(server: Server, template: str, param: str, lone: str) -> None:
    answer = await server.post("/v1/completions", template.replace("LONE", lone).encode())
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "surrogate" in answer.error["message"]


@pytest.mark.parametrize(
    "message",
    [
        '{"role": "user", "content": "LONE"}', '{"role": "LONE", "content": ""}',
        '{"role": "user", "name": "LONE", "content": ""}',
        '{"role": "user", "content": [{"type": "text", "text": "LONE"}]}',
        '{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "LONE"}}]}',
    ],
)  # fmt: skip
async def test_lone_surrogates_in_messages(server: Server, message: str) -> None:
    body = '{"messages": [MESSAGE], "stream": true}'.replace("MESSAGE", message.replace("LONE", r"\ud83d "))
    answer = await server.post("/v1/chat/completions", body.encode())
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_surrogates_hidden_in_a_string_of_json(server: Server) -> None:
    arguments = json.dumps({"x": "\ud83d"})
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    answer = await server.post("/v1/chat/completions", {"messages": [message]})
    assert (answer.status, answer.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"prompt": "a"', b"[]", b"null", b"1", b'"a"', b'{"prompt": "\xff\xfe"}', b"\xff",
        b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a"} x', b"{'prompt': 'a'}", b'{"temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "temperature": -Infinity}', b'{"prompt": "a\nb"}',
        b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"user": ' + b'{"a":' * 90_000 + b"}", b"\0" * 1000,
        b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "a", "zz": ' + b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}", b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}",
        b'{"prompt": "\\ud800", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)  # fmt: skip
async def test_bodies_that_are_no_json_of_ours(server: Server, body: bytes) -> None:
    for path in (*BOTH, "/tokenize", "/detokenize"):
        answer = await server.post(path, body)
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError")


async def test_the_last_of_duplicate_keys_counts(server: Server) -> None:
    answer = await server.post("/v1/completions", b'{"prompt": "a", "max_tokens": 0, "max_tokens": 1}')
    assert answer.json["usage"]["completion_tokens"] == 1


async def test_long_words_are_served(start: Start) -> None:
    """2 MB of one letter: off the loop, in bounded time (it is about the answer, not the time, here)."""
    server = await start(limits={"max_model_len": 3_000_000, "max_request_tokens": 3_000_000})
    for prompt in ("x" * 300_000, "\U0001fae0" * 50_000):
        answer = await server.complete(prompt=prompt, max_tokens=1)
        assert answer.json["usage"]["prompt_tokens"] > 1000


async def test_compressed_bodies_are_refused_unread(server: Server) -> None:
    for body in (gzip.compress(b'{"prompt": "the"}'), b"not gzip at all", gzip.compress(b"x" * 50_000_000)):
        answer = await server.post("/v1/completions", body, headers={"Content-Encoding": "gzip"})
        assert (answer.status, answer.error["type"]) == (415, "UnsupportedMediaType")
    assert (
        await server.post("/v1/completions", {"prompt": "a"}, headers={"Content-Encoding": "identity"})
    ).status == 200


# ---------------------------------------------------------------- messages (C32)

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": "a"}, "a"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "user", "content": []}, ""), ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": None}, ""),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "content": "a", "tool_calls": []}, "a"),
        ({"role": "assistant", "content": "a", "parsed": {"x": 1}}, "a"),
        ({"role": "assistant", "content": "a", "refusal": None, "annotations": None, "audio": None,
          "function_call": None, "tool_calls": None}, "a"),
        ({"role": "system", "content": "a", "name": "n"}, "a"),
    ],
)  # fmt: skip
async def test_message_shapes_that_are_served(server: Server, message: dict[str, Any], content: str) -> None:
    answer = await server.post("/v1/chat/completions", {"messages": [message, message], "max_tokens": 1})
    assert answer.status == 200
    turn = f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    expected = turn * 2 + "<|im_start|>assistant\n"
    assert tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids, False) == expected


async def test_developer_is_system_where_the_template_lacks_it(server: Server) -> None:
    await server.post("/v1/chat/completions", {"messages": [{"role": "developer", "content": "a"}]})
    assert tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids, False).startswith("<|im_start|>system\na")


@pytest.mark.parametrize(
    "messages",
    [
        [], None, {}, "x", [1], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "function", "content": "x"}], [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}],
        [{"role": "assistant"}], [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"image_url": {"url": "x"}, "type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": "x", "nmae": "y"}],
        [{"role": "tool", "content": "x"}], [{"role": "tool", "content": "x", "tool_call_id": "call_1"}],
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 1}}}]}],
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "not json"}}]}],
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[" * 100_000}}]}],
        [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
    ],
)  # fmt: skip
async def test_message_shapes_that_are_refused(server: Server, messages: Any) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await server.post(path, {"messages": messages})
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
        assert answer.error["param"] == ("messages" if path != "/tokenize" or messages is not None else "prompt")
    assert server.engine.submitted == []


async def test_a_templates_own_refusal_is_passed_on(server: Server) -> None:
    answer = await server.chat("refuse me")
    assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
    assert "never" in answer.error["message"]


async def test_a_model_without_a_template_says_so(start: Start) -> None:
    server = await start(model={"tokenizer": tiny_tokenizer(with_template=False)})
    answer = await server.chat()
    assert answer.status == 400
    assert "no chat template" in answer.error["message"]
    assert (await server.complete()).status == 200


async def test_prompts_that_go_on_with_the_last_message(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await server.post("/v1/chat/completions", asked)).status == 200
    text = tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids, False)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    for other in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": None}):
        answer = await server.post(
            "/v1/chat/completions", {"messages": messages, "continue_final_message": True} | other
        )
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")


async def test_template_variables(server: Server) -> None:
    assert (await server.chat(chat_template_kwargs={"thinking": True})).status == 200
    for reserved in ("messages", "tools", "add_generation_prompt"):
        answer = await server.chat(chat_template_kwargs={reserved: []})
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")


# ---------------------------------------------------------------- tokenizer routes


async def test_tokenize_and_back(server: Server) -> None:
    text = "the quick\0 fox \U0001fae0"
    answer = (await server.post("/tokenize", {"prompt": text, "return_token_strs": True})).json
    assert answer["max_model_len"] == MAX_LENGTH
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert (await server.post("/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": text}
    assert (await server.post("/tokenize", {"prompt": "a"})).json["token_strs"] is None
    assert (await server.post("/tokenize", {"prompt": ""})).json["tokens"] == []
    assert (await server.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_tokenize_gives_what_a_chat_begins_with(server: Server) -> None:
    body = body_for("/v1/chat/completions")
    ids = (await server.post("/tokenize", body)).json["tokens"]
    await server.post("/v1/chat/completions", body)
    assert server.engine.submitted[-1].prompt_ids == ids


async def test_tokenize_needs_one_of_two(server: Server) -> None:
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        assert (await server.post("/tokenize", body)).error["param"] == "prompt"
    assert (await server.post("/tokenize", {"prompt": "a", "model": "x"})).status == 404
    assert (await server.post("/detokenize", {})).error["param"] == "tokens"


async def test_tokenizer_info(server: Server) -> None:
    info = (await server.get("/tokenizer_info")).json
    assert {"tokenizer_class", "eos_token", "bos_token", "pad_token", "chat_template"} <= set(info)
    assert info["eos_token"] == "<|im_end|>"
