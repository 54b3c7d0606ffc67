"""Log-probabilities over HTTP: shape, count, order, names, and that streamed and whole are alike (cases C07, C26).

The scripted engine reports a known number for every token at every place (scripted_engine.logprob).
"""

import asyncio
import json
import math
import threading
from typing import Any

import msgspec
import pytest
from aiohttp.http_writer import StreamWriter
from http_events import joined, logprobs
from http_house import Server, Start, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import logprob, scores_of
from tiny_tokenizer import END, tiny_tokenizer

from service import completions, json_answers
from service import logprobs as logprobs_module
from service.answers import CompletionForm
from service.engine_client import Scores
from service.logprobs import (
    ScoredToken,
    Spelling,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

VOCABULARY = tiny_tokenizer().vocabulary
SPELLING = Spelling(tiny_tokenizer().token_bytes, as_ids=False)
BOTH = ["/v1/completions", "/v1/chat/completions"]


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def text_of(token: int) -> str:
    return tiny_tokenizer().token_bytes.text(token)


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [number for item in value for number in numbers_in(item)] if isinstance(value, list) else []


# ---------------------------------------------------------------- the forms


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_c26_completions_have_four_equal_arrays(server: Server, top: int) -> None:
    """The `top` likeliest, falling, with the chosen one as an extra; the chosen value is the very same float."""
    said = " a b c"
    server.engine.script = says(said)
    choice = (await server.complete(prompt=[5, 6], logprobs=top)).json["choices"][0]
    tokens, found = [*ids(said), END], choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "text_offset", "top_logprobs"}
    assert found["tokens"] == [text_of(token) for token in tokens]
    assert found["token_logprobs"] == [logprob(token, 2 + i, VOCABULARY) for i, token in enumerate(tokens)]
    assert found["text_offset"] == [0, 2, 4, 6]
    for i, (token, likeliest) in enumerate(zip(tokens, found["top_logprobs"], strict=True)):
        values = list(likeliest.values())
        assert values == sorted(values, reverse=True)
        assert likeliest[text_of(token)] == found["token_logprobs"][i]
        expected = set(scores_of(token, 2 + i, top, VOCABULARY).values) | {found["token_logprobs"][i]}
        assert set(values) == expected, "no entry may be lost because two tokens have one text"


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
async def test_c26_chats_have_exactly_the_likeliest(server: Server, top: int | None) -> None:
    said = " a \U0001fae0"
    server.engine.script = says(said)
    asked = {} if top is None else {"top_logprobs": top}
    answer = (await server.chat(logprobs=True, **asked)).json
    content = answer["choices"][0]["logprobs"]["content"]
    tokens, prompt = [*ids(said), END], answer["usage"]["prompt_tokens"]
    assert len(content) == len(tokens) == answer["usage"]["completion_tokens"]
    for i, (token, entry) in enumerate(zip(tokens, content, strict=True)):
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert (entry["token"], entry["logprob"]) == (text_of(token), logprob(token, prompt + i, VOCABULARY))
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == scores_of(token, prompt + i, top or 0, VOCABULARY).values
        assert values == sorted(values, reverse=True)
    whole = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert whole == said.encode(), "bytes are right also where a token is part of a character"
    assert [entry["token"] for entry in content[2:5]] == ["\ufffd"] * 3
    assert content[-1]["token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (BOTH[0], {"logprobs": 21}, "logprobs"), (BOTH[0], {"logprobs": 10**6}, "logprobs"),
        (BOTH[0], {"logprobs": -1}, "logprobs"), (BOTH[0], {"logprobs": "5"}, "logprobs"),
        (BOTH[0], {"logprobs": True}, "logprobs"), (BOTH[0], {"top_logprobs": 5}, "top_logprobs"),
        (BOTH[1], {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (BOTH[1], {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (BOTH[1], {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        (BOTH[1], {"logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        (BOTH[1], {"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        (BOTH[1], {"top_logprobs": 5}, "top_logprobs"), (BOTH[1], {"logprobs": 5}, "logprobs"),
        (BOTH[0], {"prompt_logprobs": 21}, "prompt_logprobs"), (BOTH[1], {"prompt_logprobs": -1}, "prompt_logprobs"),
        (BOTH[0], {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)  # fmt: skip
async def test_c26_counts_out_of_range(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    prompt = {"prompt": "the"} if path == BOTH[0] else {"messages": [{"role": "user", "content": "the"}]}
    answer = await server.post(path, prompt | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.engine.submitted == []


async def test_c26_the_limit_is_a_setting(start: Start) -> None:
    server = await start(settings={"max_logprobs": 3})
    assert (await server.complete(logprobs=3)).status == 200
    answer = await server.complete(logprobs=4)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert "0 to 3" in answer.error["message"]
    assert (await server.chat(logprobs=True, top_logprobs=4)).error["param"] == "top_logprobs"
    assert (await server.complete(prompt_logprobs=4)).error["param"] == "prompt_logprobs"


async def test_c26_without_being_asked_there_are_none(server: Server) -> None:
    for stream in (False, True):
        for answer in (await server.complete(stream=stream), await server.chat(stream=stream, logprobs=False)):
            for event in answer.events if stream else [answer.json]:
                assert event["choices"][0]["logprobs"] is None
    assert all(submit.sampling.logprobs == -1 for submit in server.engine.submitted)
    assert all(submit.prompt_logprobs == -1 for submit in server.engine.submitted)


def decoded(value: Any) -> Any:
    """As its client has it."""
    return json.loads(msgspec.json.encode(value))


INFINITE = Scores(-math.inf, 9, [7, 8], [-0.5, -math.inf])


def test_c26_minus_infinity_is_a_number_of_json() -> None:
    """JSON has no infinity, and a forbidden token has no other value."""
    entry = ScoredToken(9, INFINITE, 0)
    for answer in (
        completion_logprobs([entry], 2, SPELLING),
        chat_logprobs([entry], 2, SPELLING),
        prompt_logprobs([9], [INFINITE], 2, SPELLING),
    ):
        found = numbers_in(decoded(answer))
        assert -9999.0 in found
        assert all(math.isfinite(number) for number in found)


def test_c26_equal_texts_lose_no_entry() -> None:
    """Four ids that are parts of characters have one text. The chosen one keeps it, others are named by their ids."""
    parts = ids("\U0001fae0")
    assert {text_of(part) for part in parts} == {"\ufffd"}
    values = [-1.0, -2.0, -3.0, -4.0]
    for chosen in (1, 3):
        scores = Scores(values[chosen], chosen + 1, parts[:3], values[:3])
        found = decoded(completion_logprobs([ScoredToken(parts[chosen], scores, 0)], 3, SPELLING))["top_logprobs"][0]
        names = ["\ufffd" if i == chosen else f"token_id:{parts[i]}" for i in range(4) if i < 3 or i == chosen]
        assert list(found.items()) == list(zip(names, values, strict=False))
    other = Scores(-9.0, 50, parts[:3], values[:3])
    found = decoded(completion_logprobs([ScoredToken(END, other, 0)], 3, SPELLING))["top_logprobs"][0]
    assert list(found) == ["\ufffd", f"token_id:{parts[1]}", f"token_id:{parts[2]}", "<|im_end|>"]


@pytest.mark.parametrize("path", BOTH)
async def test_tokens_by_their_ids(server: Server, path: str) -> None:
    if path == BOTH[0]:
        choice = (await server.complete(logprobs=2, return_tokens_as_token_ids=True)).json["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*ids(" fox"), END]]
        names = [name for entry in choice["logprobs"]["top_logprobs"] for name in entry]
    else:
        asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
        content = (await server.chat(**asked)).json["choices"][0]["logprobs"]["content"]
        assert bytes(content[0]["bytes"]) == b" fox"
        names = [entry["token"] for first in content for entry in (first, *first["top_logprobs"])]
    assert all(name.removeprefix("token_id:").isdigit() for name in names)


# ---------------------------------------------------------------- streams (C07)

STOP = " the lazy dogs and a "
NEARLY = " the lazy dog, the lazy dogs and, the lazy dogs and a fox"


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("include", [False, True])
async def test_c07_entries_line_up_with_streamed_text(server: Server, path: str, include: bool) -> None:
    """A stop string that is nearly matched twice. Entries of what it takes away are there in both answers."""
    server.engine.script = says(NEARLY)
    wish: dict[str, Any] = {"logprobs": 2} if path == BOTH[0] else {"logprobs": True, "top_logprobs": 2}
    prompt = {"prompt": "the"} if path == BOTH[0] else {"messages": [{"role": "user", "content": "the"}]}
    asked = prompt | wish | {"stop": [STOP], "include_stop_str_in_output": include, "max_tokens": 200, "n": 2}
    whole = (await server.post(path, asked)).json
    options = {"include_usage": True}
    events = (await server.post(path, asked | {"stream": True, "stream_options": options})).events
    before = NEARLY[: NEARLY.index(STOP)] + (STOP if include else "")
    assert joined(events) == {0: before, 1: before}
    for choice in whole["choices"]:
        assert logprobs(events)[choice["index"]] == choice["logprobs"]
        for entries in choice["logprobs"].values():
            assert len(entries) * 2 == whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"]
        if path == BOTH[0]:
            assert choice["finish_reason"] == "stop"
            check_offsets(choice["text"], choice["logprobs"])


def check_offsets(text: str, found: dict[str, list[Any]]) -> None:
    """They rise, lie in the text, and each token that was not cut off begins there, but for parts of characters."""
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for token, offset in zip(found["tokens"], offsets, strict=True):
        if "\ufffd" not in token and offset + len(token) <= len(text):
            assert text.startswith(token, offset) or token == "<|im_end|>"


async def test_c07_no_entry_comes_before_the_text_in_front_of_it(server: Server) -> None:
    """An offset that was sent is final: a stop string cannot take away the text that it points to."""
    server.engine.script = says(NEARLY)
    events = (await server.complete(stop=[STOP], logprobs=0, max_tokens=200, stream=True)).events
    sent = 0
    for event in events:
        choice = event["choices"][0]
        sent += len(choice["text"])
        assert all(offset <= sent for offset in choice["logprobs"]["text_offset"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.text(st.sampled_from("ab \n\U0001fae0é龜"), max_size=24),
    stops=st.lists(st.text(st.sampled_from("ab \U0001fae0"), min_size=1, max_size=5), max_size=4),
    max_tokens=st.integers(1, 40),
    include=st.booleans(),
    chat=st.booleans(),
    echo=st.booleans(),
    minimum=st.integers(0, 1),
)
async def test_c07_streamed_and_whole_entries_are_equal(
    server: Server,
    said: str,
    stops: list[str],
    max_tokens: int,
    include: bool,
    chat: bool,
    echo: bool,
    minimum: int,
) -> None:
    server.engine.script = says(said)
    asked: dict[str, Any] = {"stop": stops, "max_tokens": max_tokens, "include_stop_str_in_output": include}
    asked |= {"n": 2, "min_tokens": minimum}
    asked |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1, "echo": echo}
    ask = server.chat if chat else server.complete
    whole = (await ask(**asked)).json
    events = (await ask(**asked, stream=True)).events
    found = logprobs(events)
    for choice in whole["choices"]:
        assert found[choice["index"]] == choice["logprobs"]
        if not chat:
            assert joined(events)[choice["index"]] == choice["text"]
            check_offsets(choice["text"], choice["logprobs"])
    lengths = [len(next(iter(choice["logprobs"].values()))) for choice in whole["choices"]]
    of_prompts = 2 * whole["usage"]["prompt_tokens"] if echo and not chat else 0
    assert sum(lengths) == whole["usage"]["completion_tokens"] + of_prompts


async def test_c07_many_waiting_tokens_keep_their_entries(start: Start) -> None:
    """A reader that lags gets one event with all of them."""
    server = await start(engine={"is_manual": True, "script": says(" a b c d e f g h" * 5)})
    asking = asyncio.create_task(server.complete(stream=True, logprobs=1, max_tokens=35, return_token_ids=True))
    await server.until(lambda: len(server.engine.lines) == 1)
    for _ in range(35):
        server.engine.tick()
    events = (await asking).events
    assert len(events) == 1
    choice = events[0]["choices"][0]
    assert choice["logprobs"]["tokens"] == [text_of(token) for token in choice["token_ids"]]
    assert len(choice["token_ids"]) == 35


# ---------------------------------------------------------------- the prompt


@pytest.mark.parametrize("prompt", [ids("the quick fox"), "the quick fox", "<|im_start|>the \U0001fae0 fox", [1, 2, 3]])
async def test_echo_with_logprobs_scores_the_prompt(server: Server, prompt: Any) -> None:
    """As evaluations ask: max_tokens 1 gives prompt + 1 entries; the first has nothing before it."""
    answer = await server.complete(prompt=prompt, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234)
    choice = answer.json["choices"][0]
    tokens = prompt if isinstance(prompt, list) else ids(prompt)
    found = choice["logprobs"]
    assert {len(entries) for entries in found.values()} == {len(tokens) + 1}
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    for i, token in enumerate([*tokens, ids(" fox")[0]][1:], 1):
        assert found["token_logprobs"][i] == logprob(token, i, VOCABULARY)
        assert found["top_logprobs"][i][found["tokens"][i]] == found["token_logprobs"][i]
        best = max(found["top_logprobs"][i].values())
        assert (best == found["token_logprobs"][i]) == (scores_of(token, i, 1, VOCABULARY).rank == 1)
    if isinstance(prompt, str):
        assert choice["text"] == prompt + " fox"
    assert found["text_offset"][-1] == len(choice["text"]) - len(" fox")
    visible = {k: v for k, v in found.items() if k in ("tokens", "text_offset")}
    if prompt != [1, 2, 3]:
        check_offsets(choice["text"], visible)
    assert server.engine.submitted[-1].prompt_logprobs == 1


async def test_echo_alone_scores_the_prompt_alone(server: Server) -> None:
    """max_tokens 0: no entry for what was not generated."""
    prompts = [ids("the quick fox"), ids("a b")]
    choices = (await server.complete(prompt=prompts, echo=True, max_tokens=0, logprobs=2, n=2)).json["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(prompts[i // 2]) for i in range(4)]
    assert choices[0]["logprobs"] == choices[1]["logprobs"], "every choice shows its prompt's"


async def test_a_streamed_echo_has_the_prompts_entries_first(server: Server) -> None:
    asked = {"prompt": ids("the quick"), "echo": True, "logprobs": 1, "n": 2, "stream": True}
    events = (await server.complete(**asked)).events
    for index in (0, 1):
        first = next(event["choices"][0] for event in events if event["choices"][0]["index"] == index)
        assert first["text"] == "the quick"
        assert len(first["logprobs"]["tokens"]) == len(ids("the quick"))
        assert first["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("path", BOTH)
async def test_prompt_logprobs(server: Server, path: str, top: int) -> None:
    """null, then one object a token: the token itself and the likeliest, by id, with ranks."""
    if path == BOTH[0]:
        answer = (await server.complete(prompt="the fox", prompt_logprobs=top, n=2)).json
        found = answer["choices"][0]["prompt_logprobs"]
        assert found == answer["choices"][1]["prompt_logprobs"]
    else:
        answer = (await server.chat(prompt_logprobs=top)).json
        found = answer["prompt_logprobs"]
    assert answer["choices"][0]["logprobs"] is None
    tokens = server.engine.submitted[-1].prompt_ids
    assert found[0] is None
    assert len(found) == len(tokens)
    for i, token in enumerate(tokens[1:], 1):
        scores = scores_of(token, i, top, VOCABULARY)
        own = {"logprob": scores.chosen, "rank": scores.rank, "decoded_token": text_of(token)}
        assert found[i][str(token)] == own
        others = {str(id_): value for id_, value in zip(scores.ids, scores.values, strict=True)}
        assert {name: entry["logprob"] for name, entry in found[i].items()} == others | {str(token): scores.chosen}
        assert all(found[i][str(id_)]["rank"] == rank for rank, id_ in enumerate(scores.ids, 1))


async def test_prompt_logprobs_beside_an_echo_have_their_own_count(server: Server) -> None:
    prompt = ids("the quick fox")
    answer = await server.complete(prompt=prompt, echo=True, logprobs=1, prompt_logprobs=4)
    choice = answer.json["choices"][0]
    assert server.engine.submitted[-1].prompt_logprobs == 4
    assert all(len(place) in (4, 5) for place in choice["prompt_logprobs"][1:])
    assert all(len(place) in (1, 2) for place in choice["logprobs"]["top_logprobs"][1:])


async def test_many_scores_are_written_off_the_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for name in ("whole", "opening"):
        plain = getattr(CompletionForm, name)

        def noted(self: Any, *given: Any, plain: Any = plain) -> bytes:
            threads.append(threading.current_thread() is threading.main_thread())
            return plain(self, *given)

        monkeypatch.setattr(CompletionForm, name, noted)
    server = await start()
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1}
    for prompt in ([5] * 3, [5] * 300):
        monkeypatch.setattr(completions, "OFF_LOOP_SCORES", 100)
        for stream in (False, True):
            assert (await server.complete(prompt=prompt, **asked, stream=stream)).status == 200
    assert threads == [True, True, False, False]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_places_are_encoded_in_portions(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The interpreter belongs to whoever encodes, so no call may have much to do. What comes out is the same."""
    scored = [ScoredToken(i, scores_of(i, i, 3, VOCABULARY), i) for i in range(count)]
    tokens, scores = [entry.token for entry in scored], [entry.scores for entry in scored]

    def answers() -> list[Any]:
        return [
            decoded(completion_logprobs(scored, 3, SPELLING)),
            decoded(chat_logprobs(scored, 3, SPELLING)),
            decoded(prompt_logprobs(tokens, scores, 3, SPELLING)),
        ]

    at_once = answers()
    assert len(at_once[0]["top_logprobs"]) == len(at_once[1]["content"]) == len(at_once[2]) == count
    sizes = []

    def encode(places: list[Any]) -> bytes:
        sizes.append(len(places))
        return msgspec.json.encode(places)

    monkeypatch.setattr(logprobs_module, "_encode", encode)
    monkeypatch.setattr(logprobs_module, "PLACES_AT_ONCE", 3)
    assert answers() == at_once
    assert (sum(sizes), max(sizes)) == (3 * count, min(3, count))


async def test_a_long_answer_is_sent_in_portions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them others get their turn."""
    sizes = []
    write = StreamWriter.write

    async def noted(self: StreamWriter, chunk: Any, **more: Any) -> None:
        sizes.append(len(chunk))
        await write(self, chunk, **more)

    monkeypatch.setattr(StreamWriter, "write", noted)
    monkeypatch.setattr(json_answers, "PORTION_BYTES", 1000)
    server = await start()
    answer = await server.complete(prompt=[5] * 300, prompt_logprobs=2, max_tokens=1)
    length = int(answer.headers["Content-Length"])
    assert len(answer.body) == length
    assert (sum(sizes) >= length, max(sizes)) == (True, 1000), "the request is written so, too"
    assert len(answer.json["choices"][0]["prompt_logprobs"]) == 300


async def test_a_sibling_that_is_ahead_waits_for_the_prompts_scores(start: Start) -> None:
    """The first choice brings them. Preempted amid the prompt it may come later, and must not leave an echo without."""
    server = await start(engine={"is_manual": True, "script": says(" fox")})
    asked = {"prompt": ids("the quick"), "echo": True, "logprobs": 1, "n": 2, "stream": True}
    asking = asyncio.create_task(server.complete(**asked))
    await server.until(lambda: len(server.engine.lines) == 2)
    first, line = next(iter(server.engine.lines.items()))
    del server.engine.lines[first]
    for _ in range(2):  # the sibling alone, to its end
        server.engine.tick()
        await asyncio.sleep(0.01)
    assert not asking.done()
    server.engine.lines[first] = line
    server.engine.tick()
    server.engine.tick()
    events = (await asking).events
    assert joined(events) == {0: "the quick fox", 1: "the quick fox"}
    found = logprobs(events)
    assert found[0] == found[1]
    assert found[1]["token_logprobs"].count(None) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_choices_that_end_before_the_prompt_is_scored(start: Start, order: tuple[int, int]) -> None:
    """Out of time in the queue: null for every place, in a stream as in a whole answer."""
    server = await start(engine={"is_manual": True, "timeout_after": 0})
    asked = {"prompt": ids("the quick"), "echo": True, "logprobs": 1, "n": 2, "timeout_s": 1}
    for stream in (False, True):
        asking = asyncio.create_task(server.complete(**asked, stream=stream))
        await server.until(lambda: len(server.engine.lines) == 2)
        lines = list(server.engine.lines.items())
        server.engine.lines = {lines[i][0]: lines[i][1] for i in order}
        for line in server.engine.lines.values():
            line.is_first = False  # nothing was scored
        server.engine.tick()
        answer = await asking
        for event in answer.events if stream else [answer.json]:
            for choice in event["choices"]:
                assert set(choice["logprobs"]["token_logprobs"]) <= {None}
        found = logprobs(answer.events if stream else [answer.json])
        assert [len(found[i]["tokens"]) for i in (0, 1)] == [len(ids("the quick"))] * 2


def test_the_chosen_token_has_one_value() -> None:
    """Whatever last digit two kernels may disagree about: clients ask with `==`."""
    scores = Scores(-0.25, 1, [9, 7], [math.nextafter(-0.25, 0), -2.0])
    entry = ScoredToken(9, scores, 0)
    completion = decoded(completion_logprobs([entry], 2, SPELLING))
    assert completion["top_logprobs"][0][text_of(9)] == completion["token_logprobs"][0]
    chat = decoded(chat_logprobs([entry], 2, SPELLING))["content"][0]
    assert chat["top_logprobs"][0]["logprob"] == chat["logprob"]
