"""Answers in JSON."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

PORTION_BYTES = 1 << 20
"""Of a longer answer so much is sent in a turn of the event loop: a client nearby takes it as fast as it is written,
and others would wait until it has all.
"""


def json_answer(value: object) -> web.Response:
    """Of what msgspec can encode."""
    return encoded_answer(msgspec.json.encode(value))


def encoded_answer(body: bytes) -> web.Response:
    """Of what is JSON already."""
    if len(body) <= PORTION_BYTES:
        return web.Response(body=body, content_type="application/json")
    headers = {"Content-Length": str(len(body))}
    return web.Response(body=_portions(body), content_type="application/json", headers=headers)


async def _portions(body: bytes) -> AsyncIterator[memoryview]:
    for begin in range(0, len(body), PORTION_BYTES):
        yield memoryview(body)[begin : begin + PORTION_BYTES]
        await asyncio.sleep(0)
