"""Who comes in and what is said at the door: keys, statuses, health, bodies over the limit, what is no HTTP."""

import asyncio
import re
import time
from typing import Any

import pytest
from http_house import Server, Start

from service.api import ADMIN_ROUTES, ROUTES, make_admin_app, make_app
from service.engine_client import QueueState

OPEN = {"/", "/live", "/health", "/ready", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/docs"}
"""The routes that the API marks as open, written down here again on purpose."""

KEY = "sk-Secret1"


async def raw(server: Server, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request as bytes on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body


# ---------------------------------------------------------------- keys (C33)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY.lower()}"},
        {"Authorization": f"Bearer  {KEY}"},
        {"Authorization": f"Bearer {KEY} {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": ""},
        {"X-Api-Key": KEY},
    ],
)
async def test_without_a_good_key_only_open_routes_answer(start: Start, headers: dict[str, str]) -> None:
    server = await start(settings={"api_keys": ("other", KEY)})
    for method, path, _, _ in ROUTES:
        if path.startswith("/v1/messages") and "X-Api-Key" in headers:
            continue  # that API's own way to send a key
        answer = await server.ask(method, path.replace("{id:.+}", "tiny"), headers=headers)
        assert (answer.status != 401) == (path in OPEN), path
        if answer.status == 401:
            assert answer.json["error"]["type"].lower() in ("authenticationerror", "authentication_error")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert KEY not in answer.body.decode()
    assert server.engine.submitted == []
    assert KEY not in repr(server.log)


PAGE = {"/", "/admin", "/admin/", "/admin/{file}"}
"""Files that are the same for everybody: the page asks for the key, and for all that it shows, itself."""


@pytest.mark.parametrize("with_admin", [False, True])
async def test_every_route_of_the_router_is_closed_unless_the_api_marks_it_open(start: Start, with_admin: bool) -> None:
    """C33: the list is the router's own, whatever a later change adds to it, on both ports."""
    settings = {"api_keys": (KEY,)} | ({"admin_api_key": "root"} if with_admin else {})
    server = await start(settings=settings)
    app = make_app(server.front_end)
    seen = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
    assert seen >= OPEN | {"/v1/completions"}
    for route in app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        answer = await server.ask(route.method, path.replace("{id}", "x"))
        assert (answer.status == 401) == (path not in OPEN), (route.method, path)
    for route in make_admin_app(server.front_end).router.routes():
        assert route.resource is not None
        path = route.resource.canonical.replace("{", "").replace("}", "")
        url = f"http://127.0.0.1:{server.admin_port}{path}"
        async with server.session.request(route.method, url) as response:
            assert (response.status == 401) == (with_admin and route.resource.canonical not in PAGE), url


@pytest.mark.parametrize(
    "line",
    [
        "POST /v1//completions", "POST /V1/completions", "POST /v1/../v1/completions", "POST /v1/completions/",
        "POST /%76%31/completions", "POST /v1/%63ompletions", "POST /v1/completions?key=1", "HEAD /v1/completions",
        "OPTIONS /v1/completions", "OPTIONS /health", "POST /health", "POST /", "GET /admin/v1/meminfo", "PUT /nothing",
        "POST http://x/v1/completions", "GET /health/", "GET //health", "GET /v1/models/a/b", "HEAD /v1/models",
        "POST /health/../v1/completions", "POST /health%2f..%2fv1/completions",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_path_opens_a_door(start: Start, line: str) -> None:
    server = await start(settings={"api_keys": (KEY,)})
    head = f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 13\r\n\r\n".encode()
    status, headers, _ = await raw(server, head + b'{"prompt":"a"}'[:13])
    assert status == 401
    assert headers["Content-Type"] == "application/json"
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    "lines",
    [
        f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}",
        f"Authorization: Bearer wrong\r\nAuthorization: Bearer {KEY}",
        "Authorization: Bearer \xff\xfe",
        "Authorization: Bearer sk-\u00e9",
    ],
)
async def test_two_headers_or_strange_bytes_are_no_key(start: Start, lines: str) -> None:
    server = await start(settings={"api_keys": (KEY,)})
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n\r\n".encode("latin-1")
    assert (await raw(server, request))[0] == 401


