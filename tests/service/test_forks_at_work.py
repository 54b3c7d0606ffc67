"""POST /v1/requests/{id}/fork over HTTP, with the real engine and a tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from junk_values import VALUES
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from service.decoding import fields
from service.engine_client import EngineClient
from service.schema import ForkBody

LONG = 3000  # tokens of a parent that is still running when it is forked


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RealHouse]:
    keys = {"api_keys": ["mine", "theirs"]}
    async with real_house(monkeypatch, write_tiny_model(tmp_path), max_model_len=4000, **keys) as house:
        house.session.headers["Authorization"] = "Bearer mine"
        yield house
        async with asyncio.timeout(60):
            while house.engine.scheduler.has_work:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)


class Parent:
    """A running stream, read as it comes."""

    def __init__(self, house: RealHouse, name: str, path: str = "/v1/completions", **body: Any) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._house = house
        self._reading = asyncio.create_task(self._read(path, {"request_id": name} | body))

    async def _read(self, path: str, body: dict[str, Any]) -> None:
        fixed = {"stream": True, "ignore_eos": True, "return_token_ids": True}
        async with self._house.session.post(self._house.url + path, json=fixed | body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (choice, *_) = json.loads(line.removeprefix(b"data: "))["choices"]
                    self.tokens += choice["token_ids"]
                    self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")

    async def has(self, tokens: int) -> "Parent":
        async with asyncio.timeout(60):
            while len(self.tokens) < tokens:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
        return self

    async def end(self) -> "Parent":
        await self._reading
        return self

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])


async def fork(house: RealHouse, name: str, **body: Any) -> tuple[int, Any]:
    path = f"{house.url}/v1/requests/{name}/fork"
    async with house.session.post(path, json={"ignore_eos": True, "return_token_ids": True} | body) as response:
        return response.status, await response.json()


GREEDY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": LONG}


async def test_a_greedy_fork_is_its_parents_continuation(house: RealHouse) -> None:
    parent = await Parent(house, "p", **GREEDY).has(20)
    status, answer = await fork(house, "cmpl-p", max_tokens=40)
    assert status == 200
    at = answer["forked_at"]
    assert (answer["forked_from"], answer["object"]) == ("p", "text_completion")
    assert at >= 20
    (choice,) = answer["choices"]
    await parent.has(at + 40)
    assert choice["prompt_token_ids"] == [5, 6, 7, *parent.tokens[:at]]
    assert choice["token_ids"] == parent.tokens[at : at + 40]
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 + at - 1
    await parent.leave()


async def test_a_fork_may_draw_otherwise_and_outlive_its_parent(house: RealHouse) -> None:
    """It is a request of its own: listed, streamed, and not ended with what it was forked from."""
    parent = await Parent(house, "p", **GREEDY).has(20)
    path = f"{house.url}/v1/requests/p/fork"
    body = {"temperature": 1.5, "seed": 3, "max_tokens": 600, "ignore_eos": True, "stream": True, "request_id": "f"}
    events: list[Any] = []
    async with house.session.post(path, json=body | {"return_token_ids": True}) as response:
        assert response.status == 200
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            events.append(json.loads(line.removeprefix(b"data: ")))
            if len(events) == 5:
                async with house.session.get(house.url + "/v1/requests") as listed:
                    assert {each["id"] for each in (await listed.json())["data"]} == {"p", "f"}
                shared = house.engine.scheduler.memory.information().shared_frames
                assert shared > 0
                await parent.leave()
    assert all((each["id"], each["forked_from"]) == ("cmpl-f", "p") for each in events)
    tokens = [token for each in events for token in each["choices"][0]["token_ids"]]
    assert len(tokens) == 600
    at = events[0]["forked_at"]
    assert tokens[:50] != parent.tokens[at : at + 50]


async def test_what_is_not_said_is_as_in_the_parent(house: RealHouse) -> None:
    """The parent samples one of two tokens; so does its fork, until it is told otherwise."""
    only = {"allowed_token_ids": [9, 11], "temperature": 1.0, "prompt": [5, 6, 7], "max_tokens": LONG}
    parent = await Parent(house, "p", **only).has(5)
    _, answer = await fork(house, "p", max_tokens=30)
    assert set(answer["choices"][0]["token_ids"]) == {9, 11}
    _, other = await fork(house, "p", max_tokens=30, allowed_token_ids=[12])
    assert set(other["choices"][0]["token_ids"]) == {12}
    await parent.leave()


DRAWN: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 1.5, "seed": 4, "max_tokens": LONG}


async def stop_at(house: RealHouse, tokens: int) -> str:
    """What a stream of DRAWN says first with so many tokens."""
    texts = [
        (await house.post("/v1/completions", DRAWN | {"max_tokens": at}))["choices"][0]["text"]
        for at in (tokens - 2, tokens)
    ]
    stop = texts[1].removeprefix(texts[0])
    assert len(stop) > 1
    assert stop not in texts[0]
    return stop


async def test_a_parent_that_is_past_its_stop_has_ended(house: RealHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on until it hears of the stop: no answer has those tokens, so none goes on from there."""
    lost: list[int] = []
    monkeypatch.setattr(EngineClient, "finish", lambda _, sequence_id, at: lost.append(at))
    parent = await Parent(house, "p", **DRAWN, stop=[await stop_at(house, 40)]).has(40)
    status, answer = await fork(house, "p")
    assert (status, lost, len(parent.tokens)) == (404, [40], 40), answer
    assert "has just ended" in answer["error"]["message"]
    await parent.leave()
    async with house.session.delete(house.url + "/v1/requests/p") as response:
        assert response.status == 200


