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
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace

import numpy as np

from mm import MemoryManager, pages_for
from mm.addresses import BoolArray, FloatArray, Int32Array, Int64Array
from model.step_plan import FED_BACK, RowSettings, StepPlan, StepResult
from service.engine_client import Ended, EndReason
from service.request import Sequence, State

NO_TOKEN = -2  # pads the rows of end ids: no token has this id
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


class _Rows:
    """The running Sequences as a struct of arrays, by row. A row that nobody runs in has remaining 0 and limit 0."""

    def __init__(self, rows: int, max_length: int) -> None:
        self.sequences: list[Sequence | None] = [None] * rows
        self.tokens: Int32Array = np.empty(
            (rows, max_length), np.int32
        )  # the system gives memory to touched pages only
        self.known: Int32Array = np.zeros(rows, np.int32)
        self.remaining: Int32Array = np.zeros(rows, np.int32)
        self.limit: Int32Array = np.zeros(rows, np.int32)
        self.prompt: Int32Array = np.zeros(rows, np.int32)
        self.arrival: Int64Array = np.zeros(rows, np.int64)
        self.epoch: Int64Array = np.zeros(rows, np.int64)  # grows each time a row changes hands
        self.front_end: Int32Array = np.zeros(rows, np.int32)
        self.sequence_id: Int64Array = np.zeros(rows, np.int64)
        self.last_token_s: FloatArray = np.full(rows, np.nan)
        self.end_ids: Int32Array = np.full((rows, 1), NO_TOKEN, np.int32)

    def enter(self, row: int, sequence: Sequence, arrival: int) -> None:
        count = len(sequence.tokens)
        self.sequences[row] = sequence
        self.tokens[row, :count] = sequence.tokens
        self.known[row] = self.remaining[row] = count
        self.limit[row] = sequence.limit
        self.prompt[row] = sequence.prompt_tokens
        self.arrival[row] = arrival
        self.front_end[row] = sequence.front_end
        self.sequence_id[row] = sequence.sequence_id
        self.last_token_s[row] = np.nan
        missing = len(sequence.end_ids) - self.end_ids.shape[1]
        if missing > 0:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.end_ids[row] = NO_TOKEN
        self.end_ids[row, : len(sequence.end_ids)] = sequence.end_ids

    def leave(self, row: int) -> None:
        """The tokens known so far go back to the Sequence."""
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.tokens = self.tokens[row, : self.known[row]].copy()
        self.sequences[row] = None
        self.known[row] = self.remaining[row] = self.limit[row] = 0
        self.epoch[row] += 1


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
        self._rows = _Rows(rows, settings.max_length)
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
        if (steady := self._steady) is not None:
            nobody_enters = not self.waiting or not self.memory.tables.free_rows
            if nobody_enters and steady.steps > 0 and len(steady.rows) <= self.memory.free_frames:
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
        for row in rows[state.known[rows] == state.prompt[rows] + 1].tolist():
            self._at(row).first_token_s = now
        committed = Committed(state.front_end[rows], state.sequence_id[rows], tokens, gaps, [])
        stopped = (state.end_ids[rows] == tokens[:, None]).any(axis=1)
        self._end_rows(committed, rows, stopped, state.known[rows] == state.limit[rows], now)
        for row in all_rows[mine & failed].tolist():
            sequence = self._at(row)
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
        committed = Committed(steady.front_ends, steady.sequence_ids, tokens, gaps, [])
        over = steady.steps <= 1  # the limits are known ahead: two steps are on their way at most
        if steady.has_end_ids or over:
            stopped = (steady.end_ids == tokens[:, None]).any(axis=1)
            if over or stopped.any():
                self._end_rows(committed, rows, stopped, known == state.limit[rows], now)
        return committed

    def _end_rows(
        self, committed: Committed, rows: Int32Array, stopped: BoolArray, full: BoolArray, now: float
    ) -> None:
        """End the Sequences of `rows` that sampled an end token or are as long as they may be."""
        for i in np.flatnonzero(stopped | full).tolist():
            sequence = self._at(int(rows[i]))
            reason: EndReason = "stop" if stopped[i] else "length"
            token = int(committed.tokens[i])
            committed.ended.append((sequence, self.end(sequence, reason, now, end_token=token)))

    # --- choosing

    def _choose_decodes(self) -> Int32Array:
        """(N,) rows with one token to compute; the youngest are preempted until each has its frame (rule 2)."""
        state, lengths = self._rows, self.memory.tables.lengths
        rows = np.flatnonzero((state.remaining == 1) & (lengths + 1 < state.limit)).astype(np.int32)
        while len(rows) > self.memory.free_frames and self._frames_of_decodes(rows) > self.memory.free_frames:
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
        for sequence in [self._at(row) for row in prefilling[np.argsort(state.arrival[prefilling])].tolist()]:
            if budget <= 0 or sequence.state is not State.RUNNING:
                break  # preempted for an older one, and so are all after it
            row = self._row(sequence)
            count = min(int(state.remaining[row]), budget)
            frames = self.memory.frames_needed(np.array([row], np.int32), np.array([count], np.int32))
            while frames > self.memory.free_frames - taken:
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
        state, tables, total_frames = self._rows, self.memory.tables, self.memory.frames.total
        prefilling = np.flatnonzero(state.remaining > 1).astype(np.int32)
        totals = tables.lengths[prefilling] + state.remaining[prefilling]
        promised = -(-totals // tables.page_size) - tables.pages(prefilling)
        free = self.memory.free_frames - self._frames_of_decodes(decodes) - int(promised.sum())
        while self.waiting and budget > 0 and tables.free_rows:
            sequence = next(iter(self.waiting.values()))
            if sequence.in_flight:
                break  # rule 3
            count = len(sequence.tokens)
            frames = pages_for(count, tables.page_size)
            headroom = max(int(total_frames * self.settings.admission_headroom), len(self.running))
            if frames + (headroom if self.running else 0) > free:
                break
            self._enter(sequence, now)
            chunks.append((sequence, min(count, budget)))
            free -= frames
            budget -= min(count, budget)
        return chunks

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
        width = max(len(self._at(row).end_ids) for row in rows.tolist())
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

    def _enter(self, sequence: Sequence, now: float) -> None:
        """WAITING -> RUNNING."""
        del self.waiting[sequence.key]
        sequence.space = self.memory.create(sequence.request_id)
        self._admissions += 1
        self._steady = None
        self._rows.enter(sequence.space.row, sequence, self._admissions)
        self.running[sequence.key] = sequence
        self._entered.append(sequence)
        sequence.state = State.RUNNING
        if sequence.admitted_s is None:
            sequence.admitted_s = now

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

    def _at(self, row: int) -> Sequence:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return sequence

    @staticmethod
    def _row(sequence: Sequence) -> int:
        assert sequence.space is not None
        return sequence.space.row
