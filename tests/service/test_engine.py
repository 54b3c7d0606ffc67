"""The loop around the scheduler: messages in, events out, waiting, draining, dying. Simulated executor, fake clock."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from simulated_executor import SimulatedExecutor, expected_beams, expected_output

from mm import MemoryManager
from mm.backing_store import BackingStore
from model.step_plan import SamplingParameters, StepPlan
from service.committed import Committed
from service.engine import Engine, StepReport
from service.engine_client import (
    BeamSearch,
    Cancel,
    Ended,
    EngineClient,
    EngineDied,
    Event,
    Finish,
    Limits,
    Message,
    PromptScores,
    QueueState,
    Scores,
    Sibling,
    Submit,
    TokenBatch,
)
from service.errors import Draining, EngineDead, Loading, QueueFull
from service.request import Sequence
from service.scheduler import Scheduler, SchedulerSettings
from service.token_stream import TokenStream


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Counter:
    """An observer that keeps what it is told."""

    steps: list[StepReport] = field(default_factory=list)
    ended: list[tuple[Sequence, Ended]] = field(default_factory=list)

    def step_ended(self, report: StepReport) -> None:
        self.steps.append(report)

    def sequence_ended(self, sequence: Sequence, ended: Ended, now: float) -> None:
        self.ended.append((sequence, ended))


@dataclass
class House:
    engine: Engine
    client: EngineClient
    executor: SimulatedExecutor
    counter: Counter
    clock: FakeClock
    task: asyncio.Task[None]

    def start(
        self, prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = (), client: EngineClient | None = None
    ) -> TokenStream:
        client = client or self.client
        number = client.next_sequence_id()
        stream = TokenStream(lambda: client.cancel(number))
        sampling = SamplingParameters(temperature=0.0)
        client.submit(Submit(number, f"request-{number}", prompt, max_tokens, sampling, list(end_ids)), stream)
        return stream

    @property
    def free_frames(self) -> int:
        return self.engine.scheduler.memory.available_frames


@asynccontextmanager
async def running(
    *, frames: int = 64, rows: int = 4, slots: int = 0, max_queue_requests: int = 100, is_open: bool = True
) -> AsyncIterator[House]:
    memory = MemoryManager(frames=frames, max_rows=rows + slots, max_pages=100, page_size=4, slots=slots)
    scheduler = Scheduler(memory, SchedulerSettings(max_running=rows, max_batched_tokens=16, max_length=400))
    executor, counter, clock = SimulatedExecutor(memory), Counter(), FakeClock()
    limits = Limits(
        max_model_len=400, max_request_tokens=memory.max_tokens, max_queue_requests=max_queue_requests, vocabulary=50
    )
    engine = Engine(scheduler, executor, limits, counter, step_timeout_s=60.0, clock=clock)
    client = EngineClient(engine)
    engine.connect(0, client)
    if is_open:
        engine.open()
    task = asyncio.create_task(engine.run())
    try:
        yield House(engine, client, executor, counter, clock, task)
    finally:
        executor.gate.set()
        engine.stop()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


async def read(stream: TokenStream) -> tuple[list[int], Ended]:
    tokens: list[int] = []
    async for chunk in stream:
        tokens += chunk.tokens
        if chunk.ended:
            return tokens, chunk.ended
    raise AssertionError("the stream ended without saying how")


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)


async def test_an_engine_that_polls_for_steps_polls_for_messages_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks one thing after the other asks soon: waking takes a tenth of a millisecond, and all is cold then."""
    slept = asyncio.Event()

    async def sleep(engine: Engine, seconds: float | None) -> bool:
        slept.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(Engine, "_woken_within", sleep)
    monkeypatch.setattr(SimulatedExecutor, "polls", 5)
    async with running() as house:
        turns = 0
        while not slept.is_set():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 5
        house.task.cancel()


async def test_a_first_token_reaches_its_handler_before_a_further_step_is_planned() -> None:
    """The step after it was planned while it was computed; a third would keep it waiting."""
    async with running() as house:
        async for _ in house.start([1, 2, 3], 8):
            assert len(house.executor.plans) == 2
            break


