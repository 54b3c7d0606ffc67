"""The handlers of /admin/v1: the server's memory seen from outside, as /proc shows that of a machine.

    GET  ──▶ Look ──▶ engine's process: a view (admin_views.py and its siblings) ──▶ JSON, or text (admin_text.py)

Every answer is one consistent snapshot, taken between two steps of the engine, and starts with `ts`, `step` and
`uptime_s`. JSON by default; with `Accept: text/plain`, or `.txt` behind the path, the same facts in the layout of
/proc, and step and time in headers. The unit of memory is the frame. docs/admin.md has them all.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from service import admin_text
from service.engine_client import EngineSnapshot
from service.errors import BadRequest, NotFound, quoted
from service.front_end import FRONT_END, FrontEnd
from service.json_answers import encoded_answer, json_answer
from service.middleware import Handler
from service.questions import Look, TakeSnapshot, ViewQuery

MemoryFacts = dict[str, tuple[float | int | str, str]]  # name -> value, unit

SUFFIX = ".txt"

LEAST_PROFILE_S, PROFILE_S, MOST_PROFILE_S = 0.1, 5.0, 60.0

VIEWS: Mapping[str, tuple[str, ...]] = {
    "vmstat": (),
    "pressure": (),
    "pressure/compute": (),
    "buddyinfo": (),
    "zoneinfo": (),
    "pools": (),
    "audit": (),
    "frames": ("state", "order", "limit", "offset"),
    "frames/summary": (),
    "frames/{of}": (),
    "swaps": (),
    "page_cache": ("limit", "offset", "prefix_of", "salt", "tenant"),
    "tenants": (),
    "tenants/{of}": (),
    "sequences": ("limit", "offset", "tenant"),
    "sequences/{of}/status": (),
    "sequences/{of}/maps": (),
    "sequences/{of}/smaps": (),
    "sequences/{of}/pagemap": ("limit", "offset"),
    "sequences/{of}/trace": ("event", "after", "limit"),
    "scheduler": ("limit",),
    "oom_score": (),
    "misses": ("limit", "tenant"),
    "trace": ("event", "request", "tenant", "after", "limit"),
    "steps": ("after", "limit"),
    "pulse": (),
    "config": (),
    "threads": (),
    "stacks": (),
}
"""What can be looked at, and what each takes behind the `?`."""


def view(name: str) -> Handler:
    """GET /admin/v1/{name}. Raises Loading, NotFound, BadRequest."""

    async def show(request: web.Request) -> web.StreamResponse:
        body = await look(request, name, query_of(request, VIEWS[name]))
        if not wants_text(request):
            return encoded_answer(_with_text(request, name, body))
        facts = msgspec.json.decode(body)
        headers = {"X-Step": str(facts["step"]), "X-Ts": str(facts["ts"])}
        return web.Response(text=admin_text.RENDERERS[name](facts), headers=headers)

    return show


async def tenant_file(request: web.Request) -> web.Response:
    """GET /admin/v1/tenants/{of}/{file}: one file of a tenant's cgroup, as the kernel has it."""
    facts = msgspec.json.decode(await look(request, "tenants/{of}", query_of(request, ())))
    files, name = admin_text.tenant_files(facts), request.match_info["file"]
    if name not in files:
        raise NotFound(f"A tenant has no file {quoted(name)}, but {', '.join(sorted(files))}.")
    return web.Response(text=files[name])


async def profile(request: web.Request) -> web.Response:
    """GET /admin/v1/profile?seconds=: where the engine's process spends its time, sampled from now on."""
    query_of(request, (), beside=("seconds",))
    seconds = seconds_of(request, "seconds", PROFILE_S, LEAST_PROFILE_S, MOST_PROFILE_S)
    front_end = request.app[FRONT_END]
    front_end.loaded()
    begun = await front_end.engine.ask(Look("profile/start", str(seconds)))
    number = msgspec.json.decode(begun)["number"]
    while True:
        await asyncio.sleep(seconds)
        body = await front_end.engine.ask(Look("profile/result", str(number)))
        facts = msgspec.json.decode(body)
        if facts.pop("is_over"):
            break
        seconds = LEAST_PROFILE_S
    if wants_text(request):
        return web.Response(text=admin_text.profile(facts))
    return json_answer(facts)


def wants_text(request: web.Request) -> bool:
    """By the path, or by the Accept header."""
    return request.path.endswith(SUFFIX) or "text/plain" in request.headers.get("Accept", "")


async def look(request: web.Request, name: str, query: ViewQuery) -> bytes:
    """The JSON of a view. Raises Loading, and what the view raises."""
    front_end = request.app[FRONT_END]
    front_end.loaded()
    return await front_end.engine.ask(Look(name, request.match_info.get("of", ""), query))


