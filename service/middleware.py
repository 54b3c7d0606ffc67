"""What happens around every handler: the request's id, the key, errors as JSON, counts and the log line.

Doors are closed unless the route says otherwise: a path or method that nothing answers asks for a key as well.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from http import HTTPStatus
from typing import Any, Literal

import structlog
from aiohttp import web

from service.auth import Caller
from service.cors import add_cors_headers, is_preflight, preflight_response
from service.errors import (
    AuthenticationError,
    BadRequest,
    ExpectationFailed,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PagewalkError,
    PayloadTooLarge,
    PermissionDenied,
    QueueFull,
    ServiceUnavailable,
    anthropic_body,
    quoted,
)
from service.field_checks import REQUEST_ID
from service.front_end import FRONT_END, FrontEnd
from service.questions import Enter, Leave

log = structlog.get_logger("pagewalk.http")

Access = Literal["open", "key", "admin"]
ErrorForm = Literal["openai", "anthropic"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANTHROPIC_PATH = "/v1/messages"

ACCESS = web.AppKey("access", dict[web.AbstractResource, Access])
GUIDE = web.AppKey("guide", str)  # what to tell who asks for a path that is not there
PLAIN_HEADERS = {"Server": "pagewalk", "X-Content-Type-Options": "nosniff"}  # aiohttp would name itself and Python
CLIENT_LEFT = 499  # as nginx logs it; never sent

# what handlers leave in the request for the code here
ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)
NUMBERS = web.RequestKey("numbers", dict[str, Any])  # more fields of the log line
IGNORED = web.RequestKey("ignored_fields", list[str])


def new_id() -> str:
    """The id of a request whose client gave it none: 32 hexadecimal digits, by chance."""
    return os.urandom(16).hex()


def form_of(request: web.BaseRequest) -> ErrorForm:
    """In whose form a route tells errors: so that its clients read them also when no handler was reached."""
    return "anthropic" if request.path == ANTHROPIC_PATH or request.path.startswith(f"{ANTHROPIC_PATH}/") else "openai"


def error_response(error: PagewalkError, request: web.BaseRequest | None = None) -> web.Response:
    """An error as an answer of its own; without a request in the common form."""
    if request is not None and form_of(request) == "anthropic":
        body = anthropic_body(error, request.get(ID))
    else:
        body = error.body()
    return web.Response(status=error.status, body=body, content_type="application/json", headers=error.headers)


def from_http_exception(error: web.HTTPException, request: web.BaseRequest) -> PagewalkError:
    """aiohttp's own refusals (its router, its body reader) in our form."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = sorted(error.allowed_methods)
        message = f"{request.method} is not allowed on {quoted(request.path)}: it takes {', '.join(allowed)}."
        return MethodNotAllowed(message, allow=allowed)
    if isinstance(error, web.HTTPNotFound):
        guide = f": {request.app[GUIDE]}" if isinstance(request, web.Request) else ""
        return NotFound(f"There is nothing at {quoted(request.path)}{guide}.")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return PayloadTooLarge("The body is over the limit of this server.")
    if isinstance(error, web.HTTPExpectationFailed):
        return ExpectationFailed(f"Unknown expectation {quoted(request.headers.get('Expect', ''))}.")
    return BadRequest(error.reason) if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else InternalError(error.reason)


