"""What operators do to a running server, carried out between two steps. Each is logged, and is an event of the trace.

An operation is a function that changes something and says what was and what is. A refusal changes nothing.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from mm import (
    ABSENT,
    Advice,
    MemoryManager,
    OutOfSwapSlots,
    OvercommitMode,
    Watermarks,
)
from mm.addresses import pages_for
from mm.tenants import MAX_TENANTS, UNLIMITED, TenantLimits
from model.errors import CannotResize
from service import cache_operations
from service.action_log import Done
from service.admin_bodies import (
    BODIES,
    Drain,
    Madvise,
    OomScoreAdj,
    Overcommit,
    Resize,
    SetLimits,
    SetPriority,
    SetWatermarks,
)
from service.admin_sequences import all_sequences, find, name_of
from service.admin_views import Facts, Inside
from service.engine_client import Abort
from service.errors import BadRequest, ServiceUnavailable
from service.open_requests import describe
from service.questions import Act, Answers
from service.request import Sequence, State
from service.sequences import row_of, space_of
from service.tenant_settings import TENANT_NAME, is_tenant_name

COPY_POLL_S, COPY_TRIES = 0.01, 200
"""How often and how many times an action is tried again for which swap copies have to end first."""

log = structlog.get_logger("pagewalk.admin")

Change = tuple[Facts, Facts]
"""What was, and what is."""

Operation = Callable[["Operations", str, Any], Change]


Later = Callable[[float, Callable[[], None]], object]
"""later(seconds, f): call f then."""


class Operations:
    """Carries them out, one after the other."""

    def __init__(self, inside: Inside, tell_state: Callable[[], None], later: Later) -> None:
        """tell_state: front ends must learn that the engine's state, or a limit, has changed."""
        self.inside = inside
        self.later = later
        self._tell_state = tell_state

    def answer_with(self, answers: Answers) -> None:
        """From now on."""

        async def act(front_end: int, question: Act) -> bytes:
            for _ in range(COPY_TRIES):
                with suppress(CopiesUnderWay):
                    return await self.inside.engine.between_steps(lambda: self.act(question))
                await asyncio.sleep(COPY_POLL_S)
            return await self.inside.engine.between_steps(lambda: self.act(question))

        answers.on(Act, act)

    def act(self, question: Act) -> bytes:
        """One action, now. Raises BadRequest, NotFound; then nothing has changed."""
        body = msgspec.json.decode(question.body, type=BODIES[question.action])
        action = question.action.replace("{of}", question.of)
        row = self._row_of(question.of) if question.action.startswith("sequences/") else ABSENT
        before, after = OPERATIONS[question.action](self, question.of, body)
        self.note(action, question.by, before, after, row)
        self.inside.engine.refresh_limits()
        self._tell_state()
        return msgspec.json.encode({"done": True, "before": before, "after": after})

    def note(self, action: str, by: str, before: Facts, after: Facts, row: int = ABSENT) -> None:
        """It has been done: for the log and the trace. row: of the Sequence that it was done to."""
        engine, actions = self.inside.engine, self.inside.actions
        number = actions.next_number
        actions.append(Done(number, engine.now, engine.committed_step, action, by, before, after))
        self.inside.memory.note_action(row, number)
        log.info("admin action", action=action, by=by, before=before, after=after)

    def _row_of(self, of: str) -> int:
        sequence = find(self.inside, of)
        return ABSENT if sequence.space is None else row_of(sequence)

    # --- what most of them need

    def sequence(self, of: str) -> Sequence:
        """One that stands for itself. Raises NotFound, and BadRequest for a beam or a choice of a search."""
        sequence = find(self.inside, of)
        if sequence.group is not None:
            raise BadRequest("a beam search can only be aborted: none of its beams gets on without the others")
        return sequence

    def facts(self, sequence: Sequence) -> Facts:
        """Where it stands."""
        memory, space = self.inside.memory, sequence.space
        held = None if space is None else memory.sequence_memory(space)
        return {
            "id": name_of(sequence),
            "state": "ended"
            if sequence.state is State.ENDED
            else describe(sequence, self.inside.engine.scheduler).state,
            "frames": 0 if held is None else held.resident,
            "swap": 0 if held is None else held.swap,
            "oom_score_adj": sequence.oom_score_adj,
        }

    def check_all_still_fit(self, tokens_of: Callable[[str], int]) -> None:
        """Raises BadRequest if an open Sequence could not run alone, where tokens_of(tenant) are what one may hold.

        A search is asked for one of its beams: if all do not fit, it ends with what it has (rule 10 of the scheduler).
        """
        page_size = self.inside.memory.page_size
        for sequence in all_sequences(self.inside.engine.scheduler):
            if sequence.state is State.CHOICE:
                continue
            needed = pages_for(sequence.limit, page_size) * page_size
            if needed > tokens_of(sequence.tenant):
                raise BadRequest(
                    f"sequence {name_of(sequence)} may come to hold {needed} tokens, and could not run then: abort it "
                    "first, or leave more"
                )


