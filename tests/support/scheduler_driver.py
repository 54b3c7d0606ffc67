"""The engine's loop without asyncio over a simulated executor, for tests of the scheduler: every step is audited."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from simulated_executor import SimulatedExecutor

from mm import MemoryManager, TenantLimits
from model.step_plan import SamplingParameters, StepPlan
from service.committed import Committed
from service.engine_client import BeamSearch, Ended, PromptScores, Scores, Sibling, Submit
from service.request import Sequence, State
from service.scheduler import Scheduler, SchedulerSettings

GREEDY = SamplingParameters(temperature=0.0)


@dataclass
class Driver:
    """The engine's loop without asyncio: submits step k + 1 before it commits step k, and audits after each."""

    scheduler: Scheduler
    executor: SimulatedExecutor
    tickets: deque = field(default_factory=deque)
    output: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    scores: dict[int, list[Scores]] = field(default_factory=dict)
    prompt_scores: dict[int, list[Scores]] = field(default_factory=dict)
    now: float = 0.0
    turn_s: float = 1.0  # of the clock, that a turn takes
    step_s: Callable[[StepPlan], float] = lambda plan: 0.0  # and a step, until it can be committed
    gaps_s: list[float] = field(default_factory=list)  # between tokens of a Sequence, in order of the steps
    early_tokens: int = 0  # known before the commit

    def submit(self, prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = (), **options: Any) -> Sequence:
        return self.submit_choices(1, prompt, max_tokens, end_ids, **options)[0]

    def submit_choices(
        self,
        count: int,
        prompt: list[int],
        max_tokens: int,
        end_ids: tuple[int, ...] = (),
        *,
        sampling: SamplingParameters = GREEDY,
        beams: BeamSearch | None = None,
        **options: Any,
    ) -> list[Sequence]:
        """`count` choices; the seed of choice i is that of `sampling` plus i."""
        first = len(self.output)
        siblings = [Sibling(first + i, sampling.seed + i) for i in range(1, count)]
        message = Submit(
            first,
            f"r{first}",
            prompt,
            max_tokens,
            sampling,
            list(end_ids),
            siblings=siblings,
            beam_search=beams,
            **options,
        )
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)
        self.output.update({first + i: [] for i in range(count)})
        return self.scheduler.submit(message, 0, self.now)

    def step(self) -> None:
        self.now += self.turn_s
        for ticket, succeeded in self.executor.ended():
            self.scheduler.swap_ended(ticket, succeeded=succeeded)
        plan = self.scheduler.schedule(self.now)
        ended = self.scheduler.take_ended()
        self.note(ended)
        if plan is not None:
            self.tickets.append((plan, self.executor.submit(plan)))
        for orders in self.scheduler.take_swap_orders():
            self.executor.start(orders)
        assert plan or self.tickets or ended or self.executor.mover.in_flight or not self.scheduler.has_work, "stuck"
        if len(self.tickets) > (plan is not None):
            self.commit()
        self.scheduler.memory.check_invariants()
        assert self.executor.device.writes_to_shared == 0
        self.executor.device.poison_free_frames()

    def commit(self) -> None:
        plan, ticket = self.tickets.popleft()
        self.now += self.step_s(plan)
        self.scheduler.expect()
        early = self.scheduler.early(ticket.wait())
        committed = self.scheduler.commit(ticket.wait(), self.now)
        if early is not None:
            self.check_early(early, committed)
        self.gaps_s += committed.gaps_s[~np.isnan(committed.gaps_s)].tolist()
        self.note(committed)

    def check_early(self, early: Committed, committed: Committed) -> None:
        """It was all that front ends are told."""
        assert not any((committed.ended, committed.scores, committed.prompt_scores))
        assert early.concerned == committed.concerned
        for front_end in early.concerned:
            (places, ids), (all_places, all_ids) = early.of(front_end), committed.of(front_end)
            assert ids == all_ids
            assert early.tokens[places].tolist() == committed.tokens[all_places].tolist()
        self.early_tokens += len(early.tokens)

    def note(self, committed: Committed) -> None:
        for front_end, scores in committed.prompt_scores:
            assert front_end == 0
            self.note_prompt_scores(scores)
        for place, token in enumerate(committed.tokens.tolist()):
            sequence_id = int(committed.sequence_ids[place])
            assert sequence_id not in self.ended, "a token after the end"
            self.output[sequence_id].append(token)
            if place in committed.scores:
                self.scores.setdefault(sequence_id, []).append(committed.scores[place])
        for sequence, ended in committed.ended:
            assert sequence.state is State.ENDED
            assert sequence.sequence_id not in self.ended
            self.ended[sequence.sequence_id] = ended

    def note_prompt_scores(self, message: PromptScores) -> None:
        """In order, each once, and before the first token."""
        scores = self.prompt_scores.setdefault(message.sequence_id, [])
        assert message.first == len(scores) + 1
        assert not self.output[message.sequence_id]
        scores.extend(message.scores)

    def end(self, sequence: Sequence, output: int | None = None) -> None:
        """The client cancels it, or (output) has found a text stop."""
        reason = "abort" if output is None else "stop"
        self.ended[sequence.sequence_id] = self.scheduler.end(sequence, reason, self.now, output=output)

    def run(self, limit: int = 2000) -> int:
        steps = 0
        while self.scheduler.has_work or self.executor.mover.in_flight:
            self.step()
            steps += 1
            assert steps < limit, "no end: a livelock"
        memory = self.scheduler.memory
        assert memory.free_frames + memory.lru.idle_pages == memory.frames.total
        assert not self.scheduler.sequences._bereft
        assert not self.scheduler._beams.groups
        assert not self.scheduler._beams.choices
        information = memory.information()
        assert (information.saved_frames, information.committed_frames) == (0, 0)
        return steps


def make(
    *,
    frames: int = 64,
    rows: int = 8,
    page_size: int = 4,
    max_batched_tokens: int = 16,
    max_length: int = 200,
    slots: int = 0,
    tenants: dict[str, TenantLimits] | None = None,
    **more: Any,
) -> Driver:
    """`more`: of SchedulerSettings."""
    memory = MemoryManager(
        frames=frames, max_rows=rows, max_pages=-(-max_length // page_size), page_size=page_size, slots=slots
    )
    for name, limits in (tenants or {}).items():
        memory.tenants.set_limits(name, limits)
    if slots:
        memory.costs.copy_page_s = 1e-9  # swap is always worth it
    bounds = SchedulerSettings(rows, max_batched_tokens, max_length, finds_shared_prefixes=True, **more)
    scheduler = Scheduler(memory, bounds)
    return Driver(scheduler, SimulatedExecutor(memory))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 50 for i in range(length)]