def route_of(request: web.Request) -> str:
    """The path template that matched: few values, whatever clients send."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


def access_of(request: web.Request) -> Access:
    """Who may use the route that matched; unknown ones need a key."""
    resource = request.match_info.route.resource
    return "key" if resource is None else request.app[ACCESS][resource]


def check_access(request: web.Request) -> Access:
    """Who may use its route, and whose request it is, in request[CALLER]. Raises AuthenticationError,
    PermissionDenied.
    """
    front_end, access = request.app[FRONT_END], access_of(request)
    request[CALLER] = Caller(address=address_of(request))
    if access == "open" or (access == "key" and not front_end.api_keys):
        return access
    key = _given_key(request)
    caller = None if key is None else front_end.admin_keys.find(key)
    if caller is None and key is not None and (caller := front_end.api_keys.find(key)) is not None and access != "key":
        raise PermissionDenied("This key does not open the admin routes.")
    if caller is None:
        raise AuthenticationError("A valid API key is needed: Authorization: Bearer KEY.")
    request[CALLER] = caller._replace(address=address_of(request))
    return access


def address_of(request: web.Request) -> str:
    """Whose connection it is; empty if that has no address."""
    return request.remote or ""


def _given_key(request: web.Request) -> str | None:
    """The key that the client sent, if it sent one and in one way."""
    given = request.headers.getall("Authorization", [])
    if not given and form_of(request) == "anthropic":  # its clients send keys in a header of their own
        keys = request.headers.getall("X-Api-Key", [])
        return keys[0] if len(keys) == 1 else None
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return key if scheme.lower() == "bearer" else None


@web.middleware
async def answer_every_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost layer: whatever happens inside becomes an answer, a count and, but for probes, a log line."""
    front_end = request.app[FRONT_END]
    given = request.headers.get("X-Request-Id", "")
    request[ID] = given if REQUEST_ID.fullmatch(given) else new_id()
    request[CALLER] = Caller()
    begun = time.monotonic()
    front_end.metrics.http_started()
    status, failure = CLIENT_LEFT, None
    try:
        response, failure = await _answer(request, handler, front_end)
        status = response.status
        return response
    finally:  # also when the client has left: then the handler is cancelled
        numbers: dict[str, Any] = request.get(NUMBERS, {})
        status = numbers.pop("status", status)
        route = route_of(request)
        front_end.metrics.http_ended(route, request.method, status)
        is_look = access_of(request) == "admin" and request.method == "GET" and failure is None
        if access_of(request) != "open" and not is_look:  # probes come every second, and so do those who watch
            if failure is not None:
                numbers["error"] = failure
            front_end.log_request(
                request_id=request[ID],
                method=request.method,
                route=route,
                status=status,
                tenant=request[CALLER].tenant,
                e2e_ms=round((time.monotonic() - begun) * 1000, 1),
                **numbers,
            )


async def _answer(request: web.Request, handler: Handler, front_end: FrontEnd) -> tuple[web.StreamResponse, str | None]:
    """The answer, and what went wrong if something did."""
    try:
        if is_preflight(request, front_end.settings.cors_allow_origins):
            return preflight_response(request), None
        if check_access(request) == "key" and request.method == "POST":
            tenant = request[CALLER].tenant
            async with counted(front_end, tenant) if front_end.has_rate(tenant) else nullcontext():
                await front_end.enter()
                return await handler(request), None
        return await handler(request), None
    except PagewalkError as error:
        if isinstance(error, QueueFull):
            front_end.metrics.refused(error.reason)
        return error_response(error, request), str(error)
    except web.HTTPException as error:
        refusal = from_http_exception(error, request)
        return error_response(refusal, request), str(refusal)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # a fault of ours: the client is told no more than that
        log.error("handler failed", request_id=request[ID], route=route_of(request), exc_info=error)
        told = InternalError(f"The server failed on this request, {request[ID]}.")
        return error_response(told, request), type(error).__name__


@asynccontextmanager
async def counted(front_end: FrontEnd, tenant: str) -> AsyncIterator[None]:
    """One request among those of its tenant, from here to its answer. Raises RateLimited."""
    await front_end.engine.ask(Enter(tenant))
    try:
        yield
    finally:
        with suppress(ServiceUnavailable):  # the engine is gone, and its counts with it
            await front_end.engine.ask(Leave(tenant))


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer, set just before the status line goes out."""
    response.headers.update(PLAIN_HEADERS)
    add_cors_headers(request, response, request.app[FRONT_END].settings.cors_allow_origins)
    if ID in request:  # an unknown Expect is refused before anything here has run
        response.headers["X-Request-Id"] = request[ID]
        if form_of(request) == "anthropic":
            response.headers["Request-Id"] = request[ID]
    if ignored := request.get(IGNORED):
        response.headers["X-Ignored-Fields"] = ", ".join(name for name in ignored if REQUEST_ID.fullmatch(name))


async def answer_expect(request: web.Request) -> web.StreamResponse | None:
    """Before a body is sent at all (Expect: 100-continue): refuse here what would be refused after it."""
    request[ID] = new_id()
    try:
        if request.headers["Expect"].lower() != "100-continue":
            raise ExpectationFailed(f"Unknown expectation {quoted(request.headers['Expect'])}.")
        check_access(request)
        check_length(request, request.app[FRONT_END].settings.body_limit_bytes)
    except PagewalkError as error:
        return error_response(error, request)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer proper has not begun
    return None


def check_length(request: web.Request, limit: int) -> None:
    """Refuse a body that says it is too long before any of it is read. Raises PayloadTooLarge."""
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(f"The body has {request.content_length} bytes, the limit is {limit}.")
