"""Cross-origin requests: which web pages may use this server from a browser. None, unless settings name their origins.

Keys travel in a header that pages set themselves, so credentials in the sense of CORS (cookies) are never allowed.
Source: the Fetch standard, section 3.3 "HTTP-CORS protocol".
"""

from collections.abc import Sequence

from aiohttp import hdrs, web

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Ignored-Fields"
PREFLIGHT_AGE_S = 600


def is_preflight(request: web.Request, origins: Sequence[str]) -> bool:
    """Whether a browser asks in advance for an allowed page. It sends no key then: the answer tells nothing."""
    asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    return asks and _allowed(request, origins) is not None


def preflight_response(request: web.Request) -> web.Response:
    """Any header may be sent: what it does is checked when it comes."""
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_AGE_S),
    }
    if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
    return web.Response(status=204, headers=headers)


def add_cors_headers(request: web.Request, response: web.StreamResponse, origins: Sequence[str]) -> None:
    """Let an allowed page read the answer, also that of an error."""
    if not origins:
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if (origin := _allowed(request, origins)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED


def _allowed(request: web.Request, origins: Sequence[str]) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
