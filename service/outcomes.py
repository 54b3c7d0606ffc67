"""What a step's result means for the rows it ran: pages that can be shared, scores, candidates of beams, and who ends.

`Scheduler.commit` appends the tokens, and asks here for the rest. Rules are those of scheduler.py, by number.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mm import MemoryManager
from mm.addresses import BoolArray, Int32Array, Int64Array, index_of
from model.step_plan import StepPlan, StepResult
from service.beams import Beams
from service.committed import Committed, Expected, Recipients
from service.engine_client import Ended, EndReason
from service.request import Sequence
from service.scores import ScoredChunk, prompt_scores, scores_of
from service.sequences import Sequences
from service.steady import Steady

if TYPE_CHECKING:
    from service.grammars import Matcher

NO_MEMORY = "there was no memory to compute this request"
NOT_FINITE = "the model produced numbers that are not finite for this request"
NOTHING_LEFT = "The grammar and the fields that bar tokens have together left none that may come next."


@dataclass(slots=True)
class Submitted:
    """A plan on its way, and whose rows it ran: a row may have changed hands before the result is there."""

    plan: StepPlan
    epochs: Int64Array  # (S,)
    steady: Steady | None
    asking: Int64Array  # places of the rows that report log-probabilities
    planned_s: float
    scored: Collection[ScoredChunk] = ()
    matchers: "list[Matcher]" = field(default_factory=list)  # of the rows plan.masked
    expected: Expected | None = None  # what `Scheduler.expect` has found


class Outcomes:
    """Of steps over the rows of `memory`."""

    def __init__(self, memory: MemoryManager, sequences: Sequences, beams: Beams) -> None:
        self._memory = memory
        self._sequences = sequences
        self._rows = sequences.rows
        self._beams = beams

    def take_candidates(self, submitted: Submitted, result: StepResult, places: Int64Array) -> None:
        """Beams get their likeliest next tokens. places: of the rows that sampled and are still the same."""
        rows = submitted.plan.rows[places]
        for place in places[self._rows.is_beam[rows]].tolist():
            assert result.logprobs is not None
            beam = self._rows.at(int(submitted.plan.rows[place]))
            self._beams.take(beam, result.logprobs, int(np.searchsorted(submitted.asking, place)))

    def score_tokens(self, committed: Committed, submitted: Submitted, result: StepResult, places: Int64Array) -> None:
        """The scores of the committed tokens whose rows ask for some. places (N,): of those tokens in the plan."""
        assert result.logprobs is not None
        where = np.flatnonzero(np.isin(places, submitted.asking))
        if len(where):
            found = result.logprobs.take(np.searchsorted(submitted.asking, places[where]))
            likeliest = self._rows.logprobs[submitted.plan.rows[places[where]]].tolist()
            committed.scores = dict(zip(where.tolist(), scores_of(found, likeliest), strict=True))

    def score_prompts(self, committed: Committed, submitted: Submitted, result: StepResult) -> None:
        """The scores of the prompt tokens that the step was asked for."""
        assert result.scored is not None
        failed = [bool(result.failed[chunk.place]) for chunk in submitted.scored]
        committed.prompt_scores = prompt_scores(submitted.scored, result.scored, failed)

    def expected(self, submitted: Submitted) -> Expected | None:
        """None: who gets what is only known when all of the result has been looked at."""
        plan, state = submitted.plan, self._rows
        if submitted.matchers or submitted.scored or len(submitted.asking) or self._beams.groups:
            return None
        places = plan.samples.nonzero()[0]
        rows = plan.rows[places]
        index = index_of(rows)
        if np.count_nonzero(submitted.epochs[places] != state.epoch[index]):
            return None  # preempted meanwhile
        if np.count_nonzero(state.known[index] + 1 == state.limit[index]):
            return None
        recipients = Recipients(state.front_end[index], state.sequence_id[index])
        for front_end in recipients.distinct:
            recipients.of(front_end)  # now: the step is still being computed
        no_gaps = np.full(len(rows), np.nan)
        return Expected(index_of(places), recipients, state.end_ids[index], no_gaps, self._sequences.changes)

    def publish(self, submitted: Submitted, result: StepResult) -> None:
        """Cache the pages that a step filled, of rows that are still the same and whose numbers are good (rule 6)."""
        plan = submitted.plan
        good = (submitted.epochs == self._rows.epoch[plan.rows]) & ~result.failed
        # pages on their way to swap are published when they are back
        good &= self._memory.tables.barred[plan.rows] == 0
        self._memory.publish(plan.rows[good], plan.lengths[good], self._rows.tokens)

    def end_rows(
        self,
        committed: Committed,
        rows: Int32Array,
        stopped: BoolArray,
        full: BoolArray,
        complete: BoolArray | None,
        now: float,
    ) -> None:
        """End the Sequences of `rows` that sampled an end token, have all that their grammar admits, or are as long as
        they may be.
        """
        over = stopped if complete is None else stopped | complete
        for i in (over | full).nonzero()[0].tolist():
            sequence = self._rows.at(int(rows[i]))
            reason: EndReason = "stop" if over[i] else "length"
            token = int(committed.tokens[i]) if stopped[i] else -1
            committed.ended.append((sequence, self._sequences.end(sequence, reason, now, end_token=token)))

    def fail_row(self, committed: Committed, row: int, now: float, *, lacks_memory: bool) -> None:
        """A row has failed: its Sequence ends, or its whole search."""
        sequence = self._rows.sequences[row]
        if sequence is None:
            return  # another beam of its search has failed before it
        if sequence.group is not None:
            self._beams.fail(sequence.group, NO_MEMORY if lacks_memory else NOT_FINITE, now, committed)
        else:
            committed.ended.append((sequence, self._end_failed(sequence, now, lacks_memory=lacks_memory)))

    def _end_failed(self, sequence: Sequence, now: float, *, lacks_memory: bool) -> Ended:
        """End one whose row has failed: no memory, numbers that are not finite, or by its grammar no token can come."""
        if lacks_memory:
            return self._sequences.end(sequence, "error", now, message=NO_MEMORY)
        error = "" if sequence.matcher is None else sequence.matcher.error
        if error:
            message = f"The output cannot go on in its grammar: {error}."
            return self._sequences.end(sequence, "error", now, message=message, is_refused=True)
        if sequence.matcher is not None and sequence.sampling.bars_tokens:
            return self._sequences.end(sequence, "error", now, message=NOTHING_LEFT, is_refused=True)
        return self._sequences.end(sequence, "error", now, message=NOT_FINITE)

    def commit_bereft(
        self, committed: Committed, submitted: Submitted, result: StepResult, places: Int64Array, now: float
    ) -> None:
        """Add the tokens of Sequences that were preempted while this step was on its way; other tokens are junk."""
        for place in places.tolist():
            sequence = self._sequences.claim(int(submitted.plan.rows[place]), int(submitted.epochs[place]))
            if sequence is None:
                continue
            if result.failed[place]:
                failed = self._end_failed(sequence, now, lacks_memory=result.is_starved(place))
                committed.ended.append((sequence, failed))
                continue
            token, scores = int(result.tokens[place]), None
            if sequence.sampling.logprobs >= 0:
                assert result.logprobs is not None
                found = result.logprobs.take(np.searchsorted(submitted.asking, [place]))
                scores = scores_of(found, [sequence.sampling.logprobs])[0]
            committed.add(sequence, [token], scores)
            if reason := self._sequences.give(sequence, token, now):
                end_token = token if token in sequence.end_ids else -1
                committed.ended.append((sequence, self._sequences.end(sequence, reason, now, end_token=end_token)))

    def complete(self, submitted: Submitted) -> BoolArray:
        """(S,) of a step's rows: whether nothing can follow in the row's grammar."""
        complete = np.zeros(len(submitted.plan.rows), np.bool_)
        complete[submitted.plan.masked] = [matcher.is_complete for matcher in submitted.matchers]
        return complete
