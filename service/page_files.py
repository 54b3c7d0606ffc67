"""The page /admin/ on the admin port: files of its own (admin_page/), read once, sent as they are.

It loads nothing from elsewhere and runs nothing but these files: its Content-Security-Policy says so to the browser.
The files hold no secret, so they are open; the views and actions that the page asks for are not, where there is an
admin key.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from service.errors import NotFound, quoted

FOLDER = Path(__file__).parent / "admin_page"

CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".LICENSE": "text/plain",
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """One file of the page."""

    content_type: str
    body: bytes


@functools.cache
def files() -> Mapping[str, PageFile]:
    """Every file of the page, by its path behind /admin/."""
    found = (path for path in FOLDER.rglob("*") if path.suffix in CONTENT_TYPES)
    return {
        path.relative_to(FOLDER).as_posix(): PageFile(CONTENT_TYPES[path.suffix], path.read_bytes()) for path in found
    }


async def page(request: web.Request) -> web.Response:
    """GET /admin/ and its files. Raises NotFound."""
    name = request.match_info.get("file") or "index.html"
    if (found := files().get(name)) is None:
        raise NotFound(f"The page has no file {quoted(name)}.")
    return web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers=HEADERS)


async def to_page(request: web.Request) -> web.Response:
    """GET /, and GET /admin, since the page's files are named from its folder on. A permanent redirect would stay in
    browsers, for whatever listens at this port later.
    """
    return web.Response(status=307, headers={"Location": "/admin/"})