# ---------------------------------------------------------------- sequences


def abort(operations: Operations, of: str, body: object) -> Change:
    """Whoever waits for it is told, as by DELETE /v1/requests."""
    sequence = find(operations.inside, of)
    if sequence.group is not None and sequence.state is not State.CHOICE:
        raise BadRequest("a beam cannot be aborted, but the choices of its search can")
    before = operations.facts(sequence)
    operations.inside.engine.post(sequence.front_end, Abort(sequence.sequence_id))
    operations.inside.engine.read_messages()
    return before, operations.facts(sequence)


def pause(operations: Operations, of: str, body: object) -> Change:
    sequence = operations.sequence(of)
    before = operations.facts(sequence)
    if sequence.state is not State.PAUSED:
        operations.inside.engine.scheduler.sequences.pause(sequence)
    return before, operations.facts(sequence)


def resume(operations: Operations, of: str, body: object) -> Change:
    sequence = operations.sequence(of)
    before = operations.facts(sequence)
    if sequence.state is State.PAUSED:
        operations.inside.engine.scheduler.sequences.resume(sequence)
    return before, operations.facts(sequence)


def priority(operations: Operations, of: str, body: SetPriority) -> Change:
    """Its turn from now on: as if it had come with this priority."""
    sequence, scheduler = operations.sequence(of), operations.inside.engine.scheduler
    if scheduler.settings.ageing_s is None:
        raise BadRequest("priorities mean nothing here: start the server with --scheduling-policy priority")
    before = operations.facts(sequence) | {"priority": sequence.priority}
    scheduler.sequences.set_priority(sequence, body.priority, scheduler.settings.ageing_s)
    return before, operations.facts(sequence) | {"priority": sequence.priority}


def oom_score_adj(operations: Operations, of: str, body: OomScoreAdj) -> Change:
    sequence = operations.sequence(of)
    before = operations.facts(sequence)
    operations.inside.engine.scheduler.sequences.set_oom_score_adj(sequence, body.oom_score_adj)
    return before, operations.facts(sequence)


def swap_out(operations: Operations, of: str, body: object) -> Change:
    """Its pages go to swap, and stay there: it is paused until it is resumed or swapped in."""
    sequence, sequences = operations.sequence(of), operations.inside.engine.scheduler.sequences
    before = operations.facts(sequence)
    _check_has_memory(sequence)
    if sequence.state is State.RUNNING and sequence.first_token_s is None:
        raise BadRequest("it computes its prompt: its pages can go when that is done")
    if sequence.state is State.RUNNING:
        if not sequences.swap_out([sequence]):
            raise _no_slots(operations, sequence)
    elif sequence.state is State.PAUSED and space_of(sequence).is_resident:
        try:
            sequences.swap_orders.append(operations.inside.memory.swap_out([space_of(sequence)]))
        except OutOfSwapSlots:
            raise _no_slots(operations, sequence) from None
    if sequence.state is not State.PAUSED:
        sequences.pause(sequence)
    return before, operations.facts(sequence)


def swap_in(operations: Operations, of: str, body: object) -> Change:
    """Its pages come back, and it runs, as soon as there is room; at once if there is."""
    sequence, sequences = operations.sequence(of), operations.inside.engine.scheduler.sequences
    before = operations.facts(sequence)
    _check_has_memory(sequence)
    if sequence.state is State.PAUSED:
        sequences.resume(sequence)
    if sequence.state is State.SWAPPED:
        sequences.bring_in(sequence)
    return before, operations.facts(sequence)


