"""Views of what has happened, under /admin/v1: the flight recorder, decisions to preempt, steps, and a pulse.

The pulse is what the time lines of the page are drawn from: a line of counters that only grow, and of gauges. Whoever
reads it twice takes differences; nothing is averaged here.
"""

from collections.abc import Callable
from dataclasses import asdict

import msgspec
import numpy as np

from mm import Event, EventKind, OomTable, Victim
from service.action_log import Done
from service.admin_sequences import find
from service.admin_views import Facts, Inside, View
from service.errors import BadRequest, quoted
from service.questions import Look
from service.step_log import StepEntry

KINDS = {kind.name.lower(): kind for kind in EventKind}

Latencies = Callable[[], Facts]
"""Sums and counts of TTFT, ITL and of generated tokens since the start (metrics.py)."""


def trace(inside: Inside, asked: Look) -> Facts:
    """Events of memory, oldest first, with the decisions to preempt and the actions of operators among them.

    ?event= a kind, ?request= ?tenant= whose, ?after= a number, ?limit=.
    """
    memory, query = inside.memory, asked.query
    if query.event is not None and query.event not in KINDS:
        raise BadRequest(f"event is one of {', '.join(KINDS)}, not {quoted(query.event)}", param="event")
    kind = None if query.event is None else KINDS[query.event]
    found = memory.find_events(query.limit, after=query.after, kind=kind, tenant=query.tenant, owner=query.request)
    steps = {event.step for event in found if event.kind == "preempt"}
    actions = {event.place for event in found if event.kind == "action"}
    return {
        "recorded": memory.recorder.recorded,
        "events": [event_facts(inside, event) for event in found],
        "actions": [_action(inside, done) for done in inside.actions if done.number in actions],
        "preemptions": [_decision(step, victim) for step, victim in memory.victims if step in steps],
    }


def sequence_trace(inside: Inside, asked: Look) -> Facts:
    """The events of one Sequence's request."""
    sequence = find(inside, asked.of)
    query = msgspec.structs.replace(asked.query, request=sequence.request_id)
    return trace(inside, Look("trace", query=query))


def event_facts(inside: Inside, event: Event) -> Facts:
    """One event of the flight recorder. What place and count are, its kind says (mm/flight_recorder.py)."""
    return {
        "number": event.number,
        "ts": inside.wall_clock(event.now),
        "step": event.step,
        "event": event.kind,
        "request": event.owner,
        "tenant": event.tenant,
        "place": event.place,
        "count": event.count,
    }


def _action(inside: Inside, done: Done) -> Facts:
    facts: Facts = done._asdict()
    return {"ts": inside.wall_clock(done.now)} | {name: value for name, value in facts.items() if name != "now"}


def _decision(step: int, victim: Victim) -> Facts:
    """Whom it hit, how, and the table that it was chosen from."""
    table = victim.table
    chosen = np.isin(table.candidates.rows, victim.rows)
    return {
        "step": step,
        "action": str(victim.action),
        "frames": victim.frames,
        "needed_frames": table.needed_frames,
        "victims": [owner for owner, is_chosen in zip(table.owners, chosen.tolist(), strict=True) if is_chosen],
        "candidates": [_candidate(table, i) for i in range(len(table.owners))],
    }


def _candidate(table: OomTable, i: int) -> Facts:
    score = float(table.scores[i])
    return {
        "request": table.owners[i],
        "score": None if score == -np.inf else round(score, 1),
        "frames": int(table.frames[i]),
        "priority": int(table.candidates.priorities[i]),
        "preemptions": int(table.candidates.preemptions[i]),
        "oom_score_adj": int(table.adjustments[i]),
    }


# ---------------------------------------------------------------- time lines


def steps(inside: Inside, asked: Look) -> Facts:
    """The last steps, oldest first; ?after= a step, ?limit=."""
    query = asked.query
    found = [entry for entry in inside.engine.steps if entry.step > query.after][-query.limit :]
    return {"steps": [step_facts(inside, entry) for entry in found]}


def step_facts(inside: Inside, entry: StepEntry) -> Facts:
    facts: Facts = entry._asdict()
    facts |= {"ts": inside.wall_clock(entry.now), "ms": round(1000 * entry.seconds, 3)}
    return {name: value for name, value in facts.items() if name not in ("now", "seconds")}


def pulse_of(latencies: Latencies) -> View:
    """The view `pulse`."""

    def pulse(inside: Inside, asked: Look) -> Facts:
        """All that time lines need, in one line: Sequences, memory, pressure, and counters that only grow."""
        memory, scheduler, now = inside.memory, inside.engine.scheduler, inside.engine.now
        information, counters = memory.information(), memory.counters()
        return {
            "running": len(scheduler.sequences.running),
            "waiting": inside.engine.queue.requests,
            "swapped": len(scheduler.sequences.swapped),
            "paused": len(scheduler.sequences.paused),
            "frames": {
                "total": information.total_frames,
                "free": information.free_frames,
                "cached": information.cached_frames,
                "active": information.active_frames + information.copying_frames,
                "shared": information.shared_frames,
                "saved": information.saved_frames,
                "pinned": information.pinned_frames,
            },
            "slots": {"total": information.total_slots, "free": information.free_slots},
            "pressure": {
                "memory": asdict(memory.pressure.read(now)),
                "compute": asdict(scheduler.compute_pressure.read(now)),
            },
            "counters": {
                "prefix_query": counters.prefix_query,
                "prefix_hit": counters.prefix_hit,
                "swap_in": counters.swap_in,
                "swap_out": counters.swap_out,
                "evict": counters.evict,
                "refault": counters.refault,
                "cow_fault": counters.cow_fault,
                "preempt": scheduler.preemptions,
                "trace": memory.recorder.recorded,
            }
            | latencies(),
        }

    return pulse


TRACE_VIEWS: dict[str, View] = {"trace": trace, "sequences/{of}/trace": sequence_trace, "steps": steps}
