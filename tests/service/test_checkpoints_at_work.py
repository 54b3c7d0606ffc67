"""POST /admin/v1/sequences/{id}/checkpoint and /admin/v1/restore over HTTP, with the real engine and a tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

LONG = 3000  # tokens of a request that is still running when it is saved
GREEDY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": LONG}
DRAWN: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 1.3, "seed": 11, "top_p": 0.9, "max_tokens": LONG}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return write_tiny_model(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path) -> AsyncIterator[RealHouse]:
    async with real_house(monkeypatch, model, **settings(folder)) as house:
        yield house
        await until_idle(house)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"max_model_len": 4000, "checkpoint_dir": str(folder), "dtype": "float32"} | more


async def until_idle(house: RealHouse) -> None:
    async with asyncio.timeout(60):
        while house.engine.scheduler.has_work or house.engine.scheduler.memory.is_copying:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Stream:
    """A running request, read as it comes."""

    def __init__(self, house: RealHouse, route: str = "/v1/completions", **body: Any) -> None:
        self.tokens: list[int] = []
        self.events: list[Any] = []
        self.text = ""
        self.status = 0
        self._house = house
        self._reading = asyncio.create_task(self._read(route, body))

    async def _read(self, route: str, body: dict[str, Any]) -> None:
        fixed = {"stream": True, "return_token_ids": True}
        url = admin(self._house, route) if route == "restore" else self._house.url + route
        async with self._house.session.post(url, json=fixed | body) as response:
            self.status = response.status
            assert self.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    self.events.append(event)
                    (choice, *_) = event["choices"]
                    self.tokens += choice["token_ids"]
                    self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")

    async def has(self, tokens: int) -> "Stream":
        async with asyncio.timeout(60):
            while len(self.tokens) < tokens:
                assert not self._reading.done() or len(self.tokens) >= tokens, self._reading.exception()
                await asyncio.sleep(0.001)
        return self

    async def end(self) -> "Stream":
        await self._reading
        return self

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])


def admin(house: RealHouse, path: str) -> str:
    return f"http://127.0.0.1:{house.server.admin_port}/admin/v1/{path}"


async def act(house: RealHouse, action: str, **body: Any) -> tuple[int, Any]:
    async with house.session.post(admin(house, action), json=body) as response:
        return response.status, await response.json()


async def save(house: RealHouse, name: str, file: str) -> Any:
    status, answer = await act(house, f"sequences/{name}/checkpoint", path=file)
    assert status == 200, answer
    return answer["after"]


@pytest.mark.parametrize("body", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_a_restored_request_says_what_it_would_have_said(house: RealHouse, body: dict[str, Any]) -> None:
    """In the same server, while the one that was saved goes on."""
    first = await Stream(house, request_id="r", ignore_eos=True, **body).has(40)
    after = await save(house, "r", "a")
    second = await Stream(house, "restore", path="a", request_id="again").has(300)
    at = second.events[0]["restored_tokens"]
    assert (after["tokens"], at >= 40) == (3 + at, True)
    await first.has(at + 300)
    assert second.tokens[:300] == first.tokens[at : at + 300]
    assert all((each["id"], each["restored_tokens"]) == ("cmpl-again", at) for each in second.events)
    await first.leave()
    await second.leave()


async def test_another_server_goes_on_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path
) -> None:
    body = DRAWN | {"frequency_penalty": 0.7, "repetition_penalty": 1.1, "max_tokens": 400, "ignore_eos": True}
    async with real_house(monkeypatch, model, **settings(folder)) as house:
        whole = await Stream(house, **body).end()
        part = await Stream(house, request_id="r", **body).has(50)
        await save(house, "r", "a")
        await part.leave()
        await until_idle(house)
    async with real_house(monkeypatch, model, **settings(folder, kv_cache_memory_bytes=4 << 20)) as house:
        status, answer = await act(house, "restore", path="a", return_token_ids=True)
        assert status == 200, answer
        at, (choice,) = answer["restored_tokens"], answer["choices"]
        assert choice["token_ids"] == whole.tokens[at:]
        assert choice["prompt_token_ids"] == [5, 6, 7, *whole.tokens[:at]]
        assert choice["finish_reason"] == "length"
        computed = answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert computed == 1, "its last token"


async def test_without_a_folder_nothing_is_written_or_read(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    async with real_house(monkeypatch, model, max_model_len=4000) as house:
        stream = await Stream(house, request_id="r", **GREEDY).has(5)
        for path in ("sequences/r/checkpoint", "restore"):
            status, answer = await act(house, path, path="a")
            assert (status, "--checkpoint-dir" in answer["error"]["message"]) == (403, True)
        await stream.leave()
        await until_idle(house)


@pytest.mark.parametrize("name", ["", "..", "../a", "/etc/passwd", "a/b", "a\\b", ".a", "a\0b", "x" * 300, "a\n"])
async def test_a_path_is_a_name_in_the_folder(house: RealHouse, folder: Path, name: str) -> None:
    stream = await Stream(house, request_id="r", **GREEDY).has(5)
    for path in ("sequences/r/checkpoint", "restore"):
        status, answer = await act(house, path, path=name)
        assert (status, answer["error"]["param"]) == (400, "path")
    assert not list(folder.iterdir())  # noqa: ASYNC240
    await stream.leave()


async def test_a_stop_string_that_had_begun_is_found(house: RealHouse) -> None:
    """Wherever the answer was cut: the text before and the rest are together the text as it would have been."""
    body = {"prompt": [5, 6, 7], "temperature": 1.2, "seed": 5, "max_tokens": 300, "ignore_eos": True}
    free = await Stream(house, **body).end()
    stop = free.text[200:212]
    asked = body | {"stop": [stop], "logprobs": 1}
    end = free.text.index(stop)
    for made in range(1, 100, 14):
        part = await Stream(house, request_id=f"r{made}", **asked | {"max_tokens": 2000}).has(made)
        status, _ = await act(house, f"sequences/r{made}/checkpoint", path="a")
        await part.end()
        if status == 404:
            continue  # it was over before
        rest = await Stream(house, "restore", path="a", request_id="rest").end()
        at = rest.events[0]["restored_tokens"]
        assert rest.tokens == part.tokens[at:]
        assert free.text[:end].endswith(rest.text)
        (choice,) = rest.events[-1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert rest.events[0]["choices"][0]["logprobs"] is not None


async def test_one_saved_past_its_stop_string_has_nothing_more_to_say(house: RealHouse) -> None:
    """Its front end finds the stop string some steps after the engine has made it: until then it can be saved."""
    stream = await Stream(house, request_id="r", ignore_eos=True, **DRAWN).has(60)
    stop = stream.text[20:26]
    (sequence,) = house.engine.scheduler.open_sequences()
    sequence.text = msgspec.structs.replace(sequence.text, stops=[stop])  # as if it had asked for that
    await save(house, "r", "a")
    await stream.leave()
    for shown in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        async with house.session.post(admin(house, "restore"), json={"path": "a"} | shown) as response:
            text = await response.text()
        assert response.status == 200, text
        (choice,) = json.loads(text.splitlines()[0].removeprefix("data: "))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", stop)
        assert '"completion_tokens":0' in text


async def test_a_stop_string_within_min_tokens_does_not_count_after_a_restore_either(house: RealHouse) -> None:
    free = await Stream(house, ignore_eos=True, **DRAWN | {"max_tokens": 40}).end()
    body = DRAWN | {"stop": [free.text[2:9]], "min_tokens": 20, "ignore_eos": True}
    part = await Stream(house, request_id="r", **body).has(30)
    await save(house, "r", "a")
    rest = await Stream(house, "restore", path="a", request_id="rest").has(10)
    at = rest.events[0]["restored_tokens"]
    await part.has(at + 10)
    assert rest.tokens[:10] == part.tokens[at : at + 10]
    await part.leave()
    await rest.leave()


async def test_a_restored_fork_is_the_rest_of_its_own_answer(house: RealHouse) -> None:
    """What its parent had said is neither its text nor counted, and its stop strings are not looked for there."""
    parent = await Stream(house, request_id="p", ignore_eos=True, **DRAWN).has(60)
    asked = {"stop": [parent.text[5:12]], "seed": 4, "max_tokens": 2000, "ignore_eos": True}
    fork = await Stream(house, "/v1/requests/p/fork", request_id="f", **asked).has(20)
    for file, name in (("a", "f"), ("b", "r")):  # and one that was restored before
        await save(house, name, file)
        rest = await Stream(house, "restore", path=file, request_id="r" if name == "f" else "s").has(5)
        at = rest.events[0]["restored_tokens"]
        await fork.has(at + 5)
        assert rest.tokens[:5] == fork.tokens[at : at + 5]
    for stream in (parent, fork):
        await stream.leave()
    for name in ("r", "s"):
        await house.session.delete(house.url + f"/v1/requests/{name}")


async def test_a_request_that_may_take_for_ever_is_restored(house: RealHouse) -> None:
    stream = await Stream(house, request_id="r", ignore_eos=True, timeout_s=1e300, **GREEDY).has(20)
    await save(house, "r", "a")
    rest = await Stream(house, "restore", path="a", request_id="again").has(5)
    await stream.leave()
    await rest.leave()


async def test_a_chat_goes_on_as_a_chat(house: RealHouse) -> None:
    body = {"messages": [{"role": "user", "content": "say"}], "temperature": 1.5, "seed": 3, "max_tokens": 500}
    first = await Stream(house, "/v1/chat/completions", request_id="c", ignore_eos=True, **body).has(40)
    await save(house, "chatcmpl-c".removeprefix("chatcmpl-"), "a")
    await first.end()
    status, answer = await act(house, "restore", path="a", return_token_ids=True)
    assert (status, answer["object"]) == (200, "chat.completion")
    at, (choice,) = answer["restored_tokens"], answer["choices"]
    assert choice["token_ids"] == first.tokens[at:]
    assert first.text.endswith(choice["message"]["content"])


async def test_a_grammar_goes_on_where_it_stood(house: RealHouse) -> None:
    body = {
        "prompt": "the",
        "max_tokens": 600,
        "seed": 8,
        "structured_outputs": {"regex": "([a-f]{5} is [0-9]{2,9}!){30}"},
    }
    first = await Stream(house, request_id="g", **body).has(20)
    await save(house, "g", "a")
    await first.end()
    status, answer = await act(house, "restore", path="a", return_token_ids=True)
    assert status == 200, answer
    at, (choice,) = answer["restored_tokens"], answer["choices"]
    assert choice["token_ids"] == first.tokens[at:]
    assert choice["finish_reason"] == first.events[-1]["choices"][0]["finish_reason"]


async def test_one_of_several_choices_is_saved_by_its_number(house: RealHouse) -> None:
    body = GREEDY | {"n": 2, "temperature": 1.0, "seed": 1, "request_id": "n"}
    stream = await Stream(house, ignore_eos=True, **body).has(20)
    status, answer = await act(house, "sequences/n/checkpoint", path="a")
    assert (status, "has 2 sequences" in answer["error"]["message"]) == (404, True)
    async with house.session.get(admin(house, "sequences")) as response:
        names = [each["id"] for each in (await response.json())["sequences"] if each["request"] == "n"]
    await save(house, names[1], "a")
    rest = await Stream(house, "restore", path="a", request_id="one").has(30)
    at = rest.events[0]["restored_tokens"]
    second = [
        token for each in stream.events for token in each["choices"][0]["token_ids"] if each["choices"][0]["index"] == 1
    ]
    known = second[at : at + 30]
    assert rest.tokens[: len(known)] == known
    await stream.leave()
    await rest.leave()


async def test_a_client_that_leaves_a_restored_request_ends_it(house: RealHouse) -> None:
    stream = await Stream(house, request_id="r", ignore_eos=True, **GREEDY).has(20)
    await save(house, "r", "a")
    await stream.leave()
    await until_idle(house)
    again = await Stream(house, "restore", path="a").has(3)
    async with house.session.get(house.url + "/v1/requests") as response:
        assert [each["id"] for each in (await response.json())["data"]] == ["r"]
    await again.leave()
    await until_idle(house)
    async with house.session.get(admin(house, "trace")) as response:
        actions = [each["action"] for each in (await response.json())["actions"]]
    assert actions == ["sequences/r/checkpoint", "restore"]


async def test_a_damaged_file_is_told_and_changes_nothing(house: RealHouse, folder: Path) -> None:
    stream = await Stream(house, request_id="r", **GREEDY).has(20)
    await save(house, "r", "a")
    whole = (folder / "a").read_bytes()
    cases = {"cut": whole[:-100], "junk": b"junk", "empty": b"", "damaged": whole[:-100] + bytes(100)}
    for name, data in cases.items():
        (folder / name).write_bytes(data)
        status, answer = await act(house, "restore", path=name)
        assert (status, answer["error"]["param"]) == (400, "path"), name
    status, answer = await act(house, "restore", path="none")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    await stream.leave()


async def test_clients_that_leave_while_a_file_is_read_leave_nothing(house: RealHouse) -> None:
    stream = await Stream(house, request_id="r", ignore_eos=True, **GREEDY).has(20)
    await save(house, "r", "a")
    await stream.leave()
    await until_idle(house)
    for number in range(30):
        again = Stream(house, "restore", path="a", request_id=f"r{number}")
        await asyncio.sleep(0.0005 * number)
        await again.leave()
    await act(house, "restore", path="none")  # after all those before it
    async with asyncio.timeout(60):
        while house.client.open_sequences:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    await until_idle(house)
    assert not list(house.engine.scheduler.open_sequences())


REAL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 3, "top_p": 0.95, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
async def test_the_demo_model_goes_on_in_another_server(
    monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path, folder: Path, dtype: str
) -> None:
    """In float32 with the same tokens, in bfloat16 but for near ties; beside others, and into other frames."""
    chosen = {"dtype": dtype, "load_format": "auto", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
    body = {"prompt": "A page table is", "max_tokens": 36, "ignore_eos": True, "logprobs": 2}
    wholes = {}
    async with real_house(monkeypatch, smollm2_folder, checkpoint_dir=str(folder), **chosen) as house:
        for name, sampling in REAL.items():
            wholes[name] = await Stream(house, **body, **sampling).end()
            part = await Stream(house, request_id=name, **body, **sampling).has(17)
            await save(house, name, name)
            await part.leave()
        await until_idle(house)
    async with real_house(monkeypatch, smollm2_folder, checkpoint_dir=str(folder), **chosen) as house:
        neighbour = await Stream(house, prompt="Once", max_tokens=80, temperature=0, ignore_eos=True).has(3)
        for name, whole in wholes.items():
            rest = await Stream(house, "restore", path=name).end()
            expected = whole.tokens[rest.events[0]["restored_tokens"] :]
            if dtype == "bfloat16" and rest.tokens != expected:
                differs = next(
                    i for i, pair in enumerate(zip(rest.tokens, expected, strict=True)) if len(set(pair)) > 1
                )
                best = whole.events[len(whole.tokens) - len(expected) + differs]["choices"][0]["logprobs"][
                    "top_logprobs"
                ]
                first, second = sorted(best[0].values(), reverse=True)[:2]
                assert first - second < 0.3, (name, differs)
            else:
                assert rest.tokens == expected
        await neighbour.end()
        await until_idle(house)
