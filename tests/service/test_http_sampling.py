"""Sampling fields, bounds of length, echo and truncation over HTTP (cases C23-C25, C27): what reaches the engine."""

from typing import Any

import pytest
from http_events import ends, joined
from http_house import MAX_LENGTH, Server, Start, says
from tiny_tokenizer import END, tiny_tokenizer

from model.step_plan import SamplingParameters

BOTH = ["/v1/completions", "/v1/chat/completions"]
VOCABULARY = tiny_tokenizer().vocabulary
MODELS_OWN = SamplingParameters(temperature=0.5, top_k=40, top_p=0.9, repetition_penalty=1.2)


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "the"} if path == BOTH[0] else {"messages": [{"role": "user", "content": "the"}]}
    return prompt | fields


async def sampling(server: Server, path: str = BOTH[0], **fields: Any) -> SamplingParameters:
    answer = await server.post(path, body_for(path, **fields))
    assert answer.status == 200, answer.body
    return server.engine.submitted[-1].sampling


# ---------------------------------------------------------------- what reaches the engine


@pytest.mark.parametrize("path", BOTH)
async def test_every_field_reaches_the_engine(server: Server, path: str) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.1,
        "presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": {"7": 5, "8": -1e9, "0": 1e9},
        "allowed_token_ids": [9, 8, 9, 30], "bad_words": ["fox"], "min_tokens": 3, "seed": 11, "max_tokens": 9,
        "stop_token_ids": [30],
    }  # fmt: skip
    assert await sampling(server, path, **asked) == SamplingParameters(
        temperature=0.7,
        top_k=5,
        top_p=0.8,
        min_p=0.05,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={7: 5.0, 8: -100.0, 0: 100.0},
        allowed_token_ids=[8, 9, 30],
        bad_words=[ids("fox"), ids(" fox")],
        min_tokens=3,
        barred_ids=[END, 0, 30],
        seed=11,
    )


async def test_defaults_are_the_models_with_its_repetition_penalty(start: Start) -> None:
    server = await start(model={"defaults": MODELS_OWN})
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "min_p", "typical_p", "presence_penalty")
    for asked in ({}, dict.fromkeys(names)):
        found = await sampling(server, seed=0, **asked)
        assert found == MODELS_OWN
    assert (await sampling(server, repetition_penalty=1)).repetition_penalty == 1.0


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_p": -0.1}, "[0, 1]"), ({"min_p": 1.1}, "[0, 1]"), ({"typical_p": 0}, "(0, 1]"),
        ({"typical_p": 1.5}, "(0, 1]"), ({"presence_penalty": 2.1}, "[-2, 2]"), ({"presence_penalty": "1"}, "str"),
        ({"frequency_penalty": -2.1}, "[-2, 2]"), ({"repetition_penalty": 0}, "above 0"),
        ({"repetition_penalty": -1}, "above 0"), ({"min_tokens": -1}, "at least 0"), ({"min_tokens": 1.5}, "number"),
        ({"timeout_s": 0}, "above 0"), ({"timeout_s": -1}, "above 0"), ({"truncate_prompt_tokens": 0}, "at least 1"),
        ({"truncate_prompt_tokens": -2}, "at least 1"), ({"truncation_side": "right"}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "middle"), ({"spaces_between_special_tokens": False}, "only be true"),
        ({"allowed_token_ids": []}, "must not be empty"), ({"bad_words": [""]}, "`$.bad_words[0]`"),
        ({"bad_words": ["a", "x" * 129]}, "`$.bad_words[1]`"), ({"bad_words": ["a"] * 129}, "129"),
        ({"bad_words": "x"}, "str"), ({"logit_bias": [1]}, "array"), ({"user": 5}, "int"), ({"user": ["x"]}, "array"),
        ({"metadata": "x"}, "str"), ({"store": "yes"}, "str"),
    ],
)  # fmt: skip
async def test_values_out_of_range(server: Server, path: str, fields: dict[str, Any], words: str) -> None:
    answer = await server.post(path, body_for(path, **fields))
    assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
    assert [answer.error["param"]] == list(fields)
    assert words in answer.error["message"]
    assert server.engine.submitted == []


# ---------------------------------------------------------------- extremes (C23)


