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
     At a tenant's max that holds within the tenant: for its oldest, its younger ones.
  3. A preempted Sequence waits before those that have not run, and until its tokens in flight are committed.
  4. Admission needs frames for all tokens of the Sequence, what running prefills still need, and headroom for decodes.
  5. Who needs pages that another is just computing waits for them, up to AWAIT_STEPS steps, and lets others go ahead.
  6. Pages are cached at commit, when the step that filled them is known to be good.
  7. A tenant at one of its limits holds up itself alone: its others wait, in order, and other tenants pass them by.
  8. Memory that a tenant's min protects is never taken by preemption for others, and what low protects last.
  9. Relatives share pages by forks: while one computes the prompt the others stand aside, and hold nobody up.
 10. Beams of one search are preempted together. Where nothing else can give way, of its tenant or of all, a search ends
     with what it has.
 11. Where gaps between tokens have a bound (pace.py), steps take as much of prompts as keeps to it, and a Sequence is
     admitted if its decodes will not break it.
 12. By priority, "older" above means an earlier turn: a level less urgent counts as `ageing_s` later. Who waits may
     then take the place or the frames of a running one of its tenant with a later turn and a less urgent level.
 13. Between tenants whoever has had least for its weight is next in the queue (shares.py), whatever the priorities.
 14. While frames are short, one of the next in turn whose prompt is cached may overtake (cache_order.py).
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mm import (
    MemoryManager,
    OomTable,
    SwapOrders,
    Victim,
)
from mm.addresses import Int32Array, index_of
from mm.pressure import PressureMeter
from model.step_plan import FED_BACK, RowSettings, StepPlan, StepResult
from service.admission import LOOK_AHEAD, Admission, Chunks, rows_and_counts
from service.beams import Beams
from service.committed import Committed
from service.engine_client import Ended, EndReason, Submit
from service.groups import Groups
from service.outcomes import Outcomes, Submitted
from service.pace import Pace, StepWork
from service.request import Key, Sequence, State, choices_of
from service.scores import scored_tokens
from service.sequences import Fill, Sequences, row_of
from service.steady import Steady
from service.step_chooser import StepChooser
from service.victims import Victims

if TYPE_CHECKING:
    from service.grammars import Grammar, Matcher


