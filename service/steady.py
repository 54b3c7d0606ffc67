"""Steady decode: the same rows as in the step before, one token further. What stays the same is kept, so that a step of
a thousand rows costs a dozen numpy operations.

It begins with a plan in which every row decodes, and ends when a row changes hands, somebody could be admitted, or a
limit is reached: the scheduler looks at that before each step.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from mm import MemoryManager, SteadyRows
from mm.addresses import BoolArray, FloatArray, IndexArray, Int32Array, Int64Array, empty_int32
from model.step_plan import FED_BACK, LogProbs, StepPlan
from service.committed import Committed, Recipients
from service.rows import RunningRows
from service.scores import scores_of


@dataclass(slots=True)
class Steady:
    """Rows that decode step after step, and what stays the same meanwhile. Valid while no row changes hands."""

    changes: int  # of Sequences, when this was made
    rows: Int32Array
    ones: Int32Array
    starts: Int32Array  # of the first step
    steps: int  # until the first of them reaches its limit
    plan: StepPlan  # the last one: its rows, query_starts, token_ids and samples serve again
    epochs: Int64Array
    recipients: Recipients
    end_ids: list[Int32Array]  # (S,) each: the first of every row, the second, ...
    asking: Int64Array  # places in `rows` that report log-probabilities, ...
    likeliest: list[int]  # ... and of how many tokens each
    in_memory: SteadyRows | None = None  # from the first step on
    known: Int32Array = field(default_factory=empty_int32)  # (S,) tokens that the host has; from the first commit on
    places: IndexArray = field(
        default_factory=lambda: np.empty(0, np.intp)
    )  # likewise: of the next ones, in all tokens
    last_token_s: float = 0.0  # likewise

    @classmethod
    def after(cls, plan: StepPlan, epochs: Int64Array, state: RunningRows, changes: int) -> "Steady":
        """What the next steps will share with a plan in which all rows decode."""
        rows, starts = plan.rows, plan.starts + 1
        width = int(state.end_id_counts[rows].max())
        logprobs = state.logprobs[rows]
        asking = (logprobs >= 0).nonzero()[0]
        return cls(
            changes=changes,
            rows=rows,
            ones=np.ones(len(rows), np.int32),
            starts=starts,
            steps=int((state.limit[rows] - starts).min()) - 1,
            plan=replace(plan, token_ids=np.full(len(rows), FED_BACK, np.int32)),
            epochs=epochs,
            recipients=Recipients(state.front_end[rows], state.sequence_id[rows]),
            end_ids=list(state.end_ids[rows, :width].T),
            asking=asking,
            likeliest=logprobs[asking].tolist(),
        )

    def next_plan(self, step: int, memory: MemoryManager) -> StepPlan:
        """The plan of the step before, one token further: its memory is there. Raises OutOfFrames."""
        if self.in_memory is None:
            self.in_memory = SteadyRows(self.rows, self.starts, memory.page_size)
        last, starts = self.plan, self.in_memory.lengths
        orders = memory.grow_steadily(self.in_memory)
        plan = StepPlan(
            step=step,
            orders=orders,
            settings=None,
            rows=last.rows,
            starts=starts,
            query_starts=last.query_starts,
            token_ids=last.token_ids,
            samples=last.samples,
            decodes=last.decodes,
            masked=last.masked,
            groups=last.groups,
        )
        self.plan = plan
        self.steps -= 1
        return plan

    def commit(
        self, tokens: Int32Array, found: LogProbs | None, state: RunningRows, memory: MemoryManager, now: float
    ) -> tuple[Committed, BoolArray | None, BoolArray | None]:
        """Append the tokens of a step of these rows, all of which were committed in the step before too.

        Returns also which rows sampled an end token, and which are full: each (S,), None where nobody is either.
        """
        assert self.in_memory is not None, "no step has been planned"
        index = self.in_memory.index
        if not len(self.known):
            self.known = state.known[self.rows]
            self.places = self.rows.astype(np.intp) * state.tokens.shape[1] + self.known
            gaps: FloatArray = now - state.last_token_s[self.rows]
            memory.publish(self.rows, self.known, state.tokens)
        else:
            gaps = np.full(len(self.rows), now - self.last_token_s)  # their last ones came together
            if len(full := self.in_memory.edges.at(self.known)):
                memory.publish(self.rows[full], self.known[full], state.tokens)
        state.tokens.reshape(-1)[self.places] = tokens
        self.known = known = self.known + 1
        self.places += 1
        state.known[index] = known
        state.last_token_s[index] = self.last_token_s = now
        committed = Committed.to(self.recipients, tokens, gaps)
        if self.likeliest:
            assert found is not None
            committed.scores = dict(zip(self.asking.tolist(), scores_of(found, self.likeliest), strict=True))
        return committed, *self._ends(tokens, state)

    def _ends(self, tokens: Int32Array, state: RunningRows) -> tuple[BoolArray | None, BoolArray | None]:
        over = self.steps <= 1  # the limits are known ahead: two steps are on their way at most
        if not self.end_ids and not over:
            return None, None
        stopped: BoolArray = np.zeros(len(tokens), np.bool_)
        for ids in self.end_ids:
            stopped |= ids == tokens
        if not over and not np.count_nonzero(stopped):
            return None, None
        return stopped, self.known == state.limit[self.rows]
