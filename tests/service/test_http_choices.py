"""n choices a prompt and beams, over HTTP: order, numbers, ends, and nothing left behind (cases C05, C09, C13, C17)."""

import asyncio
import json
from typing import Any

import pytest
from http_events import ends, joined
from http_house import Server, Start, says
from tiny_tokenizer import END, tiny_tokenizer

from service.engine_client import BeamSearch, QueueState, Submit
from service.generation import PromptNumbers
from service.sampling import sibling_seed

REPLIES = [" fox", " the lazy dog", "", " a b c d e f", " quick \U0001fae0", " z"]
BOTH = ["/v1/completions", "/v1/chat/completions"]


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def reply(_: Submit, choice: int) -> list[int]:
    return [*ids(REPLIES[choice % len(REPLIES)]), END]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "the"} if path == BOTH[0] else {"messages": [{"role": "user", "content": "the"}]}
    return prompt | {"max_tokens": 30} | fields


def text_of(choice: Any) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


# ---------------------------------------------------------------- n


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("n", [2, 4, 6])
async def test_c05_several_choices_in_one_stream(server: Server, path: str, n: int) -> None:
    """They end at different lengths; joined by index they are the whole answer's, and [DONE] is last."""
    server.engine.choice_script = reply
    asked = body_for(path, n=n)
    whole = (await server.post(path, asked)).json
    events = (await server.post(path, asked | {"stream": True, "stream_options": {"include_usage": True}})).events
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert [text_of(choice) for choice in whole["choices"]] == REPLIES[:n]
    assert joined(events) == dict(enumerate(REPLIES[:n]))
    assert ends(events) == dict.fromkeys(range(n), ("stop", None))
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(reply(None, i)) for i in range(n))  # type: ignore[arg-type]
    alone = (await server.post(path, asked | {"n": 1})).json["usage"]["prompt_tokens"]
    assert whole["usage"]["prompt_tokens"] == alone, "the prompt counts once"


@pytest.mark.parametrize("stream", [False, True])
async def test_c05_a_stop_string_ends_one_choice_only(server: Server, stream: bool) -> None:
    server.engine.choice_script = reply
    answer = await server.complete(n=6, stop="e", max_tokens=4, stream=stream)
    expected = {0: ("stop", None), 1: ("stop", "e"), 2: ("stop", None), 3: ("length", None), 5: ("stop", None)}
    if stream:
        found, texts = ends(answer.events), joined(answer.events)
    else:
        choices = answer.json["choices"]
        found = {choice["index"]: (choice["finish_reason"], choice["stop_reason"]) for choice in choices}
        texts = {choice["index"]: choice["text"] for choice in choices}
    assert expected.items() <= found.items()
    assert [texts[i] for i in range(4)] == [" fox", " th", "", " a b c d"]


