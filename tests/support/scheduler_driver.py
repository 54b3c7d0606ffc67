"""Drives a Scheduler over a simulated executor, and audits memory after each step."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from simulated_executor import SimulatedExecutor

from mm import MemoryManager, TenantLimits
from model.step_plan import SamplingParameters
from service.engine_client import Ended, Submit
from service.request import Sequence, State
from service.scheduler import Scheduler, SchedulerSettings


@dataclass
class Driver:
    """The engine's loop without asyncio: submits step k + 1 before it commits step k, and audits after each."""

    scheduler: Scheduler
    executor: SimulatedExecutor
    tickets: deque = field(default_factory=deque)
    output: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    now: float = 0.0

    def submit(self, prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = (), **options: Any) -> Sequence:
        greedy = SamplingParameters(temperature=0.0)
        message = Submit(len(self.output), "r", prompt, max_tokens, greedy, list(end_ids), **options)
        sequence = Sequence.from_submit(message, 0, self.now)
        self.output[sequence.sequence_id] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        self.now += 1.0
        for ticket, succeeded in self.executor.ended():
            self.scheduler.swap_ended(ticket, succeeded=succeeded)
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.tickets.append(self.executor.submit(plan))
        for orders in self.scheduler.take_swap_orders():
            self.executor.start(orders)
        if len(self.tickets) > (plan is not None):
            self.commit()
        self.scheduler.memory.check_invariants()
        assert self.executor.device.writes_to_shared == 0
        self.executor.device.poison_free_frames()

    def commit(self) -> None:
        committed = self.scheduler.commit(self.tickets.popleft().wait(), self.now)
        for sequence_id, token in zip(committed.sequence_ids.tolist(), committed.tokens.tolist(), strict=True):
            self.output[sequence_id].append(token)
        for sequence, ended in committed.ended:
            assert sequence.state is State.ENDED
            self.ended[sequence.sequence_id] = ended

    def run(self, limit: int = 2000) -> int:
        steps = 0
        while self.scheduler.has_work or self.executor.mover.in_flight:
            self.step()
            steps += 1
            assert steps < limit, "no end: a livelock"
        memory = self.scheduler.memory
        assert memory.free_frames + memory.lru.idle_pages == memory.frames.total
        assert not self.scheduler.sequences._bereft
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
