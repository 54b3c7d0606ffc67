"""Answers in JSON."""

import msgspec
from aiohttp import web


def json_answer(value: object) -> web.Response:
    """Of what msgspec can encode."""
    return encoded_answer(msgspec.json.encode(value))


def encoded_answer(body: bytes) -> web.Response:
    """Of what is JSON already."""
    return web.Response(body=body, content_type="application/json")
