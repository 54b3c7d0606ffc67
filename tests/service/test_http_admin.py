"""The admin routes over HTTP with the real engine: forms, parameters, keys."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from http_house import Start
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from service import admin
from service.admin_bodies import BODIES
from service.api import ADMIN_ROUTES


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    async with real_house(monkeypatch, folder, max_model_len=200) as house:
        yield house


async def get(house: RealHouse, path: str, **headers: str) -> tuple[int, str, Any]:
    """Status, content type, and the body, as JSON if it is that."""
    url = f"http://127.0.0.1:{house.server.admin_port}/admin/v1/{path}"
    async with house.session.get(url, headers=headers) as response:
        is_json = response.content_type == "application/json"
        return response.status, response.content_type, await (response.json() if is_json else response.text())


async def test_every_view_as_json_and_as_text(house: RealHouse) -> None:
    await house.post("/v1/completions", {"prompt": list(range(2, 40)), "max_tokens": 4})
    for name in admin.VIEWS:
        if "{of}" in name and not name.startswith("tenants"):
            continue  # nothing runs
        path = name.replace("{of}", "default")
        status, kind, facts = await get(house, path)
        assert (status, kind) == (200, "application/json"), name
        assert list(facts)[:3] == ["ts", "step", "uptime_s"]
        assert (await get(house, path + ".txt"))[:2] == (200, "text/plain"), name
        assert (await get(house, path, Accept="text/plain"))[:2] == (200, "text/plain"), name
    assert (await get(house, "tenants/default/memory.max"))[2] == "max\n"
    assert (await get(house, "tenants/default/memory.lunch"))[0] == 404
    assert (await get(house, "frames/0"))[2]["frame"] == 0
    assert re.match(r"total: +\d+ frames\n", (await get(house, "meminfo.txt"))[2].split("\n", 3)[3])


async def test_wrong_parameters_are_refused_by_name(house: RealHouse) -> None:
    for path, param in {
        "vmstat?limit=3": "limit",
        "frames?limit=0": "limit",
        "frames?limit=x": "limit",
        "frames?state=lunch": "state",
        "frames?order=lunch": "order",
        "trace?event=lunch": "event",
        "meminfo?x=1": "x",
        "page_cache?prefix_of=1,99999999": "prefix_of",
        "page_cache?salt=a": "salt",
        "page_cache?tenant=a": "tenant",
        "page_cache?prefix_of=1&limit=5": "limit",
        "page_cache?prefix_of=1&offset=5": "offset",
        f"trace?after={10**30}": "after",
        f"frames?offset={10**30}": "offset",
    }.items():
        status, _, body = await get(house, path)
        assert (status, body["error"]["param"]) == (400, param), path
    for path in ("sequences/0.1/status", "tenants/nobody", "frames/x", "lunch"):
        assert (await get(house, path))[0] == 404, path
    for path in (f"trace?after={2**62}", f"steps?after={2**62}", f"frames?offset={2**62}"):
        assert (await get(house, path))[0] == 200, path


async def test_a_profile_over_http(house: RealHouse) -> None:
    status, _, facts = await get(house, "profile?seconds=0.2")
    assert status == 200
    assert facts["samples"] > 0
    lines = (await get(house, "profile.txt?seconds=0.1"))[2].splitlines()
    assert all(re.fullmatch(r".+ \d+", line) for line in lines)
    for wrong in ("0", "61", "x", "nan"):
        assert (await get(house, f"profile?seconds={wrong}"))[2]["error"]["param"] == "seconds"


async def test_text_of_the_page_cache_only_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    for shows in (False, True):
        async with real_house(monkeypatch, folder, max_model_len=200, admin_show_text=shows) as house:
            await house.post("/v1/completions", {"prompt": list(range(2, 40)), "max_tokens": 4})
            pages = (await get(house, "page_cache"))[2]["top"]
            assert len(pages) == 2
            assert all(("text" in page) is shows and "token_ids" not in page for page in pages)


@pytest.mark.parametrize("route", ADMIN_ROUTES, ids=lambda route: f"{route[0]} {route[1]}")
async def test_the_right_key_a_wrong_one_and_none(
    start: Start, route: tuple[str, str, Callable[..., Awaitable[Any]], str]
) -> None:
    method, path, _, _ = route
    path = path.replace("{of}", "default").replace("{file}", "memory.max").replace("{name}", "default")
    server = await start(settings={"admin_api_key": "root", "api_keys": ("user",)})
    for base in (server.url, f"http://127.0.0.1:{server.admin_port}"):
        for key, statuses in ((None, {401}), ("wrong", {401}), ("user", {401, 403}), ("root", {200, 400, 503})):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = {} if method == "POST" else None
            async with server.session.request(method, base + path, headers=headers, json=body) as response:
                assert response.status in statuses, (method, path, key)


async def test_without_an_admin_key_the_main_port_has_no_admin_routes(start: Start) -> None:
    server = await start()
    for method, path, _, _ in ADMIN_ROUTES:
        assert (await server.ask(method, path.replace("{of}", "0.1"))).status == 404, path


# ---------------------------------------------------------------- actions


@pytest.fixture
async def locked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    keys: dict[str, Any] = {"admin_api_key": "root", "api_keys": ["user"]}
    async with real_house(monkeypatch, folder, max_model_len=200, **keys) as house:
        yield house


async def post(house: RealHouse, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{house.server.admin_port}/admin/v1/{path}"
    async with house.session.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


ACTIONS: dict[str, dict[str, Any]] = {
    "sequences/0.9/abort": {},
    "sequences/0.9/pause": {},
    "sequences/0.9/resume": {},
    "sequences/0.9/priority": {"priority": 3},
    "sequences/0.9/oom_score_adj": {"oom_score_adj": 5},
    "sequences/0.9/madvise": {"advice": "cold"},
    "sequences/0.9/swap_out": {},
    "sequences/0.9/swap_in": {},
    "page_cache/pin": {"messages": [{"role": "user", "content": "the"}], "owner": "me"},
    "page_cache/unpin": {"pin": 1},
    "page_cache/madvise": {"messages": [{"role": "user", "content": "the"}], "advice": "cold"},
    "page_cache/drop": {"level": 1},
    "watermarks": {"min": 1, "low": 2, "high": 3},
    "overcommit": {"mode": "always"},
    "tenants/new": {"max": 50, "high": 40},
    "resize": {"frames": 400, "slots": 0},
    "drain": {"timeout_s": 60},
}


def test_each_action_is_tried() -> None:
    tried = {path.replace("0.9", "{of}").replace("/new", "/{of}") for path in ACTIONS}
    assert tried == BODIES.keys()


@pytest.mark.parametrize("path", ACTIONS)
async def test_an_action_needs_the_admin_key(locked: RealHouse, path: str) -> None:
    """No key, a wrong one and a user's change nothing and are not in the trace; the right one acts."""
    refusals = {"none": {}, "wrong": {"Authorization": "Bearer x"}, "user": {"Authorization": "Bearer user"}}
    for whose, headers in refusals.items():
        status, answer = await post(locked, path, ACTIONS[path], **headers)
        assert status == (403 if whose == "user" else 401), whose
        assert "done" not in answer
    root = {"Authorization": "Bearer root"}
    assert (await get(locked, "trace?event=action", **root))[2]["events"] == []
    status, answer = await post(locked, path, ACTIONS[path], **root)
    if path.startswith("sequences"):
        assert status == 404
    elif path in ("page_cache/pin", "page_cache/madvise"):
        assert (status, "cached" in answer["error"]["message"]) == (400, True)
    else:
        assert status == 200
        assert list(answer) == ["done", "before", "after"]
        (done,) = (await get(locked, "trace?event=action", **root))[2]["actions"]
        assert (done["action"], done["after"]) == (path, answer["after"])
        assert done["by"]


