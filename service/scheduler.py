"""Decides what each step does: who decodes, whose prompt goes on, who is admitted, who is preempted. Pure policy.

It reads no clock, knows no asyncio and no torch: time is an argument, plans and results are numpy. What every step does
for every running Sequence is a handful of numpy operations over rows; loops run over admissions, ends, preemptions.

The host is one step behind: `schedule` builds step k + 1 while step k runs, so a row's newest token may be known to the
device alone. Per row:

    computed (mm's length)   tokens whose keys and values exist or are being written by a submitted step
    remaining                tokens that exist and are not computed. The newest may exist on the device alone
    known                    tokens the host has: computed + remaining, less one if a submitted step sampled one
    limit                    prompt + max_tokens

    remaining == 1                    the row decodes: one token in, one token out, so this stays 1
    remaining >  1                    the row prefills: a prompt, or a preempted Sequence computing its tokens again
    computed + remaining == limit     nothing more to schedule; it ends at the next commit

In steady decode (the same rows as in the step before, and nobody waits who could be admitted) next to nothing changes:
a `_Steady` keeps what does not, so that a step costs a dozen numpy operations.

Rules, cited by number below:
  1. Decodes come first, then running prefills in order of arrival, then admissions in order of arrival.
  2. Only a younger Sequence is preempted for an older one, so the oldest always gets on; the youngest goes first.
  3. A preempted Sequence waits at the head of the queue, and until its tokens in flight are committed.
  4. Admission needs frames for all tokens of the Sequence, what running prefills still need, and headroom for decodes.
  5. Who needs pages that another is just computing waits for them, up to AWAIT_STEPS steps, and lets others go ahead.
  6. Pages are cached at commit, when the step that filled them is known to be good.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from mm import MemoryManager, Miss, Namespace, PrefixMatch, pages_for
from mm.addresses import BoolArray, FloatArray, Int32Array, Int64Array
from model.step_plan import FED_BACK, RowSettings, StepPlan, StepResult
from service.engine_client import Ended, EndReason, MissInfo
from service.request import Sequence, State
from service.rows import RunningRows

LOOK_AHEAD = 32
"""Waiting Sequences that one step looks at: those in front may be waiting for pages that others compute."""

AWAIT_STEPS = 64
"""Steps that a Sequence waits at most for pages that others compute; then it computes them itself."""

NOT_FINITE = "the model produced numbers that are not finite for this request"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of one step and of the queue."""

    max_batched_tokens: int  # query tokens of one step
    max_length: int  # prompt + output of one Sequence
    admission_headroom: float = 0.01  # share of the pool that admissions leave free while others run


@dataclass(frozen=True, slots=True)
class Committed:
    """What one committed step brought, N tokens in all: tokens[i] goes to sequence_ids[i] of front_ends[i].

    gaps_s (N,) float64: time since that Sequence's token before; NaN for its first.
    """

    front_ends: Int32Array
    sequence_ids: Int64Array
    tokens: Int32Array
    gaps_s: FloatArray
    ended: list[tuple[Sequence, Ended]]


