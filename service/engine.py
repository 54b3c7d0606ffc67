"""The engine: one loop that schedules, submits, and commits the step before, while the device works.

    messages ──▶ schedule ──▶ submit (step k + 1) ──▶ commit (step k) ──▶ token batches
                 └─ host, microseconds ─┘              └─ waits for the device

Where rows of step k + 1 have a grammar, what is submitted ends before its sampling. The tokens of step k advance their
Matchers, which fill the masks of step k + 1; then its sampling is submitted, and step k committed.

It owns the scheduler and, through it, all memory. Everything reaches it by messages (engine_client.py) and leaves it by
events. A broken invariant or a step that raises ends it for good: every open Sequence is told, and the process exits.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import msgspec
import structlog

from mm.addresses import FloatArray
from mm.errors import MemoryCorruption
from model.executor import Executor
from model.step_plan import StepPlan, StepResult, Ticket
from service.between_steps import BetweenSteps
from service.committed import Committed
from service.copies import Copies
from service.engine_client import (
    Abort,
    Cancel,
    Ended,
    EngineDied,
    EngineSnapshot,
    EngineState,
    Event,
    Finish,
    Limits,
    Message,
    OpenRequest,
    QueueState,
    Submit,
    TokenBatch,
)
from service.errors import BadRequest, QueueFull
from service.forks import find_parent, fork
from service.grammars import Grammar, MaskWorker, Matcher
from service.held_submits import Held, HeldSubmits
from service.open_requests import open_requests
from service.questions import FindParent, Fork, Forked, Parent
from service.queue_wait import QueueWait
from service.rate_limits import RateLimits
from service.request import Sequence
from service.scheduler import Scheduler
from service.step_log import StepEntry, StepLog

QUIET_S = 0.05
"""An engine uses idle time for work that can wait after so long: the next request of one client comes sooner."""

IDLE_AUDIT_S = 1.0
"""An engine that has been idle this long audits its memory once: never while a request could wait for it."""

READ_AT_ONCE = 128
"""Requests that a step reads. One costs 0.1 ms to take in: where a thousand come at once, the device computes for the
first while the others are read.
"""

END_COST = 1 / 8
"""What a message that ends a request costs to read, beside one that begins one. Counted in full, clients that leave by
the thousand would stay in the queue for dozens of steps, which would compute for them.
"""

SWAP_POLL_S = 0.0005
"""How often copies are asked for while nothing else is to do: a page takes some 10 us, a Sequence milliseconds."""

log = structlog.get_logger("pagewalk.engine")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one committed step did. Times are seconds of the host; `wait_s` overlaps with the device."""

    step: int
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    graph_hit: bool | None  # None where there are no graphs
    gaps_s: FloatArray  # (N,) per token: since that Sequence's token before; NaN for first tokens
    schedule_s: float
    submit_s: float
    wait_s: float
    commit_s: float


class EngineObserver(Protocol):
    """Who counts (metrics.py). Called in the loop: must be quick."""

    def step_ended(self, report: StepReport) -> None: ...
    def sequence_ended(self, sequence: Sequence, ended: Ended, now: float) -> None: ...


class FrontEnd(Protocol):
    """Where a front end's events go."""

    def deliver(self, event: Event) -> None: ...


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    ticket: Ticket
    submitted_s: float  # on the engine's clock
    schedule_s: float
    submit_s: float
    matchers: list[Matcher]  # of the rows plan.masked


