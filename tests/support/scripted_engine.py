"""An engine without a model: each Sequence says what the test wrote for it. It keeps the rules of the real one:
one token a step, ends at an end id or at max_tokens, a Finish ends it, a Cancel is final.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mm import EventCounters, MemoryInformation
from service.engine_client import (
    Cancel,
    Ended,
    EngineDied,
    EngineSnapshot,
    EngineState,
    Finish,
    Limits,
    LocalEngineClient,
    Message,
    MissInfo,
    Submit,
    TokenBatch,
)

Script = Callable[[Submit], Sequence[int]]


@dataclass
class Line:
    """One running Sequence."""

    submit: Submit
    tokens: list[int]
    said: int = 0


@dataclass
class ScriptedEngine:
    """An EnginePort. `tick` is one step; it runs by itself unless `is_manual`."""

    limits: Limits
    script: Script
    step_s: float = 0.0
    is_manual: bool = False
    state: EngineState = "ready"
    is_alive: bool = True
    fail_after: int | None = None  # tokens, then an error
    cached_tokens: int = 0
    miss: MissInfo | None = None
    steps: int = 0
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    lines: dict[int, Line] = field(default_factory=dict)
    extra_waiting: int = 0

    def __post_init__(self) -> None:
        self.client = LocalEngineClient(self)
        self._work = asyncio.Event()

    @property
    def waiting(self) -> int:
        return self.extra_waiting

    def post(self, front_end: int, message: Message) -> None:
        match message:
            case Submit():
                self.submitted.append(message)
                self.lines[message.sequence_id] = Line(message, list(self.script(message)))
                self._work.set()
            case Cancel(sequence_id=sequence_id):
                self.cancelled.append(sequence_id)
                self.lines.pop(sequence_id, None)
            case Finish(sequence_id=sequence_id, at=at):
                self.finished.append(message)
                if self.lines.pop(sequence_id, None) is not None:
                    ended = Ended(
                        sequence_id, "stop", output_tokens=at, cached_tokens=self.cached_tokens, miss=self.miss
                    )
                    # the real one reads messages before its next step, not at once
                    asyncio.get_running_loop().call_soon(self._deliver, [], [], [ended])

    async def run(self) -> None:
        while True:
            await self._work.wait()
            while self.lines and not self.is_manual:
                await asyncio.sleep(self.step_s)
                self.tick()
            self._work.clear()

    def tick(self) -> None:
        """Every running Sequence says its next token."""
        self.steps += 1
        ids, tokens, ended = [], [], []
        for sequence_id, line in list(self.lines.items()):
            if self.fail_after is not None and line.said >= self.fail_after:
                ended.append(Ended(sequence_id, "error", message="the model produced numbers that are not finite"))
                del self.lines[sequence_id]
                continue
            end_ids = line.submit.end_ids
            token = line.tokens[line.said] if line.said < len(line.tokens) else (end_ids or line.tokens)[0]
            line.said += 1
            ids.append(sequence_id)
            tokens.append(token)
            if token in end_ids or line.said >= line.submit.max_tokens:
                ended.append(
                    Ended(
                        sequence_id,
                        "stop" if token in end_ids else "length",
                        end_token=token if token in end_ids else -1,
                        output_tokens=line.said,
                        cached_tokens=self.cached_tokens,
                        miss=self.miss,
                    )
                )
                del self.lines[sequence_id]
        self._deliver(ids, tokens, ended)

    def die(self) -> None:
        self.state, self.is_alive = "dead", False
        self.lines.clear()
        self.client.deliver(EngineDied("the engine has stopped because of an internal error"))

    def _deliver(self, ids: list[int], tokens: list[int], ended: list[Ended]) -> None:
        self.client.deliver(TokenBatch(self.steps, ids, tokens, ended))

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state=self.state,
            step=self.steps,
            uptime_s=12.5,
            running=len(self.lines),
            swapped=0,
            waiting=self.waiting,
            preemptions=0,
            memory=MemoryInformation(
                total_frames=100,
                free_frames=80,
                cached_frames=11,
                active_frames=7,
                copying_frames=2,
                available_frames=91,
                cached_pages=14,
                total_slots=40,
                free_slots=37,
                shared_frames=2,
                references=9,
                rows=3,
                tokens=130,
                unused_tokens=14,
                page_size=16,
            ),
            counters=EventCounters(allocate=7, free=0, cow_fault=0, fork=0, truncate=0),
            frame_bytes=4096,
        )