async def test_tokens_leave_before_the_books_of_their_step_unless_something_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four, all but the last, which ends it; in steady decode the books take no time."""
    happened: list[str] = []
    commit, deliver = Scheduler.commit, EngineClient.deliver

    def note_commit(scheduler: Scheduler, *arguments: Any) -> Committed:
        happened.append("commit")
        return commit(scheduler, *arguments)

    def note_tokens(client: EngineClient, event: Event) -> None:
        if isinstance(event, TokenBatch):
            happened.append("ended" if event.ended else "token")
        deliver(client, event)

    monkeypatch.setattr(Scheduler, "commit", note_commit)
    monkeypatch.setattr(EngineClient, "deliver", note_tokens)
    async with running() as house:
        assert (await read(house.start([1, 2, 3], 4)))[0] == expected_output([1, 2, 3], 4)
    assert happened[:3] == ["token", "commit", "token"]
    assert sorted(happened[3:-2]) == ["commit", "commit", "token"]
    assert happened[-2:] == ["commit", "ended"]


async def test_a_step_is_looked_through_only_for_front_ends_that_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look comes before the next front end's first token."""
    looked_for, of = set(), Committed.of

    def note(committed: Committed, front_end: int) -> Any:
        looked_for.add(front_end)
        return of(committed, front_end)

    monkeypatch.setattr(Committed, "of", note)
    async with running() as house:
        house.engine.connect(7, EngineClient(house.engine, 7))
        await read(house.start([1, 2, 3], 8))
    assert looked_for == {0}


async def test_streams_get_their_own_tokens() -> None:
    async with running() as house:
        prompts = [[i, i + 1, i + 2] for i in range(10)]
        streams = [house.start(prompt, 5 + i) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*map(read, streams))
        for i, (tokens, ended) in enumerate(results):
            assert tokens == expected_output(prompts[i], 5 + i)
            assert (ended.reason, ended.output_tokens) == ("length", 5 + i)
        assert house.free_frames == 64
        assert house.client.open_sequences == 0


async def submit_choices(
    house: House, prompt: list[int], max_tokens: int, count: int, **options: Any
) -> tuple[list[TokenStream], list[int]]:
    ids = [house.client.next_sequence_id() for _ in range(count)]
    streams = [TokenStream(lambda number=number: house.client.cancel(number)) for number in ids]  # type: ignore[misc]
    siblings = [Sibling(number, i) for i, number in enumerate(ids[1:], 1)]
    sampling = SamplingParameters(temperature=0.0)
    house.client.submit(Submit(ids[0], "r", prompt, max_tokens, sampling, [], siblings=siblings, **options), *streams)
    return streams, ids


async def test_every_choice_has_its_own_stream_and_counts_in_the_queue() -> None:
    async with running() as house:
        streams, _ = await submit_choices(house, [1, 2, 3], 9, 5)
        assert house.engine.queue == QueueState(5, 3)
        for tokens, ended in await asyncio.gather(*map(read, streams)):
            assert (tokens, ended.reason) == (expected_output([1, 2, 3], 9), "length")
        assert house.engine.queue == QueueState()
        assert len(house.counter.ended) == 5


async def test_a_search_gives_each_choice_its_tokens_in_one_go() -> None:
    async with running() as house:
        streams, _ = await submit_choices(house, [1, 2, 3], 9, 2, beam_search=BeamSearch(3))
        results = expected_beams([1, 2, 3], 9, BeamSearch(3))
        for stream, result in zip(streams, results, strict=False):
            chunk = await anext(aiter(stream))
            assert chunk.tokens == result.tokens
            assert chunk.ended is not None
            assert chunk.ended.beam_score == pytest.approx(result.score, abs=1e-5)
        assert {ended.sequence_id for _, ended in house.counter.ended} == {1, 2}
        await until(lambda: house.free_frames == 64)


async def test_a_time_limit_ends_a_request_while_it_waits_and_while_it_runs() -> None:
    async with running(rows=1) as house:
        running_one, _ = await submit_choices(house, [1, 2, 3], 200, 1, timeout_s=5.0)
        waiting_one, _ = await submit_choices(house, [4, 5], 9, 1, timeout_s=5.0)
        house.executor.gate.clear()
        await until(lambda: house.engine.scheduler.sequences.running)
        house.clock.now += 6.0
        house.executor.gate.set()
        (tokens, ended), (nothing, too_late) = await asyncio.gather(read(running_one[0]), read(waiting_one[0]))
        assert (ended.reason, ended.output_tokens) == ("timeout", len(tokens))
        assert tokens == expected_output([1, 2, 3], len(tokens))
        assert (nothing, too_late.reason) == ([], "timeout")
        await until(lambda: house.free_frames == 64)


