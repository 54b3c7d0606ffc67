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

The row of a beam stands still while its group waits for the host: then remaining == 0 (beams.py).

In steady decode (the same rows as in the step before, and nobody waits who could be admitted) next to nothing changes:
steady.py keeps what does not.

Rules, cited by number below:
  1. Decodes come first, then running prefills in order of arrival, then admissions in order of arrival.
  2. Only a younger Sequence is preempted for an older one, so the oldest always gets on; the youngest goes first.
  3. A preempted Sequence waits at the head of the queue, and until its tokens in flight are committed.
  4. Admission needs frames for all tokens of the Sequence, what running prefills still need, and headroom for decodes.
  5. Who needs pages that another is just computing waits for them, up to AWAIT_STEPS steps, and lets others go ahead.
  6. Pages are cached at commit, when the step that filled them is known to be good.
  7. Relatives share pages by forks: while one computes the prompt the others stand aside, and hold nobody up.
  8. Beams of one search are preempted together. Where nothing else can give way, a search ends with what it has.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mm import Action, Candidates, MemoryManager, Namespace, OverCommit, PrefixMatch, SwapOrders, pages_for
from mm.addresses import BoolArray, Int32Array, Int64Array
from model.step_plan import FED_BACK, RowSettings, StepPlan, StepResult
from service.beams import Beams
from service.committed import Committed
from service.engine_client import Ended, EndReason, Submit
from service.request import Sequence, State, choices_of
from service.scores import ScoredChunk, prompt_scores, scored_tokens, scores_of
from service.sequences import Key, Sequences, row_of, space_of
from service.steady import Steady

LOOK_AHEAD = 32
"""Waiting Sequences that one step looks at: those in front may be waiting for pages that others compute."""

AWAIT_STEPS = 64
"""Steps that a Sequence waits at most for pages that others compute; then it computes them itself."""

NOT_FINITE = "the model produced numbers that are not finite for this request"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of a step."""

    max_running: int  # Sequences that run at once
    max_batched_tokens: int  # query tokens of one step
    max_length: int  # prompt + output of one Sequence
    admission_headroom: float = 0.01  # share of the pool that admissions leave free while others run


@dataclass(slots=True)
class _Submitted:
    """A plan on its way, and whose rows it ran: a row may have changed hands before the result is there."""

    plan: StepPlan
    epochs: Int64Array  # (S,)
    steady: Steady | None
    asking: Int64Array  # places of the rows that report log-probabilities
    scored: Collection[ScoredChunk] = ()


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How a Sequence would be admitted: by a fork of `relative`, or else with what is cached of its tokens."""

    frames: int  # until all its tokens are computed
    match: PrefixMatch | None = None
    relative: Sequence | None = None
    length: int = 0  # tokens that it has in common with `relative`