@pytest.mark.parametrize("stream", [False, True])
async def test_c05_two_prompts_with_two_choices_each(server: Server, stream: bool) -> None:
    """Prompt-major: 0 and 1 are of the first prompt. One message to the engine for each prompt."""
    server.engine.choice_script = lambda submit, choice: [submit.prompt_ids[0], 10 + choice, END]
    asked = {"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 9, "return_token_ids": True, "stream": stream}
    answer = await server.complete(**asked)
    said: dict[int, list[int]] = {}
    for event in answer.events if stream else [answer.json]:
        for choice in event["choices"]:
            said.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert dict(sorted(said.items())) == {0: [5, 10, 2], 1: [5, 11, 2], 2: [6, 10, 2], 3: [6, 11, 2]}
    assert [(submit.prompt_ids, len(submit.siblings)) for submit in server.engine.submitted] == [([5], 1), ([6, 7], 1)]
    if not stream:
        assert [choice["prompt_token_ids"] for choice in answer.json["choices"]] == [[5], [5], [6, 7], [6, 7]]
        assert answer.json["usage"]["prompt_tokens"] == 3


async def test_c05_running_usage_with_several_choices(server: Server) -> None:
    server.engine.choice_script = reply
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await server.complete(n=3, max_tokens=30, stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == sum(len(reply(None, i)) for i in range(3))  # type: ignore[arg-type]
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(ids("the"))}


async def test_numbers_of_a_request_with_several_choices(server: Server) -> None:
    """The log line and the counters: a prompt once, all choices, and what its first choice found in the cache."""
    server.engine.choice_script = reply
    server.engine.cached_tokens = 1
    answer = await server.complete(prompt=[[5], [6, 7]], n=3, max_tokens=30)
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    lengths = [len(reply(None, i)) for i in range(3)]  # type: ignore[arg-type]
    line = server.log[-1]
    assert (line["choices"], line["prompt_tokens"], line["completion_tokens"]) == (6, 3, 2 * sum(lengths))
    assert (line["cached_tokens"], line["finish_reasons"]) == (2, ["stop"])
    assert server.metrics.prompts == [
        PromptNumbers(3, 1, 1, 30, max(lengths), is_answered=True),
        PromptNumbers(3, 2, 1, 30, max(lengths), is_answered=True),
    ]


async def test_admission_counts_every_choice(start: Start) -> None:
    server = await start(limits={"max_queue_requests": 10})
    assert (await server.complete(prompt=["a", "b"], n=5)).status == 200
    server.engine.queue = QueueState(1)
    answer = await server.complete(prompt=["a", "b"], n=5)
    assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
    answer = await server.complete(prompt=["a", "b"], n=6)
    assert (answer.status, answer.error["param"]) == (400, "n"), "this can never be admitted"
    assert "12" in answer.error["message"]
    assert "10" in answer.error["message"]
    assert (await server.complete(prompt=["a"] * 11)).error["param"] == "prompt"


async def test_only_one_choice_must_fit(start: Start) -> None:
    """n choices that do not fit together are served, one after the other if need be (case C15)."""
    server = await start(limits={"max_request_tokens": 100})
    assert (await server.complete(prompt=[5] * 90, max_tokens=10, n=64)).status == 200
    assert (await server.complete(prompt=[5] * 90, max_tokens=11, n=2)).error["param"] == "max_tokens"


@pytest.mark.parametrize("best_of", [1, 3, None])
async def test_best_of_is_n(server: Server, best_of: int | None) -> None:
    answer = await server.complete(n=2, best_of=best_of)
    if best_of is None:
        assert answer.status == 200
    else:
        assert (answer.status, answer.error["param"]) == (400, "best_of")
    assert (await server.complete(n=3, best_of=3)).status == 200


async def test_a_failure_of_one_of_several_choices_ends_the_request(server: Server) -> None:
    server.engine.script = says(" a b c d e f")
    server.engine.fail_after = 2
    answer = await server.complete(n=3, stream=True)
    assert "error" in answer.events[-1]
    assert server.engine.lines == {}
    assert (await server.complete(n=3)).status == 500


# ---------------------------------------------------------------- seeds (C24)


async def test_c24_seeds_of_choices(server: Server) -> None:
    """The first draws with the request's own; all differ; the same request has the same set."""
    for _ in range(2):
        await server.complete(n=64, seed=42)
    first, second = server.engine.submitted
    seeds = [first.sampling.seed, *(sibling.seed for sibling in first.siblings)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 64
    assert [sibling.seed for sibling in second.siblings] == seeds[1:]
    assert all(0 <= seed < 2**64 for seed in seeds)
    neighbours = {sibling_seed(seed, i) for seed in range(40, 45) for i in range(64)}
    assert len(neighbours) == 5 * 64, "choices of neighbouring seeds share nothing"


async def test_c24_the_seed_of_a_choice_is_what_the_documentation_says() -> None:
    assert sibling_seed(42, 0) == 42
    assert sibling_seed(42, 1) == 14984675442531746856  # of sha256sum
    assert sibling_seed(2**64 - 1, 63) == 16979406422828790706


async def test_c24_prompts_without_a_seed_draw_differently(server: Server) -> None:
    """Also those of one request; with a seed, equal prompts draw alike."""
    await server.complete(prompt=["a", "a"], n=2)
    seeds = {s for submit in server.engine.submitted for s in (submit.sampling.seed, submit.siblings[0].seed)}
    assert len(seeds) == 4
    await server.complete(prompt=["a", "a"], seed=7)
    assert [submit.sampling.seed for submit in server.engine.submitted[2:]] == [7, 7]


# ---------------------------------------------------------------- leaving (C09)


async def leave(server: Server, body: dict[str, Any]) -> asyncio.StreamWriter:
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await reader.readuntil(b"data: ")
    writer.close()
    return writer


async def test_c09_leaving_cancels_every_choice(start: Start) -> None:
    """Two hundred times, after the first event; and when some of the choices have ended."""
    server = await start(engine={"choice_script": lambda _, choice: [5] * 30 if choice > 2 else [5, END]})
    for _ in range(200):
        await leave(server, {"prompt": "a", "n": 6, "stream": True, "max_tokens": 400, "ignore_eos": True})
    await server.until(lambda: server.metrics.inflight == 0)
    assert server.engine.lines == {}
    assert server.engine.client.open_sequences == 0

    server.engine.is_manual = True
    server.engine.cancelled.clear()
    leaving = asyncio.create_task(leave(server, {"prompt": "a", "n": 6, "stream": True, "max_tokens": 400}))
    await server.until(lambda: len(server.engine.lines) == 6)
    server.engine.tick()
    server.engine.tick()  # three have ended
    await leaving
    await server.until(lambda: server.metrics.inflight == 0)
    submit = server.engine.submitted[-1]
    assert sorted(server.engine.cancelled) == [sibling.sequence_id for sibling in submit.siblings[2:]]


# ---------------------------------------------------------------- beams (C17)


async def test_c17_beams_reach_the_engine_and_come_best_first(server: Server) -> None:
    server.engine.choice_script = reply
    asked = {"use_beam_search": True, "beam_width": 4, "n": 3, "max_tokens": 10}
    answer = await server.complete(**asked, length_penalty=0.5, early_stopping="never", stop_token_ids=[9])
    submit = server.engine.submitted[-1]
    assert submit.beam_search == BeamSearch(4, 0.5, "never")
    assert (len(submit.siblings), submit.max_tokens, submit.end_ids) == (2, 10, [END, 0, 9])
    assert (submit.sampling.temperature, submit.sampling.repetition_penalty) == (0.0, 1.0)
    assert [choice["text"] for choice in answer.json["choices"]] == REPLIES[:3]
    assert (await server.chat(use_beam_search=True, early_stopping=True)).status == 200
    assert server.engine.submitted[-1].beam_search == BeamSearch(2, 1.0, True)
    await server.chat(use_beam_search=True, n=5, temperature=0, top_p=1, top_k=-1, logit_bias={})
    assert server.engine.submitted[-1].beam_search == BeamSearch(5, 1.0, False)


async def test_c17_a_stop_string_cuts_the_text_of_a_beam(server: Server) -> None:
    server.engine.choice_script = reply
    answer = await server.complete(use_beam_search=True, n=4, stop="c", max_tokens=10)
    choices = answer.json["choices"]
    assert [choice["text"] for choice in choices] == [" fox", " the lazy dog", "", " a b "]
    assert [choice["stop_reason"] for choice in choices] == [None, None, None, "c"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 1}, "beam_width"), ({"beam_width": 17}, "beam_width"), ({"n": 17}, "n"),
        ({"n": 5, "beam_width": 4}, "n"), ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": -1e9}, "length_penalty"), ({"early_stopping": "soon"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"), ({"stream": True}, "stream"), ({"temperature": 0.1}, "temperature"),
        ({"top_p": 0.9}, "top_p"), ({"top_k": 5}, "top_k"), ({"min_p": 0.1}, "min_p"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"), ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 1}, "min_tokens"), ({"seed": 1}, "seed"), ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)  # fmt: skip
async def test_what_beams_cannot_have(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    answer = await server.post(path, body_for(path, use_beam_search=True, **fields))
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", param)
    logprobs: Any = 0 if path == BOTH[0] else True
    answer = await server.post(path, body_for(path, use_beam_search=True, logprobs=logprobs))
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert server.engine.submitted == []


@pytest.mark.parametrize("fields", [{"beam_width": 4}, {"length_penalty": 2}, {"early_stopping": True}])
async def test_fields_of_beams_need_beams(server: Server, fields: dict[str, Any]) -> None:
    for off in (None, False):
        answer = await server.complete(use_beam_search=off, **fields)
        assert (answer.status, [answer.error["param"]]) == (400, list(fields))
    assert (await server.complete(length_penalty=1, early_stopping=False)).status == 200


async def test_all_beams_must_fit_at_once(start: Start) -> None:
    server = await start(limits={"max_request_tokens": 100})
    assert (await server.complete(prompt=[5] * 20, use_beam_search=True, beam_width=4, max_tokens=20)).status == 200
    answer = await server.complete(prompt=[5] * 20, use_beam_search=True, beam_width=4, max_tokens=21)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert "104 tokens (20 in the prompt, 21 for each of 4 beams" in answer.error["message"]
    await server.chat(use_beam_search=True, beam_width=3, ignore_eos=True)
    submit = server.engine.submitted[-1]
    assert submit.max_tokens == (100 - len(submit.prompt_ids)) // 3
    answer = await server.complete(prompt=[5] * 97, use_beam_search=True, beam_width=4, max_tokens=1)
    assert answer.error["param"] == "prompt"


async def test_beams_may_hold_more_than_one_context_together(start: Start) -> None:
    """The context bounds each beam, the pool bounds all of them."""
    server = await start(limits={"max_model_len": 100, "max_request_tokens": 300})
    fields = {"prompt": [5] * 20, "use_beam_search": True, "beam_width": 4}
    assert (await server.complete(**fields, max_tokens=70)).status == 200
    answer = await server.complete(**fields, max_tokens=71)
    assert "KV memory holds 300 tokens of one request" in answer.error["message"]
    assert "304 tokens" in answer.error["message"]
    answer = await server.complete(**fields | {"beam_width": 2}, max_tokens=81)
    assert "maximum context length is 100 tokens" in answer.error["message"]


async def test_a_search_needs_a_place_for_each_beam(start: Start) -> None:
    server = await start(limits={"max_running": 3})
    assert (await server.complete(use_beam_search=True, beam_width=3)).status == 200
    answer = await server.complete(use_beam_search=True, beam_width=4)
    assert (answer.status, answer.error["param"]) == (400, "beam_width")
    assert (await server.complete(use_beam_search=True, n=4)).error["param"] == "n"
    assert (await server.complete(n=4)).status == 200
