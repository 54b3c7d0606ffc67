"""The handlers of actions under /admin/v1: POST with a JSON body; the answer says what was, and what is.

    POST ──▶ key ──▶ not from another site's page ──▶ checked body ──▶ Act ──▶ engine's process (operations.py)

On the admin port no key may be asked for. Then a page of another site, open in a browser on this machine, could act: so
its requests are refused by what browsers say of them, and names that could be made to point here are no hosts.
"""

import ipaddress
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from service.admin import query_of
from service.admin_bodies import BODIES, Prefix
from service.body import read_body
from service.errors import PermissionDenied, quoted
from service.field_checks import check_token_ids
from service.front_end import FRONT_END
from service.json_answers import encoded_answer
from service.middleware import CALLER, Handler
from service.prompts import chat_prompt
from service.questions import Act
from service.schema import TokenizeBody


def action(path: str) -> Handler:
    """POST /admin/v1/{path}."""

    async def act(request: web.Request) -> web.Response:
        check_site(request)
        query_of(request, ())
        front_end = request.app[FRONT_END]
        model = front_end.loaded()
        body = await read_body(request, BODIES[path], may_be_empty=True)
        if isinstance(body, Prefix) and body.messages is not None:
            chat = TokenizeBody(messages=body.messages, add_generation_prompt=False)
            prompt = await chat_prompt(chat, model, body.tenant)
            body = msgspec.structs.replace(body, messages=None, tokens=prompt.ids)
        elif isinstance(body, Prefix) and body.tokens is not None:
            check_token_ids(body.tokens, model.client.limits.vocabulary, param="tokens", path="$.tokens")
        of, by = request.match_info.get("of", ""), request[CALLER].owner
        done = await front_end.engine.ask(Act(path, of, msgspec.json.encode(body), by))
        return encoded_answer(done)

    return act


def check_site(request: web.Request) -> None:
    """Raises PermissionDenied for what a page of another site sends, in whatever way it may have found this port."""
    fetched_by = request.headers.get("Sec-Fetch-Site", "none")
    origin = request.headers.get("Origin")
    if fetched_by not in ("none", "same-origin") or (origin is not None and urlsplit(origin).netloc != request.host):
        raise PermissionDenied("Actions are not taken from pages of other sites.")
    if not request[CALLER].owner and not _is_local_name(request.host):
        raise PermissionDenied(
            f"Without an admin key, actions are taken under an address or a local name, not {quoted(request.host)}."
        )


def _is_local_name(host: str) -> bool:
    """An address, localhost, or a name without a dot: nobody else's name server can point such a name here."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name
    return True