@pytest.mark.parametrize("of_a_fork", [False, True])
async def test_a_parent_is_not_past_a_stop_that_does_not_count(house: RealHouse, of_a_fork: bool) -> None:
    """One within its min_tokens, or in what it was itself forked from."""
    stop = [await stop_at(house, 20)]
    parent = await Parent(house, "p", **DRAWN, **({} if of_a_fork else {"stop": stop, "min_tokens": 30})).has(25)
    if of_a_fork:
        child = asyncio.create_task(fork(house, "p", request_id="c", seed=5, stop=stop, logit_bias={"7": 100}))
        async with asyncio.timeout(60):
            while (await fork(house, "c", max_tokens=1))[0] != 200:
                assert not child.done()
        child.cancel()
        await asyncio.wait([child])
    else:
        assert (await fork(house, "p", max_tokens=1))[0] == 200
    await parent.leave()


async def test_a_chat_is_forked_as_a_chat_and_no_character_is_cut_in_two(house: RealHouse) -> None:
    """The texts of parent, up to the fork, and of the fork are together the text of all the tokens."""
    chat = {"messages": [{"role": "user", "content": "say"}], "temperature": 1.5, "seed": 11, "max_tokens": LONG}
    parent = await Parent(house, "c", "/v1/chat/completions", **chat).has(10)
    tokenizer = house.server.doors.front_end.loaded().tokenizer  # type: ignore[union-attr]
    for i in range(12):
        await parent.has(len(parent.tokens) + 1 + i % 3)
        status, answer = await fork(house, "chatcmpl-c", max_tokens=12, temperature=1.0)
        assert status == 200
        assert answer["object"] == "chat.completion"
        at, (choice,) = answer["forked_at"], answer["choices"]
        detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        before = "".join(map(detokenizer.push, parent.tokens[:at]))
        assert len(parent.tokens) >= at or await parent.has(at)
        after = "".join(map(detokenizer.push, choice["token_ids"])) + detokenizer.flush()
        assert choice["message"]["content"] == after
        assert parent.text.startswith(before)
    await parent.leave()