async def test_a_running_sequence_is_paused_resumed_and_aborted(house: RealHouse) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 190, "ignore_eos": True, "stream": True, "request_id": "mine"}
    async with house.session.post(house.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        status, answer = await post(house, "sequences/mine/pause", {})
        assert (status, answer["after"]["state"]) == (200, "paused")
        assert (await get(house, "sequences/mine/status"))[2]["client"] == "127.0.0.1"
        (line,) = [line for line in (await get(house, "sequences.txt"))[2].splitlines() if line.endswith("  mine")]
        assert line.split()[-2] == "127.0.0.1"
        async with house.session.get(house.url + "/v1/requests/mine") as shown:
            assert (await shown.json())["sequences"][0]["state"] == "paused"
        assert (await post(house, "sequences/mine/resume", {}))[1]["before"]["state"] == "paused"
        assert (await post(house, "sequences/mine/abort", {}))[1]["after"]["state"] == "ended"
        assert b'"error"' in await response.content.read()
    assert (await post(house, "sequences/mine/abort", {}))[0] == 404


async def test_an_action_may_come_without_a_body(house: RealHouse) -> None:
    """As `curl -X POST` sends it. What needs fields says which."""
    url = f"http://127.0.0.1:{house.server.admin_port}/admin/v1/"
    body = {"prompt": [5, 6, 7], "max_tokens": 190, "ignore_eos": True, "stream": True, "request_id": "mine"}
    async with house.session.post(house.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        async with house.session.post(url + "sequences/mine/abort") as done:
            assert (await done.json())["after"]["state"] == "ended"
        async with house.session.post(url + "page_cache/drop") as refused:
            assert (refused.status, "`level`" in (await refused.json())["error"]["message"]) == (400, True)


async def test_a_chat_s_beginning_is_pinned(house: RealHouse) -> None:
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 6}]
    await house.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    status, answer = await post(house, "page_cache/pin", {"messages": messages, "owner": "me", "ttl_s": 60})
    assert status == 200
    assert answer["after"]["frames"] * 16 == answer["after"]["tokens"] > 0
    assert (await get(house, "meminfo"))[2]["pinned"] == answer["after"]["frames"]
    assert (await post(house, "page_cache/unpin", {"owner": "me"}))[1]["after"]["pinned_frames"] == 0