async def test_a_good_key_opens(start: Start) -> None:
    server = await start(settings={"api_keys": ("other", KEY)})
    for scheme in ("Bearer", "bearer"):
        for key in ("other", KEY):
            headers = {"Authorization": f"{scheme} {key}"}
            assert (await server.post("/v1/completions", {"prompt": "a"}, headers=headers)).status == 200
            assert (await server.get("/nothing", headers=headers)).status == 404


async def test_a_key_that_is_not_ascii(start: Start) -> None:
    server = await start(settings={"api_keys": ("clé",)})
    request = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer clé\r\n\r\n".encode()
    assert (await raw(server, request))[0] == 200


async def test_without_keys_any_header_is_accepted(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer whatever"}, {"Authorization": "nonsense"}):
        assert (await server.get("/v1/models", headers=headers)).status == 200


async def test_admin_routes(start: Start) -> None:
    """On the public port only with an admin key, and only for it; on the admin port for all unless there is one."""
    closed = await start(settings={"api_keys": (KEY,), "admin_api_key": "root"})
    path = ADMIN_ROUTES[0][1]
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 403),
        ({"Authorization": "Bearer root"}, 200),
    ):
        for port in (closed.port, closed.admin_port):
            async with closed.session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response:
                assert response.status == status
    assert (await closed.get("/v1/models", headers={"Authorization": "Bearer root"})).status == 200
    without = await start()
    assert (await without.get(path)).status == 404
    async with without.session.get(f"http://127.0.0.1:{without.admin_port}{path}") as response:
        assert response.status == 200
    async with without.session.get(f"http://127.0.0.1:{without.admin_port}/v1/models") as response:
        assert response.status == 404


# ---------------------------------------------------------------- statuses


async def test_unknown_paths_and_methods(server: Server) -> None:
    for path in (
        "/nothing",
        "/v1",
        "/v1/",
        "/v1/completions/",
        "/V1/models",
        "/admin/v1/meminfo",
        "/" + "x" * 4000,
    ):
        answer = await server.get(path)
        assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    answer = await server.ask("PUT", "/v1/completions")
    assert (answer.status, answer.error["type"], answer.headers["Allow"]) == (405, "MethodNotAllowed", "POST")
    assert (await server.ask("POST", "/health")).headers["Allow"] == "GET, HEAD"
    assert (await server.ask("HEAD", "/v1/completions")).status == 405
    assert (await server.ask("HEAD", "/health")).status == 200


async def test_what_is_nowhere_is_told_with_where_to_look(start: Start) -> None:
    server = await start()
    told = (await server.get("/chat/completions")).error["message"]
    assert told == "There is nothing at /chat/completions: see /docs, or the admin port for what is under /admin."
    told = (await server.ask("DELETE", "/health")).error["message"]
    assert told == "DELETE is not allowed on /health: it takes GET, HEAD."
    for path in ("/v1/models", "/admin/v1", "/admin/v1/", "/admin/v1/lunch"):
        async with server.session.get(f"http://127.0.0.1:{server.admin_port}{path}") as response:
            told = (await response.json())["error"]["message"]
        assert (response.status, told) == (404, f"There is nothing at {path}: this port is for operators, see /admin/.")


async def test_routes_of_later_releases(server: Server) -> None:
    answer = await server.ask("POST", "/v1/embeddings")
    assert (answer.status, answer.error["type"]) == (400, "NotImplementedError")
    assert answer.headers["x-should-retry"] == "false"