@dataclass(slots=True)
class _Steady:
    """Rows that decode step after step, and what stays the same meanwhile. Valid while no row changes hands."""

    rows: Int32Array
    ones: Int32Array
    starts: Int32Array  # of the next step
    steps: int  # until the first of them reaches its limit
    plan: StepPlan  # the last one: its rows, query_starts, token_ids and samples serve again
    epochs: Int64Array
    front_ends: Int32Array
    sequence_ids: Int64Array
    end_ids: Int32Array  # (S, E)
    has_end_ids: bool


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A plan on its way, and whose rows it ran: a row may have changed hands before the result is there."""

    plan: StepPlan
    epochs: Int64Array  # (S,)
    steady: _Steady | None


class Scheduler:
    """Continuous batching over the rows of `memory`."""

    def __init__(self, memory: MemoryManager, settings: SchedulerSettings) -> None:
        rows = memory.tables.max_rows
        if settings.max_batched_tokens < rows:
            raise ValueError(f"a step of {settings.max_batched_tokens} tokens cannot hold one of each of {rows} rows")
        self.memory = memory
        self.settings = settings
        self.waiting: OrderedDict[tuple[int, int], Sequence] = OrderedDict()  # in order of arrival
        self.running: OrderedDict[tuple[int, int], Sequence] = OrderedDict()  # in order of arrival
        self.preemptions = 0
        self._step = 0
        self._admissions = 0
        self._rows = RunningRows(rows, settings.max_length)
        self._submitted: deque[_Submitted] = deque()
        self._bereft: dict[tuple[int, int], Sequence] = {}  # (row, epoch) -> preempted with a token in flight
        self._entered: list[Sequence] = []  # rows whose sampling parameters the next plan carries
        self._steady: _Steady | None = None

    # --- what the engine calls

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._submitted)

    def add(self, sequence: Sequence) -> None:
        """Queue a new Sequence. It must fit into an empty pool: that is checked where it comes in."""
        self.waiting[sequence.key] = sequence

    def find(self, key: tuple[int, int]) -> Sequence | None:
        """A Sequence that has not ended."""
        return self.running.get(key) or self.waiting.get(key)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. Every plan must be submitted, and committed in order."""
        self.memory.turn(now, self._step + 1)
        if (steady := self._steady) is not None:
            nobody_enters = not self.waiting or not self.memory.tables.free_rows
            if nobody_enters and steady.steps > 0 and len(steady.rows) <= self.memory.available_frames:
                return self._steady_plan(steady)
        decodes = self._choose_decodes()
        decodes, chunks = self._choose_prefills(decodes)
        budget = self.settings.max_batched_tokens - len(decodes) - sum(count for _, count in chunks)
        chunks += self._admit(decodes, budget, now)
        if not len(decodes) and not chunks:
            return None
        return self._plan(decodes, chunks)

    def commit(self, result: StepResult, now: float) -> Committed:
        """Take the result of the oldest submitted step: append tokens, find who ended, free what they held."""
        submitted, state = self._submitted.popleft(), self._rows
        steady = self._steady
        if steady is not None and submitted.steady is steady and not result.failed.any():
            return self._commit_steady(steady, result.tokens, now)
        sampled = np.flatnonzero(submitted.plan.samples)
        all_rows = submitted.plan.rows[sampled]
        mine = submitted.epochs[sampled] == state.epoch[all_rows]
        failed = result.failed[sampled]
        good = mine & ~failed
        rows, tokens = all_rows[good], result.tokens[sampled[good]]
        state.tokens[rows, state.known[rows]] = tokens
        state.known[rows] += 1
        gaps = now - state.last_token_s[rows]
        state.last_token_s[rows] = now
        self._publish(submitted, result)
        for row in rows[state.known[rows] == state.prompt[rows] + 1].tolist():
            self._rows.at(row).first_token_s = now
        committed = Committed(state.front_end[rows], state.sequence_id[rows], tokens, gaps, [])
        stopped = (state.end_ids[rows] == tokens[:, None]).any(axis=1)
        self._end_rows(committed, rows, stopped, state.known[rows] == state.limit[rows], now)
        for row in all_rows[mine & failed].tolist():
            sequence = self._rows.at(row)
            committed.ended.append((sequence, self.end(sequence, "error", now, message=NOT_FINITE)))
        return committed if mine.all() else self._commit_bereft(committed, submitted, result, sampled[~mine], now)

    def end(
        self,
        sequence: Sequence,
        reason: EndReason,
        now: float,
        *,
        message: str = "",
        end_token: int = -1,
        output: int | None = None,
    ) -> Ended:
        """Release all that `sequence` holds, at once: its frames may be reused by later steps, which run later."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        else:
            del self.waiting[sequence.key]
        sequence.state = State.ENDED
        admitted, first = sequence.admitted_s, sequence.first_token_s
        return Ended(
            sequence_id=sequence.sequence_id,
            reason=reason,
            message=message,
            end_token=end_token if reason == "stop" else -1,
            cached_tokens=sequence.cached_tokens,
            miss=_miss_info(sequence.miss),
            output_tokens=len(sequence.tokens) - sequence.prompt_tokens if output is None else output,
            preemptions=sequence.preemptions,
            queue_s=(now if admitted is None else admitted) - sequence.submitted_s,
            ttft_s=(now if first is None else first) - sequence.submitted_s,
        )

    # --- steady decode

    def _steady_plan(self, steady: _Steady) -> StepPlan:
        """The plan of the step before, one token further."""
        orders = self.memory.grow(steady.rows, steady.ones)
        self._step += 1
        last = steady.plan
        plan = StepPlan(
            step=self._step,
            orders=orders,
            settings=None,
            rows=last.rows,
            starts=steady.starts,
            query_starts=last.query_starts,
            token_ids=last.token_ids,
            samples=last.samples,
            decodes=last.decodes,
        )
        steady.plan = plan
        steady.starts = steady.starts + 1
        steady.steps -= 1
        self._submitted.append(_Submitted(plan, steady.epochs, steady))
        return plan

    def _commit_steady(self, steady: _Steady, tokens: Int32Array, now: float) -> Committed:
        """`commit` for rows that have all been committed in the step before too: nobody is new, nobody has left."""
        state, rows = self._rows, steady.rows
        known = state.known[rows]
        state.tokens[rows, known] = tokens
        known += 1
        state.known[rows] = known
        gaps = now - state.last_token_s[rows]
        state.last_token_s[rows] = now
        self.memory.publish(rows, known - 1, state.tokens)
        committed = Committed(steady.front_ends, steady.sequence_ids, tokens, gaps, [])
        over = steady.steps <= 1  # the limits are known ahead: two steps are on their way at most
        if steady.has_end_ids or over:
            stopped = (steady.end_ids == tokens[:, None]).any(axis=1)
            if over or stopped.any():
                self._end_rows(committed, rows, stopped, known == state.limit[rows], now)
        return committed

    def _publish(self, submitted: _Submitted, result: StepResult) -> None:
        """Cache the pages that a step filled, of rows that are still the same and whose numbers are good (rule 6)."""
        plan = submitted.plan
        good = (submitted.epochs == self._rows.epoch[plan.rows]) & ~result.failed
        self.memory.publish(plan.rows[good], plan.lengths[good], self._rows.tokens)

    def _end_rows(
        self, committed: Committed, rows: Int32Array, stopped: BoolArray, full: BoolArray, now: float
    ) -> None:
        """End the Sequences of `rows` that sampled an end token or are as long as they may be."""
        for i in np.flatnonzero(stopped | full).tolist():
            sequence = self._rows.at(int(rows[i]))
            reason: EndReason = "stop" if stopped[i] else "length"
            token = int(committed.tokens[i])
            committed.ended.append((sequence, self.end(sequence, reason, now, end_token=token)))

    # --- choosing

    def _choose_decodes(self) -> Int32Array:
        """(N,) rows with one token to compute; the youngest are preempted until each has its frame (rule 2)."""
        state, lengths = self._rows, self.memory.tables.lengths
        rows = np.flatnonzero((state.remaining == 1) & (lengths + 1 < state.limit)).astype(np.int32)
        while len(rows) > (free := self.memory.available_frames) and self._frames_of_decodes(rows) > free:
            self._preempt(next(reversed(self.running.values())))
            rows = rows[state.remaining[rows] > 0]
        return rows

    def _frames_of_decodes(self, rows: Int32Array) -> int:
        return self.memory.frames_needed(rows, np.ones(len(rows), np.int32)) if len(rows) else 0

    def _choose_prefills(self, decodes: Int32Array) -> tuple[Int32Array, list[tuple[Sequence, int]]]:
        """Chunks (Sequence, tokens) of running prefills, oldest first, and the decodes that are left beside them."""
        state = self._rows
        prefilling = np.flatnonzero(state.remaining > 1)
        chunks: list[tuple[Sequence, int]] = []
        if not len(prefilling):
            return decodes, chunks
        budget = self.settings.max_batched_tokens - len(decodes)
        taken = self._frames_of_decodes(decodes)
        for sequence in [self._rows.at(row) for row in prefilling[np.argsort(state.arrival[prefilling])].tolist()]:
            if budget <= 0 or sequence.state is not State.RUNNING:
                break  # preempted for an older one, and so are all after it
            row = self._row(sequence)
            count = min(int(state.remaining[row]), budget)
            frames = self.memory.frames_needed(np.array([row], np.int32), np.array([count], np.int32))
            while frames > self.memory.available_frames - taken:
                victim = next(reversed(self.running.values()))
                if victim is sequence:
                    return decodes, chunks  # the youngest waits: the older ones will end
                self._preempt(victim)
                before = self._frames_of_decodes(decodes)
                decodes = decodes[state.remaining[decodes] > 0]
                taken -= before - self._frames_of_decodes(decodes)
            chunks.append((sequence, count))
            taken += frames
            budget -= count
        return decodes, chunks

    def _admit(self, decodes: Int32Array, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """First chunks of Sequences that enter a row now (rule 4)."""
        chunks: list[tuple[Sequence, int]] = []
        if not self.waiting or budget <= 0:
            return chunks
        state, tables = self._rows, self.memory.tables
        prefilling = np.flatnonzero(state.remaining > 1).astype(np.int32)
        totals = tables.lengths[prefilling] + state.remaining[prefilling]
        promised = -(-totals // tables.page_size) - tables.pages(prefilling)
        free = self.memory.available_frames - self._frames_of_decodes(decodes) - int(promised.sum())
        for sequence in list(islice(self.waiting.values(), LOOK_AHEAD)):
            if budget <= 0 or not tables.free_rows or sequence.in_flight or free <= sequence.blocked_at:
                break  # rule 3; or no more is free than when it did not fit
            match = self._look_up(sequence)
            if match is not None and self._should_await(sequence, match):
                continue  # rule 5
            count = len(sequence.tokens)
            frames = pages_for(count, tables.page_size)
            if match is not None:
                frames = match.frames_for(count, tables.page_size) + match.idle_frames
            headroom = max(int(self.memory.frames.total * self.settings.admission_headroom), len(self.running))
            if self.running and frames + headroom > free:
                sequence.blocked_at = free
                break
            if frames > free:  # alone it fits, but not beside cached pages of which it needs a copy too
                match, frames = None, pages_for(count, tables.page_size)
            self._enter(sequence, match, now)
            free -= frames
            chunks.append((sequence, min(count - sequence.cached_of_row, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _look_up(self, sequence: Sequence) -> PrefixMatch | None:
        """What of its tokens is cached; None if it does not use the cache."""
        if not sequence.uses_cache:
            return None
        if sequence.chain is None:
            sequence.chain = self.memory.chain(sequence.tokens, Namespace(salt=sequence.cache_salt), sequence.tenant)
        return self.memory.lookup(sequence.chain, resident_only=True)

    def _should_await(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether another Sequence is just computing what this one needs next (rule 5)."""
        if match.awaited is None or sequence.awaited_steps >= AWAIT_STEPS:
            return False
        sequence.awaited_steps += 1
        return self.memory.is_being_written(match.awaited)

    def _plan(self, decodes: Int32Array, chunks: list[tuple[Sequence, int]]) -> StepPlan:
        state = self._rows
        chunk_rows = np.array([self._row(sequence) for sequence, _ in chunks], np.int32)
        rows = np.concatenate((decodes, chunk_rows))
        counts = np.ones(len(rows), np.int32)
        counts[len(decodes) :] = [count for _, count in chunks]
        starts = self.memory.tables.lengths[rows]
        orders = self.memory.grow(rows, counts)
        fed_back = state.known[decodes] == starts[: len(decodes)]  # the token to compute is the device's alone
        newest = state.tokens[decodes, starts[: len(decodes)]]
        token_ids = [np.where(fed_back, FED_BACK, newest).astype(np.int32)]
        for row, start, count in zip(chunk_rows, starts[len(decodes) :], counts[len(decodes) :], strict=True):
            token_ids.append(state.tokens[row, start : start + count])
        remaining = state.remaining[rows]
        samples = counts == remaining
        state.remaining[rows] = remaining - counts + samples
        entered, self._entered = self._entered, []
        settings = None
        if entered:
            entered_rows = np.array([self._row(sequence) for sequence in entered], np.int32)
            settings = RowSettings(entered_rows, [sequence.sampling for sequence in entered])
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        self._step += 1
        plan = StepPlan(
            step=self._step,
            orders=orders,
            settings=settings,
            rows=rows,
            starts=starts,
            query_starts=query_starts,
            token_ids=np.concatenate(token_ids),
            samples=samples,
            decodes=len(decodes),
        )
        epochs = state.epoch[rows]
        self._steady = None if chunks or not len(rows) else self._steady_from(plan, epochs)
        self._submitted.append(_Submitted(plan, epochs, None))
        return plan

    def _steady_from(self, plan: StepPlan, epochs: Int64Array) -> _Steady:
        """What the next steps will share with a plan in which all rows decode."""
        state, rows = self._rows, plan.rows
        starts = plan.starts + 1
        width = max(len(self._rows.at(row).end_ids) for row in rows.tolist())
        return _Steady(
            rows=rows,
            ones=np.ones(len(rows), np.int32),
            starts=starts,
            steps=int((state.limit[rows] - starts).min()) - 1,
            plan=replace(plan, token_ids=np.full(len(rows), FED_BACK, np.int32)),
            epochs=epochs,
            front_ends=state.front_end[rows],
            sequence_ids=state.sequence_id[rows],
            end_ids=state.end_ids[rows, :width],
            has_end_ids=width > 0,
        )

    # --- moving between states

    def _enter(self, sequence: Sequence, match: PrefixMatch | None, now: float) -> None:
        """WAITING -> RUNNING, with what is cached of its tokens."""
        del self.waiting[sequence.key]
        sequence.space = self.memory.create(sequence.request_id, tenant=sequence.tenant, match=match)
        sequence.chain = None  # a preempted one has more tokens when it returns
        sequence.blocked_at = -1
        sequence.cached_of_row = sequence.space.length
        self._admissions += 1
        self._steady = None
        self._rows.enter(sequence.space.row, sequence, self._admissions, sequence.cached_of_row)
        self.running[sequence.key] = sequence
        self._entered.append(sequence)
        sequence.state = State.RUNNING
        if sequence.admitted_s is None:
            sequence.admitted_s = now
            sequence.cached_tokens = sequence.cached_of_row
            sequence.miss = None if match is None else match.miss

    def _leave(self, sequence: Sequence) -> None:
        """RUNNING -> nowhere: the row and all frames are free again."""
        assert sequence.space is not None
        self._steady = None
        self._rows.leave(sequence.space.row)
        sequence.space.release()
        sequence.space = None
        del self.running[sequence.key]
        if sequence in self._entered:
            self._entered.remove(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """RUNNING -> WAITING, at the head of the queue (rule 3). Its tokens will be computed again."""
        row = self._row(sequence)
        exist = int(self.memory.tables.lengths[row] + self._rows.remaining[row])
        sequence.in_flight = exist - int(self._rows.known[row])
        if sequence.in_flight:
            self._bereft[row, int(self._rows.epoch[row])] = sequence
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting[sequence.key] = sequence
        self.waiting.move_to_end(sequence.key, last=False)

    def _commit_bereft(
        self, committed: Committed, submitted: _Submitted, result: StepResult, places: Int64Array, now: float
    ) -> Committed:
        """Add the tokens of Sequences that were preempted while this step was on its way; other tokens are junk."""
        found: list[tuple[Sequence, int]] = []
        for place in places.tolist():
            key = int(submitted.plan.rows[place]), int(submitted.epochs[place])
            sequence = self._bereft.pop(key, None)
            if sequence is None or sequence.state is State.ENDED:
                continue
            sequence.in_flight -= 1
            if result.failed[place]:
                committed.ended.append((sequence, self.end(sequence, "error", now, message=NOT_FINITE)))
                continue
            token = int(result.tokens[place])
            found.append((sequence, token))
            sequence.tokens = np.append(sequence.tokens, np.int32(token))
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            if token in sequence.end_ids:
                committed.ended.append((sequence, self.end(sequence, "stop", now, end_token=token)))
            elif len(sequence.tokens) == sequence.limit:
                committed.ended.append((sequence, self.end(sequence, "length", now)))
        return Committed(
            np.append(committed.front_ends, np.array([s.front_end for s, _ in found], np.int32)),
            np.append(committed.sequence_ids, np.array([s.sequence_id for s, _ in found], np.int64)),
            np.append(committed.tokens, np.array([token for _, token in found], np.int32)),
            np.append(committed.gaps_s, np.full(len(found), np.nan)),
            committed.ended,
        )

    @staticmethod
    def _row(sequence: Sequence) -> int:
        assert sequence.space is not None
        return sequence.space.row


def _miss_info(miss: Miss | None) -> MissInfo | None:
    if miss is None:
        return None
    return MissInfo(str(miss.reason), miss.position, miss.evicted_s, miss.evicted_for or "")
