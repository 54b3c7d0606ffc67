"""Views of Sequences under /admin/v1: as ps and /proc/PID show processes. Never a token of theirs.

A Sequence is named `FRONT_END.NUMBER` here, which is its own as long as the server runs. A request's id serves too,
where it names one Sequence alone.
"""

from dataclasses import asdict

import msgspec
import numpy as np

from mm import Action
from mm.addresses import ABSENT, slot_entry
from mm.frame_views import Holder, holders, page_hash, resident_and_proportional
from service.admin_views import Facts, Inside, View
from service.engine_client import SequenceState
from service.errors import NotFound, quoted
from service.open_requests import describe
from service.questions import Look
from service.request import Sequence, State
from service.scheduler import Scheduler
from service.sequences import row_of


class SequenceEntry(msgspec.Struct, frozen=True):
    """A line of ps. Memory in frames, times in seconds or ms."""

    id: str
    request: str
    state: SequenceState
    wait_reason: str
    tenant: str
    priority: int
    key: str  # what the requests of one key have in common
    front_end: int
    client: str  # the address that it came from
    age_s: float
    queue_ms: float | None  # None: not admitted yet
    ttft_ms: float | None  # None: no token yet
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    frames: int  # pages of its page table that are in frames
    rss: int
    pss: float
    swap: int
    preemptions: int
    last_step: int | None
    is_beam: bool


def name_of(sequence: Sequence) -> str:
    """What operators call it."""
    return f"{sequence.front_end}.{sequence.sequence_id}"


def all_sequences(scheduler: Scheduler) -> list[Sequence]:
    """Everyone that has not ended, oldest first: also the beams of searches, which hold their memory."""
    all_ = scheduler.sequences
    found = {each.key: each for each in scheduler.open_sequences()}
    for each in (*all_.waiting, *all_.running.values(), *all_.swapped.values(), *all_.paused.values()):
        found.setdefault(each.key, each)
    return sorted(found.values(), key=lambda each: (each.submitted_s, each.key))


def find(inside: Inside, name: str) -> Sequence:
    """By its own name, or by that of a request with one Sequence. Raises NotFound."""
    found = all_sequences(inside.engine.scheduler)
    for sequence in found:
        if name_of(sequence) == name:
            return sequence
    named = [sequence for sequence in found if sequence.request_id == name and sequence.group is None]
    if len(named) == 1:
        return named[0]
    if named:
        names = ", ".join(name_of(sequence) for sequence in named[:8])
        raise NotFound(f"Request {quoted(name)} has {len(named)} sequences: ask for one of {names}.")
    raise NotFound(f"No sequence or request {quoted(name)} is open.")


# ---------------------------------------------------------------- ps


def sequences(inside: Inside, asked: Look) -> Facts:
    """Everyone that runs or waits, and the holders of frames that are no Sequences; ?limit= ?offset= ?tenant=."""
    query = asked.query
    found = [
        each for each in all_sequences(inside.engine.scheduler) if query.tenant is None or each.tenant == query.tenant
    ]
    chosen = found[query.offset : query.offset + query.limit]
    return {
        "total": len(found),
        "sequences": _entries(inside, chosen),
        "holders": [_holder(inside, each) for each in holders(inside.memory)],
    }


def _holder(inside: Inside, holder: Holder) -> Facts:
    expires_s = holder.expires_s
    return {
        "id": holder.name,
        "tenant": holder.tenant,
        "owner": holder.owner,
        "rss": holder.resident,
        "pss": round(holder.proportional, 6),
        "expires_in_s": None if expires_s is None else round(expires_s - inside.engine.now, 3),
    }


def _entries(inside: Inside, chosen: list[Sequence]) -> list[SequenceEntry]:
    memory, now = inside.memory, inside.engine.now
    with_row = [each for each in chosen if each.space is not None]
    rows = np.array([row_of(each) for each in with_row], np.int32)
    resident, proportional = resident_and_proportional(memory, rows)
    pages = memory.tables.pages(rows)
    held = {
        each.key: (int(resident[i]), round(float(proportional[i]), 6), int(pages[i] - resident[i]))
        for i, each in enumerate(with_row)
    }
    entries = []
    for each in chosen:
        facts = describe(each, inside.engine.scheduler)
        rss, pss, swap = held.get(each.key, (0, 0.0, 0))
        entries.append(
            SequenceEntry(
                id=name_of(each),
                request=each.request_id,
                state=facts.state,
                wait_reason=wait_reason(inside, each),
                tenant=each.tenant,
                priority=each.priority,
                key=each.owner,
                front_end=each.front_end,
                client=each.client,
                age_s=round(now - each.submitted_s, 3),
                queue_ms=_ms(each.admitted_s, each.submitted_s),
                ttft_ms=_ms(each.first_token_s, each.submitted_s),
                prompt_tokens=each.prompt_tokens,
                cached_tokens=each.cached_tokens,
                output_tokens=facts.output_tokens,
                max_tokens=each.max_tokens,
                frames=rss,
                rss=rss,
                pss=pss,
                swap=swap,
                preemptions=each.preemptions,
                last_step=inside.engine.scheduler.last_step_of(each),
                is_beam=each.group is not None and each.state is not State.CHOICE,
            )
        )
    return entries