async def test_models(server: Server) -> None:
    listed = (await server.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["tiny", "org/tiny"]
    assert (await server.get("/v1/models/org/tiny")).json == listed["data"][1]
    assert (await server.get("/v1/models/org%2Ftiny")).json == listed["data"][1]
    entry = listed["data"][0]
    assert entry | {"id": "", "root": ""} == {
        "id": "", "object": "model", "created": 1790000000, "owned_by": "pagewalk", "root": "", "parent": None,
        "max_model_len": 512,
    }  # fmt: skip
    answer = await server.get("/v1/models/" + "x" * 3000)
    assert (answer.status, answer.error["param"]) == (404, "model")
    assert len(answer.error["message"]) < 300


async def test_answers_do_not_name_the_software_below(server: Server) -> None:
    for path in ("/health", "/nothing"):
        answer = await server.get(path)
        assert answer.headers["Server"] == "pagewalk"


async def test_an_exception_of_ours_is_a_500_without_its_words(server: Server, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.engine_client.EngineClient.submit", broken)
    for stream in (False, True):
        answer = await server.complete(stream=stream)
        assert (answer.status, answer.error["type"]) == (500, "InternalServerError")
        assert "secret" not in answer.error["message"]
        assert answer.headers["X-Request-Id"] in answer.error["message"]
    assert (await server.get("/health")).status == 200


# ---------------------------------------------------------------- bodies at the door


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON;charset=UTF-8", 200),
        (None, 200), ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415),
        ("application/json; charset=latin-1", 415), ("application/jsonx", 415), ("", 415), ("nonsense", 415),
        ("\xff;=", 415),
    ],
)  # fmt: skip
async def test_content_types(server: Server, content_type: str | None, status: int) -> None:
    line = "" if content_type is None else f"Content-Type: {content_type}\r\n"
    body = b'{"prompt": "the"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{line}\r\n"
    got, headers, _ = await raw(server, head.encode("latin-1") + body)
    assert got == status
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("header", ["Content-Encoding", "Expect", "X-Request-Id", "Authorization", "Host", "Origin"])
async def test_bytes_in_headers_that_are_no_text(server: Server, header: str) -> None:
    body = b'{"prompt": "the"}'
    lines = f"{header}: \xff\xfe\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    if header == "Host":
        lines = lines.replace("Host: x\r\n", "")
    got, _, answer = await raw(server, b"POST /v1/completions HTTP/1.1\r\n" + lines.encode("latin-1") + body)
    assert got == {"Content-Encoding": 415, "Expect": 417}.get(header, 200), answer


async def test_a_body_that_says_it_is_too_long_is_refused_unread(start: Start) -> None:
    server = await start(settings={"body_limit_bytes": 1000})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000000\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"PayloadTooLarge" in await asyncio.wait_for(reader.readuntil(b"}}"), 5)
    writer.close()


async def test_an_endless_body_is_refused_when_the_limit_is_reached(start: Start) -> None:
    """By chunked transfer, without a length: the answer comes while the client still sends."""
    server = await start(settings={"body_limit_bytes": 2**20})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    sent = 0
    while not answer.done() and sent < 500 * 2**20:
        writer.write(chunk)
        await writer.drain()
        sent += len(chunk)
        await asyncio.sleep(0)
    assert (await answer).startswith(b"HTTP/1.1 413 ")
    assert sent < 16 * 2**20
    writer.close()


async def test_a_body_just_within_the_limit_is_read(start: Start) -> None:
    server = await start(settings={"body_limit_bytes": 1000})
    body = b'{"prompt": "the"}'
    assert (await server.post("/v1/completions", body + b" " * (1000 - len(body)))).status == 200
    assert (await server.post("/v1/completions", body + b" " * (1001 - len(body)))).status == 413


async def test_a_prompt_of_two_megabytes_passes_the_default_limit(start: Start) -> None:
    server = await start(limits={"max_model_len": 2**20, "max_request_tokens": 2**20})
    assert (await server.complete(prompt=[333] * 500_000, max_tokens=1)).status == 200