async def test_a_search_too_wide_for_the_engine_is_told_so() -> None:
    async with running(rows=2) as house:
        streams, _ = await submit_choices(house, [1, 2, 3], 9, 2, beam_search=BeamSearch(3))
        for _, ended in await asyncio.gather(*map(read, streams)):
            assert ended.reason == "error"
            assert "3 beams" in ended.message


async def test_scores_reach_the_stream_of_their_token() -> None:
    async with running() as house:
        streams, ids = await submit_choices(house, [1, 2, 3, 4], 3, 2, prompt_logprobs=2)
        batches: list[TokenBatch] = []
        deliver = house.client.deliver
        house.client.deliver = lambda event: (batches.append(event), deliver(event))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        await asyncio.gather(*map(read, streams))
        scored = [scores for batch in batches for scores in batch.prompt_scores]
        assert [(scores.sequence_id, scores.first, len(scores.scores)) for scores in scored] == [(ids[0], 1, 3)]
        assert all(not batch.sequence_ids or batch.prompt_scores for batch in batches[:1])


async def test_front_ends_get_their_own_sequences_only() -> None:
    """Two front ends may use the same sequence ids."""
    async with running() as house:
        other = EngineClient(house.engine, front_end=1)
        house.engine.connect(1, other)
        first, second = house.start([1, 2, 3], 6), house.start([4, 5], 6, client=other)
        assert (await read(first))[0] == expected_output([1, 2, 3], 6)
        assert (await read(second))[0] == expected_output([4, 5], 6)


async def test_a_closed_stream_frees_its_frames() -> None:
    async with running() as house:
        stream = house.start([1, 2, 3], 300 - 100)
        await until(lambda: house.free_frames < 64)
        stream.close()
        await until(lambda: house.free_frames == 64)
        assert [ended.reason for _, ended in house.counter.ended] == ["abort"]
        assert house.engine.snapshot().running == 0


async def test_a_text_stop_ends_it_at_the_token_the_front_end_names() -> None:
    async with running() as house:
        number = house.client.next_sequence_id()
        stream = TokenStream(lambda: house.client.cancel(number))
        house.client.submit(Submit(number, "r", [1, 2], 200, SamplingParameters(temperature=0.0), []), stream)
        seen = 0
        async for chunk in stream:
            seen += len(chunk.tokens)
            if chunk.ended:
                break
            if seen >= 3:
                house.client.finish(number, 2)
        assert (chunk.ended.reason, chunk.ended.output_tokens) == ("stop", 2)
        await until(lambda: house.free_frames == 64)


async def test_messages_for_what_has_ended_change_nothing() -> None:
    async with running() as house:
        stream = house.start([1, 2], 2)
        await read(stream)
        house.engine.post(0, Cancel(1))
        house.engine.post(0, Finish(1, 1))
        assert (await read(house.start([5], 4)))[0] == expected_output([5], 4)


async def test_admission_is_refused_by_state_and_by_the_queues_length() -> None:
    async with running(is_open=False, rows=1, max_queue_requests=3) as house:
        with pytest.raises(Loading):
            house.start([1], 1)
        house.engine.open()
        house.executor.gate.clear()
        for _ in range(3):
            house.start([1, 2], 5)
        with pytest.raises(QueueFull, match="3 requests are waiting"):
            house.start([1], 1)
        house.executor.gate.set()
        await house.engine.drained()
        house.engine.drain()
        with pytest.raises(Draining):
            house.start([1], 1)


