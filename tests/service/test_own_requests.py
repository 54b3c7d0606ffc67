"""GET and DELETE /v1/requests: a key sees and ends its own requests, and those of others do not exist for it."""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from http_events import named_events
from http_house import Server, Start
from yarl import URL

MINE, THEIRS = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer theirs"}


@pytest.fixture
async def house(start: Start) -> Server:
    return await start(engine={"is_manual": True}, settings={"api_keys": ("mine", "theirs")})


def running(server: Server, request_id: str, headers: dict[str, str], **body: Any) -> "asyncio.Task[Any]":
    named = headers | {"X-Request-Id": request_id}
    return asyncio.create_task(server.post("/v1/completions", {"prompt": "the"} | body, headers=named))


async def listed(server: Server, headers: dict[str, str]) -> list[str]:
    body = (await server.get("/v1/requests", headers=headers)).json
    assert body["object"] == "list"
    return [entry["id"] for entry in body["data"]]


async def end_all(server: Server, *tasks: "asyncio.Task[Any]") -> None:
    while server.engine.lines:
        server.engine.tick()
    await asyncio.gather(*tasks)


async def test_each_key_sees_its_own(house: Server) -> None:
    tasks = [running(house, "a", MINE, n=2), running(house, "b", THEIRS), running(house, "c/d", MINE)]
    await house.until(lambda: len(house.engine.lines) == 4)
    assert sorted(await listed(house, MINE)) == ["a", "c/d"]
    assert await listed(house, THEIRS) == ["b"]
    entry = (await house.get("/v1/requests/a", headers=MINE)).json
    assert (entry["id"], entry["object"], len(entry["sequences"])) == ("a", "request", 2)
    assert entry["sequences"][0] == {
        "state": "queued", "prompt_tokens": len(house.engine.submitted[0].prompt_ids), "cached_tokens": 0,
        "output_tokens": 0, "max_tokens": 16, "preemptions": 0,
    }  # fmt: skip
    slashed = URL(f"{house.url}/v1/requests/cmpl-c%2Fd", encoded=True)
    async with house.session.get(slashed, headers=MINE) as response:
        assert (await response.json())["id"] == "c/d"
    for path in ("/v1/requests/b", "/v1/requests/nothing"):
        answer = await house.get(path, headers=MINE)
        assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    await end_all(house, *tasks)
    assert await listed(house, MINE) == []


@pytest.mark.parametrize("name", ["{a}", "a}{", "a/{b}", "..", "?#%25&;=+", "[^`|]\\", "a.txt"])
async def test_every_id_that_a_request_may_have_finds_it(house: Server, name: str) -> None:
    task = running(house, name, MINE)
    await house.until(lambda: len(house.engine.lines) == 1)
    url = URL(f"{house.url}/v1/requests/{quote(name, safe='')}", encoded=True)
    async with house.session.get(url, headers=MINE) as response:
        assert (response.status, (await response.json())["id"]) == (200, name)
    async with house.session.delete(url, headers=MINE) as response:
        assert await response.json() == {"id": name, "object": "request", "aborted": True}
    assert (await task).status == 503


@pytest.mark.parametrize("name", ["a", "cmpl-a"])
async def test_an_aborted_request_ends_with_an_error_that_says_so(house: Server, name: str) -> None:
    """Whole answers get 503, and are not tried again by the client; a second DELETE changes nothing."""
    task = running(house, "a", MINE, n=2)
    await house.until(lambda: len(house.engine.lines) == 2)
    answer = await house.ask("DELETE", f"/v1/requests/{name}", headers=MINE)
    assert answer.json == {"id": name, "object": "request", "aborted": True}
    ended = await task
    assert (ended.status, ended.error["type"]) == (503, "ServiceUnavailableError")
    assert "aborted" in ended.error["message"]
    assert ended.headers["x-should-retry"] == "false"
    again = await house.ask("DELETE", f"/v1/requests/{name}", headers=MINE)
    assert (again.status, again.json) == (200, {"id": name, "object": "request", "aborted": False})
    assert house.engine.lines == {}


async def test_an_aborted_stream_ends_with_an_error_event(house: Server) -> None:
    task = running(house, "a", MINE, stream=True, max_tokens=100, ignore_eos=True)
    await house.until(lambda: len(house.engine.lines) == 1)
    house.engine.tick()
    await house.ask("DELETE", "/v1/requests/a", headers=MINE)
    *_, error = (await task).events
    assert (error["error"]["code"], "aborted" in error["error"]["message"]) == (503, True)


async def test_requests_of_others_cannot_be_ended(house: Server) -> None:
    task = running(house, "a", THEIRS)
    await house.until(lambda: len(house.engine.lines) == 1)
    answer = await house.ask("DELETE", "/v1/requests/a", headers=MINE)
    assert (answer.status, answer.json["aborted"]) == (200, False), "as for one that never was"
    assert len(house.engine.lines) == 1
    await end_all(house, task)
    assert (await task).status == 200


async def test_without_keys_all_requests_are_everybodys(start: Start) -> None:
    server = await start(engine={"is_manual": True})
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stream": True}
    task = asyncio.create_task(server.post("/v1/messages", body, headers={"X-Request-Id": "m"}))
    await server.until(lambda: len(server.engine.lines) == 1)
    server.engine.tick()
    assert (await server.ask("DELETE", "/v1/requests/msg_m")).json["aborted"] is True
    *_, (kind, data) = named_events((await task).body)
    assert (kind, data["error"]["type"]) == ("error", "overloaded_error")