async def test_c23_extreme_values_reach_the_engine(server: Server) -> None:
    asked = {"temperature": 2.0, "top_p": 1e-9, "min_p": 1.0, "typical_p": 1e-300, "repetition_penalty": 1e300}
    found = await sampling(server, **asked)
    assert {name: getattr(found, name) for name in asked} == asked
    assert (await sampling(server, top_k=10**9)).top_k == 0
    assert (await sampling(server, min_p=0, repetition_penalty=1e-300)).repetition_penalty == 1e-300


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 100}, {"temperature": 1e30}, {"top_p": 0}, {"top_k": 2.5}, {"top_k": "5"}, {"temperature": -1}],
)
async def test_c23_what_is_not_a_value_is_refused(server: Server, fields: dict[str, Any]) -> None:
    answer = await server.complete(**fields)
    assert (answer.status, [answer.error["param"]]) == (400, list(fields))


# ---------------------------------------------------------------- ids (C25)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "key",
    [str(VOCABULARY), str(VOCABULARY + 1), "-1", "1" + "0" * 18, "1" * 4000, "abc", "1.5", "", " 1", "01", "1e1", "²"],
)
async def test_c25_keys_of_logit_bias(server: Server, path: str, key: str) -> None:
    answer = await server.post(path, body_for(path, logit_bias={"5": 1, key: 1}))
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert f"0 ... {VOCABULARY - 1}" in answer.error["message"]
    assert server.engine.submitted == []


async def test_c25_values_of_logit_bias(server: Server) -> None:
    top = str(VOCABULARY - 1)
    for given, served in ((100, 100.0), (-100, -100.0), (1e9, 100.0), (-1e300, -100.0), (0, 0.0)):
        assert (await sampling(server, logit_bias={top: given})).logit_bias == {int(top): served}
    for value in (None, "1", [1], {}):
        answer = await server.complete(logit_bias={"1": value})
        assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    answer = await server.post(BOTH[0], b'{"prompt": "a", "logit_bias": {"1": NaN}}')
    assert answer.status == 400


