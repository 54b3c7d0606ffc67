"""A real engine over the simulated executor that a test steps by hand, under a load that its small pool cannot hold."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from simulated_executor import VOCABULARY, SimulatedExecutor

from mm import CostEstimates, MemoryManager, QuotaExceeded, TenantLimits
from model.step_plan import SamplingParameters
from service.admin_views import Inside, Inspector
from service.engine import Engine
from service.engine_client import Cancel, EngineClient, Event, Limits, Sibling, Submit
from service.inspector import inspector
from service.metrics import Metrics
from service.operations import Operations
from service.questions import Act, Look, ViewQuery
from service.scheduler import Scheduler, SchedulerSettings
from service.settings import Settings

PAGE = 4
LENGTH = 80


class Deaf:
    """A front end that reads nothing."""

    def deliver(self, event: Event) -> None: ...


class FixedCosts(CostEstimates):
    """Not measured: so whether victims swap or recompute is the same in each run."""

    WEIGHT = 0.0


class SteppedEngine:
    """`step()` is one turn; `act()` one thing that clients or operators may do."""

    def __init__(
        self,
        seed: int = 0,
        *,
        frames: int = 40,
        slots: int = 24,
        shows_text: bool = False,
        ageing_s: float | None = None,
    ) -> None:
        self.memory = MemoryManager(
            frames=frames, max_rows=12, max_pages=LENGTH // PAGE, page_size=PAGE, slots=slots, costs=FixedCosts()
        )
        self.memory.tenants.set_limits("small", TenantLimits(max=24, high=20))
        bounds = SchedulerSettings(max_running=8, max_batched_tokens=24, max_length=LENGTH, ageing_s=ageing_s)
        self.executor = SimulatedExecutor(self.memory)
        self.executor.end_swaps = lambda ticket: True if self.chance.random() < 0.4 else None
        limits = Limits(max_model_len=LENGTH, max_request_tokens=LENGTH, max_queue_requests=999, vocabulary=VOCABULARY)
        metrics = Metrics("x")
        self.now = 100.0
        scheduler = Scheduler(self.memory, bounds)
        self.engine = Engine(scheduler, self.executor, limits, metrics, clock=lambda: self.now)
        self.engine.connect(0, Deaf())
        self.client = EngineClient(self.engine)
        inside = Inside(self.engine, shows_text=shows_text)
        settings = Settings(admin_api_key="secret")
        self.inspector: Inspector = inspector(inside, metrics, settings, {"admin_api_key": "env"})
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.operations = Operations(inside, lambda: None, lambda *call: self.later.append(call))
        self.chance = random.Random(seed)
        self.submitted = 0

    async def step(self) -> None:
        self.now += 0.01
        if self.engine.scheduler.has_work or self.engine.has_messages or self.memory.is_copying:
            await self.engine.step()

    def submit(self, prompt: list[int], max_tokens: int, choices: int = 1, **more: Any) -> int:
        """Returns the first choice's number."""
        first = self.submitted + 1
        self.submitted += choices
        siblings = [Sibling(number, number) for number in range(first + 1, first + choices)]
        greedy = SamplingParameters(temperature=0.0)
        options: dict[str, Any] = {"siblings": siblings} | more
        self.engine.post(0, Submit(first, f"request {first}", prompt, max_tokens, greedy, [], **options))
        return first

    def act(self) -> None:
        """Something happens."""
        chance = self.chance
        match chance.randrange(6):
            case 0 | 1 | 2:
                begin = [7, 8, 9, 10, 11, 12, 13, 14][: chance.randrange(0, 9)]
                prompt = begin + [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 30))]
                tenant = chance.choice(["default", "small"])
                self.submit(prompt, chance.randrange(1, 30), chance.choice([1, 1, 3]), tenant=tenant)
            case 3:
                self.engine.post(0, Cancel(chance.randrange(1, 1 + max(1, self.submitted))))
            case 4 | 5:
                self.act_on_pins()

    def act_on_pins(self) -> None:
        """A pin comes, or some go."""
        chance = self.chance
        match chance.randrange(2):
            case 0:
                chain = self.memory.chain(np.array([7, 8, 9, 10, 11, 12, 13, 14], np.int32))
                with suppress(QuotaExceeded):
                    self.memory.pin(chain, "operator", ttl_s=chance.choice([None, 0.05]))
            case 1:
                for number in list(self.memory.pins.held)[:2]:
                    self.memory.unpin(number)

    def do(self, action: str, of: str = "", **body: Any) -> Any:
        """An action, at once: between two steps."""
        return json.loads(self.operations.act(Act(action, of, json.dumps(body).encode(), "")))

    def look(self, view: str, of: str = "", **query: Any) -> bytes:
        return self.inspector.look(Look(view, of, ViewQuery(**query)))
