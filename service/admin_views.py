"""The views under /admin/v1, made in the engine's process between two steps: of memory as a whole.

A view is a function that reads and changes nothing; its facts are encoded here, and given their form for people in the
front end (admin_text.py). All of one answer is of one moment. Views of Sequences: admin_sequences.py; of what has
happened: admin_trace.py.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mm import ABSENT, MemoryManager, Namespace
from mm.addresses import Int32Array
from mm.frame_views import (
    MOST_OWNERS,
    STATE_BITS,
    FrameState,
    SlotState,
    frame_facts,
    frame_map,
    free_runs,
    held_by_pins,
    holders,
    owners_of,
    page_hash,
    resident_and_proportional,
    slot_states,
    use_counts,
)
from mm.statistics import TenantMemory
from mm.tenants import UNLIMITED
from service.action_log import ActionLog
from service.engine import Engine
from service.errors import BadRequest, NotFound, quoted
from service.questions import Answers, FrameBytes, Look, MapFrames, ViewQuery

Facts = dict[str, object]


@dataclass(frozen=True, slots=True)
class Inside:
    """What a view may read."""

    engine: Engine
    shows_text: bool  # of prompts: else not even their token ids leave this process
    actions: ActionLog = field(default_factory=ActionLog)
    began_ts: float = field(init=False)  # Unix time at which the engine's clock was 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "began_ts", time.time() - self.engine.now)

    @property
    def memory(self) -> MemoryManager:
        return self.engine.scheduler.memory

    def wall_clock(self, now: float) -> float:
        """Unix time of a moment of the engine's clock: the same whenever it is asked for."""
        return round(self.began_ts + now, 3)

    def head(self) -> Facts:
        engine = self.engine
        return {"ts": round(time.time(), 3), "step": engine.committed_step, "uptime_s": round(engine.uptime_s, 3)}


View = Callable[[Inside, Look], Facts]


class Inspector:
    """Answers what operators ask to see."""

    def __init__(self, inside: Inside, views: Mapping[str, View], looked: Callable[[float], None]) -> None:
        """looked(seconds) is told the CPU time that each answer took."""
        self._looked = looked
        self._inside = inside
        self._views = views

    def answer_with(self, answers: Answers) -> None:
        """From now on."""

        async def look(front_end: int, question: Look) -> bytes:
            return await self.audit() if question.view == "audit" else self.look(question)

        async def map_frames(front_end: int, question: MapFrames) -> FrameBytes:
            return self.map_frames()

        answers.on(Look, look)
        answers.on(MapFrames, map_frames)

    def look(self, question: Look) -> bytes:
        """One view as JSON. Raises NotFound, BadRequest."""
        begun = time.thread_time()
        try:
            return msgspec.json.encode(self._inside.head() | self._views[question.view](self._inside, question))
        finally:
            self._looked(time.thread_time() - begun)

    async def audit(self) -> bytes:
        """The view of that name, which lets others in on its way. If one of them changes memory, what was found is
        void, and all is looked through anew in one piece: where steps go on, it would never come to an end otherwise.
        """
        inside, begun, found = self._inside, time.thread_time(), list[str]()
        turn = inside.engine.turns
        for discrepancy in inside.memory.auditing():
            if discrepancy is not None:
                found.append(discrepancy)
                continue
            self._looked(time.thread_time() - begun)
            await asyncio.sleep(0)
            begun = time.thread_time()
            if inside.engine.turns != turn:
                found = inside.memory.audit()
                break
        facts = inside.head() | audited(inside, found)
        self._looked(time.thread_time() - begun)
        return msgspec.json.encode(facts)

    def map_frames(self) -> FrameBytes:
        """Every frame and slot."""
        begun, engine = time.thread_time(), self._inside.engine
        found = frame_map(self._inside.memory)
        parts = found.states.tobytes(), found.shares.tobytes(), found.slots.tobytes()
        cost_s = time.thread_time() - begun
        self._looked(cost_s)
        return FrameBytes(round(time.time(), 3), engine.committed_step, round(engine.uptime_s, 3), *parts, cost_s)


# ---------------------------------------------------------------- memory in total


def vmstat(inside: Inside, asked: Look) -> Facts:
    """/proc/vmstat: counters since the start."""
    counters, scheduler = inside.memory.counters(), inside.engine.scheduler
    facts = asdict(counters)
    facts = {"alloc": facts.pop("allocate")} | facts
    return facts | {
        "alloc_stall": scheduler.stalls,
        "recompute_tokens": counters.prefix_return - counters.prefix_recover,
        "preempt": scheduler.preemptions,
        "oom_abort": scheduler.oom_ends,
        "graph_hit": inside.engine.steps.graph_hits,
        "graph_miss": inside.engine.steps.graph_misses,
    }