async def test_a_body_that_breaks_off_or_is_badly_chunked(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"prompt"')
    await writer.drain()
    writer.close()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head + b"zz\r\n")
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert (await server.complete()).status == 200


async def test_expectations(start: Start) -> None:
    """What would be refused after a long body is refused before it is sent."""
    server = await start(settings={"api_keys": (KEY,), "body_limit_bytes": 1000})
    good = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
    body = b'{"prompt": "the"}'
    length = f"Content-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{good}{length}Expect: 100-continue\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    for request, status in (
        (f"{good}Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n", 413),
        (f"{good.replace(KEY, 'no')}{length}Expect: 100-continue\r\n\r\n", 401),
        (f"{good}{length}Expect: a miracle\r\n\r\n", 417),
        (f"{good.replace('/v1/completions', '/nothing')}{length}Expect: a miracle\r\n\r\n", 417),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request.encode())
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"application/json" in answer
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(200)) + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)  # fmt: skip
async def test_what_is_not_http_gets_an_error_in_json(server: Server, request_bytes: bytes) -> None:
    status, headers, body = await raw(server, request_bytes)
    assert status == 400
    assert headers["Content-Type"] == "application/json"
    assert b'"type":"BadRequestError"' in body
    assert b"aiohttp" not in body
    assert (headers["Server"], headers["X-Content-Type-Options"]) == ("pagewalk", "nosniff")
    assert (await server.complete()).status == 200


