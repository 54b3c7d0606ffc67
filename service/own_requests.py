"""GET and DELETE /v1/requests: what a key has running, and how to end it from another connection.

A client knows a request by the id that it sent as X-Request-Id or got back there, or by the `id` of its answer, which
has a prefix; a slash in it is written %2F. Requests of other keys do not exist here. Without keys everything is
everybody's.
"""

from aiohttp import web

from service.engine_client import OpenRequest
from service.errors import NotFound, quoted
from service.front_end import FRONT_END
from service.json_answers import json_answer
from service.middleware import CALLER
from service.questions import AbortRequest, ListRequests

PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_")


async def list_requests(request: web.Request) -> web.Response:
    """GET /v1/requests: those that have not ended, oldest first."""
    front_end = request.app[FRONT_END]
    front_end.loaded()
    found = await front_end.engine.ask(ListRequests(request[CALLER].owner))
    return json_answer({"object": "list", "data": [_entry(each) for each in found]})


async def show_request(request: web.Request) -> web.Response:
    """GET /v1/requests/{id}. Raises NotFound once it has ended."""
    front_end, ids = request.app[FRONT_END], ids_of(request)
    front_end.loaded()
    for each in await front_end.engine.ask(ListRequests(request[CALLER].owner)):
        if each.id in ids:
            return json_answer(_entry(each))
    raise NotFound(f"No request {quoted(ids[0])} of yours is open.")


async def delete_request(request: web.Request) -> web.Response:
    """DELETE /v1/requests/{id}: end it. Whoever waits for its answer gets an error. Idempotent."""
    front_end, ids = request.app[FRONT_END], ids_of(request)
    front_end.loaded()
    aborted = await front_end.engine.ask(AbortRequest(request[CALLER].owner, ids))
    return json_answer({"id": ids[0], "object": "request", "aborted": aborted > 0})


def ids_of(request: web.Request) -> list[str]:
    """The id as it was given, and without the prefix that it may have as the id of an answer."""
    given = request.match_info["id"]
    return [given, *(given.removeprefix(prefix) for prefix in PREFIXES if given.startswith(prefix))]


def _entry(request: OpenRequest) -> dict[str, object]:
    return {
        "id": request.id,
        "object": "request",
        "age_s": round(request.age_s, 3),
        "sequences": request.sequences,
    }