def pressure(inside: Inside, asked: Look) -> Facts:
    """/proc/pressure/memory."""
    return asdict(inside.memory.pressure.read(inside.engine.now))


def compute_pressure(inside: Inside, asked: Look) -> Facts:
    """/proc/pressure/cpu: who waits for a place, or for the budget of a step."""
    return asdict(inside.engine.scheduler.compute_pressure.read(inside.engine.now))


def buddyinfo(inside: Inside, asked: Look) -> Facts:
    """/proc/buddyinfo. Any free frame serves any page, so runs tell what a resize could give back."""
    memory = inside.memory
    rows = memory.tables.rows_in_use()
    pages, tokens = int(memory.tables.pages(rows).sum()), int(memory.tables.lengths[rows].sum())
    return {
        "free_runs": free_runs(memory),
        "allocated_tokens": pages * memory.page_size,
        "used_tokens": tokens,
    }


def zoneinfo(inside: Inside, asked: Look) -> Facts:
    """/proc/zoneinfo: what bounds the pool now, after all that operators have changed. In frames and slots."""
    memory = inside.memory
    marks = memory.reclaimer.watermarks
    return {
        "free": memory.frames.free_frames,
        "min": marks.min,
        "low": marks.low,
        "high": marks.high,
        "present": memory.frames.total,  # reserved at the start
        "managed": memory.frames.usable,
        "slots_present": memory.swap.total,
        "slots_managed": memory.swap.usable,
        "overcommit": str(memory.ledger.mode),
    }