async def test_a_connection_that_sends_no_head_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a head, and none at all: neither holds a socket for ever. Requests that run are not touched."""
    monkeypatch.setattr("service.http_server.HEAD_TIMEOUT_S", 0.05)
    server.engine.is_manual = True
    running = asyncio.create_task(server.complete())
    await server.until(lambda: len(server.engine.lines) == 1)
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    while server.engine.lines:
        server.engine.tick()
    assert (await running).status == 200


async def test_a_body_that_trickles_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.body.BODY_TIMEOUT_S", 0.05)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 50\r\n\r\n{"
    status, _, body = await raw(server, request)
    assert (status, b"did not come within" in body) == (400, True)


# ---------------------------------------------------------------- health and states


async def statuses(server: Server) -> dict[str, int]:
    return {path: (await server.get(path)).status for path in ("/live", "/health", "/ping", "/ready")}


async def test_probes_while_serving(server: Server) -> None:
    assert await statuses(server) == {"/live": 200, "/health": 200, "/ping": 200, "/ready": 200}
    assert (await server.get("/health")).body == b""
    assert (await server.get("/version")).json == {"version": "1.2.3"}
    answer = await server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_while_loading(start: Start, is_loaded: bool) -> None:
    """Before there is a model at all, and while the engine still warms up."""
    server = await start(is_loaded=is_loaded)
    server.engine.state = "loading"
    assert await statuses(server) == {"/live": 200, "/health": 503, "/ping": 503, "/ready": 503}
    for answer in (await server.complete(), await server.chat(stream=True)):
        assert (answer.status, answer.error["type"]) == (503, "ServiceUnavailableError")
        assert int(answer.headers["Retry-After"]) > 0
    if not is_loaded:
        assert (await server.get("/v1/models")).status == 503


async def test_the_root_says_what_this_is_and_the_same_to_everybody(start: Start) -> None:
    """Every path that it names is there, and nothing of the model, the version or the state."""
    loaded = await start(settings={"api_keys": (KEY,)})
    answer = await loaded.get("/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    text = answer.body.decode()
    assert text.startswith("Pagewalk")
    paths = re.findall(r"(?<=\s)/\S+", text)
    assert {"/v1", "/docs", "/health"} <= set(paths)
    for path in set(paths) - {"/v1"}:
        assert (await loaded.get(path)).status in (200, 401), path
    assert all(known not in text for known in ("tiny", "1.2.3", "/models/"))
    for other in (await start(is_loaded=False), await start()):
        assert (await other.get("/")).body == answer.body
    loaded.engine.die()
    assert (await loaded.get("/")).body == answer.body


async def test_while_draining(start: Start) -> None:
    """What runs goes on; nothing new comes in; still healthy."""
    server = await start(engine={"is_manual": True})
    running = asyncio.create_task(server.complete())
    await server.until(lambda: len(server.engine.lines) == 1)
    server.engine.state = "draining"
    assert await statuses(server) == {"/live": 200, "/health": 200, "/ping": 200, "/ready": 503}
    answer = await server.complete()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
    assert (await server.post("/v1/completions", b"not even read")).status == 503
    server.engine.tick()
    server.engine.tick()
    assert (await running).status == 200


async def test_when_the_engine_is_dead(server: Server) -> None:
    server.engine.die()
    assert await statuses(server) == {"/live": 503, "/health": 503, "/ping": 503, "/ready": 503}
    assert (await server.complete()).status == 503


async def test_when_the_engine_is_stuck(server: Server) -> None:
    server.engine.is_alive = False
    assert await statuses(server) == {"/live": 503, "/health": 503, "/ping": 503, "/ready": 503}


async def test_when_the_queue_is_full(start: Start) -> None:
    """429 with Retry-After, all prompts of a request or none."""
    server = await start(limits={"max_queue_requests": 3}, engine={"is_manual": True})
    server.engine.queue = QueueState(2, 10, 7)
    assert (await server.get("/ready")).status == 200
    answer = await server.complete(prompt=["a", "b"])
    assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
    assert answer.headers["Retry-After"] == "7", "what the queue takes"
    assert server.engine.submitted == []
    server.engine.queue = QueueState(3)
    assert await statuses(server) == {"/live": 200, "/health": 200, "/ping": 200, "/ready": 503}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_full_queue_refuses_before_anything_is_read(start: Start, path: str) -> None:
    """What a flood of such requests costs must be little: their bodies are not looked at."""
    server = await start(limits={"max_queue_requests": 3}, engine={"is_manual": True})
    server.engine.queue = QueueState(3, 10, 7)
    answer = await server.post(path, b"not even read")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    assert server.metrics.refusals == {"queue_requests": 1}
    server.engine.queue = QueueState(2)
    assert (await server.post(path, b"not JSON")).status == 400


async def test_when_too_many_prompt_tokens_wait(start: Start) -> None:
    """The bound is on what waits together: a long prompt that would wait alone is let in."""
    server = await start(limits={"max_queue_tokens": 10})
    server.engine.queue = QueueState(1, 8, 30)
    answer = await server.complete(prompt=[5, 6, 7])
    assert (answer.status, answer.headers["Retry-After"]) == (429, "30")
    assert "8 prompt tokens are waiting, the limit is 10" in answer.error["message"]
    assert (await server.complete(prompt=[5, 6])).status == 200
    server.engine.queue = QueueState()
    assert (await server.complete(prompt=[5] * 20)).status == 200
    assert server.metrics.refusals == {"queue_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_engine_finds_the_queue_full_after_all(start: Start, stream: bool) -> None:
    """Front ends do not know what others have sent since they heard of the queue: the engine's word is final."""
    server = await start(engine={"refuses_after_s": 9})
    answer = await server.complete(n=2, stream=stream)
    assert (answer.status, answer.headers["Retry-After"], answer.error["type"]) == (429, "9", "RateLimitError")
    assert server.metrics.refusals == {"queue_requests": 1}


async def test_load_counts_requests_that_generate(start: Start) -> None:
    server = await start(engine={"is_manual": True})
    asked = [asyncio.create_task(server.complete(stream=bool(i % 2))) for i in range(4)]
    await server.until(lambda: len(server.engine.lines) == 4)
    assert (await server.get("/load")).json == {"server_load": 4}
    server.engine.tick()
    server.engine.tick()
    await asyncio.gather(*asked)
    assert (await server.get("/load")).json == {"server_load": 0}