def _ms(end: float | None, start: float) -> float | None:
    return None if end is None else round(1000 * (end - start), 3)


def wait_reason(inside: Inside, sequence: Sequence) -> str:
    """Why it does not run; "" if it does."""
    scheduler, memory = inside.engine.scheduler, inside.memory
    if sequence.state is State.SWAPPED:
        return "copying" if memory.is_copying and memory.tables.barred[row_of(sequence)] else "frames"
    if sequence.state is State.PAUSED:
        return "paused"
    if sequence.state is not State.WAITING:
        return ""
    if sequence.in_flight:
        return "tokens_in_flight"
    if sequence.held_at >= 0:
        return "tenant_limit"
    if sequence.blocked_at >= 0:
        return "frames"
    family = sequence.family
    if family is not None and family.is_computing(sequence, scheduler.sequences.rows, memory.tables.lengths):
        return "relative_computes"
    if not scheduler.has_place:
        return "places"
    return "awaits_page" if sequence.awaited_steps else "turn"


def waiting(inside: Inside, asked: Look) -> Facts:
    """Why each Sequence in the queue waits, in order; ?limit=."""
    scheduler = inside.engine.scheduler
    queue = scheduler.sequences.waiting
    return {
        "waiting": len(queue),
        "running": len(scheduler.sequences.running),
        "swapped": len(scheduler.sequences.swapped),
        "max_running": scheduler.settings.max_running,
        "max_batched_tokens": scheduler.settings.max_batched_tokens,
        "has_place": scheduler.has_place,
        "queue": [
            {
                "id": name_of(each),
                "request": each.request_id,
                "tenant": each.tenant,
                "reason": wait_reason(inside, each),
                "age_s": round(inside.engine.now - each.submitted_s, 3),
                "tokens": len(each.tokens),
                "could_have": max(each.blocked_at, each.held_at) if max(each.blocked_at, each.held_at) >= 0 else None,
            }
            for each in queue.in_order(asked.query.limit)
        ],
    }


# ---------------------------------------------------------------- one Sequence


def status(inside: Inside, asked: Look) -> Facts:
    """/proc/PID/status."""
    sequence = find(inside, asked.of)
    (entry,) = _entries(inside, [sequence])
    facts: Facts = msgspec.structs.asdict(entry)
    sampling = sequence.sampling
    facts |= {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "uses_cache": sequence.uses_cache,
        "miss": None if sequence.miss is None else sequence.miss.reason,
        "deadline_in_s": None if sequence.deadline_s is None else round(sequence.deadline_s - inside.engine.now, 3),
    }
    return facts


def maps(inside: Inside, asked: Look) -> Facts:
    """/proc/PID/maps: runs of equal pages, in token positions."""
    sequence, memory = find(inside, asked.of), inside.memory
    if sequence.space is None:
        return {"id": name_of(sequence), "runs": []}
    row, length = row_of(sequence), sequence.space.length
    pages_there = sequence.cached_of_row // memory.page_size  # when it entered its row
    runs = []
    for run in memory.maps(sequence.space):
        begin, end = run.first_page, run.first_page + run.pages
        cut = min(max(begin, pages_there), end)
        for first, last, origin in ((begin, cut, sequence.origin_of_row), (cut, end, "own")):
            if first == last:
                continue
            entry = memory.tables.entries[row, first]
            cached = memory.cache.entries_of_frames[entry] if entry >= 0 else ABSENT
            runs.append(
                {
                    "start": first * memory.page_size,
                    "end": min(length, last * memory.page_size),
                    "flags": f"r{'w' if run.is_writable else '-'}-{'s' if run.is_shared else 'p'}",
                    "place": run.place,
                    "origin": origin,
                    "hash": page_hash(memory, int(cached)) if cached != ABSENT else None,
                }
            )
    return {"id": name_of(sequence), "page_tokens": memory.page_size, "runs": runs}