async def test_the_engine_refuses_what_front_ends_let_past_the_bound_together() -> None:
    """Each has looked before it sent, none knew of the other: the second one's is refused, and holds nothing."""
    async with running(rows=1, max_queue_requests=2) as house:
        other = EngineClient(house.engine, front_end=7)
        house.engine.connect(7, other)
        first, second = TokenStream(), TokenStream()
        sampling = SamplingParameters(temperature=0.0)
        house.engine.post(0, Submit(1, "a", [1, 2], 5, sampling, [], siblings=[Sibling(2, 0)]))
        other._sinks[1] = second
        house.engine.post(7, Submit(1, "b", [1, 2], 5, sampling, []))
        tokens, ended = await read(second)
        assert (tokens, ended.reason, ended.retry_after_s) == ([], "error", 1)
        assert "2 requests are waiting, the limit is 2" in ended.message
        await house.engine.drained()
        assert len(house.counter.ended) == 2, "what was refused has never been"
        assert first is not None
        assert house.free_frames == 64


async def test_a_drained_engine_has_finished_what_it_had() -> None:
    async with running() as house:
        streams = [house.start([i], 20) for i in range(8)]
        house.engine.drain()
        await house.engine.drained()
        for i, stream in enumerate(streams):
            assert (await read(stream))[0] == expected_output([i], 20)


async def test_stopping_ends_open_streams_with_an_error() -> None:
    async with running() as house:
        house.executor.gate.clear()
        stream = house.start([1, 2], 200)
        await until(lambda: house.executor.plans)
        house.engine.stop("the server is stopping")
        house.executor.gate.set()
        await house.task
        with pytest.raises(EngineDead, match="stopping"):
            await read(stream)


async def test_a_step_that_raises_kills_the_engine_and_tells_every_stream() -> None:
    """C40: dead is not alive, every open request ends with an error, and run() raises so that the process can exit."""
    async with running() as house:
        streams = [house.start([i], 50) for i in range(6)]
        await until(lambda: len(house.executor.plans) > 3)
        house.executor.error = RuntimeError("the device fell off")
        with pytest.raises(RuntimeError, match="fell off"):
            await house.task
        for stream in streams:
            with pytest.raises(EngineDead):
                await read(stream)
        assert not house.client.is_alive
        assert house.client.state == "dead"
        with pytest.raises(EngineDead):
            house.start([1], 1)


async def test_a_step_without_memory_ends_its_own_sequences_and_nobody_else() -> None:
    """Whatever they are: beams, choices, scored prompts. Who was not in the step, and who comes later, gets everything;
    nothing of the step is cached."""
    async with running(rows=4) as house:
        house.executor.lacks_memory = lambda plan: len(house.executor.plans) == 1
        house.executor.gate.clear()
        beams, _ = await submit_choices(house, [1, 2, 3], 9, 2, beam_search=BeamSearch(2))
        plain = house.start([4] * 8, 50)
        scored, _ = await submit_choices(house, [5] * 12, 9, 1, prompt_logprobs=2)
        later = [house.start([i] * 9, 20) for i in range(6)]
        house.executor.gate.set()
        doomed = [*beams, plain, *scored]
        for _, ended in await asyncio.gather(*map(read, doomed)):
            assert (ended.reason, ended.message) == ("error", "there was no memory to compute this request")
        for i, (tokens, ended) in enumerate(await asyncio.gather(*map(read, later))):
            assert (tokens, ended.reason) == (expected_output([i] * 9, 20), "length")
        assert (await read(house.start([4] * 8, 50)))[0] == expected_output([4] * 8, 50)
        assert (await read(house.start([5] * 12, 9)))[0] == expected_output([5] * 12, 9)
        assert house.client.is_alive
        await until(lambda: house.free_frames == 64)
        house.engine.scheduler.memory.check_invariants()


async def test_alive_means_that_steps_complete_or_that_there_is_nothing_to_do() -> None:
    async with running() as house:
        house.clock.now += 1000
        assert house.client.is_alive  # idle for long
        house.executor.gate.clear()
        stream = house.start([1, 2], 5)
        await until(lambda: house.executor.plans)
        house.clock.now += 59
        assert house.client.is_alive
        house.clock.now += 2
        assert not house.client.is_alive  # a step is overdue
        house.executor.gate.set()
        await read(stream)
        assert house.client.is_alive


