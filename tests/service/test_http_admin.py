"""The admin routes over HTTP with the real engine: forms, parameters, keys."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from http_house import Start
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from service import admin
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
        if name != "pulse":
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
    }.items():
        status, _, body = await get(house, path)
        assert (status, body["error"]["param"]) == (400, param), path
    for path in ("sequences/0.1/status", "tenants/nobody", "frames/x", "lunch"):
        assert (await get(house, path))[0] == 404, path


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
            async with server.session.request(method, base + path, headers=headers) as response:
                assert response.status in statuses, (method, path, key)


async def test_without_an_admin_key_the_main_port_has_no_admin_routes(start: Start) -> None:
    server = await start()
    for method, path, _, _ in ADMIN_ROUTES:
        assert (await server.ask(method, path.replace("{of}", "0.1"))).status == 404, path
