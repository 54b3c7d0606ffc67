"""Reads a request's body: its kind, its size, its bytes, its fields. Each fault has its own status."""

import asyncio
from contextlib import nullcontext
from email.message import Message
from typing import TypeVar

import structlog
from aiohttp import web

from service.body_values import check_values
from service.decoding import decode
from service.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType, quoted
from service.front_end import FRONT_END, FrontEnd
from service.middleware import ID, IGNORED, check_length
from service.schema import Body

BODY_TIMEOUT_S = 120.0
"""A body must have come within this: one that trickles holds a socket, and a place among its tenant's requests."""

JSON = "application/json"

OFF_LOOP_BYTES = 65_536
"""Larger bodies are decoded and checked in a thread, one after the other: 10 to 100 ns a byte. What is one call into C
holds the interpreter even so, at most some 60 ms for the most values that a body may have; several at once would each
do so before the loop had its turn."""

log = structlog.get_logger("pagewalk.http")

B = TypeVar("B", bound=Body)


async def read_body(request: web.Request, kind: type[B], *, may_be_empty: bool = False) -> B:
    """The checked body. Raises BadRequest, NotImplementedYet, PayloadTooLarge or UnsupportedMediaType.

    may_be_empty: nothing, of whatever type, is an object without fields. A body over the limit is refused as soon as
    its length is known: at once if it is declared, else when the limit has been read.
    """
    if request.can_read_body or not may_be_empty:
        _check_content_type(request)
    settings = request.app[FRONT_END].settings
    check_length(request, settings.body_limit_bytes)
    try:
        async with nullcontext() if request.content.is_eof() else asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError:
        raise BadRequest(f"The body did not come within {BODY_TIMEOUT_S:g} s.") from None
    except web.HTTPRequestEntityTooLarge:
        raise PayloadTooLarge(f"The body has more than {settings.body_limit_bytes} bytes, the limit.") from None
    except web.RequestPayloadError:
        raise BadRequest("The body cannot be read: its transfer encoding is broken.") from None
    if may_be_empty and not raw:
        raw = b"{}"
    body, ignored = await _decoded(raw, kind, request.app[FRONT_END])
    if ignored:
        request[IGNORED] = ignored
        log.warning("unknown fields ignored", request_id=request[ID], fields=[quoted(name) for name in ignored[:16]])
    return body


async def _decoded(raw: bytes, kind: type[B], front_end: FrontEnd) -> tuple[B, list[str]]:
    def read() -> tuple[B, list[str]]:
        check_values(raw)
        return decode(raw, kind, front_end.settings.unknown_fields)

    if len(raw) <= OFF_LOOP_BYTES:
        return read()
    async with front_end.large_bodies:
        return await asyncio.to_thread(read)


def _check_content_type(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(f"Compressed bodies are not read: Content-Encoding {quoted(encoding)}.")
    given = request.headers.get("Content-Type")
    if given in (None, JSON):  # all that most clients send: no need to take it apart
        return
    header = Message()
    header["Content-Type"] = given
    charset = header.get_content_charset("utf-8")
    if header.get_content_type() != JSON or charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"The body must be sent with Content-Type: {JSON}, not {quoted(given)}.")