@pytest.mark.parametrize("is_shown", [True, False])
async def test_a_fork_shows_reasoning_where_its_parent_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shown: bool
) -> None:
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    chat = {"messages": [{"role": "user", "content": "say"}], "temperature": 0, "max_tokens": 1000}
    async with real_house(monkeypatch, folder, max_model_len=4000) as house:
        parent = await Parent(house, "c", "/v1/chat/completions", include_reasoning=is_shown, **chat).has(10)
        status, answer = await fork(house, "c", max_tokens=12)
        await parent.end()
    message = answer["choices"][0]["message"]
    assert (status, message["content"]) == (200, "")
    assert bool(message.get("reasoning_content")) == is_shown
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


async def test_one_of_several_choices_is_forked_by_its_number(house: RealHouse) -> None:
    body = GREEDY | {"n": 3, "temperature": 1.0, "seed": 1}
    parent = await Parent(house, "p", **body).has(30)
    status, answer = await fork(house, "p", max_tokens=4)
    assert (status, answer["error"]["param"]) == (400, "choice")
    status, answer = await fork(house, "p", max_tokens=4, choice=2)
    assert status == 200
    status, answer = await fork(house, "p", max_tokens=4, choice=3)
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    await parent.leave()


async def test_refusals(house: RealHouse) -> None:
    parent = await Parent(house, "p", **GREEDY).has(5)
    status, answer = await fork(house, "nothing", max_tokens=4)
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    for field, value in (("n", 2), ("echo", True), ("cache_salt", "x"), ("priority", 1), ("max_tokens", LONG + 2000)):
        status, answer = await fork(house, "p", **{field: value})
        assert (status, answer["error"]["param"]) == (400, field), answer
    search = asyncio.create_task(
        house.post(
            "/v1/completions", {"prompt": [1, 2], "use_beam_search": True, "max_tokens": 1000, "request_id": "b"}
        )
    )
    async with asyncio.timeout(60):
        while (await fork(house, "b"))[0] in (404, 409):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    status, answer = await fork(house, "b")
    assert (status, "beam search" in answer["error"]["message"]) == (400, True)
    await search
    house.session.headers["Authorization"] = "Bearer theirs"
    status, answer = await fork(house, "p")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError"), "of others there is nothing to fork"
    house.session.headers["Authorization"] = "Bearer mine"
    await parent.leave()


async def test_a_fork_whose_client_leaves_is_gone(house: RealHouse) -> None:
    parent = await Parent(house, "p", **GREEDY).has(5)
    child = asyncio.create_task(fork(house, "p", max_tokens=2000, request_id="f"))
    async with asyncio.timeout(60):
        while len(house.engine.scheduler.sequences.running) < 2:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    child.cancel()
    async with asyncio.timeout(60):
        while len(house.engine.scheduler.sequences.running) > 1:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    await parent.leave()


async def test_a_request_of_another_form_is_forked_as_a_chat(house: RealHouse) -> None:
    body = {"input": "say", "max_output_tokens": LONG, "temperature": 1, "stream": True}
    path = house.url + "/v1/responses"
    async with house.session.post(path, json=body, headers={"X-Request-Id": "r"}) as response:
        async with asyncio.timeout(60):
            while b"output_text.delta" not in await response.content.readline():
                pass
        status, answer = await fork(house, "resp_r", max_tokens=3)
    assert (status, answer["object"], answer["forked_from"]) == (200, "chat.completion", "r")
    assert answer["usage"]["completion_tokens"] == 3


async def test_no_field_of_any_value_is_a_5xx(house: RealHouse) -> None:
    """Each is served, or a 400 that names it (404 for a model, or a choice); nothing is left behind."""
    for name in sorted(fields(ForkBody)):
        parent = await Parent(house, name, **GREEDY).has(1)
        for value in VALUES:
            path = f"{house.url}/v1/requests/{name}/fork"
            async with house.session.post(path, json={"max_tokens": 1} | {name: value}) as response:
                answer = await response.read()
            if response.status == 200:
                continue
            error = json.loads(answer)["error"]
            assert (response.status, error["param"]) in ((400, name), (404, name)), (name, value, error)
            assert response.status == 400 or name in ("model", "choice"), (name, value, error)
        await parent.leave()
    assert (await fork(house, "choice"))[0] == 404, "it has ended"