NO_PLACES, NO_TOKENS = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of a step."""

    max_running: int  # Sequences that run at once
    max_batched_tokens: int  # query tokens of one step
    max_length: int  # prompt + output of one Sequence
    finds_shared_prefixes: bool = False  # plans say which decodes begin with the same frames (StepPlan.groups)
    prefix_caching: bool = True  # whether requests may read and fill the page cache
    max_gap_s: float | None = None  # between two tokens of a Sequence (pace.py)
    step_sizes: tuple[int, ...] = ()  # what steps with prompts are cut to then: Executor.step_sizes
    most_overtaken: int = 0  # times that a waiting one may be overtaken for what others have cached (rule 14)
    ageing_s: float | None = None  # of waiting make a level of priority (rule 12); None: priorities mean nothing


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
        self._submitted: deque[Submitted] = deque()
        self._steady: Steady | None = None
        self._groups = Groups(memory, self._rows) if settings.finds_shared_prefixes else None
        self._beams = Beams(self.sequences)
        self._outcomes = Outcomes(memory, self.sequences, self._beams)
        self._deadlines: list[tuple[float, Key]] = []  # a heap, also of those who have ended before
        self._ended = Committed.nothing()  # what ended outside a commit, for `take_ended`
        self._victims = Victims(memory, self.sequences)
        self._pace = None if settings.max_gap_s is None else Pace(settings.max_gap_s, settings.step_sizes)
        self._committed_s = 0.0
        self._waits_for_compute = False
        self._stand_still = False  # whether somebody did when it was reported last
        self.compute_pressure = PressureMeter()  # who waits for places and the budget of steps
        self._admission = Admission(
            memory,
            self.sequences,
            self._beams,
            self._victims,
            self._submitted,
            max_running=settings.max_running,
            prefix_caching=settings.prefix_caching,
            pace=self._pace,
            most_overtaken=settings.most_overtaken,
            by_priority=settings.ageing_s is not None,
        )
        self._chooser = StepChooser(
            memory,
            self.sequences,
            self._beams,
            self._victims,
            self._admission,
            max_batched_tokens=settings.max_batched_tokens,
            pace=self._pace,
        )

    # --- what the engine calls

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run: what operators have paused is not."""
        return self._has_unpaused or bool(self._submitted)

    @property
    def _has_unpaused(self) -> bool:
        all_ = self.sequences
        return bool(all_.waiting or all_.running or all_.swapped)

    @property
    def oom_ends(self) -> int:
        """Searches that ended for want of memory, since the start."""
        return self._chooser.oom_ends

    @property
    def preemptions(self) -> int:
        return self.sequences.preemptions

    @property
    def stalls(self) -> int:
        """Times that a Sequence began to wait for frames."""
        return self._admission.stalls

    @property
    def has_place(self) -> bool:
        """Whether one more Sequence may run."""
        return self._admission.has_place

    def let_go(self, rows: Int32Array) -> None:
        """Whoever has one of these rows gives up what it holds, and computes it again; a search as a whole."""
        for row in rows.tolist():
            sequence = self._rows.sequences[row]
            if sequence is None:
                continue  # a beam of a search that has gone
            for each in [sequence] if sequence.group is None else list(sequence.group.beams):
                if each.space is not None:
                    self.sequences.recompute(each)

    def last_step_of(self, sequence: Sequence) -> int | None:
        """The last step that it was in, in the row that it has; None: it has none, or has not run in it."""
        if sequence.space is None:
            return None
        row = row_of(sequence)
        is_in_steady = self._steady is not None and bool((self._steady.rows == row).any())
        return self._step if is_in_steady else int(self._rows.last_step[row]) or None

    def oom_table(self) -> tuple[list[Sequence], OomTable, Victim | None]:
        """Who could be preempted, oldest first, with their scores; and whom it would be now. Changes nothing."""
        rows = self._rows
        running = sorted(self.sequences.running.values(), key=lambda each: int(rows.arrival[row_of(each)]))
        table = self.memory.oom_table(self._victims.candidates(running), 1)
        return running, table, self.memory.scorer.choose(table)

    def submit(self, message: Submit, front_end: int, now: float, grammar: "Grammar | None" = None) -> list[Sequence]:
        """Queue all choices of a request. grammar: its constraint, compiled."""
        choices = choices_of(message, front_end, now, grammar)
        self._set_turns(choices, now)
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

    def fork(self, parent: Sequence, message: Submit, inherited: int, front_end: int, now: float) -> None:
        """Queue one that begins with the tokens of `parent`, and shares its pages when it enters a row.

        inherited: of the message's prompt, tokens at the end that are the answer so far.
        """
        (child,) = choices_of(message, front_end, now)
        child.inherited_tokens, child.family = inherited, self.sequences.family_of(parent)
        child.matcher = None if parent.matcher is None else parent.matcher.copy(child.end_ids)
        self._set_turns([child], now)
        self.add(child)

    def restore(self, sequence: Sequence, now: float) -> None:
        """Queue one that was made from a checkpoint."""
        self._set_turns([sequence], now)
        self.add(sequence)

    def take_fills(self) -> list[Fill]:
        """Whose pages are to be copied into their frames now, after the plan of the same turn was submitted."""
        fills, self.sequences.fills = self.sequences.fills, []
        return fills

    def good_positions(self, sequence: Sequence) -> int:
        """Positions of its row, from the first on, whose keys and values are those of known tokens, and known to be
        good.

        The last known token is left out: whoever goes on from there wants its logits, and computes it.
        """
        if sequence.space is None:
            return 0
        row = row_of(sequence)
        good = min(int(self.memory.tables.lengths[row]), int(self._rows.known[row]) - 1)
        for submitted in self._submitted:
            places = np.flatnonzero((submitted.plan.rows == row) & (submitted.epochs == self._rows.epoch[row]))
            good = min([good, *submitted.plan.starts[places].tolist()])
        return good

    def _set_turns(self, choices: list[Sequence], now: float) -> None:
        if (ageing_s := self.settings.ageing_s) is not None:
            for choice in choices:
                choice.turn_s = now + choice.priority * ageing_s

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

    def open_sequences(self) -> Iterator[Sequence]:
        """All that have not ended; of a beam search the choices, not the beams."""
        all_ = self.sequences
        for sequence in chain(all_.waiting, all_.running.values(), all_.swapped.values(), all_.paused.values()):
            if sequence.group is None:
                yield sequence
        yield from self._beams.choices.values()

    def is_due(self, now: float) -> bool:
        """Whether the time of one that is paused may be over: nothing else would bring a step."""
        return bool(self.sequences.paused and self._deadlines) and self._deadlines[0][0] <= now

    @property
    def next_deadline_s(self) -> float | None:
        """When that would be."""
        return self._deadlines[0][0] if self.sequences.paused and self._deadlines else None

    def take_ended(self) -> Committed:
        """What ended since the last call other than by `commit` and `end`: for the time, or for want of memory."""
        ended = self._ended
        if ended:
            self._ended = Committed.nothing()
        return ended

    def latest_matchers(self) -> "list[Matcher]":
        """Of the rows that the latest plan masks, in its order. They must have its tokens before it is committed."""
        return self._submitted[-1].matchers

    def take_swap_orders(self) -> list[SwapOrders]:
        """What the executor must start now, after the plan of the same turn was submitted."""
        orders, self.sequences.swap_orders = self.sequences.swap_orders, []
        return [order for order in orders if len(order)]

    def swap_ended(self, ticket: int, *, succeeded: bool) -> None:
        """A swap order has been carried out, or could not be: then whose pages did not come computes them again."""
        if succeeded:
            self.memory.complete(ticket)
            return
        for row in self.memory.fail(ticket):
            sequence = self._rows.sequences[row]
            if sequence is not None and sequence.state in (State.SWAPPED, State.PAUSED):
                self.sequences.recompute(sequence)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. Every plan must be submitted, and committed in order."""
        self.memory.turn(now, self._step + 1)
        if self._deadlines and self._deadlines[0][0] <= now:
            self._end_late(now)
        self.sequences.swap_orders.append(self.memory.background_reclaim())
        if (steady := self._steady) is not None and self._is_steady(steady):
            self._report_compute_pressure(now)
            return self._steady_plan(steady, now)
        while True:
            before = self.preemptions
            decodes, chunks = self._chooser.choose(self._ended, now)
            if len(decodes) or chunks or not (self.preemptions > before or self._give_way(now)):
                break  # else somebody has given up pages, and others may run by that
        self._report_pressure()
        self._report_compute_pressure(now)
        if not len(decodes) and not chunks:
            if self._groups is not None:
                self._groups.forget()  # rows may come back from swap to other frames
            return None
        return self._plan(decodes, chunks, now)

    def expect(self) -> None:
        """Find out to whom the tokens of the oldest submitted step go, while it is computed; one that is steady takes
        no time to commit.
        """
        submitted = self._submitted[0]
        if submitted.steady is None:
            submitted.expected = self._outcomes.expected(submitted)

    def early(self, result: StepResult) -> Committed | None:
        """What `commit` will bring of the oldest submitted step, but for the gaps, if that is nothing but the tokens
        that were expected: a first token need not wait for the books.
        """
        expected = self._submitted[0].expected
        if expected is None or expected.changes != self.sequences.changes:
            return None
        return expected.brought_by(result)

    def commit(self, result: StepResult, now: float) -> Committed:
        """Take the result of the oldest submitted step: append tokens, find who ended, free what they held."""
        submitted, state = self._submitted.popleft(), self._rows
        if self._pace is not None:
            self._pace.observe(StepWork.of(submitted.plan), now - max(self._committed_s, submitted.planned_s))
            self._committed_s = now
        steady = self._steady
        is_same = steady is not None and submitted.steady is steady and steady.changes == self.sequences.changes
        if steady is not None and is_same and not result.failed.any():
            return self._commit_steady(submitted, steady, result, now)
        sampled = submitted.plan.samples.nonzero()[0]
        all_rows = submitted.plan.rows[sampled]
        mine = submitted.epochs[sampled] == state.epoch[all_rows]
        good = mine & ~result.failed[sampled]
        if self._beams.groups:
            self._outcomes.take_candidates(submitted, result, sampled[good])
            good &= ~state.is_beam[all_rows]
        rows, tokens = all_rows[good], result.tokens[sampled[good]]
        index = index_of(rows)
        state.tokens[rows, state.known[index]] = tokens
        state.known[index] += 1
        gaps = now - state.last_token_s[index]
        state.last_token_s[index] = now
        self._outcomes.publish(submitted, result)
        for row in rows[state.known[index] == state.prompt[index] + 1].tolist():
            self._rows.at(row).first_token_s = now
        committed = Committed(state.front_end[rows], state.sequence_id[rows], tokens, gaps)
        if submitted.scored and not result.lacks_memory:
            self._outcomes.score_prompts(committed, submitted, result)
        if len(submitted.asking) and not result.lacks_memory:
            self._outcomes.score_tokens(committed, submitted, result, sampled[good])
        stopped = (state.end_ids[index] == tokens[:, None]).any(axis=1)
        complete = self._outcomes.complete(submitted)[sampled[good]] if submitted.matchers else None
        self._outcomes.end_rows(committed, rows, stopped, state.known[index] == state.limit[index], complete, now)
        if result.failed.any():  # also of a chunk that is not the last: nothing good can come after it
            lost = result.failed & (submitted.epochs == state.epoch[submitted.plan.rows])
            for place in np.flatnonzero(lost).tolist():
                row = int(submitted.plan.rows[place])
                self._outcomes.fail_row(committed, row, now, lacks_memory=result.is_starved(place))
        if not mine.all():
            self._outcomes.commit_bereft(committed, submitted, result, sampled[~mine], now)
        if self._beams.groups:
            committed.extend(self._beams.go_on(now))
        return committed

    def end(self, sequence: Sequence, reason: EndReason, now: float, **facts: Any) -> Ended:
        """Sequences.end, or Beams.end_choice."""
        if sequence.state is State.CHOICE:
            return self._beams.end_choice(sequence, reason, now, output=facts.get("output", 0))
        return self.sequences.end(sequence, reason, now, **facts)

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
        """Nothing can run. If nothing is on its way either, those that operators have paused give up what they hold;
        else beams stand still for want of pages (rule 10).

        The youngest search gives its pages up, for others that hold some or wait to come back from swap. Where it is
        the only one, its own beams come next; if they do not fit, it has the whole pool, and ends with what it has.
        Returns whether anything has changed.
        """
        if self._submitted or self.memory.is_copying:
            return False
        if self._has_unpaused and self._victims.take_from_paused():
            return True
        groups = [group for group in self._beams.groups if group.family.with_row]
        if not groups:
            return False
        groups.sort(key=lambda group: int(self._rows.arrival[row_of(next(iter(group.family.with_row.values())))]))
        oldest, youngest = groups[0], groups[-1]
        others_swapped = any(sequence.group is not youngest for sequence in self.sequences.swapped.values())
        if oldest is not youngest or others_swapped:
            for beam in list(youngest.family.with_row.values()):
                self.sequences.recompute(beam)
            self.sequences.put_first(oldest.beams)
        elif not self.sequences.put_first(oldest.beams):
            self._chooser.oom_ends += 1
            self._beams.finish(oldest, "length", now, self._ended)
        return True

    # --- steady decode

    def _is_steady(self, steady: Steady) -> bool:
        """Whether the next step is the one before, one token further."""
        all_ = self.sequences
        return (
            steady.changes == all_.changes
            and steady.steps > 0
            and not (all_.waiting and (self._admission.has_place or self._admission.is_urgent))
            and not all_.swapped
            and len(steady.rows) <= self.memory.available_frames
            and (not self.memory.tenants.is_limited or self.memory.shortage(steady.rows, steady.ones) is None)
        )

    def _steady_plan(self, steady: Steady, now: float) -> StepPlan:
        """The plan of the step before, one token further."""
        plan = steady.next_plan(self._step + 1, self.memory)
        self._step += 1
        self.sequences.shares.decode(steady.rows)
        matchers = self._submitted[-1].matchers if self._submitted else self._matchers_of(plan)
        self._submitted.append(Submitted(plan, steady.epochs, steady, steady.asking, now, matchers=matchers))
        return plan

    def _commit_steady(self, submitted: Submitted, steady: Steady, result: StepResult, now: float) -> Committed:
        """`commit` for rows that have all been committed in the step before too: nobody is new, nobody has left."""
        committed, stopped, full = steady.commit(result.tokens, result.logprobs, self._rows, self.memory, now)
        complete = self._outcomes.complete(submitted) if submitted.matchers else None
        if stopped is not None and full is not None:
            self._outcomes.end_rows(committed, steady.rows, stopped, full, complete, now)
        elif complete is not None and complete.any():
            nobody = np.zeros(len(complete), np.bool_)
            self._outcomes.end_rows(committed, steady.rows, nobody, nobody, complete, now)
        return committed

    def _matchers_of(self, plan: StepPlan) -> "list[Matcher]":
        rows = () if plan.masked is None else plan.rows[plan.masked].tolist()
        matchers = [self._rows.at(row).matcher for row in rows]
        return [matcher for matcher in matchers if matcher is not None]

    # --- what a step is made of

    def _report_pressure(self) -> None:
        """Who stands still for want of pages, and who gets on. Waiting ones beyond LOOK_AHEAD are not counted."""
        all_ = self.sequences
        if not (all_.swapped or all_.waiting or self._stand_still):
            return  # nobody does, as before
        still = Counter(sequence.tenant for sequence in all_.swapped.values())
        passed_by: set[str] = set()
        for sequence in all_.waiting.in_order(LOOK_AHEAD, passed_by):
            if sequence.blocked_at < 0 and sequence.held_at < 0:
                break
            still[sequence.tenant] += 1
            if sequence.held_at >= 0:
                passed_by.add(sequence.tenant)  # those behind it wait for their turn
        self._stand_still = bool(still)
        self.memory.report_pressure(still, all_.running_by_tenant)

    def _report_compute_pressure(self, now: float) -> None:
        """Whether anybody waits, and not for memory: for a place or the budget of a step. Others get on meanwhile."""
        all_ = self.sequences
        waits = bool(all_.waiting) and not all_.swapped
        waits = waits and not (self._admission.is_short and self._admission.has_place)
        if waits != self._waits_for_compute or not self._step:
            self._waits_for_compute = waits
            self.compute_pressure.report(now, waiting=int(waits), progressing=1)

    def _plan(self, decodes: Int32Array, chunks: Chunks, now: float) -> StepPlan:
        state = self._rows
        rows, counts = rows_and_counts(decodes, chunks)
        chunk_rows = rows[len(decodes) :]
        starts = self.memory.tables.lengths[rows]
        orders = self.memory.grow(rows, counts)
        token_ids: list[Int32Array] = []
        if len(decodes):
            fed_back = state.known[decodes] == starts[: len(decodes)]  # the token to compute is the device's alone
            newest = state.tokens[decodes, starts[: len(decodes)]]
            token_ids.append(np.where(fed_back, FED_BACK, newest).astype(np.int32))
        for row, start, count in zip(chunk_rows, starts[len(decodes) :], counts[len(decodes) :], strict=True):
            token_ids.append(state.tokens[row, start : start + count])
        index = index_of(rows)
        remaining = state.remaining[index]
        samples = counts == remaining
        has_beams = bool(self._beams.groups and state.is_beam[index].any())
        state.remaining[index] = remaining - counts + (samples & ~state.is_beam[index] if has_beams else samples)
        entered, self.sequences.entered = self.sequences.entered, []
        settings = None
        if entered:
            entered_rows = np.array([row_of(sequence) for sequence in entered], np.int32)
            settings = RowSettings(
                rows=entered_rows,
                parameters=[sequence.sampling for sequence in entered],
                prompts=np.array([sequence.answer_begin for sequence in entered], np.int32),
                histories=[self._history(sequence) for sequence in entered],
            )
        masked, asking = NO_TOKENS, NO_PLACES  # what nobody asks for is not looked for: a first token waits for this
        if state.constrained:
            masked = (samples & state.is_constrained[index]).nonzero()[0].astype(np.int32)
        if state.reporting:
            asking = (samples & (state.logprobs[index] >= 0)).nonzero()[0]
        if len(decodes):
            self.sequences.shares.decode(decodes)
        query_starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=query_starts[1:])
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
            groups=self._groups.of(decodes, starts[: len(decodes)]) if self._groups is not None else None,
            scored=scored,
            masked=masked if len(masked) else None,
        )
        if (before := self._steady) is not None:  # its steps have noted nothing
            stayed = before.rows[before.epochs == state.epoch[before.rows]]
            state.last_step[stayed] = self._step - 1
        state.last_step[index] = self._step
        epochs = state.epoch[rows]
        is_steady = not chunks and len(rows) > 0 and not has_beams and np.count_nonzero(state.remaining) == len(rows)
        self._steady = Steady.after(plan, epochs, state, self.sequences.changes) if is_steady else None
        self._submitted.append(Submitted(plan, epochs, None, asking, now, scored_chunks, self._matchers_of(plan)))
        return plan

    def _history(self, sequence: Sequence) -> Int32Array:
        """All its tokens, if its sampling parameters look back at them."""
        if not sequence.sampling.needs_history:
            return NO_TOKENS
        row = row_of(sequence)
        return self._rows.tokens[row, : self._rows.known[row]].copy()
