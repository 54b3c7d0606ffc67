"""The least that turns prompts into tokens through an Executor: StepPlans by hand, no scheduler, no memory manager.

Frames are dealt in shuffled order, one Sequence a row, and never reused, so a test sees the executor alone.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np
from slow_sampling import packed_masks

from mm.addresses import pages_for
from mm.page_copies import MemoryOrders, TableChanges
from model.executor import Executor
from model.step_plan import FED_BACK, RowSettings, SamplingParameters, StepPlan

GREEDY = SamplingParameters(temperature=0.0)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Running:
    """One Sequence of the driver."""

    row: int
    prompt: list[int]
    wanted: int
    done: int = 0  # prompt tokens computed
    pages: int = 0
    output: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.done == len(self.prompt)


class PlanDriver:
    def __init__(
        self, executor: Executor, *, page_size: int = 16, seed: int = 0, masked: dict[int, np.ndarray] | None = None
    ) -> None:
        """masked: (V) bool of rows that sample under a mask, always the same."""
        self.masked = masked or {}
        self.executor = executor
        self.page_size = page_size
        self.free = np.random.default_rng(seed).permutation(executor.frames).astype(np.int32).tolist()
        self.steps = 0

    def generate(
        self,
        prompts: Ids[Ids[int]],
        tokens: int | Ids[int],
        *,
        budget: int = 512,
        sampling: Ids[SamplingParameters] | None = None,
        arrive: int | None = None,
    ) -> list[Running]:
        """Run all prompts, greedy unless `sampling` says otherwise, `budget` tokens a step at most.

        arrive: so many prompts join at each step; None: all at once.
        """
        wanted = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        waiting = [Running(row, list(p), w) for row, (p, w) in enumerate(zip(prompts, wanted, strict=True))]
        everyone = list(waiting)
        parameters = list(sampling or [GREEDY] * len(prompts))
        settings = RowSettings(
            rows=np.arange(len(prompts), dtype=np.int32),
            parameters=parameters,
            prompts=int32(*(len(prompt) for prompt in prompts)),
            histories=[int32(*(p if s.needs_history else [])) for p, s in zip(prompts, parameters, strict=True)],
        )
        running: list[Running] = []
        while waiting or any(len(s.output) < s.wanted for s in running):
            joining = len(waiting) if arrive is None else min(arrive, len(waiting))
            running += [waiting.pop(0) for _ in range(joining)]
            self._step([s for s in running if len(s.output) < s.wanted], budget, settings if self.steps == 0 else None)
        return everyone

    def _step(self, running: list[Running], budget: int, settings: RowSettings | None) -> None:
        decoding = [s for s in running if s.is_decoding]
        chunks = [(s, 1) for s in decoding]
        left = budget - len(chunks)
        for s in running:
            if not s.is_decoding and left > 0:
                chunks.append((s, min(left, len(s.prompt) - s.done)))
                left -= chunks[-1][1]
        plan = self._plan(chunks, len(decoding), settings)
        ticket = self.executor.submit(plan)
        if plan.masked is not None:
            rows = plan.rows[plan.masked].tolist()
            self.executor.masks[: len(rows)] = packed_masks([self.masked[row] for row in rows])
            self.executor.sample(plan)
        result = ticket.wait()
        self.steps += 1
        for place, (s, count) in enumerate(chunks):
            if not s.is_decoding:
                s.done += count
            s.failed |= bool(result.failed[place])
            if plan.samples[place]:
                s.output.append(int(result.tokens[place]))
            else:
                assert result.tokens[place] == -1

    def _plan(self, chunks: list[tuple[Running, int]], decodes: int, settings: RowSettings | None) -> StepPlan:
        ids: list[int] = []
        starts, samples, changes = [], [], []
        for place, (s, count) in enumerate(chunks):
            start = s.done if place >= decodes else len(s.prompt) + len(s.output) - 1
            ids += [FED_BACK] if place < decodes else s.prompt[s.done : s.done + count]
            starts.append(start)
            samples.append(place < decodes or s.done + count == len(s.prompt))
            while s.pages < pages_for(start + count, self.page_size):
                changes.append((s.row, s.pages, self.free.pop()))
                s.pages += 1
        masked = [place for place, (s, _) in enumerate(chunks) if samples[place] and s.row in self.masked]
        rows, pages, frames = np.array(changes, np.int32).reshape(-1, 3).T
        return StepPlan(
            step=self.steps,
            orders=MemoryOrders(table_changes=TableChanges(rows, pages, frames)),
            settings=settings,
            rows=int32(*(s.row for s, _ in chunks)),
            starts=np.array(starts, np.int32),
            query_starts=np.cumsum([0] + [count for _, count in chunks]).astype(np.int32),
            token_ids=np.array(ids, np.int32),
            samples=np.array(samples, np.bool_),
            decodes=decodes,
            masked=int32(*masked) if masked else None,
        )
