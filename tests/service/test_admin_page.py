"""The files of the page /admin/: who gets them, with which policy, and that they ask for nothing from elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
from http_house import Answer, Server, Start

from service.api import ADMIN_ROUTES
from service.page_files import FOLDER, files

OWN = [path for path in FOLDER.rglob("*") if path.is_file() and "vendor" not in path.parts]


async def get(server: Server, path: str, **options: Any) -> Answer:
    url = f"http://127.0.0.1:{server.admin_port}{path}"
    async with server.session.get(url, **options) as response:
        return Answer(response.status, response.headers, await response.read())


async def test_every_file_is_served_under_a_strict_policy(server: Server) -> None:
    assert set(files()) == {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    for name in ["", *files()]:
        answer = await get(server, f"/admin/{name}")
        policy = answer.headers["Content-Security-Policy"]
        assert answer.status == 200, name
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ")
        assert "unsafe" not in policy
        kind = {"js": "text/javascript", "css": "text/css", "": "text/html", "html": "text/html"}
        assert answer.headers["Content-Type"].startswith(kind.get(name.rpartition(".")[2], "text/plain")), name


async def test_the_page_is_found_from_its_folder_only_on_the_admin_port(start: Start) -> None:
    server = await start(settings={"admin_api_key": "root"})
    for path in ("/", "/admin"):
        moved = await get(server, path, allow_redirects=False)
        assert (moved.status, moved.headers["Location"]) == (307, "/admin/")
    assert (await get(server, "/admin/")).body == files()["index.html"].body  # it holds no secret, and asks for the key
    assert (await server.get("/admin/")).status == 404
    for wrong in ("/admin/lunch.js", "/admin/../api.py", "/admin/%2e%2e/api.py", "/admin/vendor", "/admin/vendor/"):
        assert (await get(server, wrong)).status in (401, 404), wrong


async def test_what_only_looks_like_a_view_is_no_file_of_the_page(server: Server) -> None:
    answer = await get(server, "/admin/v1/lunch")
    assert (answer.status, "no file" in answer.error["message"]) == (404, False)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_loaded_from_elsewhere_and_nothing_is_inline(path: Path) -> None:
    text = path.read_text("utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s'\"]*", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text)


def test_every_module_that_is_imported_is_there() -> None:
    for path in OWN:
        for name in re.findall(r'from "\./([^"]+)"', path.read_text("utf-8")):
            assert (FOLDER / name).is_file(), (path.name, name)


def test_every_action_but_restore_which_answers_with_text_can_be_taken_from_the_page() -> None:
    text = "\n".join(path.read_text("utf-8") for path in OWN if path.suffix == ".js")
    actions = {path.removeprefix("/admin/v1/") for method, path, _, _ in ADMIN_ROUTES if method == "POST"}
    assert len(actions) > 10
    for path in actions - {"restore"}:
        verb = path.removeprefix("sequences/{of}/")
        assert "tenants/${" in text if path == "tenants/{of}" else f'"{verb}"' in text, path