def query_of(request: web.Request, names: tuple[str, ...], beside: tuple[str, ...] = ()) -> ViewQuery:
    """What stands behind the `?`, checked; `beside` is looked at elsewhere. Raises BadRequest."""
    given = {name: value for name, value in request.query.items() if name not in beside}
    for name in given:
        if name not in names:
            takes = f"takes {', '.join(names)}" if names else "takes nothing"
            raise BadRequest(f"unknown parameter {quoted(name)}: this view {takes}", param=quoted(name))
    try:
        return msgspec.convert(given, ViewQuery, strict=False)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$.")
        raise BadRequest(f"{quoted(words)} - at `{path}", param=path.rstrip("`") or None) from None


def seconds_of(request: web.Request, name: str, usual_s: float, least_s: float, most_s: float) -> float:
    """A number of seconds behind the `?`. Raises BadRequest."""
    given = request.query.get(name)
    if given is None:
        return usual_s
    with suppress(ValueError):
        seconds = float(given)
        if least_s <= seconds <= most_s:
            return seconds
    raise BadRequest(f"{name} is {least_s:g} to {most_s:g} seconds, not {quoted(given)}", param=name)


def _with_text(request: web.Request, name: str, body: bytes) -> bytes:
    """Where token ids may be shown at all, their text in their place."""
    if name != "page_cache" or b'"token_ids"' not in body:
        return body
    facts: dict[str, Any] = msgspec.json.decode(body)
    tokenizer = request.app[FRONT_END].loaded().tokenizer
    for page in (*facts.get("top", ()), *facts.get("found", ())):
        page["text"] = tokenizer.decode(page.pop("token_ids"), skip_special_tokens=False)
    return msgspec.json.encode(facts)


# ---------------------------------------------------------------- memory in total


async def meminfo(request: web.Request) -> web.Response:
    """GET /admin/v1/meminfo. Raises Loading."""
    query_of(request, ())
    front_end: FrontEnd = request.app[FRONT_END]
    model = front_end.loaded()
    snapshot = await front_end.engine.ask(TakeSnapshot())
    weights: MemoryFacts = {"dtype": (model.dtype, ""), "weights_bytes": (model.weights_bytes, "B")}
    facts = _head(snapshot) | _memory(snapshot) | weights
    if snapshot.device_memory is not None:
        facts["activations_peak_bytes"] = snapshot.device_memory.activations_peak_bytes, "B"
    if wants_text(request):
        lines = [f"{name + ':':<18}{value:>16} {unit}".rstrip() + "\n" for name, (value, unit) in facts.items()]
        return web.Response(text="".join(lines))
    return json_answer({name: value for name, (value, _) in facts.items()})


def _head(snapshot: EngineSnapshot) -> MemoryFacts:
    return {
        "ts": (round(time.time(), 3), "s"),
        "step": (snapshot.step, ""),
        "uptime_s": (round(snapshot.uptime_s, 3), "s"),
    }


def _memory(snapshot: EngineSnapshot) -> MemoryFacts:
    """total = free + cached + active; of the active frames, nothing but a copy holds the copying ones; saved ones would
    be in use if nothing were shared, reserved ones are not in the total, slots are places in the host's memory.
    """
    memory = snapshot.memory
    limit = memory.commit_limit
    return {
        "total": (memory.total_frames, "frames"),
        "reserved": (memory.reserved_frames, "frames"),
        "free": (memory.free_frames, "frames"),
        "cached": (memory.cached_frames, "frames"),
        "active": (memory.active_frames + memory.copying_frames, "frames"),
        "copying": (memory.copying_frames, "frames"),
        "shared": (memory.shared_frames, "frames"),
        "saved": (memory.saved_frames, "frames"),
        "pinned": (memory.pinned_frames, "frames"),
        "inactive": (memory.inactive_frames, "frames"),
        "available": (memory.available_frames, "frames"),
        "committed": (memory.committed_frames, "frames"),
        "committed_ratio": (round(memory.committed_frames / limit, 4) if limit else 0.0, ""),
        "host_total": (memory.total_slots, "slots"),
        "host_free": (memory.free_slots, "slots"),
        "cached_pages": (memory.cached_pages, "pages"),
        "references": (memory.references + memory.copying_frames, ""),
        "address_spaces": (memory.rows, ""),
        "tokens": (memory.tokens, "tokens"),
        "unused_tokens": (memory.unused_tokens, "tokens"),
        "page_tokens": (memory.page_size, "tokens"),
        "frame_bytes": (snapshot.frame_bytes, "B"),
    }