async def test_c25_counts_are_limited(server: Server) -> None:
    many = {str(i): 1 for i in range(150_000)}
    answer = await server.complete(logit_bias=many)
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert "1024" in answer.error["message"]
    assert "150000" in answer.error["message"]
    answer = await server.complete(allowed_token_ids=[1] * 300_000)
    assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": ids("k"), "bad_words": ["k"]}, "bad_words"),
        ({"allowed_token_ids": [END, 0], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [*ids("k"), END], "bad_words": ["k"], "min_tokens": 1}, "bad_words"),
        ({"allowed_token_ids": ids("kk"), "bad_words": ["kk"]}, "bad_words"),  # after one k nothing would be left
    ],
)
async def test_c25_banning_everything_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = await server.complete(max_tokens=5, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.engine.submitted == []


async def test_c25_banning_almost_everything_is_served(server: Server) -> None:
    assert (await server.complete(allowed_token_ids=[END, 0])).status == 200
    assert (await server.complete(allowed_token_ids=[END, 5], min_tokens=1)).status == 200
    assert (await server.complete(allowed_token_ids=[*ids("k"), END], bad_words=["k"])).status == 200


async def test_bad_words_are_barred_with_and_without_a_space(server: Server) -> None:
    found = (await sampling(server, bad_words=["lazy", " dog", "\U0001fae0", " "])).bad_words
    for text in ("lazy", " lazy", "dog", " dog", "\U0001fae0", " "):
        assert ids(text) in found
    assert len({tuple(word) for word in found}) == len(found)


# ---------------------------------------------------------------- minimum length and ends (C27)


@pytest.mark.parametrize("minimum", [0, 1, 4, 16])
@pytest.mark.parametrize("stream", [False, True])
async def test_c27_the_minimum_comes_before_any_end(server: Server, minimum: int, stream: bool) -> None:
    """All end tokens and the client's own are barred until then, and no longer."""
    server.engine.script = lambda _: [END, 0, 9, *[END] * 20]
    asked = {"min_tokens": minimum, "max_tokens": 17, "stop_token_ids": [9], "return_token_ids": True}
    answer = await server.complete(**asked, stream=stream)
    choices = [event["choices"][0] for event in answer.events] if stream else [answer.json["choices"][0]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert len(tokens) == minimum + 1
    assert not {END, 0, 9} & set(tokens[:-1])
    assert choices[-1]["finish_reason"] == "stop"
    parameters = server.engine.submitted[-1].sampling
    assert parameters.barred_ids == ([END, 0, 9] if minimum else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_c27_stop_strings_within_the_minimum_do_not_stop(server: Server, stream: bool) -> None:
    server.engine.script = says(" a b c d a b c d")
    answer = await server.complete(min_tokens=3, max_tokens=20, stop=["b", "q"], stream=stream)
    text = joined(answer.events)[0] if stream else answer.json["choices"][0]["text"]
    assert text == " a b c d a "
    if stream:
        assert ends(answer.events) == {0: ("stop", "b")}


@pytest.mark.parametrize(
    ("asked", "is_served"),
    [
        ({"min_tokens": 5, "max_tokens": 5}, True), ({"min_tokens": 6, "max_tokens": 5}, False),
        ({"min_tokens": 16}, True), ({"min_tokens": 17}, False), ({"min_tokens": 10**30}, False),
    ],
)  # fmt: skip
async def test_c27_the_minimum_is_at_most_the_maximum(server: Server, asked: dict[str, int], is_served: bool) -> None:
    """Also where the maximum is the route's own: 16 for completions."""
    answer = await server.complete(**asked)
    if is_served:
        assert answer.status == 200
    else:
        assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    if "max_tokens" in asked and not is_served:
        answer = await server.chat(min_tokens=6, max_completion_tokens=5, max_tokens=100)
        assert (answer.status, answer.error["param"]) == (400, "min_tokens")


async def test_c27_ignoring_the_end_bars_only_what_still_ends(server: Server) -> None:
    parameters = await sampling(server, ignore_eos=True, min_tokens=2, stop_token_ids=[9])
    assert parameters.barred_ids == server.engine.submitted[-1].end_ids == [9]


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("path", BOTH)
async def test_a_deadline_ends_every_choice_with_what_it_has(server: Server, path: str) -> None:
    server.engine.choice_script = lambda _, choice: [*ids(" a b c d e f")] if choice else [*ids(" a"), END]
    server.engine.timeout_after = 3
    asked = body_for(path, timeout_s=2.5, n=2, max_tokens=20)
    whole = (await server.post(path, asked)).json
    assert server.engine.submitted[-1].timeout_s == 2.5
    found = [(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]
    assert found == [("stop", None), ("length", "timeout")]
    events = (await server.post(path, asked | {"stream": True})).events
    assert ends(events) == {0: ("stop", None), 1: ("length", "timeout")}
    assert joined(events)[1] == " a b c"
    assert server.log[-1]["finish_reasons"] == ["stop", "timeout"]


async def test_a_deadline_before_the_first_token(server: Server) -> None:
    server.engine.timeout_after = 0
    choice = (await server.complete(timeout_s=1, echo=True, logprobs=1)).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the", "length", "timeout")
    assert choice["logprobs"]["token_logprobs"][0] is None


# ---------------------------------------------------------------- truncation


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 5}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": 10**30}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8, 9]),
    ],
)
async def test_prompts_are_cut_on_the_side_that_was_asked(server: Server, fields: Any, kept: list[int]) -> None:
    answer = await server.complete(prompt=[[5, 6, 7, 8, 9], [1]], return_token_ids=True, **fields)
    assert [submit.prompt_ids for submit in server.engine.submitted] == [kept, [1]]
    assert answer.json["choices"][0]["prompt_token_ids"] == kept
    assert answer.json["usage"]["prompt_tokens"] == len(kept) + 1


async def test_truncation_to_what_fits(server: Server) -> None:
    """-1 leaves room for max_tokens, or for one token."""
    for asked, room in (({}, 1), ({"max_tokens": 30}, 30), ({"max_tokens": MAX_LENGTH - 1}, MAX_LENGTH - 1)):
        answer = await server.complete(prompt=[5] * 2000, truncate_prompt_tokens=-1, **asked)
        assert answer.json["usage"]["prompt_tokens"] == MAX_LENGTH - room
    answer = await server.complete(prompt=[5] * 2000, truncate_prompt_tokens=-1, max_tokens=MAX_LENGTH)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    answer = await server.chat("a " * 2000, truncate_prompt_tokens=-1, max_tokens=10)
    assert answer.json["usage"]["prompt_tokens"] == MAX_LENGTH - 10
    assert server.engine.submitted[-1].prompt_ids[-1] == ids("\n")[0], "a chat keeps its end, where the answer begins"


# ---------------------------------------------------------------- echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the quick", "<|im_start|>the\U0001fae0", ids("the quick"), [1, *ids("the")]])
async def test_echo_puts_the_prompt_first(server: Server, stream: bool, prompt: Any) -> None:
    """A text as it was sent, ids as they decode; every choice has it, and it is no output."""
    answer = await server.complete(prompt=prompt, echo=True, n=2, stream=stream, return_token_ids=True)
    shown = prompt if isinstance(prompt, str) else tiny_tokenizer().decode(prompt, skip_special_tokens=True)
    if stream:
        assert joined(answer.events) == {0: shown + " fox", 1: shown + " fox"}
        assert answer.events[0]["choices"][0]["text"] == shown
        assert sum("prompt_token_ids" in event["choices"][0] for event in answer.events) == 2
        tokens = [token for event in answer.events for token in event["choices"][0]["token_ids"]]
    else:
        assert [choice["text"] for choice in answer.json["choices"]] == [shown + " fox"] * 2
        assert answer.json["usage"]["completion_tokens"] == 4
        tokens = [token for choice in answer.json["choices"] for token in choice["token_ids"]]
    assert sorted(tokens) == sorted([*ids(" fox"), END] * 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_alone_generates_nothing(server: Server, stream: bool) -> None:
    """max_tokens 0: what the engine makes, since it makes a token, is neither shown nor counted."""
    asked = {"prompt": ["the", "a b"], "echo": True, "max_tokens": 0, "n": 2, "return_token_ids": True}
    answer = await server.complete(**asked, stream=stream)
    assert (server.engine.submitted[-1].max_tokens, server.engine.submitted[-1].end_ids) == (1, [])
    if stream:
        assert joined(answer.events) == {0: "the", 1: "the", 2: "a b", 3: "a b"}
        assert ends(answer.events) == dict.fromkeys(range(4), ("length", None))
    else:
        choices = answer.json["choices"]
        found = [(choice["text"], choice["finish_reason"], choice["token_ids"]) for choice in choices]
        assert found == [("the", "length", [])] * 2 + [("a b", "length", [])] * 2
        assert answer.json["usage"]["completion_tokens"] == 0
    assert [prompt.is_answered for prompt in server.metrics.prompts] == [True, True]


async def test_no_tokens_without_echo(server: Server) -> None:
    for echo in (None, False):
        answer = await server.complete(max_tokens=0, echo=echo)
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    answer = await server.complete(max_tokens=0, echo=True, min_tokens=1)
    assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    assert (await server.chat(max_tokens=0)).error["param"] == "max_tokens"


async def test_echo_in_a_chat_goes_on_with_the_last_message(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the quick"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    whole = (await server.post(BOTH[1], asked)).json
    assert whole["choices"][0]["message"]["content"] == "the quick fox"
    events = (await server.post(BOTH[1], asked | {"stream": True})).events
    assert joined(events) == {0: "the quick fox"}
    await server.post(BOTH[1], asked | {"logprobs": True})
    assert server.engine.submitted[-1].prompt_logprobs == -1, "a chat shows no scores of its prompt by that"
    answer = await server.chat(echo=True)
    assert (answer.status, answer.error["param"]) == (400, "echo")


# ---------------------------------------------------------------- template fields


async def test_reasoning_effort_is_the_templates(start: Start) -> None:
    server = await start(model={"tokenizer": tiny_tokenizer(with_effort=True)})
    assert (await server.chat(reasoning_effort="low")).status == 200
    assert tiny_tokenizer().decode(server.engine.submitted[-1].prompt_ids, False).startswith("effort: low")
    plain = await start()
    answer = await plain.chat(reasoning_effort="low")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