def madvise(operations: Operations, of: str, body: Madvise) -> Change:
    """willneed: as swap_in. pageout: to swap, until the scheduler has room again. cold, dontneed: at its end."""
    sequence, sequences = operations.sequence(of), operations.inside.engine.scheduler.sequences
    _check_has_memory(sequence)
    advice = Advice(body.advice)
    if advice is Advice.WILLNEED:
        return swap_in(operations, of, body)
    before = operations.facts(sequence)
    if advice is not Advice.PAGEOUT:
        sequences.swap_orders.append(operations.inside.memory.advise(space_of(sequence), advice))
    elif sequence.state is State.RUNNING and not sequences.swap_out([sequence]):
        raise _no_slots(operations, sequence)
    return before | {"advice": None}, operations.facts(sequence) | {"advice": body.advice}


def _check_has_memory(sequence: Sequence) -> None:
    if sequence.space is None:
        raise BadRequest("it holds no memory: it waits for its turn")


def _no_slots(operations: Operations, sequence: Sequence) -> BadRequest:
    """With the bound that its pages meet."""
    memory = operations.inside.memory
    swap, tenants = memory.swap, memory.tenants
    tenant = tenants.id(sequence.tenant)
    most, used = tenants.limits[tenant].swap_max, int(tenants.swap_usage[tenant])
    if not swap.usable:
        words = "this server has no swap area"
    elif memory.swapper.rests:
        words = "a copy has failed, so nothing is copied out for up to a minute"
    elif most - used < memory.sequence_memory(space_of(sequence)).resident:
        words = f"swap_max of its tenant is {most} slots, and {used} of them are in use"
    else:
        words = f"{swap.free_slots} of {swap.usable} slots are free"
    return BadRequest(f"its pages do not fit into swap: {words}")


# ---------------------------------------------------------------- the whole


def watermarks(operations: Operations, of: str, body: SetWatermarks) -> Change:
    memory = operations.inside.memory
    before = memory.reclaimer.watermarks
    given = {name: value for name in ("min", "low", "high") if (value := getattr(body, name)) is not None}
    try:
        after: Watermarks = replace(before, **given)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if after.high > memory.frames.usable:
        raise BadRequest(f"high is {after.high}, and there are {memory.frames.usable} frames", param="high")
    memory.reclaimer.watermarks = after
    return _watermarks(before), _watermarks(after)


def _watermarks(marks: Watermarks) -> Facts:
    return {"min": marks.min, "low": marks.low, "high": marks.high}


def overcommit(operations: Operations, of: str, body: Overcommit) -> Change:
    ledger = operations.inside.memory.ledger
    before = ledger.mode
    ledger.mode = OvercommitMode(body.mode)
    return {"mode": str(before)}, {"mode": str(ledger.mode)}


def tenant_limits(operations: Operations, of: str, body: SetLimits) -> Change:
    """As if they had been in the settings file; until the server ends. Limits that are not given move out of the way of
    those that are: in a cgroup, too, a `max` below `high` counts.
    """
    memory = operations.inside.memory
    tenants = memory.tenants
    if not is_tenant_name(of):
        raise BadRequest(f"the name of a tenant is {TENANT_NAME}")
    is_known = of in tenants.names
    if not is_known and len(tenants.names) >= MAX_TENANTS - 1:
        raise BadRequest(f"{MAX_TENANTS - 1} tenants are told apart, and there are as many")
    before = tenants.limits[tenants.names.index(of)] if is_known else TenantLimits()
    given = {name: getattr(body, name) for name in SetLimits.__struct_fields__ if name in _LIMITS}
    given = {name: UNLIMITED if value == "max" else value for name, value in given.items() if value is not None}
    try:
        after = replace(before, **_in_order(before, given))
    except ValueError as error:
        raise BadRequest(str(error)) from None
    tenants.set_limits(of, after)
    try:
        if sum(limits.min for limits in tenants.limits) > memory.frames.usable:
            raise BadRequest("the min of all tenants together are more frames than there are", param="min")
        operations.check_all_still_fit(memory.max_tokens_of)
    except BadRequest:
        tenants.set_limits(of, before)
        if not is_known:
            tenants.forget(of)
        raise
    return _limits(before), _limits(after)


