"""The page cache as clients see it: prefix_cache, cache_salt, return_cache_info, usage. Form, then the real engine."""

import time
from pathlib import Path
from typing import Any

import pytest
from http_house import Start, says
from real_house import real_house
from tiny_model import write_tiny_model

from service.engine_client import MissInfo

BOTH = ["/v1/completions", "/v1/chat/completions"]
PROMPT = {
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
EVICTED = MissInfo("evicted", 32, evicted_s=0.0)


@pytest.mark.parametrize("path", BOTH)
async def test_fields_reach_the_engine(start: Start, path: str) -> None:
    server = await start()
    await server.post(path, PROMPT[path])
    await server.post(path, PROMPT[path] | {"prefix_cache": True, "cache_salt": None})
    await server.post(path, PROMPT[path] | {"prefix_cache": False, "cache_salt": "x" * 128})
    assert [(submit.prefix_cache, submit.cache_salt) for submit in server.engine.submitted] == [
        (True, ""), (True, ""), (False, "x" * 128),
    ]  # fmt: skip
    assert "xxx" not in repr(server.log), "a salt is a secret among those who share it"


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stop", [None, "o"])
async def test_cache_info_comes_with_the_end_of_a_choice(start: Start, path: str, stop: str | None) -> None:
    """Whole and streamed alike; also when a stop string ends the choice before the engine says how it went."""
    server = await start(engine={"script": says(" the quick brown fox"), "cached_tokens": 32, "miss": EVICTED})
    body = PROMPT[path] | {"return_cache_info": True, "stop": stop, "return_token_ids": True}
    whole = (await server.post(path, body)).json
    info = whole["choices"][0].pop("cache_info")
    engine_began = time.time() - time.monotonic()
    assert info["miss"].pop("evicted_at") == pytest.approx(engine_began, abs=60)
    assert info == {
        "cached_tokens": 32,
        "miss": {"reason": "evicted", "position": 32},
    }
    plain = (await server.post(path, PROMPT[path] | {"stop": stop, "return_token_ids": True})).json
    assert whole["choices"] == plain["choices"], "cache_info adds to an answer and changes nothing else"

    events = (await server.post(path, body | {"stream": True})).events
    choices = [event["choices"][0] for event in events]
    assert [choice for choice in choices if "cache_info" in choice] == choices[-1:]
    assert choices[-1]["finish_reason"] == "stop"
    streamed = choices[-1]["cache_info"]
    assert (streamed["cached_tokens"], streamed["miss"]["reason"]) == (32, "evicted")
    without = (await server.post(path, PROMPT[path] | {"stop": stop, "return_token_ids": True, "stream": True})).events
    del choices[-1]["cache_info"]
    assert choices == [event["choices"][0] for event in without]


async def test_a_miss_is_told_without_what_it_does_not_have(start: Start) -> None:
    server = await start(engine={"miss": MissInfo("never_computed", 0)})
    choice = (await server.complete(return_cache_info=True)).json["choices"][0]
    assert choice["cache_info"] == {"cached_tokens": 0, "miss": {"reason": "never_computed", "position": 0}}
    server.engine.miss = MissInfo("other_salt", 16)  # operators may see that somebody else asked the same
    choice = (await server.complete(return_cache_info=True)).json["choices"][0]
    assert choice["cache_info"] == {"cached_tokens": 0, "miss": {"reason": "never_computed", "position": 16}}
    server.engine.miss = MissInfo("disabled", 0)
    choice = (await server.complete(return_cache_info=True, prefix_cache=False)).json["choices"][0]
    assert choice["cache_info"] == {"cached_tokens": 0, "miss": {"reason": "disabled", "position": 0}}
    assert "cache_info" not in (await server.complete()).json["choices"][0]


async def test_every_choice_has_its_own(start: Start) -> None:
    server = await start(engine={"miss": MissInfo("never_computed", 0)})
    events = (await server.complete(prompt=["a", "b"], return_cache_info=True, stream=True)).events
    told = [choice["index"] for event in events for choice in event["choices"] if "cache_info" in choice]
    assert sorted(told) == [0, 1]


# ---------------------------------------------------------------- the real engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


async def test_a_prompt_is_cached_from_one_request_to_the_next(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Over HTTP, with real pages of 16 tokens: usage, cache_info, metrics and meminfo tell the same story."""
    ids = [5 + i % 300 for i in range(49)]  # three pages, and the token that is always computed
    answers: list[tuple[int, Any]] = []
    async with real_house(monkeypatch, folder, dtype="float32") as house:

        async def ask(prompt: list[int], **fields: Any) -> Any:
            fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_cache_info": True} | fields
            answer = await house.post("/v1/completions", {"prompt": prompt, "return_token_ids": True} | fields)
            choice = answer["choices"][0]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert choice["cache_info"]["cached_tokens"] == cached
            answers.append((cached, choice["token_ids"]))
            return choice["cache_info"]["miss"]

        before = await house.metrics()
        assert before["vllm:prefix_cache_queries_total"] == before["vllm:prefix_cache_hits_total"] == 0, "warm-up"
        assert (await ask(ids))["reason"] == "never_computed"
        assert await ask(ids) == {"reason": "last_token", "position": 48}
        assert await ask(ids, cache_salt="mine") == {"reason": "never_computed", "position": 0}, (
            "of others nothing is told"
        )
        assert (await ask(ids, cache_salt="mine"))["reason"] == "last_token"
        assert await ask(ids, prefix_cache=False) == {"reason": "disabled", "position": 0}
        assert await ask([*ids[:20], 350, *ids[21:]]) == {"reason": "token_differs", "position": 20}
        assert [cached for cached, _ in answers] == [0, 48, 0, 48, 0, 20]
        assert len({tuple(tokens) for _, tokens in answers[:5]}) == 1, "the cache must not change an answer"

        events = await house.events(
            "/v1/completions",
            {"prompt": ids, "max_tokens": 2, "return_cache_info": True, "stream_options": {"include_usage": True}},
        )
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
        assert events[-2]["choices"][0]["cache_info"]["cached_tokens"] == 48
        turn = {
            "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}],
            "max_tokens": 2,
        }
        first, second = [await house.post("/v1/chat/completions", turn) for _ in range(2)]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        chat_tokens = second["usage"]["prompt_tokens"]
        chat_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (chat_tokens - 1) // 16 * 16 <= chat_cached < chat_tokens

        after, facts = await house.metrics(), await house.meminfo()
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    hits = 48 + 48 + 20 + 48 + chat_cached
    assert grown["vllm:prefix_cache_hits_total"] == grown["vllm:prompt_tokens_cached_total"] == hits
    assert grown["vllm:prefix_cache_queries_total"] == 6 * 49 + 2 * chat_tokens, "one of eight did not ask"
    assert grown["vllm:prompt_tokens_total"] == 7 * 49 + 2 * chat_tokens
    assert grown['pagewalk_kv_events_total{kind="cow"}'] > 0, "partly matching pages are copied"
    assert after["vllm:kv_cache_usage_perc"] == 0, "cached pages are free for whoever needs them"
    assert facts["cached"] == after['pagewalk_kv_frames{state="cached"}'] > 0
    assert facts["total"] == facts["free"] + facts["cached"] + facts["active"] + facts["copying"]
    assert facts["available"] == facts["total"]
    assert facts["dtype"] == "float32"
    assert facts["weights_bytes"] > 0