async def test_one_log_line_and_one_count_per_request(server: Server) -> None:
    """With the numbers, without text, and none for probes."""
    await server.complete(prompt=["secret words", "a"], max_tokens=1)
    await server.chat("secret words", stream=True)
    await server.complete(top_p=3)
    await server.get("/secret")
    await server.get("/health")
    lines = [(line["route"], line["status"], line.get("completion_tokens")) for line in server.log]
    assert lines == [
        ("/v1/completions", 200, 2), ("/v1/chat/completions", 200, 2), ("/v1/completions", 400, None),
        ("unmatched", 404, None),
    ]  # fmt: skip
    expected = {"request_id", "e2e_ms", "queue_ms", "ttft_ms", "prompt_tokens", "cached_tokens", "preemptions"}
    assert expected <= set(server.log[0])
    assert "words" not in repr(server.log)
    assert server.metrics.ended == {
        ("/v1/completions", "POST", 200): 1, ("/v1/chat/completions", "POST", 200): 1,
        ("/v1/completions", "POST", 400): 1, ("unmatched", "GET", 404): 1, ("/health", "GET", 200): 1,
    }  # fmt: skip


async def test_open_requests_are_bounded_by_open_files(start: Start) -> None:
    """A refusal and a probe need a socket too: more requests than that are told to come again, at once."""
    server = await start(engine={"is_manual": True}, settings={"max_generating": 2})
    open_ones = [asyncio.create_task(server.complete(stream=bool(i))) for i in range(2)]
    await server.until(lambda: len(server.engine.lines) == 2)
    for answer in (await server.complete(), await server.chat()):
        assert (answer.status, answer.error["type"]) == (429, "RateLimitError")
        assert int(answer.headers["Retry-After"]) > 0
    assert (await server.get("/ready")).status == 503
    assert (await server.get("/health")).status == 200
    while server.engine.lines:
        server.engine.tick()
    assert [(await one).status for one in open_ones] == [200, 200]
    assert (await server.get("/ready")).status == 200


# ---------------------------------------------------------------- admin


async def test_meminfo(start: Start) -> None:
    """JSON, and the same facts as /proc would show them."""
    server = await start()
    url = f"http://127.0.0.1:{server.admin_port}/admin/v1/meminfo"
    async with server.session.get(url) as response:
        facts = await response.json()
    assert list(facts)[:3] == ["ts", "step", "uptime_s"]
    assert abs(facts["ts"] - time.time()) < 60
    assert facts["total"] == facts["free"] + facts["cached"] + facts["active"] == 100
    assert (facts["cached"], facts["copying"], facts["available"], facts["cached_pages"]) == (11, 2, 91, 14)
    assert (facts["shared"], facts["page_tokens"], facts["frame_bytes"]) == (2, 16, 4096)
    assert (facts["host_total"], facts["host_free"]) == (40, 37)
    assert (facts["dtype"], facts["weights_bytes"], facts["activations_peak_bytes"]) == ("bfloat16", 123_456, 654_321)
    async with server.session.get(url, headers={"Accept": "text/plain"}) as response:
        assert response.content_type == "text/plain"
        lines = [line.split() for line in (await response.text()).splitlines()]
    assert {line[0].rstrip(":"): line[1] for line in lines[1:]} == {
        name: str(value) for name, value in list(facts.items())[1:]
    }
    assert ["free:", "80", "frames"] in lines
    frames = {line[0].rstrip(":"): int(line[1]) for line in lines if line[2:] == ["frames"]}
    assert frames["total"] == frames["free"] + frames["cached"] + frames["active"]


async def test_meminfo_before_the_model(start: Start) -> None:
    server = await start(is_loaded=False)
    async with server.session.get(f"http://127.0.0.1:{server.admin_port}/admin/v1/meminfo") as response:
        assert response.status == 503