async def test_copies_that_never_end_are_no_sign_of_life() -> None:
    """Everybody waits for pages that are on their way to swap, and never arrive: until they do, after all."""
    async with running(frames=24, slots=24) as house:
        house.engine.scheduler.memory.costs.copy_page_s = 1e-9
        house.executor.end_swaps = lambda ticket: None
        streams = [house.start([i] * 8, 60) for i in range(4)]
        async with asyncio.timeout(30):
            while house.client.is_alive:
                await asyncio.sleep(0.02)  # many turns
                house.clock.now += 61
                await asyncio.sleep(0.02)
        house.executor.end_swaps = lambda ticket: True
        for i, stream in enumerate(streams):
            assert (await read(stream))[0] == expected_output([i] * 8, 60)
        assert house.client.is_alive


async def test_the_next_step_is_submitted_before_the_last_one_is_done() -> None:
    async with running() as house:
        house.executor.gate.clear()
        stream = house.start([1, 2], 5)
        await until(lambda: len(house.executor.plans) == 2)
        house.executor.gate.set()
        await read(stream)


async def test_of_many_requests_at_once_the_first_run_before_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.READ_AT_ONCE", 3)
    async with running(rows=2, max_queue_requests=20) as house:
        left: list[int] = []
        submit = house.executor.submit

        def count_and_submit(plan: StepPlan) -> Any:
            left.append(len(house.engine._inbox))
            return submit(plan)

        house.executor.submit = count_and_submit  # type: ignore[method-assign]
        streams = [house.start([1, 2, number], 3) for number in range(10)]
        await until(lambda: left)
        assert left[0] == 7
        for number, stream in enumerate(streams):
            assert (await read(stream))[0] == expected_output([1, 2, number], 3)


async def test_clients_that_leave_together_are_out_of_the_queue_within_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.engine.READ_AT_ONCE", 2)
    async with running(rows=1, max_queue_requests=20) as house:
        stays = house.start([1, 2], 50)
        leaving = [house.start([1, 2, number], 3) for number in range(16)]
        await until(lambda: not house.engine.has_messages)
        house.executor.gate.clear()  # no step reads anything now
        await until(lambda: house.engine.previous is not None)
        for stream in leaving:
            stream.close()
        house.engine.read_messages(2)
        assert house.engine.queue.requests == 0
        house.executor.gate.set()
        assert (await read(stays))[0] == expected_output([1, 2], 50)


async def test_two_hundred_random_disconnects_leave_no_frame_held() -> None:
    """C10 inside: streams closed at every stage, while queued, prefilling, decoding, preempted."""
    async with running(frames=30, rows=4, max_queue_requests=1000) as house:
        for i in range(200):
            stream = house.start([i % 50] * (1 + i % 23), 1 + (i * 7) % 60)
            for _ in range(i % 5):
                await asyncio.sleep(0)
            if i % 3:
                asyncio.get_running_loop().call_later((i % 7) / 1000, stream.close)
        await house.engine.drained()
        assert house.free_frames == 30
        house.engine.scheduler.memory.check_invariants()
        assert house.client.open_sequences == 0
        assert house.engine.snapshot().preemptions > 0