class Scheduler:
    """Continuous batching over the rows of `memory`."""

    def __init__(self, memory: MemoryManager, settings: SchedulerSettings) -> None:
        if settings.max_batched_tokens < settings.max_running:
            raise ValueError(
                f"a step of {settings.max_batched_tokens} tokens cannot hold one of each of {settings.max_running} rows"
            )
        self.memory = memory
        self.settings = settings
        self.sequences = Sequences(memory, settings.max_length)
        self._rows = self.sequences.rows
        self._step = 0
        self._submitted: deque[_Submitted] = deque()
        self._steady: Steady | None = None
        self._beams = Beams(self.sequences)
        self._deadlines: list[tuple[float, Key]] = []  # a heap, also of those who have ended before
        self._ended = Committed.nothing()  # what ended outside a commit, for `take_ended`
        self._swaps_work = memory.swap.total > 0

    # --- what the engine calls

    @property
    def has_work(self) -> bool:
        all_ = self.sequences
        return bool(all_.waiting or all_.running or all_.swapped or self._submitted)

    @property
    def preemptions(self) -> int:
        return self.sequences.preemptions

    def submit(self, message: Submit, front_end: int, now: float) -> list[Sequence]:
        """Queue all choices of a request."""
        choices = choices_of(message, front_end, now)
        if message.beam_search is None:
            for choice in choices:
                self.add(choice)
            return choices
        if (width := message.beam_search.width) > self.settings.max_running:
            words = f"a search of {width} beams takes {width} places, and there are {self.settings.max_running}"
            for choice in choices:
                self.sequences.add(choice)
                self._ended.ended.append((choice, self.end(choice, "error", now, message=words)))
            return choices
        self._beams.add(choices, message.beam_search)
        for choice in choices:
            self._note_deadline(choice)
        return choices

    def add(self, sequence: Sequence) -> None:
        """Queue a new Sequence. It must fit into an empty pool: that is checked where it comes in."""
        self.sequences.add(sequence)
        self._note_deadline(sequence)

    def _note_deadline(self, sequence: Sequence) -> None:
        if sequence.deadline_s is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.key))

    def find(self, key: tuple[int, int]) -> Sequence | None:
        """A Sequence that has not ended."""
        return self.sequences.find(key) or self._beams.choices.get(key)

    def take_ended(self) -> Committed:
        """What ended since the last call other than by `commit` and `end`: for the time, or for want of memory."""
        ended = self._ended
        if ended:
            self._ended = Committed.nothing()
        return ended

    def take_swap_orders(self) -> list[SwapOrders]:
        """What the executor must start now, after the plan of the same turn was submitted."""
        orders, self.sequences.swap_orders = self.sequences.swap_orders, []
        return [order for order in orders if len(order)]

    def swap_ended(self, ticket: int, *, succeeded: bool) -> None:
        """A swap order has been carried out, or could not be: nothing is lost by that, but no more is swapped out."""
        if succeeded:
            self.memory.complete(ticket)
        else:
            self.memory.fail(ticket)
            self._swaps_work = False

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. Every plan must be submitted, and committed in order."""
        self.memory.turn(now, self._step + 1)
        if self._deadlines and self._deadlines[0][0] <= now:
            self._end_late(now)
        self.sequences.swap_orders.append(self.memory.background_reclaim())
        if (steady := self._steady) is not None and self._is_steady(steady):
            return self._steady_plan(steady)
        decodes, chunks = self._choose(now)
        while not len(decodes) and not chunks and self._give_way(now):
            decodes, chunks = self._choose(now)
        self._report_pressure()
        if not len(decodes) and not chunks:
            return None
        return self._plan(decodes, chunks)

    def commit(self, result: StepResult, now: float) -> Committed:
        """Take the result of the oldest submitted step: append tokens, find who ended, free what they held."""
        submitted, state = self._submitted.popleft(), self._rows
        steady = self._steady
        is_same = steady is not None and submitted.steady is steady and steady.changes == self.sequences.changes
        if steady is not None and is_same and not result.failed.any():
            return self._commit_steady(steady, result, now)
        sampled = np.flatnonzero(submitted.plan.samples)
        all_rows = submitted.plan.rows[sampled]
        mine = submitted.epochs[sampled] == state.epoch[all_rows]
        good = mine & ~result.failed[sampled]
        if self._beams.groups:
            self._take_candidates(submitted, result, sampled[good])
            good &= ~state.is_beam[all_rows]
        rows, tokens = all_rows[good], result.tokens[sampled[good]]
        state.tokens[rows, state.known[rows]] = tokens
        state.known[rows] += 1
        gaps = now - state.last_token_s[rows]
        state.last_token_s[rows] = now
        self._publish(submitted, result)
        for row in rows[state.known[rows] == state.prompt[rows] + 1].tolist():
            self._rows.at(row).first_token_s = now
        committed = Committed(state.front_end[rows], state.sequence_id[rows], tokens, gaps)
        if submitted.scored:
            self._score_prompts(committed, submitted, result)
        if len(submitted.asking):
            self._score_tokens(committed, submitted, result, sampled[good])
        stopped = (state.end_ids[rows] == tokens[:, None]).any(axis=1)
        self._end_rows(committed, rows, stopped, state.known[rows] == state.limit[rows], now)
        if result.failed.any():  # also of a chunk that is not the last: nothing good can come after it
            lost = result.failed & (submitted.epochs == state.epoch[submitted.plan.rows])
            for row in submitted.plan.rows[lost].tolist():
                self._fail_row(committed, row, now)
        if not mine.all():
            self._commit_bereft(committed, submitted, result, sampled[~mine], now)
        if self._beams.groups:
            committed.extend(self._beams.go_on(now))
        return committed

    def end(self, sequence: Sequence, reason: EndReason, now: float, **facts: Any) -> Ended:
        """Sequences.end, or Beams.end_choice."""
        if sequence.state is State.CHOICE:
            return self._beams.end_choice(sequence, reason, now, output=facts.get("output", 0))
        return self.sequences.end(sequence, reason, now, **facts)

    def _fail_row(self, committed: Committed, row: int, now: float) -> None:
        """The numbers of a row are not finite: its Sequence ends, or its whole search."""
        sequence = self._rows.sequences[row]
        if sequence is None:
            return  # another beam of its search has failed before it
        if sequence.group is not None:
            self._beams.fail(sequence.group, NOT_FINITE, now, committed)
        else:
            committed.ended.append((sequence, self.end(sequence, "error", now, message=NOT_FINITE)))

    # --- ends that no step brings

    def _end_late(self, now: float) -> None:
        """End all whose time is over, with what they have."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = self.find(heapq.heappop(self._deadlines)[1])
            if sequence is None:
                continue
            if sequence.state is State.CHOICE:
                assert sequence.group is not None
                self._beams.finish(sequence.group, "timeout", now, self._ended)
            else:
                self._ended.ended.append((sequence, self.end(sequence, "timeout", now)))

    def _give_way(self, now: float) -> bool:
        """Nothing can run. If nothing is on its way either, beams stand still for want of pages (rule 8).

        The youngest search gives its pages up, for others that hold some or wait to come back from swap. Where it is
        the only one, its own beams come next; if they do not fit, it has the whole pool, and ends with what it has.
        Returns whether anything has changed.
        """
        groups = [group for group in self._beams.groups if group.family.with_row]
        if not groups or self._submitted or self.memory.is_copying:
            return False
        groups.sort(key=lambda group: int(self._rows.arrival[row_of(next(iter(group.family.with_row.values())))]))
        oldest, youngest = groups[0], groups[-1]
        others_swapped = any(sequence.group is not youngest for sequence in self.sequences.swapped.values())
        if oldest is not youngest or others_swapped:
            for beam in list(youngest.family.with_row.values()):
                self.sequences.recompute(beam)
            self.sequences.put_first(oldest.beams)
        elif not self.sequences.put_first(oldest.beams):
            self._beams.finish(oldest, "length", now, self._ended)
        return True

    # --- steady decode

    def _is_steady(self, steady: Steady) -> bool:
        """Whether the next step is the one before, one token further."""
        all_ = self.sequences
        return (
            steady.changes == all_.changes
            and steady.steps > 0
            and not (all_.waiting and self._has_place)
            and not all_.swapped
            and len(steady.rows) <= self.memory.available_frames
        )

    @property
    def _has_place(self) -> bool:
        """Whether one more Sequence may run, as far as others have not reserved its place."""
        return self._taken_places < self.settings.max_running and self.memory.tables.free_rows > 0

    @property
    def _taken_places(self) -> int:
        return len(self.sequences.running) + len(self.sequences.swapped)

    def _has_place_for(self, sequence: Sequence) -> bool:
        """Whether this one may run: a search needs a place for each beam before the first one enters."""
        reserved = self._beams.reserved_places
        needed = 1
        if sequence.group is not None:
            needed, own = sequence.group.search.width, sequence.group.reserved_places
            if own:
                needed, reserved = 1, reserved - own
        free = min(self.settings.max_running - self._taken_places, self.memory.tables.free_rows)
        return needed <= free - reserved

    def _steady_plan(self, steady: Steady) -> StepPlan:
        """The plan of the step before, one token further."""
        orders = self.memory.grow(steady.rows, steady.ones)
        self._step += 1
        plan = steady.next_plan(self._step, orders)
        self._submitted.append(_Submitted(plan, steady.epochs, steady, steady.asking))
        return plan

    def _commit_steady(self, steady: Steady, result: StepResult, now: float) -> Committed:
        """`commit` for rows that have all been committed in the step before too: nobody is new, nobody has left."""
        committed, stopped, full = steady.commit(result.tokens, result.logprobs, self._rows, self.memory, now)
        if stopped is not None and full is not None:
            self._end_rows(committed, steady.rows, stopped, full, now)
        return committed

    # --- what a step brought

    def _take_candidates(self, submitted: _Submitted, result: StepResult, places: Int64Array) -> None:
        """Beams get their likeliest next tokens. places: of the rows that sampled and are still the same."""
        rows = submitted.plan.rows[places]
        for place in places[self._rows.is_beam[rows]].tolist():
            assert result.logprobs is not None
            beam = self._rows.at(int(submitted.plan.rows[place]))
            self._beams.take(beam, result.logprobs, int(np.searchsorted(submitted.asking, place)))

    def _score_tokens(
        self, committed: Committed, submitted: _Submitted, result: StepResult, places: Int64Array
    ) -> None:
        """The scores of the committed tokens whose rows ask for some. places (N,): of those tokens in the plan."""
        assert result.logprobs is not None
        where = np.flatnonzero(np.isin(places, submitted.asking))
        if len(where):
            found = result.logprobs.take(np.searchsorted(submitted.asking, places[where]))
            likeliest = self._rows.logprobs[submitted.plan.rows[places[where]]].tolist()
            committed.scores = dict(zip(where.tolist(), scores_of(found, likeliest), strict=True))

    def _score_prompts(self, committed: Committed, submitted: _Submitted, result: StepResult) -> None:
        assert result.scored is not None
        failed = [bool(result.failed[chunk.place]) for chunk in submitted.scored]
        committed.prompt_scores = prompt_scores(submitted.scored, result.scored, failed)

    def _publish(self, submitted: _Submitted, result: StepResult) -> None:
        """Cache the pages that a step filled, of rows that are still the same and whose numbers are good (rule 6)."""
        plan = submitted.plan
        good = (submitted.epochs == self._rows.epoch[plan.rows]) & ~result.failed
        good &= self.memory.tables.barred[plan.rows] == 0  # pages on their way to swap are published when they are back
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

    def _choose(self, now: float) -> tuple[Int32Array, list[tuple[Sequence, int]]]:
        """Who runs in the next step: rows that decode, and chunks (Sequence, tokens)."""
        self._return_from_swap()
        if self._beams.groups:
            self._ended.extend(self._beams.go_on(now))  # who was not resident when its candidates came
        decodes = self._choose_decodes()
        decodes, chunks = self._choose_prefills(decodes)
        budget = self.settings.max_batched_tokens - len(decodes) - sum(count for _, count in chunks)
        return decodes, self._that_fit(decodes, chunks + self._admit(decodes, budget, now))

    def _choose_decodes(self) -> Int32Array:
        """(N,) rows with one token to compute, and a frame for each: others are preempted, or wait a step (rule 2)."""
        state, lengths = self._rows, self.memory.tables.lengths
        rows = np.flatnonzero((state.remaining == 1) & (lengths + 1 < state.limit)).astype(np.int32)
        if len(rows) <= self.memory.available_frames:
            return rows
        while (needed := self._frames_of_decodes(rows)) > self.memory.available_frames + self.memory.arriving_frames:
            if not self._preempt_for(self.sequences.oldest(), needed - self.memory.available_frames):
                break
            rows = rows[state.remaining[rows] > 0]
        return self._hold_back(rows)

    def _hold_back(self, rows: Int32Array) -> Int32Array:
        """Without the youngest ones that need frames which are not there yet: those are on their way to swap."""
        if self._frames_of_decodes(rows) <= self.memory.available_frames:
            return rows
        rows = rows[np.argsort(self._rows.arrival[rows])]
        needs = np.array([self._frames_of_decodes(rows[i : i + 1]) for i in range(len(rows))], np.int32)
        return rows[np.cumsum(needs) <= self.memory.available_frames]

    def _preempt_for(self, sequence: Sequence, frames: int) -> bool:
        """Preempt younger ones to get `frames`: whom, and by swap or recomputation, mm's score says (rule 2)."""
        younger = self.sequences.younger_than(sequence, self.sequences.running)
        if not younger:  # swapped ones still hold what they share among each other
            swapped = self.sequences.younger_than(sequence, self.sequences.swapped)
            if swapped:
                self.sequences.recompute(swapped[-1])
            return bool(swapped)
        victim = self.memory.choose_victim(self._candidates(younger), frames)
        if victim is None:  # nobody frees anything alone: what the youngest shares is freed when all who share it go
            for sequence in self._with_beams([younger[-1]]):
                self.sequences.recompute(sequence)
            return True
        victims = self._with_beams([self._rows.at(row) for row in victim.rows.tolist()])
        if victim.action is not Action.SWAP or not self._swaps_work or not self.sequences.swap_out(victims):
            for sequence in victims:
                self.sequences.recompute(sequence)
        return True

    def _with_beams(self, victims: list[Sequence]) -> list[Sequence]:
        """And all that run of the searches whose beams are among them: none gets on without the others (rule 8)."""
        groups = {id(victim.group): victim.group for victim in victims if victim.group is not None}
        beams = [beam for group in groups.values() for beam in group.beams if beam.state is State.RUNNING]
        return [victim for victim in victims if victim.group is None] + beams

    def _candidates(self, sequences: list[Sequence]) -> Candidates:
        """Those who could be preempted, as mm's score wants to know them. The last one goes first among equals."""
        rows = np.array([row_of(sequence) for sequence in sequences], np.int32)
        state = self._rows
        done = (state.known[rows] - state.prompt[rows]) / np.maximum(state.limit[rows] - state.prompt[rows], 1)
        preemptions = np.array([sequence.preemptions for sequence in sequences], np.int32)
        return Candidates(rows, np.zeros(len(rows), np.int32), done.astype(np.float64), preemptions)

    def _return_from_swap(self) -> None:
        """Let those run whose pages are back; order pages back as there is room, oldest first, before any admission."""
        all_ = self.sequences
        has_room = True
        for sequence in sorted(all_.swapped.values(), key=lambda other: int(self._rows.arrival[row_of(other)])):
            space = space_of(sequence)
            if space.is_resident:
                all_.return_from_swap(sequence)
            elif has_room:
                room = self.memory.available_frames - (self._headroom if all_.running else 0)
                has_room = int(self.memory.tables.barred[space.row]) <= room and all_.bring_in(sequence)

    @property
    def _headroom(self) -> int:
        """Frames that are left free for those that run when another one comes (rule 4)."""
        if self._beams.groups and not self._submitted and not self._rows.remaining.any():
            return 0  # beams that stand still for somebody who is to come back
        share = int(self.memory.frames.total * self.settings.admission_headroom)
        return max(share, len(self.sequences.running))

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
            row = row_of(sequence)
            count = min(int(state.remaining[row]), budget)
            frames = self.memory.frames_needed(np.array([row], np.int32), np.array([count], np.int32))
            while frames > self.memory.available_frames - taken:
                if frames <= self.memory.available_frames + self.memory.arriving_frames - taken:
                    return decodes, chunks  # they are on their way
                before = self._frames_of_decodes(decodes)  # before some of them may be in swap
                if not self._preempt_for(sequence, frames + taken - self.memory.available_frames):
                    return decodes, chunks  # the youngest waits: the older ones will end
                decodes = decodes[state.remaining[decodes] > 0]
                taken -= before - self._frames_of_decodes(decodes)
            chunks.append((sequence, count))
            taken += frames
            budget -= count
        return decodes, chunks

    def _admit(self, decodes: Int32Array, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """First chunks of Sequences that enter a row now (rule 4)."""
        chunks: list[tuple[Sequence, int]] = []
        if not self.sequences.waiting or self.sequences.swapped or budget <= 0:
            return chunks
        state, tables = self._rows, self.memory.tables
        prefilling = np.flatnonzero(state.remaining > 1).astype(np.int32)
        totals = tables.lengths[prefilling] + state.remaining[prefilling]
        promised = -(-totals // tables.page_size) - tables.pages(prefilling)
        promised += tables.exposed[prefilling]  # a copy of the page that it shares in part
        free = self.memory.available_frames - self._frames_of_decodes(decodes) - int(promised.sum())
        for sequence in self._in_line():
            if budget <= 0 or not self._has_place_for(sequence) or sequence.in_flight:
                break  # rule 3
            if sequence.family is None and free <= sequence.blocked_at:
                break  # no more is free than when it did not fit
            beginning = self._beginning(sequence)
            if beginning is None:
                continue  # rules 5 and 7
            frames, match = beginning.frames, beginning.match
            if self.sequences.running and frames + self._headroom > free:
                sequence.blocked_at = free
                break
            if frames > free:  # alone it fits, but not beside cached pages of which it needs a copy too
                match = None if match is None else match.whole_pages(tables.page_size)
                frames = pages_for(len(sequence.tokens), tables.page_size)
            try:
                if beginning.relative is not None:
                    self.sequences.fork(sequence, beginning.relative, beginning.length, now)
                else:
                    self.sequences.enter(sequence, match, now)
            except OverCommit:  # strict mode: its whole length cannot be promised beside those of the others
                sequence.blocked_at = free
                break
            free -= frames
            if sequence.state is not State.RUNNING:
                continue  # some of its pages are in swap: it runs when they are back
            chunks.append((sequence, min(len(sequence.tokens) - sequence.cached_of_row, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _in_line(self) -> list[Sequence]:
        """Those who wait, in order, LOOK_AHEAD of them at most. Relatives of one who computes do not count (rule 7)."""
        line: list[Sequence] = []
        for sequence in self.sequences.waiting.values():
            family = sequence.family
            if family is not None and family.is_computing(sequence, self._rows, self.memory.tables.lengths):
                continue
            line.append(sequence)
            if len(line) == LOOK_AHEAD:
                break
        return line

    def _beginning(self, sequence: Sequence) -> _Beginning | None:
        """What it would begin with; None if it should wait for what others are just computing."""
        tables, count = self.memory.tables, len(sequence.tokens)
        family, relative, length = sequence.family, None, -1
        if family is not None and family.with_row and not sequence.is_scoring:
            nearest = family.nearest(sequence, self._rows, tables.lengths)
            if nearest is None:
                return None
            relative, length = nearest
        match = self._look_up(sequence) if length < count - 1 else None
        if relative is not None and (match is None or match.cached_tokens <= length):
            frames = pages_for(count, tables.page_size) - length // tables.page_size
            return _Beginning(frames, relative=relative, length=length)
        if match is None:
            return _Beginning(pages_for(count, tables.page_size))
        if self._should_await(sequence, match):
            return None
        return _Beginning(match.frames_for(count, tables.page_size) + match.idle_frames, match)

    def _that_fit(self, decodes: Int32Array, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Without the last chunks, if all together need more frames than there are.

        Each was counted when it was chosen, but pages that several of them share, or want to copy, are only known when
        all are chosen. Who is left out has its row, and goes on as a running prefill.
        """
        while chunks:
            rows, counts = _rows_and_counts(decodes, chunks)
            if self.memory.frames_needed(rows, counts) <= self.memory.available_frames:
                break
            chunks = chunks[:-1]
        return chunks

    def _report_pressure(self) -> None:
        """Who stands still for want of pages, and who gets on. Waiting ones beyond LOOK_AHEAD are not counted."""
        all_ = self.sequences
        still = Counter(sequence.tenant for sequence in all_.swapped.values())
        for sequence in islice(all_.waiting.values(), LOOK_AHEAD):
            if sequence.blocked_at < 0:
                break
            still[sequence.tenant] += 1
        self.memory.report_pressure(still, all_.running_by_tenant)

    def _look_up(self, sequence: Sequence) -> PrefixMatch | None:
        """What of its tokens is cached; None if it does not use the cache."""
        if not sequence.uses_cache:
            return None
        if sequence.chain is None:
            sequence.chain = self.memory.chain(sequence.tokens, Namespace(salt=sequence.cache_salt), sequence.tenant)
        match = self.memory.lookup(sequence.chain)
        return match.unread() if sequence.is_scoring else match

    def _should_await(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether another Sequence is just computing what this one needs next (rule 5)."""
        if match.awaited is None or sequence.awaited_steps >= AWAIT_STEPS:
            return False
        sequence.awaited_steps += 1
        return self.memory.is_being_written(match.awaited)

    def _plan(self, decodes: Int32Array, chunks: list[tuple[Sequence, int]]) -> StepPlan:
        state = self._rows
        rows, counts = _rows_and_counts(decodes, chunks)
        chunk_rows = rows[len(decodes) :]
        starts = self.memory.tables.lengths[rows]
        orders = self.memory.grow(rows, counts)
        fed_back = state.known[decodes] == starts[: len(decodes)]  # the token to compute is the device's alone
        newest = state.tokens[decodes, starts[: len(decodes)]]
        token_ids = [np.where(fed_back, FED_BACK, newest).astype(np.int32)]
        for row, start, count in zip(chunk_rows, starts[len(decodes) :], counts[len(decodes) :], strict=True):
            token_ids.append(state.tokens[row, start : start + count])
        remaining = state.remaining[rows]
        samples = counts == remaining
        has_beams = bool(self._beams.groups and state.is_beam[rows].any())
        state.remaining[rows] = remaining - counts + (samples & ~state.is_beam[rows] if has_beams else samples)
        entered, self.sequences.entered = self.sequences.entered, []
        settings = None
        if entered:
            entered_rows = np.array([row_of(sequence) for sequence in entered], np.int32)
            settings = RowSettings(
                rows=entered_rows,
                parameters=[sequence.sampling for sequence in entered],
                prompts=state.prompt[entered_rows],
                histories=[self._history(sequence) for sequence in entered],
            )
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        scored, scored_chunks = scored_tokens(chunks, len(decodes), starts, query_starts)
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
            scored=scored,
        )
        epochs = state.epoch[rows]
        is_steady = not chunks and len(rows) > 0 and not has_beams
        self._steady = Steady.after(plan, epochs, state, self.sequences.changes) if is_steady else None
        asking = np.flatnonzero(samples & (state.logprobs[rows] >= 0))
        self._submitted.append(_Submitted(plan, epochs, None, asking, scored_chunks))
        return plan

    def _history(self, sequence: Sequence) -> Int32Array:
        """All its tokens, if its sampling parameters look back at them."""
        row = row_of(sequence)
        return self._rows.tokens[row, : self._rows.known[row] if sequence.sampling.needs_history else 0].copy()

    def _commit_bereft(
        self, committed: Committed, submitted: _Submitted, result: StepResult, places: Int64Array, now: float
    ) -> None:
        """Add the tokens of Sequences that were preempted while this step was on its way; other tokens are junk."""
        for place in places.tolist():
            sequence = self.sequences.claim(int(submitted.plan.rows[place]), int(submitted.epochs[place]))
            if sequence is None:
                continue
            if result.failed[place]:
                committed.ended.append((sequence, self.end(sequence, "error", now, message=NOT_FINITE)))
                continue
            token, scores = int(result.tokens[place]), None
            if sequence.sampling.logprobs >= 0:
                assert result.logprobs is not None
                found = result.logprobs.take(np.searchsorted(submitted.asking, [place]))
                scores = scores_of(found, [sequence.sampling.logprobs])[0]
            committed.add(sequence, [token], scores)
            if reason := self.sequences.give(sequence, token, now):
                committed.ended.append((sequence, self.end(sequence, reason, now, end_token=token)))


def _rows_and_counts(decodes: Int32Array, chunks: list[tuple[Sequence, int]]) -> tuple[Int32Array, Int32Array]:
    """The rows of a step and how many tokens each computes, both (S,) int32: decodes, then chunks."""
    chunk_rows = np.array([row_of(sequence) for sequence, _ in chunks], np.int32)
    counts = np.ones(len(decodes) + len(chunks), np.int32)
    counts[len(decodes) :] = [count for _, count in chunks]
    return np.concatenate((decodes, chunk_rows)), counts