def pools(inside: Inside, asked: Look) -> Facts:
    """/proc/slabinfo: what is bounded here, and how full it is."""
    memory, executor = inside.memory, inside.engine.executor
    frames, swap, tables, cache = memory.frames, memory.swap, memory.tables, memory.cache
    row_bytes = 4 * tables.max_pages

    def pool(name: str, active: int, total: int, size: int, most: int | None = None) -> Facts:
        return {"name": name, "active_objs": active, "num_objs": total, "obj_bytes": size, "high_water": most}

    device = executor.device_memory
    of_device = [] if device is None else [
        pool("step_graphs", device.graphs, device.most_graphs, device.graph_bytes // max(1, device.graphs)),
        pool("scratch", 1, 1, device.activations_peak_bytes),
    ]  # fmt: skip
    return {
        "pools": [
            pool("kv_frames", frames.usable - frames.free_frames, frames.usable, executor.frame_bytes,
                 frames.most_held),
            pool("swap_slots", swap.used_slots, swap.usable, executor.frame_bytes),
            pool("page_tables", tables.max_rows - tables.free_rows, tables.max_rows, row_bytes),
            pool("page_cache", len(cache), cache.capacity, 4 * memory.page_size),
            pool("shadows", len(memory.shadows), memory.shadows.capacity, 32),
            pool("pins", memory.pins.pages, memory.pins.limit, executor.frame_bytes),
            *of_device,
        ]
    }  # fmt: skip


def audit(inside: Inside, asked: Look) -> Facts:
    """Every count anew, in one piece (Inspector.audit lets others in): 0.1 s and more for a large pool."""
    return audited(inside, inside.memory.audit())


def audited(inside: Inside, found: list[str]) -> Facts:
    """What an audit has found, and the sums over all holders."""
    memory = inside.memory
    resident, proportional = resident_and_proportional(memory, memory.tables.rows_in_use())
    others = holders(memory)
    copying = others[0].resident
    information = memory.information()
    return {
        "balanced": not found,
        "discrepancies": found,
        "total": information.total_frames,
        "free": information.free_frames,
        "cached": information.cached_frames,
        "active": information.active_frames + copying,
        "references": information.references + copying,
        "resident": int(resident.sum()) + sum(holder.resident for holder in others),
        "proportional": round(float(proportional.sum()) + sum(holder.proportional for holder in others), 6),
    }


# ---------------------------------------------------------------- frames


def frames(inside: Inside, asked: Look) -> Facts:
    """/proc/kpageflags, a frame a line; ?state= ?order=frame|uses|references ?limit= ?offset=."""
    memory, query = inside.memory, asked.query
    chosen = np.arange(memory.frames.usable, dtype=np.int32)
    if query.state is not None:
        names = [state.name.lower() for state in FrameState]
        if query.state not in names:
            raise BadRequest(f"state is one of {', '.join(names)}, not {quoted(query.state)}", param="state")
        states = frame_map(memory).states & STATE_BITS
        chosen = np.flatnonzero(states == FrameState[query.state.upper()]).astype(np.int32)
    chosen = _ordered(memory, chosen, query.order)[query.offset : query.offset + query.limit]
    return {"total": memory.frames.usable, "frames": frame_facts(memory, chosen, inside.engine.now)}


def _ordered(memory: MemoryManager, chosen: Int32Array, order: str | None) -> Int32Array:
    if order in (None, "frame"):
        return chosen
    if order == "references":
        keys = memory.frames.references[chosen]
    elif order == "uses":
        entries = memory.cache.entries_of_frames[chosen]
        keys = np.where(entries >= 0, np.asarray(memory.cache.hits)[entries], -1)
    else:
        raise BadRequest(f"order is frame, uses or references, not {quoted(str(order))}", param="order")
    return chosen[np.argsort(-keys, kind="stable")]


def frame(inside: Inside, asked: Look) -> Facts:
    """One frame, with what has happened to it as far as that is recorded."""
    memory = inside.memory
    number = int(asked.of) if asked.of.isascii() and asked.of.isdigit() else ABSENT
    if not 0 <= number < memory.frames.usable:
        raise NotFound(f"There is no frame {quoted(asked.of)}: they are 0 to {memory.frames.usable - 1}.")
    (facts,) = frame_facts(memory, np.array([number], np.int32), inside.engine.now)
    history = [
        {"ts": inside.wall_clock(event.now), "step": event.step, "kind": event.kind, "owner": event.owner}
        for event in memory.events_of_frame(number, MOST_OWNERS * 4)
    ]
    return asdict(facts) | {"history": history}


def frames_summary(inside: Inside, asked: Look) -> Facts:
    """Frames and slots by state, and cached pages by how often they were found (pg_buffercache_usage_counts)."""
    found = frame_map(inside.memory)
    names = ("uses", "pages", "mapped", "clean")
    return {
        "frames": _by_state(found.states & STATE_BITS, FrameState),
        "slots": _by_state(found.slots, SlotState),
        "usage_counts": [dict(zip(names, line, strict=True)) for line in use_counts(inside.memory)],
    }


def _by_state(states: npt.NDArray[np.integer[Any]], kinds: type[IntEnum]) -> Facts:
    counts = np.bincount(states, minlength=len(kinds)).tolist()
    return {kind.name.lower(): counts[kind] for kind in kinds}


def swaps(inside: Inside, asked: Look) -> Facts:
    """/proc/swaps, and whose pages are there."""
    memory, executor = inside.memory, inside.engine.executor
    rows = memory.tables.rows_in_use()
    swapped = [(row, int(np.count_nonzero(memory.tables.mapped(row) < ABSENT))) for row in rows.tolist()]
    return {
        "total": memory.swap.usable,
        "used": memory.swap.used_slots,
        "opened": memory.swap.opened,
        "slot_bytes": executor.frame_bytes,
        "slots": _by_state(slot_states(memory), SlotState),
        "holders": [{"owner": memory.tables.owners[row], "slots": count} for row, count in swapped if count],
    }


# ---------------------------------------------------------------- the page cache


def page_cache(inside: Inside, asked: Look) -> Facts:
    """Cached pages, those found most often first; ?limit= ?offset=. With ?prefix_of=IDS what of a prompt is cached."""
    has_prefix = asked.query.prefix_of is not None
    for name in ("limit", "offset") if has_prefix else ("salt", "tenant"):
        if getattr(asked.query, name) != getattr(ViewQuery(), name):
            raise BadRequest(f"{name} goes {'without' if has_prefix else 'with'} prefix_of", param=name)
    if has_prefix:
        return _prefix(inside, asked)
    memory, query = inside.memory, asked.query
    cache = memory.cache
    used = np.flatnonzero(cache.in_use()).astype(np.int32)
    hits = np.asarray(cache.hits)
    chosen = used[np.argsort(-hits[used], kind="stable")][query.offset : query.offset + query.limit]
    depths = _depths(memory, chosen)
    frames = cache.frames[chosen]
    owners = owners_of(memory, frames[frames != ABSENT])
    pinned = held_by_pins(memory)
    pages = []
    for entry, depth in zip(chosen.tolist(), depths, strict=True):
        page = _page(inside, entry)
        frame = cache.frame[entry]
        page |= {"depth_tokens": depth * memory.page_size, "pinned": frame != ABSENT and bool(pinned[frame])}
        page["owners"] = owners.get(frame, [])
        pages.append(page)
    return {
        "pages": len(cache),
        "active_pages": memory.lru.active_pages,
        "collisions": cache.collisions,
        "top": pages,
        "pins": [
            {"pin": pin.number, "owner": pin.owner, "tenant": pin.tenant, "tokens": pin.tokens,
             "frames": len(pin.frames),
             "expires_in_s": None if pin.expires_s is None else round(pin.expires_s - inside.engine.now, 3)}
            for pin in memory.pins.held.values()
        ],
    }  # fmt: skip


def _page(inside: Inside, entry: int) -> Facts:
    memory = inside.memory
    cache, frame, slot = memory.cache, memory.cache.frame[entry], memory.cache.slot[entry]
    place, charged = (
        ("frame", memory.tenants.of_frame[frame]) if frame != ABSENT else ("swap", memory.tenants.of_slot[slot])
    )
    parent = cache.parent[entry]
    facts: Facts = {
        "hash": page_hash(memory, entry),
        "parent": page_hash(memory, parent) if parent != ABSENT and cache.has_parent(entry) else None,
        "place": place,
        "frame": None if frame == ABSENT else frame,
        "slot": None if slot == ABSENT else slot,
        "references": memory.frames.reference_count[frame] if frame != ABSENT else memory.swap.references[slot],
        "hits": cache.hits[entry],
        "is_active": bool(memory.lru.active[entry]),
        "idle_s": round(inside.engine.now - cache.used_s[entry], 3),
        "tenant": memory.tenants.names[charged],
    }
    if inside.shows_text:
        facts["token_ids"] = np.frombuffer(cache.content[entry], np.int32).tolist()
    return facts


def _depths(memory: MemoryManager, entries: Int32Array) -> list[int]:
    """Pages from the beginning up to and with each entry, as far as those before it are cached."""
    parents, serials = np.asarray(memory.cache.parent), np.asarray(memory.cache.parent_serial)
    depths = np.ones(len(entries), np.int64)
    at, places = entries.copy(), np.arange(len(entries))
    while len(places):
        before = parents[at]
        goes_on = (before != ABSENT) & (memory.cache.serials[before] == serials[at])
        at, places = before[goes_on], places[goes_on]
        depths[places] += 1
    counts: list[int] = depths.tolist()
    return counts


def _prefix(inside: Inside, asked: Look) -> Facts:
    """What of a prompt is cached, page by page, and why the next page is not."""
    memory, query = inside.memory, asked.query
    tokens = token_ids(query.prefix_of or "", inside.engine.limits.vocabulary, inside.engine.limits.max_model_len)
    chain = memory.chain(np.array(tokens, np.int32), Namespace(salt=query.salt), query.tenant or "default")
    match = memory.lookup(chain)
    miss = asdict(match.miss)
    if miss["evicted_s"] is not None:
        miss["evicted_ts"] = inside.wall_clock(miss["evicted_s"])
    return {
        "tokens": len(tokens),
        "cached_tokens": match.cached_tokens,
        "found": [_page(inside, entry) for entry in match.entries.tolist()],
        "miss": miss,
    }


def token_ids(text: str, vocabulary: int, most: int) -> list[int]:
    """Ids separated by commas. Raises BadRequest."""
    parts = text.split(",")
    if len(parts) > most or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise BadRequest(f"prefix_of is up to {most} token ids, separated by commas", param="prefix_of")
    ids = [int(part) for part in parts]
    if max(ids) >= vocabulary:
        raise BadRequest(f"the token id {max(ids)} is not below {vocabulary}", param="prefix_of")
    return ids


# ---------------------------------------------------------------- tenants


def tenants(inside: Inside, asked: Look) -> Facts:
    """Every tenant, as the files of its cgroup have it."""
    return {"tenants": [_tenant(inside, each) for each in inside.memory.tenant_memory(inside.engine.now)]}


def tenant(inside: Inside, asked: Look) -> Facts:
    """One of them."""
    for each in inside.memory.tenant_memory(inside.engine.now):
        if each.name == asked.of:
            return _tenant(inside, each)
    raise NotFound(f"There is no tenant {quoted(asked.of)}.")


def _tenant(inside: Inside, found: TenantMemory) -> Facts:
    limits = found.limits
    return {
        "name": found.name,
        "current": found.current,
        "peak": found.peak,
        "min": limits.min,
        "low": limits.low,
        "high": _limit(limits.high),
        "max": _limit(limits.max),
        "swap_current": found.swap,
        "swap_max": _limit(limits.swap_max),
        "weight": limits.weight,
        "isolate": limits.isolate,
        "events": asdict(found.events),
        "stat": {"active": found.current - found.cached, "cached": found.cached},
        "pressure": asdict(found.pressure),
    }


def _limit(frames: int) -> int | None:
    return None if frames == UNLIMITED else frames


MEMORY_VIEWS: dict[str, View] = {
    "vmstat": vmstat,
    "pressure": pressure,
    "pressure/compute": compute_pressure,
    "buddyinfo": buddyinfo,
    "zoneinfo": zoneinfo,
    "pools": pools,
    "audit": audit,
    "frames": frames,
    "frames/{of}": frame,
    "frames/summary": frames_summary,
    "swaps": swaps,
    "page_cache": page_cache,
    "tenants": tenants,
    "tenants/{of}": tenant,
}
