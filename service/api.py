"""The routes of the public port, and the small ones themselves: models, tokenizer, health. No engine logic.

`make_app` needs a FrontEnd only; the model joins it when it is loaded. Start the app with `http_server.make_runner`.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from service import admin, admin_actions, admin_streams, checkpoint_routes
from service.admin_bodies import BODIES
from service.anthropic_messages import count_tokens, create_message
from service.body import read_body
from service.completions import create_chat_completion, create_completion
from service.docs_page import docs, openapi
from service.errors import EngineDead, NotImplementedYet, QueueFull, ServiceUnavailable, quoted
from service.field_checks import check_token_ids
from service.fork_route import fork_request
from service.front_end import FRONT_END, FrontEnd
from service.json_answers import json_answer
from service.middleware import ACCESS, CALLER, GUIDE, Access, Handler, add_headers, answer_every_request, answer_expect
from service.own_requests import delete_request, list_requests, show_request
from service.page_files import page, to_page
from service.prompts import chat_prompt, check_text_length
from service.questions import CountGenerating, RenderMetrics
from service.responses import create_response
from service.schema import DetokenizeBody, TokenizeBody
from service.served_model import ServedModel

Route = tuple[str, str, Handler, Access]


def make_app(front_end: FrontEnd) -> web.Application:
    """The application of the public port; with an admin key, the admin routes too."""
    routes = ROUTES if front_end.settings.admin_api_key is None else [*ROUTES, *ADMIN_ROUTES]
    app = _application(front_end, routes, "see /docs, or the admin port for what is under /admin")
    app.cleanup_ctx.append(_watch_keys)
    return app


async def _watch_keys(app: web.Application) -> AsyncIterator[None]:
    """While the application runs, a changed file of keys is read again."""
    watching = asyncio.create_task(app[FRONT_END].api_keys.watch())
    yield
    watching.cancel()


def make_admin_app(front_end: FrontEnd) -> web.Application:
    """The application of the admin port. Whoever reaches that port may use it, unless there is an admin key."""
    routes = ADMIN_ROUTES
    if front_end.settings.admin_api_key is None:
        routes = [(method, path, handler, "open") for method, path, handler, _ in ADMIN_ROUTES]
    return _application(front_end, [*routes, *PAGE_ROUTES], "this port is for operators, see /admin/")


def _application(front_end: FrontEnd, routes: Sequence[Route], guide: str) -> web.Application:
    """guide: for who asks for a path that is not there."""
    app = web.Application(middlewares=[answer_every_request], client_max_size=front_end.settings.body_limit_bytes)
    app[FRONT_END] = front_end
    access: dict[web.AbstractResource, Access] = {}
    for method, template, handler, who in routes:
        path = re.sub(
            r"\{(\w+)\}", r"{\1:[^/]+}", template
        )  # names may have braces, which aiohttp's own would not take
        route = app.router.add_route(method, path, handler, expect_handler=answer_expect)
        if method == "GET":
            app.router.add_route("HEAD", path, handler, expect_handler=answer_expect)
        assert route.resource is not None
        access[route.resource] = who
    app[ACCESS] = access
    app[GUIDE] = guide
    admin_streams.watch(app)
    app.on_response_prepare.append(add_headers)
    return app


# ---------------------------------------------------------------- models and tokenizer


def _model_entry(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "pagewalk",
        "root": model.root,
        "parent": None,
        "max_model_len": model.client.limits.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    model = request.app[FRONT_END].loaded()
    return json_answer({"object": "list", "data": [_model_entry(model, name) for name in model.names]})


async def show_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; an id may contain slashes."""
    model = request.app[FRONT_END].loaded()
    name = request.match_info["id"]
    return json_answer(_model_entry(model, model.check_name(name)))


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the ids that a completion or a chat would begin with."""
    model = request.app[FRONT_END].loaded()
    body = await read_body(request, TokenizeBody)
    model.check_name(body.model)
    if body.prompt is not None:
        check_text_length(len(body.prompt), model.client.limits, param="prompt")
        ids = await model.tokenizer.encode_async(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        ids = (await chat_prompt(body, model, request[CALLER].tenant)).ids
    return json_answer(
        {
            "count": len(ids),
            "max_model_len": model.client.limits.max_model_len,
            "tokens": ids,
            "token_strs": model.tokenizer.token_strings(ids) if body.return_token_strs else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of ids, special tokens included."""
    model = request.app[FRONT_END].loaded()
    body = await read_body(request, DetokenizeBody)
    model.check_name(body.model)
    ids = body.tokens or []
    check_token_ids(ids, model.client.limits.vocabulary, param="tokens", path="$.tokens")
    return json_answer({"prompt": await model.tokenizer.decode_async(ids)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info."""
    return json_answer(request.app[FRONT_END].loaded().tokenizer.info())


# ---------------------------------------------------------------- health

ROOT = """\
Pagewalk, a server for language models.

/v1        base URL of clients in OpenAI's form; in Anthropic's it is this address
/docs      every route and field; /openapi.json for programs
/health    200 once it can serve
"""
"""The same for everybody, in every state: it is open, and tells nothing of this server."""


async def root(request: web.Request) -> web.Response:
    """GET /: for who has an address and no more."""
    return web.Response(text=ROOT)


async def live(request: web.Request) -> web.Response:
    """GET /live: 200 from the first moment; 503 once only a restart helps."""
    _check_alive(request.app[FRONT_END])
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """GET /health, /ping: 200 once it can serve, also while it drains."""
    front_end = request.app[FRONT_END]
    _check_alive(front_end)
    if front_end.state != "draining":
        front_end.ready()
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when a request would be admitted now."""
    front_end = request.app[FRONT_END]
    _check_alive(front_end)
    try:
        front_end.ready().client.check_admission(1)
        front_end.check_room()
    except QueueFull as full:
        raise ServiceUnavailable(str(full), retry_after_s=full.retry_after_s) from None
    return web.Response()


def _check_alive(front_end: FrontEnd) -> None:
    if not front_end.is_alive:
        raise EngineDead("The engine has stopped, or has not finished a step for too long.")


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_answer({"version": request.app[FRONT_END].settings.version})


async def load(request: web.Request) -> web.Response:
    """GET /load: requests that generate now, waiting ones included."""
    return json_answer({"server_load": await request.app[FRONT_END].engine.ask(CountGenerating())})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    text = await request.app[FRONT_END].engine.ask(RenderMetrics(request.headers.get("Accept", "")))
    return web.Response(body=text.body, headers={"Content-Type": text.content_type})


async def not_yet(request: web.Request) -> web.Response:
    """Routes that the API names and a later release serves."""
    raise NotImplementedYet(f"{request.method} {quoted(request.path)} is not served by this version.")


def _with_suffix(path: str, handler: Handler) -> list[Route]:
    """A view, and the same as text."""
    return [("GET", path + admin.SUFFIX, handler, "admin"), ("GET", path, handler, "admin")]


ROUTES: list[Route] = [
    ("POST", "/v1/completions", create_completion, "key"),
    ("POST", "/v1/chat/completions", create_chat_completion, "key"),
    ("GET", "/v1/models", list_models, "key"),
    ("GET", "/v1/models/{id:.+}", show_model, "key"),
    ("POST", "/tokenize", tokenize, "key"),
    ("POST", "/detokenize", detokenize, "key"),
    ("GET", "/tokenizer_info", tokenizer_info, "key"),
    ("GET", "/", root, "open"),
    ("GET", "/live", live, "open"),
    ("GET", "/health", health, "open"),
    ("GET", "/ready", ready, "open"),
    ("GET", "/ping", health, "open"),
    ("GET", "/version", version, "open"),
    ("GET", "/load", load, "open"),
    ("GET", "/metrics", metrics, "open"),
    ("POST", "/v1/responses", create_response, "key"),
    ("POST", "/v1/messages", create_message, "key"),
    ("POST", "/v1/messages/count_tokens", count_tokens, "key"),
    ("POST", "/v1/embeddings", not_yet, "key"),
    ("GET", "/v1/requests", list_requests, "key"),
    ("POST", "/v1/requests/{id}/fork", fork_request, "key"),
    ("GET", "/v1/requests/{id}", show_request, "key"),
    ("DELETE", "/v1/requests/{id}", delete_request, "key"),
    ("GET", "/openapi.json", openapi, "open"),
    ("GET", "/docs", docs, "open"),
]


def _admin_routes() -> list[Route]:
    routes = _with_suffix("/admin/v1/meminfo", admin.meminfo)
    routes.append(("GET", "/admin/v1/frames/map", admin_streams.frame_map, "admin"))
    routes.append(("GET", "/admin/v1/frames/stream", admin_streams.stream_frames, "admin"))
    routes += _with_suffix("/admin/v1/profile", admin.profile)
    for name in admin.VIEWS:
        show = admin.view(name)
        if (stream := admin_streams.STREAMS.get(name)) is not None:
            show = admin_streams.or_stream(show, stream)
            routes.append(("GET", f"/admin/v1/{name}/stream", stream, "admin"))
        routes += _with_suffix(f"/admin/v1/{name}", show)
    routes.append(("GET", "/admin/v1/tenants/{of}/{file}", admin.tenant_file, "admin"))
    routes.append(("POST", "/admin/v1/sequences/{of}/checkpoint", checkpoint_routes.checkpoint, "admin"))
    routes.append(("POST", "/admin/v1/restore", checkpoint_routes.restore, "admin"))
    routes += [("POST", f"/admin/v1/{path}", admin_actions.action(path), "admin") for path in BODIES]
    return routes


ADMIN_ROUTES = _admin_routes()

PAGE_ROUTES: list[Route] = [
    ("GET", "/", to_page, "open"),
    ("GET", "/admin", to_page, "open"),
    ("GET", "/admin/", page, "open"),
    ("GET", "/admin/{file:(?!v1(?:/|$)).+}", page, "open"),
]
