"""Steady decode: the same rows as in the step before, one token further. What stays the same is kept, so that a step of
a thousand rows costs a dozen numpy operations.

It begins with a plan in which every row decodes, and ends when a row changes hands, somebody could be admitted, or a
limit is reached: the scheduler looks at that before each step.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from mm import MemoryManager, MemoryOrders
from mm.addresses import BoolArray, FloatArray, IndexArray, Int32Array, Int64Array, empty_int32
from model.step_plan import FED_BACK, LogProbs, StepPlan
from service.committed import Committed
from service.rows import RunningRows
from service.scores import scores_of


@dataclass(slots=True)
class Steady:
    """Rows that decode step after step, and what stays the same meanwhile. Valid while no row changes hands."""

    changes: int  # of Sequences, when this was made
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
    asking: Int64Array  # places in `rows` that report log-probabilities, ...
    likeliest: list[int]  # ... and of how many tokens each
    index: IndexArray  # the rows, as numpy indexes fastest
    known: Int32Array = field(default_factory=empty_int32)  # (S,) tokens that the host has; from the first commit on
    places: IndexArray = field(
        default_factory=lambda: np.empty(0, np.intp)
    )  # likewise: of the next ones, in all tokens

    @classmethod
    def after(cls, plan: StepPlan, epochs: Int64Array, state: RunningRows, changes: int) -> "Steady":
        """What the next steps will share with a plan in which all rows decode."""
        rows, starts = plan.rows, plan.starts + 1
        width = max(len(state.at(row).end_ids) for row in rows.tolist())
        logprobs = state.logprobs[rows]
        asking = np.flatnonzero(logprobs >= 0)
        return cls(
            changes=changes,
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
            asking=asking,
            likeliest=logprobs[asking].tolist(),
            index=rows.astype(np.intp),
        )

    def next_plan(self, step: int, orders: MemoryOrders) -> StepPlan:
        """The plan of the step before, one token further."""
        last = self.plan
        plan = StepPlan(
            step=step,
            orders=orders,
            settings=None,
            rows=last.rows,
            starts=self.starts,
            query_starts=last.query_starts,
            token_ids=last.token_ids,
            samples=last.samples,
            decodes=last.decodes,
            groups=last.groups,
        )
        self.plan = plan
        self.starts = self.starts + 1
        self.steps -= 1
        return plan

    def commit(
        self, tokens: Int32Array, found: LogProbs | None, state: RunningRows, memory: MemoryManager, now: float
    ) -> tuple[Committed, BoolArray | None, BoolArray | None]:
        """Append the tokens of a step of these rows, all of which were committed in the step before too.

        Returns also which rows sampled an end token, and which are full: each (S,), None where nobody is either.
        """
        index = self.index
        if not len(self.known):
            self.known = state.known[index]
            self.places = index * state.tokens.shape[1] + self.known
            gaps: FloatArray = now - state.last_token_s[index]
        else:
            gaps = np.full(len(index), now - state.last_token_s[index[0]])  # their last ones came together
        state.tokens.reshape(-1)[self.places] = tokens
        memory.publish(self.rows, self.known, state.tokens)
        self.known = known = self.known + 1
        self.places += 1
        state.known[index] = known
        state.last_token_s[index] = now
        committed = Committed(self.front_ends, self.sequence_ids, tokens, gaps)
        if self.likeliest:
            assert found is not None
            committed.scores = dict(zip(self.asking.tolist(), scores_of(found, self.likeliest), strict=True))
        over = self.steps <= 1  # the limits are known ahead: two steps are on their way at most
        if self.has_end_ids or over:
            stopped: BoolArray = (self.end_ids == tokens[:, None]).any(axis=1)
            if over or stopped.any():
                full: BoolArray = known == state.limit[index]
                return committed, stopped, full
        return committed, None, None