async def test_a_pool_grows_and_shrinks_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same answers from the real executor, whatever size the pool has, also across a change."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    sizes = {"kv_cache_memory_bytes": 30 << 10, "kv_cache_max_memory_bytes": 50 << 10}
    sizes |= {"swap_memory_bytes": 5 << 10, "swap_max_memory_bytes": 20 << 10, "dtype": "bfloat16"}
    body = {"prompt": list(range(2, 50)), "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    async with real_house(monkeypatch, folder, max_model_len=200, max_num_seqs=4, **sizes) as house:
        facts = (await get(house, "meminfo"))[2]
        assert (facts["total"], facts["host_total"], facts["frame_bytes"]) == (30, 5, 1024)
        expected = (await house.post("/v1/completions", body))["choices"][0]["text"]
        for frames, slots in ((50, 20), (20, 3), (50, 10)):
            reading = asyncio.create_task(house.post("/v1/completions", body | {"prefix_cache": False}))
            await asyncio.sleep(0)
            status, answer = await post(house, "resize", {"frames": frames, "slots": slots})
            assert (status, answer["after"]) == (200, {"frames": frames, "slots": slots})
            assert (await reading)["choices"][0]["text"] == expected
            assert (await get(house, "meminfo"))[2]["total"] == frames
        assert (await post(house, "resize", {"frames": 51}))[0] == 400


async def test_wrong_bodies_are_refused_by_name(house: RealHouse) -> None:
    for path, body, param in (
        ("watermarks", {"lwo": 1}, "lwo"),
        ("watermarks", {"low": -1}, "low"),
        ("overcommit", {}, "mode"),
        ("overcommit", {"mode": "lunch"}, "mode"),
        ("page_cache/drop", {"level": 4}, "level"),
        ("page_cache/pin", {"owner": "me"}, "tokens"),
        ("page_cache/madvise", {"advice": "cold"}, "tokens"),
        ("page_cache/madvise", {"advice": "lunch", "tokens": [1]}, "advice"),
        ("page_cache/pin", {"owner": "me", "tokens": [10**8]}, "tokens"),
        ("page_cache/unpin", {}, "pin"),
        ("tenants/a", {"max": "lunch"}, "max"),
        ("sequences/0.1/oom_score_adj", {"oom_score_adj": 1001}, "oom_score_adj"),
        ("drain", {"timeout_s": 0}, "timeout_s"),
    ):
        status, answer = await post(house, path, body)
        assert status == 400, (path, body)
        assert param in (answer["error"]["param"] or answer["error"]["message"]), (path, answer)
    assert house.engine.state == "ready"


async def test_pages_of_other_sites_cannot_act(house: RealHouse) -> None:
    """Without a key: neither a form on another site, nor a name that was made to point at this machine."""
    port = house.server.admin_port
    for headers in (
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": f"rebound.example.org:{port}"},
    ):
        status, answer = await post(house, "page_cache/drop", {"level": 1}, **headers)
        assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError"), headers
    for headers in (
        {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"},
        {"Host": f"localhost:{port}"},
        {"Host": f"[::1]:{port}"},
        {"Host": "pagewalk"},
    ):
        assert (await post(house, "page_cache/drop", {"level": 1}, **headers))[0] == 200, headers


@pytest.mark.parametrize("actions", [("pause", "resume"), ("pause", "swap_out", "resume")])
async def test_what_is_paused_and_moved_answers_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, actions: tuple[str, ...]
) -> None:
    """Sampled by a grammar, whose state must stand still with it, by the real executor."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    grammar = {"structured_outputs": {"regex": "(ab|cd|ef){60}"}}
    body = {"prompt": "the", "max_tokens": 200, "temperature": 1, "seed": 5, "prefix_cache": False} | grammar
    async with real_house(monkeypatch, folder, max_model_len=300, swap_memory_bytes=1 << 20) as house:
        expected = (await house.post("/v1/completions", body))["choices"][0]["text"]
        assert re.fullmatch("(ab|cd|ef){60}", expected)
        again = asyncio.create_task(house.post("/v1/completions", body | {"request_id": "it"}))
        done = 0
        while not again.done():
            for action in actions:
                done += (await post(house, f"sequences/it/{action}", {}))[0] == 200
        assert (await again)["choices"][0]["text"] == expected
        assert done >= len(actions)


async def test_a_paused_request_can_be_forked(house: RealHouse) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True, "temperature": 0, "request_id": "p"}
    parent = asyncio.create_task(house.post("/v1/completions", body))
    while (await post(house, "sequences/p/pause", {}))[1].get("after", {}).get("frames", 0) < 2:
        await post(house, "sequences/p/resume", {})
    fork = asyncio.create_task(house.post("/v1/requests/p/fork", {"temperature": 0}))
    while len(found := (await get(house, "sequences"))[2]["sequences"]) < 2 and not fork.done():
        pass
    assert {each["client"] for each in found} == {"127.0.0.1"}
    child = await fork
    await post(house, "sequences/p/resume", {})
    assert (await parent)["choices"][0]["text"].endswith(child["choices"][0]["text"])


async def test_a_reload_is_in_the_trace(house: RealHouse) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(60):
        while not (found := (await get(house, "trace?event=action"))[2]["actions"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (found[0]["action"], found[0]["by"]) == ("reload", "SIGHUP")
