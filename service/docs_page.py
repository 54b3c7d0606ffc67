"""The pages that describe the API: /openapi.json, and /docs, one small page of our own that shows it.

The page loads nothing but the description, from this server: its Content-Security-Policy allows its own script and
style by their hashes and no others, so it works offline and nothing can be put into it.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path

from aiohttp import web

from service.front_end import FRONT_END
from service.json_answers import encoded_answer
from service.openapi import document


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    front_end = request.app[FRONT_END]
    return encoded_answer(document(front_end.settings.version, asks_key=bool(front_end.api_keys)))


async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    page, policy = _page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return web.Response(text=page, content_type="text/html", headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and its policy."""
    page = (Path(__file__).parent / "docs.html").read_text("utf-8")
    script, style = (_hash_of(page, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _hash_of(page: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
