"""Web pages of other origins: none may use the server unless settings name them, and then errors can be read too."""

from typing import Any

import pytest
from http_house import Start

PAGE = "https://chat.example.org"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def allowed(answer: Any) -> str | None:
    return answer.headers.get("Access-Control-Allow-Origin")


async def test_off_by_default(start: Start) -> None:
    server = await start()
    answer = await server.ask("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert (answer.status, allowed(answer)) == (405, None)
    assert allowed(await server.get("/v1/models", headers={"Origin": PAGE})) is None


@pytest.mark.parametrize(("origins", "expected"), [((PAGE, "http://b"), PAGE), (("*",), "*")])
async def test_an_allowed_page(start: Start, origins: tuple[str, ...], expected: str) -> None:
    """The preflight comes without a key, and does nothing; then every answer can be read, also streams and errors."""
    server = await start(settings={"cors_allow_origins": origins, "api_keys": ("good",)})
    asked = PREFLIGHT | {"Access-Control-Request-Headers": "authorization,content-type"}
    answer = await server.ask("OPTIONS", "/v1/completions", headers=asked)
    assert (answer.status, allowed(answer), answer.body) == (204, expected, b"")
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in answer.headers
    page = {"Origin": PAGE}
    key = {"Authorization": "Bearer good"}
    for answer, status in (
        (await server.get("/v1/models", headers=page), 401),
        (await server.get("/nothing", headers=page | key), 404),
        (await server.post("/v1/completions", {"prompt": "a"}, headers=page | key), 200),
        (await server.post("/v1/completions", {"prompt": "a", "stream": True}, headers=page | key), 200),
    ):
        assert (answer.status, allowed(answer), answer.headers["Vary"]) == (status, expected, "Origin")
        assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
    assert len(server.engine.submitted) == 2


async def test_other_pages_stay_out(start: Start) -> None:
    server = await start(settings={"cors_allow_origins": (PAGE,), "api_keys": ("good",)})
    for origin in ("https://evil.example", "http://chat.example.org", PAGE + ".evil.example", "null", ""):
        answer = await server.ask("OPTIONS", "/v1/completions", headers=PREFLIGHT | {"Origin": origin})
        assert (answer.status, allowed(answer)) == (401, None)
        answer = await server.get("/health", headers={"Origin": origin})
        assert (answer.status, allowed(answer)) == (200, None)
        assert answer.headers["Vary"] == "Origin", "a cache must not give one page the answer of another"