class Engine:
    """Runs Sequences until `stop`. One per process and device."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: Limits,
        observer: EngineObserver,
        *,
        step_timeout_s: float = 60.0,
        rates: RateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.rates = RateLimits({}, clock) if rates is None else rates
        self.scheduler = scheduler
        self.executor = executor
        self.previous: _InFlight | None = None
        self._observer = observer
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._front_ends: dict[int, FrontEnd] = {}
        self._inbox: deque[tuple[int, Message | Held]] = deque()
        self.held = HeldSubmits(self._release)  # until their grammars are compiled
        self._masks: MaskWorker | None = None  # made when it is first needed
        self._unread = self._unread_tokens = 0  # choices that were submitted since the last step, and their prompts
        self._queue_wait = QueueWait()
        self._wake = asyncio.Event()
        self._between_steps = BetweenSteps(self._wake.set)
        self._is_idle = asyncio.Event()
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="step-waiter")
        self._state: EngineState = "loading"
        self._is_stopping = False
        self._started_s = self._progress_s = clock()
        self._step = 0
        self.turns = 0  # grows before memory changes: who has let others in sees whether it is still as it was
        self.steps = StepLog()
        self.copies = Copies(scheduler, executor, self._between_steps, clock)

    # --- the loop

    async def run(self) -> None:
        """Step until stopped; then return. Raises what broke the engine, after every front end has been told."""
        try:
            while not self._is_stopping:
                if not self._has_work:
                    await self._idle()
                else:
                    await self.step()
        except BaseException as error:
            self._die(error)
            raise
        finally:
            self._waiter.shutdown(wait=False)
            self.held.close()
            if self._masks is not None:
                self._masks.close()
            self.copies.stop()
            self._between_steps.end()

    @property
    def _has_work(self) -> bool:
        scheduler = self.scheduler
        is_asked = bool(self._inbox or self._between_steps)
        return is_asked or scheduler.has_work or self.copies.are_under_way or scheduler.is_due(self._clock())

    async def step(self) -> None:
        """One turn. The plan is built and submitted while the device runs the one before it."""
        self.turns += 1
        self.read_messages(READ_AT_ONCE)
        self._between_steps.carry_out()
        self.copies.open_slots()
        if self.copies.take_ended():
            self._progress_s = self._clock()
        started = self._clock()
        plan = self.scheduler.schedule(started)
        scheduled = self._clock()
        submitted = None
        if plan is not None:  # before anything else is done: a first token may wait for it
            ticket = self.executor.submit(plan)
            matchers = self.scheduler.latest_matchers()
            submitted = _InFlight(plan, ticket, scheduled, scheduled - started, self._clock() - scheduled, matchers)
        self._queue_wait.observe(
            self.scheduler.sequences.admissions, scheduled, waits=bool(self.scheduler.sequences.waiting)
        )
        ended = self.scheduler.take_ended()
        self._publish(self._step, ended, scheduled)
        self.copies.start()
        if plan is None and self.previous is None:
            if self.copies.are_swapping or self.scheduler.memory.is_copying:
                await asyncio.sleep(SWAP_POLL_S)  # all who could run wait for their pages
            elif self.scheduler.has_work and not ended:
                raise RuntimeError("the scheduler has work and nothing to run: no step could ever change that")
        if self.previous is not None:
            await self._commit(self.previous, submitted)
        elif submitted is not None and submitted.matchers:
            await self._mask([], submitted)
        self.previous = submitted

    async def _commit(self, step: _InFlight, following: _InFlight | None) -> None:
        began = self._clock()
        self.scheduler.expect()
        result = await self._wait(step.ticket)
        if (early := self.scheduler.early(result)) is not None:
            self._publish(step.plan.step, early, began)
        if step.matchers:
            places = step.plan.masked
            pairs = zip(step.matchers, result.tokens[places].tolist(), result.failed[places].tolist(), strict=True)
            await self._mask([(matcher, token) for matcher, token, failed in pairs if not failed], following)
            lost = [bool(matcher.error) for matcher in step.matchers]
            if any(lost):
                failed = result.failed.copy()
                failed[places] |= lost
                result = replace(result, failed=failed)
        elif following is not None and following.matchers:
            await self._mask([], following)
        now = self._clock()
        self.turns += 1
        committed = self.scheduler.commit(result, now)
        seconds = now - max(self._progress_s, step.submitted_s)
        if (prefilled := step.plan.prefill_tokens) > step.plan.decodes:
            self.scheduler.memory.costs.observe_prefill(prefilled, seconds)
        if early is None:
            self._publish(step.plan.step, committed, now)
        self._log_step(step, len(committed.tokens), seconds, now)
        self._progress_s = now
        self._step = step.plan.step
        self._observer.step_ended(
            StepReport(
                step=step.plan.step,
                prefill_tokens=prefilled,
                decode_tokens=step.plan.decodes,
                sampled_tokens=len(committed.tokens),
                graph_hit=step.ticket.graph_hit,
                gaps_s=committed.gaps_s,
                schedule_s=step.schedule_s,
                submit_s=step.submit_s,
                wait_s=now - began,
                commit_s=self._clock() - now,
            )
        )
        if prefilled:
            await asyncio.sleep(0)  # handlers of this process write first tokens before the next step is planned

    def _log_step(self, step: _InFlight, sampled: int, seconds: float, now: float) -> None:
        plan, scheduler, memory = step.plan, self.scheduler, self.scheduler.memory
        self.steps.append(
            StepEntry(
                step=plan.step,
                now=now,
                seconds=seconds,
                prefill_tokens=plan.prefill_tokens,
                decode_tokens=plan.decodes,
                sampled_tokens=sampled,
                batch=len(plan.rows),
                running=len(scheduler.sequences.running),
                swapped=len(scheduler.sequences.swapped),
                waiting=len(scheduler.sequences.waiting),
                mapped_frames=memory.frames.mapped,
                free_frames=memory.free_frames,
                evictions=memory.shadows.evictions,
                graph_hit=step.ticket.graph_hit,
            )
        )

    async def _mask(self, sampled: list[tuple[Matcher, int]], following: _InFlight | None) -> None:
        """Advance Matchers by what their rows have sampled, and let the following step sample, if it waits for that."""
        if self._masks is None:
            self._masks = MaskWorker()
        matchers = [] if following is None else following.matchers
        await self._masks.turn(sampled, matchers, self.executor.masks)
        if following is not None and matchers:
            self.executor.sample(following.plan)

    async def _wait(self, ticket: Ticket) -> StepResult:
        """Let the event loop run until the step is done: poll where steps are short, else wait in a thread."""
        await asyncio.sleep(0)  # front ends get a turn each step, however fast the device is
        if await self._polled(ticket.is_done):
            return ticket.wait()
        return await asyncio.get_running_loop().run_in_executor(self._waiter, ticket.wait)

    async def _idle(self) -> None:
        """Poll for a message, as for a step: who asks one thing after the other asks soon. Then sleep until one comes;
        meanwhile, once, check that the books balance.
        """
        if not self.held:
            self._is_idle.set()
        await self._polled(self._wake.is_set)
        if not await self._woken_within(QUIET_S):
            while not self._wake.is_set() and self.executor.use_idle_time():  # noqa: ASYNC110 - each turn does work
                await asyncio.sleep(0)
            if not await self._woken_within(IDLE_AUDIT_S):
                await self._audit()
                due_s = self.scheduler.next_deadline_s
                await self._woken_within(None if due_s is None else max(0.0, due_s - self._clock()))
        self._wake.clear()

    async def _audit(self) -> None:
        """Raises MemoryCorruption. Who comes meanwhile does not wait for the rest: it is begun anew another time."""
        found = []
        for discrepancy in self.scheduler.memory.auditing():
            if discrepancy is not None:
                found.append(discrepancy)
                continue
            await asyncio.sleep(0)
            if self._wake.is_set():
                break
        if found:
            raise MemoryCorruption(found)

    async def _polled(self, is_done: Callable[[], bool]) -> bool:
        """Whether it is, at the latest after as many turns of the event loop as the device is polled for."""
        for _ in range(self.executor.polls):
            if is_done():
                return True
            await asyncio.sleep(0)
        return is_done()

    async def _woken_within(self, seconds: float | None) -> bool:
        if not self._wake.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), seconds)
        return self._wake.is_set()

    # --- messages in, events out

    def connect(self, front_end: int, receiver: FrontEnd) -> None:
        """From now on `receiver` gets what concerns Sequences of `front_end`."""
        self._front_ends[front_end] = receiver

    def disconnect(self, front_end: int) -> None:
        """Nobody receives for `front_end` any more."""
        self._front_ends.pop(front_end, None)
        self.rates.forget(front_end)

    def is_connected(self, front_end: int) -> bool:
        """Whether anybody receives for it."""
        return front_end in self._front_ends

    def post(self, front_end: int, message: Message) -> None:
        """Hand in a message; it is read before the next step. In the engine's event loop only."""
        if not self._inbox and not self.scheduler.has_work:
            self._progress_s = self._clock()  # until now there was nothing to be late with
        self._inbox.append((front_end, message))
        if isinstance(message, Submit):
            self._unread += 1 + len(message.siblings)
            self._unread_tokens += len(message.prompt_ids)
        self._wake.set()
        self._is_idle.clear()

    def read_messages(self, most: int | None = None) -> None:
        """Act on the messages that wait, or on the first so many of them; those that end requests count less."""
        left = math.inf if most is None else most
        for _ in range(len(self._inbox)):
            if left <= 0:
                break
            front_end, message = self._inbox.popleft()
            left -= 1 if isinstance(message, Submit | Held) else END_COST
            now = self._clock()
            if isinstance(message, Held):
                self._submit_held(message)
                continue
            if isinstance(message, Submit):
                if message.constraint is None:
                    self._submit(message, front_end, now)
                else:
                    self.held.hold(front_end, message, now)
                continue
            if self.held.keeps(front_end, message):
                continue
            sequence = self.scheduler.find((front_end, message.sequence_id))
            if sequence is None:
                continue  # it ended while the message was on its way
            match message:
                case Cancel() | Abort():
                    ended = self.scheduler.end(sequence, "abort", now)
                case Finish(at=at):
                    ended = self.scheduler.end(sequence, "stop", now, output=at)
            self._deliver(front_end, TokenBatch(self._step, [], [], [ended]))
            self._observer.sequence_ended(sequence, ended, now)

    def _submit(self, message: Submit, front_end: int, now: float, grammar: Grammar | None = None) -> None:
        """Queue it, unless the queue is full: front ends have looked, but may not have known of each other."""
        self._note_read(message)
        waiting = self.scheduler.sequences.waiting
        queue = QueueState(len(waiting), waiting.prompt_tokens, self.queue.wait_s)
        try:
            self.limits.check_queue(queue, 1 + len(message.siblings), len(message.prompt_ids))
            self.limits.check_fits(len(message.prompt_ids), message.max_tokens, message.tenant)
        except QueueFull as full:
            self._refuse(message, front_end, str(full), retry_after_s=full.retry_after_s)
        except BadRequest as refusal:  # the next try meets a front end that knows why it does not fit
            self._refuse(message, front_end, str(refusal), retry_after_s=1)
        else:
            self.scheduler.submit(message, front_end, now, grammar)

    def _note_read(self, message: Submit) -> None:
        self._unread -= 1 + len(message.siblings)
        self._unread_tokens -= len(message.prompt_ids)

    def _refuse(
        self, message: Submit, front_end: int, why: str, *, retry_after_s: int | None = None, is_refused: bool = False
    ) -> None:
        refused = [Ended(id_, "error", why, retry_after_s, is_refused=is_refused) for id_ in message.sequence_ids]
        self._deliver(front_end, TokenBatch(self._step, [], [], refused))

    def _release(self, held: Held) -> None:
        """Its grammar is there, or will not be: it is read before the next step."""
        if not self._has_work:
            self._progress_s = self._clock()  # nobody was late by that
        self._inbox.append((held.front_end, held))
        self._wake.set()

    def _submit_held(self, held: Held) -> None:
        self.held.take(held)
        if held.grammar is None:
            self._note_read(held.message)
            self._refuse(held.message, held.front_end, held.refusal, is_refused=not held.is_our_fault)
        else:
            self._submit(held.message, held.front_end, held.came_s, held.grammar)
        self._inbox.extendleft((held.front_end, later) for later in reversed(held.later))

    def _unseen(self) -> list[tuple[int, Submit]]:
        """Submits that the scheduler has not seen, with their front ends."""
        unread = [(front_end, message) for front_end, message in self._inbox if isinstance(message, Submit)]
        return self.held.submits() + unread

    def _publish(self, step: int, committed: Committed, now: float) -> None:
        """One token batch to each front end that the step concerns."""
        for front_end in committed.concerned if committed else ():
            mine, ids = committed.of(front_end)
            ended = [end for sequence, end in committed.ended if sequence.front_end == front_end]
            prompt_scores = [scores for whose, scores in committed.prompt_scores if whose == front_end]
            tokens, scores = committed.tokens[mine].tolist(), {}
            if committed.scores:
                found = ((i, committed.scores.get(place)) for i, place in enumerate(mine.tolist()))
                scores = {i: each for i, each in found if each is not None}
            self._deliver(front_end, TokenBatch(step, ids, tokens, ended, scores, prompt_scores))
        for sequence, end in committed.ended:
            if end.reason == "error" and sequence.constraint is not None and self.held.grammars is not None:
                self.held.grammars.forget(sequence.constraint)
            self._observer.sequence_ended(sequence, end, now)

    def _deliver(self, front_end: int, event: Event) -> None:
        if (receiver := self._front_ends.get(front_end)) is not None:
            receiver.deliver(event)

    # --- what operators do

    async def between_steps(self, action: Callable[[], A]) -> A:
        """Carry `action` out before the next step, when the scheduler may be changed. Raises what it raises."""
        return await self._between_steps.run(action)

    def abort_all(self) -> None:
        """End whatever is open, before the next step."""
        for sequence in list(self.scheduler.open_sequences()):
            self.post(sequence.front_end, Abort(sequence.sequence_id))

    def refresh_limits(self) -> None:
        """What one request can hold has changed: front ends, and the engine, refuse by that from now on."""
        memory = self.scheduler.memory
        names = {*self.limits.tenant_request_tokens, *memory.limited_tenants}
        self.limits = msgspec.structs.replace(
            self.limits,
            max_request_tokens=memory.max_tokens_of(None),
            tenant_request_tokens={name: memory.max_tokens_of(name) for name in names},
        )

    def open_requests(self, owner: str) -> list[OpenRequest]:
        """The requests of an owner that have not ended, oldest first."""
        return open_requests(self.scheduler, (message for _, message in self._unseen()), owner, self._clock())

    def find_parent(self, asked: FindParent) -> Parent:
        """Raises NotFound, NotStarted or BadRequest."""
        return find_parent(self.scheduler, (message for _, message in self._unseen()), asked)

    async def fork(self, front_end: int, asked: Fork) -> Forked:
        """Begin a Sequence with all that another has. Raises NotFound, BadRequest, QueueFull or EngineDead."""

        def begin() -> Forked:
            return fork(self.scheduler, self.limits, self.queue, front_end, asked, self._clock())

        return await self.between_steps(begin)

    def abort(self, owner: str, request_ids: Iterable[str]) -> int:
        """End an owner's requests of these ids before the next step; returns how many Sequences that ends."""
        ids = frozenset(request_ids)
        keys = [each.key for each in self.scheduler.open_sequences() if each.owner == owner and each.request_id in ids]
        for front_end, message in self._unseen():
            if message.owner == owner and message.request_id in ids:
                keys += [(front_end, sequence_id) for sequence_id in message.sequence_ids]
        for front_end, sequence_id in keys:
            self.post(front_end, Abort(sequence_id))
        return len(keys)

    # --- states

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def queue(self) -> QueueState:
        """What waits, with what has not been read yet."""
        waiting = self.scheduler.sequences.waiting
        requests, tokens = len(waiting) + self._unread, waiting.prompt_tokens + self._unread_tokens
        return QueueState(requests, tokens, self._queue_wait.seconds(requests, tokens))

    @property
    def is_alive(self) -> bool:
        """Whether steps complete, or would: not dead, and no step is overdue while there is work."""
        if self._state == "dead":
            return False
        has_work = self.scheduler.has_work or bool(self._inbox)
        return not has_work or self._clock() - self._progress_s < self._step_timeout_s

    def open(self) -> None:
        """Weights are loaded and a first generation has run: admit requests."""
        if self._state == "loading":
            self._state = "ready"

    def drain(self) -> None:
        """Admit nothing more; what runs goes on."""
        if self._state in ("loading", "ready"):
            self._state = "draining"

    async def drained(self) -> None:
        """Wait until nothing is left to run, or ever will."""
        await self._is_idle.wait()

    def stop(self, message: str = "the server is stopping") -> None:
        """End every open Sequence with an error, and let `run` return after the current step."""
        if self._state != "dead":
            self._state = "draining"
            for receiver in tuple(self._front_ends.values()):
                receiver.deliver(EngineDied(message))
        self._is_stopping = True
        self._wake.set()

    def _die(self, error: BaseException) -> None:
        self._state = "dead"
        self._is_idle.set()
        if not isinstance(error, asyncio.CancelledError):
            log.error("engine died", exc_info=error)
        for receiver in tuple(self._front_ends.values()):
            receiver.deliver(EngineDied("the engine has stopped because of an internal error"))

    @property
    def has_messages(self) -> bool:
        """Whether some have not been read."""
        return bool(self._inbox)

    @property
    def now(self) -> float:
        """By the engine's clock."""
        return self._clock()

    @property
    def committed_step(self) -> int:
        """The last step whose tokens are known."""
        return self._step

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_s

    def snapshot(self) -> EngineSnapshot:
        """One consistent view, between two steps."""
        memory = self.scheduler.memory
        return EngineSnapshot(
            state=self._state,
            step=self._step,
            uptime_s=self.uptime_s,
            running=len(self.scheduler.sequences.running),
            swapped=len(self.scheduler.sequences.swapped),
            queue=self.queue,
            preemptions=self.scheduler.preemptions,
            memory=memory.information(),
            counters=memory.counters(),
            pressure=memory.pressure.read(memory.now),
            frame_bytes=self.executor.frame_bytes,
            device_memory=self.executor.device_memory,
            graph_hits=self.steps.graph_hits,
            graph_misses=self.steps.graph_misses,
            stalls=self.scheduler.stalls,
            oom_ends=self.scheduler.oom_ends,
        )