def smaps(inside: Inside, asked: Look) -> Facts:
    """/proc/PID/smaps_rollup, in frames."""
    sequence, memory = find(inside, asked.of), inside.memory
    names = ("rss", "pss", "shared_clean", "private_dirty", "swap", "referenced", "waste_tokens", "committed")
    facts: Facts = {"id": name_of(sequence), "tokens": 0} | dict.fromkeys(names, 0)
    if sequence.space is None:
        return facts
    held = memory.sequence_memory(sequence.space)
    return facts | {
        "tokens": held.tokens,
        "rss": held.resident,
        "pss": round(held.proportional, 6),
        "shared_clean": held.shared,
        "private_dirty": held.private,
        "swap": held.swap,
        "referenced": held.resident if sequence.state is State.RUNNING else 0,  # a step reads all of its pages
        "waste_tokens": held.unused_tokens,
        "committed": held.committed,
    }


def pagemap(inside: Inside, asked: Look) -> Facts:
    """/proc/PID/pagemap, page by page; ?offset= ?limit=."""
    sequence, memory, query = find(inside, asked.of), inside.memory, asked.query
    if sequence.space is None:
        return {"id": name_of(sequence), "total": 0, "pages": []}
    entries, length = memory.tables.mapped(row_of(sequence)), sequence.space.length
    pages = []
    for page in range(query.offset, min(len(entries), query.offset + query.limit)):
        entry = int(entries[page])
        is_frame = entry >= 0
        cached = memory.cache.entry_of_frame[entry] if is_frame else memory.swap.entry[slot_entry(entry)]
        pages.append(
            {
                "page": page,
                "tier": "frame" if is_frame else "swap",
                "number": entry if is_frame else slot_entry(entry),
                "references": memory.frames.reference_count[entry]
                if is_frame
                else memory.swap.references[slot_entry(entry)],
                "hash": page_hash(memory, cached) if cached != ABSENT else None,
                "tokens": min(memory.page_size, length - page * memory.page_size),
                "is_writable": is_frame
                and memory.frames.reference_count[entry] == 1
                and not bool(memory.frames.sealed[entry]),
            }
        )
    return {"id": name_of(sequence), "total": len(entries), "pages": pages}


# ---------------------------------------------------------------- who would go, what was missed


def oom_score(inside: Inside, asked: Look) -> Facts:
    """The table of scores as it would be used now to free one frame, worst off first."""
    running, table, victim = inside.engine.scheduler.oom_table()
    chosen = set() if victim is None else set(victim.rows.tolist())
    lines = [
        {
            "id": name_of(sequence),
            "request": sequence.request_id,
            "score": None if table.scores[i] == -np.inf else round(float(table.scores[i]), 1),
            "oom_score_adj": int(table.adjustments[i]),
            "frames": int(table.frames[i]),
            "pages_to_copy": int(table.pages_to_copy[i]),
            "swap_ms": round(1000 * float(table.swap_s[i]), 3),
            "recompute_ms": round(1000 * float(table.recompute_s[i]), 3),
            "action": str(table.action(i)),
            "preemptions": sequence.preemptions,
            "is_next": row_of(sequence) in chosen,
        }
        for i, sequence in enumerate(running)
    ]
    order = np.argsort(-table.scores, kind="stable").tolist()
    costs = inside.memory.costs
    return {
        "swap_possible": inside.memory.swap.total > 0 and any(line["action"] == Action.SWAP for line in lines),
        "copy_page_us": round(1e6 * costs.copy_page_s, 3),
        "prefill_token_us": round(1e6 * costs.prefill_token_s, 3),
        "candidates": [lines[i] for i in order],
    }


def misses(inside: Inside, asked: Look) -> Facts:
    """The latest prompts that the page cache did not serve in full, newest first; ?limit= ?tenant=."""
    query = asked.query
    found = [
        each
        for each in reversed(inside.engine.scheduler.sequences.misses)
        if query.tenant is None or each.tenant == query.tenant
    ]
    return {
        "misses": [
            {
                "ts": inside.wall_clock(each.admitted_s),
                "id": f"{each.sequence[0]}.{each.sequence[1]}",
                "request": each.request_id,
                "tenant": each.tenant,
                "prompt_tokens": each.prompt_tokens,
                "cached_tokens": each.cached_tokens,
                "reason": str(each.miss.reason),
                "position": each.miss.position,
                "evicted_ts": None if each.miss.evicted_s is None else inside.wall_clock(each.miss.evicted_s),
                "evicted_for": each.miss.evicted_for,
                "writer": each.miss.writer,
            }
            for each in found[: query.limit]
        ],
        "working_set": asdict(inside.memory.working_set()),
    }


SEQUENCE_VIEWS: dict[str, View] = {
    "sequences": sequences,
    "sequences/{of}/status": status,
    "sequences/{of}/maps": maps,
    "sequences/{of}/smaps": smaps,
    "sequences/{of}/pagemap": pagemap,
    "scheduler": waiting,
    "oom_score": oom_score,
    "misses": misses,
}