def _in_order(before: TenantLimits, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and what min, low, high and max are beside it. Protection (min, low) never raises a limit."""
    limits: dict[str, Any] = {**{name: getattr(before, name) for name in _RISING}, **given}
    if "high" not in given and before.high == before.max:
        limits["high"] = limits["max"]  # none of its own
    if "low" not in given:
        limits["low"] = max(limits["low"], limits["min"])
    for lower, upper in (("high", "max"), ("low", "high"), ("min", "low")):
        if lower not in given:
            limits[lower] = min(limits[lower], limits[upper])
    return limits


_RISING = ("min", "low", "high", "max")
_LIMITS = frozenset(("min", "low", "high", "max", "swap_max", "weight", "isolate"))


def _limits(limits: TenantLimits) -> Facts:
    return {name: "max" if (value := getattr(limits, name)) == UNLIMITED else value for name in sorted(_LIMITS)}


def resize(operations: Operations, of: str, body: Resize) -> Change:
    """Use fewer frames and slots, or more, up to what was reserved at the start. What is cached at the end goes; whose
    pages are there computes them again, in other frames.
    """
    engine, memory = operations.inside.engine, operations.inside.memory
    frames = memory.frames.usable if body.frames is None else body.frames
    slots = memory.swap.usable if body.slots is None else body.slots
    before = _sizes(memory)
    if frames > memory.frames.total:
        raise BadRequest(f"at most {memory.frames.total} frames were reserved at the start", param="frames")
    if slots > memory.swap.total:
        raise BadRequest(f"at most {memory.swap.total} slots were reserved at the start", param="slots")
    if frames != memory.frames.usable and not engine.executor.resizes_frames:
        raise BadRequest("this pool was made in one piece: start the server with --kv-cache-max-memory-bytes")
    if (floor := sum(limits.min for limits in memory.tenants.limits)) > frames:
        raise BadRequest(f"the min of all tenants together are {floor} frames", param="frames")
    gone = (memory.frames.usable - frames) * memory.page_size
    operations.check_all_still_fit(lambda tenant: memory.max_tokens_of(tenant) - gone)
    found = memory.beyond(frames, slots)
    if found.pins:
        raise BadRequest(f"the frames at the end are held by the pins {found.pins}: unpin them first", param="frames")
    if found.is_copying:
        raise CopiesUnderWay("copies to or from what is to go are under way: try again", retry_after_s=1)
    grows = frames > memory.frames.usable or slots > memory.swap.usable
    try:
        if grows:  # memory comes before it is used
            engine.executor.resize(max(frames, memory.frames.usable), max(slots, memory.swap.usable))
        engine.scheduler.let_go(found.rows)
        memory.resize(frames, slots)
        engine.copies.resized(slots)
        engine.executor.resize(frames, slots)
    except CannotResize as error:
        raise BadRequest(str(error)) from None
    return before, _sizes(memory)


def _sizes(memory: MemoryManager) -> Facts:
    return {"frames": memory.frames.usable, "slots": memory.swap.usable}


class CopiesUnderWay(ServiceUnavailable):
    """Swap copies end by themselves: the same action may be carried out soon."""


def drain(operations: Operations, of: str, body: Drain) -> Change:
    """New requests are answered 503. The process stays until it is told to stop."""
    engine = operations.inside.engine
    before: Facts = {"state": engine.state, "sequences": len(all_sequences(engine.scheduler))}
    engine.drain()
    if body.timeout_s is not None:
        operations.later(body.timeout_s, engine.abort_all)
    return before, {"state": engine.state, "timeout_s": body.timeout_s}


OPERATIONS: Mapping[str, Operation] = {
    "sequences/{of}/abort": abort,
    "sequences/{of}/pause": pause,
    "sequences/{of}/resume": resume,
    "sequences/{of}/priority": priority,
    "sequences/{of}/oom_score_adj": oom_score_adj,
    "sequences/{of}/madvise": madvise,
    "sequences/{of}/swap_out": swap_out,
    "sequences/{of}/swap_in": swap_in,
    "page_cache/pin": cache_operations.pin,
    "page_cache/unpin": cache_operations.unpin,
    "page_cache/madvise": cache_operations.advise_prefix,
    "page_cache/drop": cache_operations.drop,
    "watermarks": watermarks,
    "overcommit": overcommit,
    "tenants/{of}": tenant_limits,
    "resize": resize,
    "drain": drain,
}
assert OPERATIONS.keys() == BODIES.keys()
