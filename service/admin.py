"""/admin/v1/*: the memory of the server, seen from outside as /proc shows that of a machine.

Every answer is one consistent snapshot, taken between two steps of the engine, and starts with `ts`, `step` and
`uptime_s`. JSON by default; `Accept: text/plain` gives the same facts in the layout of /proc. The unit of memory is the
frame.
"""

import time

import msgspec
from aiohttp import web

from service.engine_client import EngineSnapshot
from service.front_end import FRONT_END
from service.questions import TakeSnapshot

Facts = dict[str, tuple[float | int | str, str]]  # name -> value, unit


async def meminfo(request: web.Request) -> web.Response:
    """GET /admin/v1/meminfo. Raises Loading."""
    model = request.app[FRONT_END].loaded()
    snapshot = await request.app[FRONT_END].engine.ask(TakeSnapshot())
    weights: Facts = {"dtype": (model.dtype, ""), "weights_bytes": (model.weights_bytes, "B")}
    return _answer(request, _head(snapshot) | _memory(snapshot) | weights)


def _head(snapshot: EngineSnapshot) -> Facts:
    return {
        "ts": (round(time.time(), 3), "s"),
        "step": (snapshot.step, ""),
        "uptime_s": (round(snapshot.uptime_s, 3), "s"),
    }


def _memory(snapshot: EngineSnapshot) -> Facts:
    """total = free + cached + active + copying; shared frames are active, saved ones
    would be in use if nothing were shared, slots are places in the host's memory."""
    memory = snapshot.memory
    return {
        "total": (memory.total_frames, "frames"),
        "free": (memory.free_frames, "frames"),
        "cached": (memory.cached_frames, "frames"),
        "active": (memory.active_frames, "frames"),
        "copying": (memory.copying_frames, "frames"),
        "shared": (memory.shared_frames, "frames"),
        "saved": (memory.saved_frames, "frames"),
        "available": (memory.available_frames, "frames"),
        "host_total": (memory.total_slots, "slots"),
        "host_free": (memory.free_slots, "slots"),
        "cached_pages": (memory.cached_pages, "pages"),
        "references": (memory.references, ""),
        "address_spaces": (memory.rows, ""),
        "tokens": (memory.tokens, "tokens"),
        "unused_tokens": (memory.unused_tokens, "tokens"),
        "page_tokens": (memory.page_size, "tokens"),
        "frame_bytes": (snapshot.frame_bytes, "B"),
    }


def _answer(request: web.Request, facts: Facts) -> web.Response:
    if "text/plain" in request.headers.get("Accept", ""):
        lines = [f"{name + ':':<18}{value:>16} {unit}".rstrip() + "\n" for name, (value, unit) in facts.items()]
        return web.Response(text="".join(lines))
    body = msgspec.json.encode({name: value for name, (value, _) in facts.items()})
    return web.Response(body=body, content_type="application/json")
