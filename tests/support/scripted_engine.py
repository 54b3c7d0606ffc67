"""An engine without a model: each Sequence says what the test wrote for it. It keeps the rules of the real one:
one token a step, ends at an end id or at max_tokens, a Finish ends it, a Cancel is final; siblings run side by side;
scores of the prompt come before the first token; beams come all at once, the best first.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mm import EventCounters, MemoryInformation, Pressure, Stall
from model.executor import DeviceMemory
from service.engine_client import (
    Abort,
    Cancel,
    Ended,
    EngineClient,
    EngineDied,
    EngineSnapshot,
    EngineState,
    Finish,
    Limits,
    Message,
    MissInfo,
    OpenRequest,
    OpenSequence,
    PromptScores,
    QueueState,
    Scores,
    SequenceState,
    Submit,
    TokenBatch,
)
from service.rate_limits import RateLimits

Script = Callable[[Submit], Sequence[int]]
ChoiceScript = Callable[[Submit, int], Sequence[int]]
"""The same for one choice of a Submit, by its number."""


def logprob(token: int, place: int, vocabulary: int) -> float:
    """The log-probability of a token at a place of its Sequence: all differ, as float32 has them."""
    return float(np.float32(-0.1 - (token * 7919 + place * 104_729) % vocabulary / 10))


def scores_of(token: int, place: int, likeliest: int, vocabulary: int) -> Scores:
    """What the engine reports of a token that stands at `place`."""
    values = {id_: logprob(id_, place, vocabulary) for id_ in range(vocabulary)}
    ids = sorted(values, key=lambda id_: -values[id_])
    best = ids[:likeliest]
    return Scores(values[token], 1 + ids.index(token), best, [values[id_] for id_ in best])


@dataclass
class Line:
    """One running Sequence."""

    submit: Submit
    tokens: list[int]
    is_first: bool = True  # of its Submit
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
    choice_script: ChoiceScript | None = None  # in place of `script`
    fail_after: int | None = None  # tokens, then an error
    timeout_after: int | None = None  # tokens, then those that have a timeout_s are out of time
    refuses_after_s: int | None = None  # Retry-After with which every Submit is refused
    cached_tokens: int = 0
    miss: MissInfo | None = None
    steps: int = 0
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    lines: dict[int, Line] = field(default_factory=dict)
    queue: QueueState = field(default_factory=QueueState)
    rates: RateLimits = field(default_factory=lambda: RateLimits({}, time.monotonic))

    def __post_init__(self) -> None:
        self.client = EngineClient(self)
        self._work = asyncio.Event()

    def post(self, front_end: int, message: Message) -> None:
        match message:
            case Submit():
                self.submitted.append(message)
                ids = [message.sequence_id, *(sibling.sequence_id for sibling in message.siblings)]
                if self.refuses_after_s is not None:
                    ended = [Ended(id_, "error", "the queue is full", self.refuses_after_s) for id_ in ids]
                    asyncio.get_running_loop().call_soon(self._deliver, [], [], ended)
                    return
                for choice, sequence_id in enumerate(ids):
                    says = self.choice_script(message, choice) if self.choice_script else self.script(message)
                    self.lines[sequence_id] = Line(message, list(says), is_first=choice == 0)
                self._work.set()
            case Abort(sequence_id=sequence_id):
                if self.lines.pop(sequence_id, None) is not None:
                    asyncio.get_running_loop().call_soon(self._deliver, [], [], [Ended(sequence_id, "abort")])
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
        """Every running Sequence says its next token; beams say all."""
        self.steps += 1
        batch = TokenBatch(self.steps, [], [], [], {}, [])
        for sequence_id, line in list(self.lines.items()):
            submit = line.submit
            if line.said == 0 and line.is_first and submit.prompt_logprobs >= 0:
                batch.prompt_scores.append(self._prompt_scores(submit))
            ended = self._say(sequence_id, line, batch)
            while ended is None and submit.beam_search is not None:
                ended = self._say(sequence_id, line, batch)
            if ended is not None:
                batch.ended.append(ended)
                del self.lines[sequence_id]
        self.client.deliver(batch)

    def _say(self, sequence_id: int, line: Line, batch: TokenBatch) -> Ended | None:
        """One token of a Sequence, and its end if that is it."""
        submit, place = line.submit, len(line.submit.prompt_ids) + line.said
        if self.fail_after is not None and line.said >= self.fail_after:
            return Ended(sequence_id, "error", message="the model produced numbers that are not finite")
        numbers: dict[str, Any] = {"output_tokens": line.said, "cached_tokens": self.cached_tokens, "miss": self.miss}
        if self.timeout_after is not None and submit.timeout_s is not None and line.said >= self.timeout_after:
            return Ended(sequence_id, "timeout", **numbers)
        end_ids = submit.end_ids
        token = line.tokens[line.said] if line.said < len(line.tokens) else (end_ids or line.tokens)[0]
        if line.said < submit.sampling.min_tokens and token in submit.sampling.barred_ids:
            token = next(id_ for id_ in range(self.limits.vocabulary) if id_ not in submit.sampling.barred_ids)
        if submit.sampling.logprobs >= 0:
            batch.scores[len(batch.tokens)] = scores_of(token, place, submit.sampling.logprobs, self.limits.vocabulary)
        line.said += 1
        batch.sequence_ids.append(sequence_id)
        batch.tokens.append(token)
        if token not in end_ids and line.said < submit.max_tokens:
            return None
        is_end = token in end_ids
        numbers["output_tokens"] = line.said
        return Ended(sequence_id, "stop" if is_end else "length", end_token=token if is_end else -1, **numbers)

    def _prompt_scores(self, submit: Submit) -> PromptScores:
        ids, vocabulary = submit.prompt_ids, self.limits.vocabulary
        scores = [scores_of(ids[i], i, submit.prompt_logprobs, vocabulary) for i in range(1, len(ids))]
        return PromptScores(submit.sequence_id, 1, scores)

    def die(self) -> None:
        self.state, self.is_alive = "dead", False
        self.lines.clear()
        self.client.deliver(EngineDied("the engine has stopped because of an internal error"))

    def _deliver(self, ids: list[int], tokens: list[int], ended: list[Ended]) -> None:
        self.client.deliver(TokenBatch(self.steps, ids, tokens, ended))

    def open_requests(self, owner: str) -> list[OpenRequest]:
        found: dict[str, OpenRequest] = {}
        for line in self.lines.values():
            if line.submit.owner == owner:
                request = found.setdefault(line.submit.request_id, OpenRequest(line.submit.request_id, 1.5, []))
                prompt, most = len(line.submit.prompt_ids), line.submit.max_tokens
                state: SequenceState = "decode" if line.said else "queued"
                request.sequences.append(OpenSequence(state, prompt, self.cached_tokens, line.said, most, 0))
        return list(found.values())

    def abort(self, owner: str, request_ids: Iterable[str]) -> int:
        ids = set(request_ids)
        mine = [
            sequence_id
            for sequence_id, line in self.lines.items()
            if line.submit.owner == owner and line.submit.request_id in ids
        ]
        for sequence_id in mine:
            self.post(0, Abort(sequence_id))
        return len(mine)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state=self.state,
            step=self.steps,
            uptime_s=12.5,
            running=len(self.lines),
            swapped=0,
            queue=self.queue,
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
            pressure=Pressure(some=Stall(0.0, 0.0, 0.0, 0), full=Stall(0.0, 0.0, 0.0, 0)),
            frame_bytes=4096,
            device_memory=DeviceMemory(654_321, 2, 10, 3000),
        )