async def test_swap_memory_that_comes_slowly_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much again is wanted when half of what was asked for is in use; after a resize, too, up to the new size."""
    monkeypatch.setattr("service.copies.FIRST_SWAP_BYTES", 16 * SimulatedExecutor.frame_bytes)
    memory = MemoryManager(frames=8, max_rows=4, max_pages=8, page_size=4, slots=100, opened_slots=0)
    memory.resize(8, 40)
    scheduler = Scheduler(memory, SchedulerSettings(max_running=4, max_batched_tokens=16, max_length=32))
    executor = SimulatedExecutor(memory)
    engine = Engine(scheduler, executor, Limits(32, 32, 8, 50), Counter())
    executor.ready_slots = 0

    async def come(slots: int) -> None:
        for _ in range(slots):
            await engine.step()
            executor.ready_slots += 1
        await engine.step()

    await come(16)
    assert executor.wanted_slots == [16]
    memory.swap.allocate(0, 15)  # nearly all that is there
    await come(16)
    assert executor.wanted_slots == [16, 32]
    memory.swap.allocate(0, 1)
    await come(8)
    assert set(executor.wanted_slots[2:]) == {40}, "that is all there is a place for"
    memory.swap.allocate(0, 4)
    memory.resize(8, 100)
    engine.copies.resized(100)
    await come(0)
    assert executor.wanted_slots[-1] == 80


class Stored(SimulatedExecutor):
    """Its slots have the memory that executors give them."""

    def __init__(self, memory: MemoryManager) -> None:
        self.store = BackingStore(memory.swap.total, self.frame_bytes, page_locked=False, chunk_bytes=1)
        super().__init__(memory)

    @property
    def ready_slots(self) -> int:
        self.store.wait()
        return self.store.ready_slots

    @ready_slots.setter
    def ready_slots(self, slots: int) -> None: ...

    def want_slots(self, slots: int) -> None:
        self.store.want(slots)

    def resize(self, frames: int, slots: int) -> None:
        self.store.resize(slots)

    def close(self) -> None:
        self.store.close()


async def test_a_swap_area_that_was_made_small_has_memory_again_when_it_is_larger() -> None:
    memory = MemoryManager(frames=8, max_rows=4, max_pages=8, page_size=4, slots=20, opened_slots=0)
    scheduler = Scheduler(memory, SchedulerSettings(max_running=4, max_batched_tokens=16, max_length=32))
    executor = Stored(memory)
    engine = Engine(scheduler, executor, Limits(32, 32, 8, 50), Counter())
    try:
        for slots in (20, 0, 12, 1, 20):
            memory.resize(8, slots)
            engine.copies.resized(slots)
            executor.resize(8, slots)
            for _ in range(3):
                await engine.step()
            if memory.swap.opened < slots:
                assert memory.swap.opened == 1, "what there was stays, until half of it is used"
                memory.swap.allocate(0, 1)
                for _ in range(3):
                    await engine.step()
            assert memory.swap.opened == slots
    finally:
        executor.close()


async def test_an_idle_engine_audits_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.IDLE_AUDIT_S", 0.01)
    async with running() as house:
        house.engine.scheduler.memory.frames.references[3] = 1  # planted: a frame that nobody holds
        with pytest.raises(Exception, match="frame 3"):
            await house.task
        assert house.client.state == "dead"


async def test_who_comes_during_an_audit_does_not_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.IDLE_AUDIT_S", 0.01)
    begun, looked_at = asyncio.Event(), 0

    def endless() -> Iterator[None]:
        nonlocal looked_at
        while True:
            looked_at += 1
            begun.set()
            yield None

    async with running() as house, asyncio.timeout(20):
        house.engine.scheduler.memory.auditing = endless
        await begun.wait()
        tokens, ended = await read(house.start([1, 2, 3], 4))
        assert len(tokens) == 4
        assert ended.reason == "length"
        before, begun = looked_at, asyncio.Event()
        await begun.wait()  # begun anew when it is quiet again
        assert looked_at > before


async def test_reports_count_what_a_step_did() -> None:
    async with running() as house:
        await read(house.start([1, 2, 3, 4, 5], 3))
        assert [(r.prefill_tokens, r.decode_tokens, r.sampled_tokens) for r in house.counter.steps] == [
            (5, 0, 1),
            (0, 1, 1),
            (0, 1, 1),
        ]


@pytest.mark.parametrize(
    "message",
    [
        Submit(1, "r", [1, 2], 3, SamplingParameters(0.5, 3, 0.9, seed=2**64 - 1), [7], "tenant"),
        Submit(
            1,
            "r",
            [1, 2],
            3,
            SamplingParameters(logit_bias={7: -1.0}, bad_words=[[1, 2]], logprobs=3),
            [],
            siblings=[Sibling(2, 2**64 - 1)],
            beam_search=BeamSearch(4, -1.0, "never"),
            timeout_s=1.5,
        ),
        Cancel(5),
        Finish(5, 9),
        TokenBatch(3, [1, 2], [7, 8], [Ended(1, "stop", end_token=7)]),
        TokenBatch(3, [1], [7], [], {0: Scores(-0.5, 1, [7], [-0.5])}, [PromptScores(1, 1, [Scores(-1.0, 2, [], [])])]),
        EngineDied("gone"),
    ],
)
def test_every_message_survives_the_wire(message: Message | Event) -> None:
    """Front ends may become processes: nothing but encodable messages passes."""
    packed = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(packed, type=Submit | Cancel | Finish | TokenBatch | EngineDied) == message
