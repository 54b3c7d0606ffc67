"""The executor: plans by hand. Copies, table changes, feedback, chunks, failures; and the golden prompts."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import GREEDY, PlanDriver, int32
from short_memory import no_memory, short_of_memory

from mm.page_copies import MemoryOrders, PageCopies, SwapOrders, TableChanges
from model import cpu_executor, sampler
from model.config import read_config
from model.cpu_executor import CpuExecutor, choose_dtype
from model.kv_pool import KvPool
from model.loader import load_parameters
from model.step_plan import FED_BACK, RowSettings, SamplingParameters, ScoredTokens, StepPlan, StepResult

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 211, 37)]


def executor_of(folder: Path, native: ctypes.CDLL | None, **sizes: int) -> CpuExecutor:
    config = read_config(folder)
    sizes = {"frames": 64, "max_rows": 8, "max_pages": 16, "threads": 1, **sizes}
    return CpuExecutor(config, load_parameters(folder, config, torch.float32), native=native, **sizes)


@pytest.fixture
def model(tiny):
    return tiny("Qwen3", seed=4)


@pytest.fixture
def executor(model, cpu_kernels) -> Iterator[CpuExecutor]:
    running = executor_of(model.folder, cpu_kernels)
    yield running
    running.close()


def plan(
    rows: list[int],
    starts: list[int],
    chunks: list[list[int]],
    *,
    samples: list[bool] | None = None,
    orders: MemoryOrders | None = None,
    sampling: SamplingParameters = GREEDY,
    decodes: int = 0,
) -> StepPlan:
    return StepPlan(
        step=0,
        orders=orders or MemoryOrders(),
        settings=RowSettings(int32(*rows), [sampling] * len(rows)),
        rows=int32(*rows),
        starts=int32(*starts),
        query_starts=np.cumsum([0] + [len(chunk) for chunk in chunks]).astype(np.int32),
        token_ids=int32(*(token for chunk in chunks for token in chunk)),
        samples=np.array([True] * len(rows) if samples is None else samples),
        decodes=decodes,
    )


def mapped(row: int, frames: list[int], first_page: int = 0, copies: PageCopies | None = None) -> MemoryOrders:
    changes = TableChanges(
        int32(*[row] * len(frames)), np.arange(first_page, first_page + len(frames), dtype=np.int32), int32(*frames)
    )
    return MemoryOrders(copies or PageCopies(), changes)


def run(executor: CpuExecutor, *plans: StepPlan) -> list[StepResult]:
    """Submit all before waiting for the first, as the engine does with two."""
    return [ticket.wait() for ticket in [executor.submit(p) for p in plans]]


@pytest.mark.parametrize("budget", [5, 16, 64, 512])
def test_greedy_output_equals_transformers(model, executor: CpuExecutor, budget: int) -> None:
    """Several Sequences, joining one a step, prefilled in chunks beside the decodes of the others."""
    prompts = [PROMPT, PROMPT[:16], PROMPT[3:4], PROMPT[10:27]]
    made = PlanDriver(executor).generate(prompts, [12, 3, 17, 9], budget=budget, arrive=1)
    for prompt, sequence in zip(prompts, made, strict=True):
        assert sequence.output == model.generate(prompt, len(sequence.output))
        assert not sequence.failed


def test_tokens_are_fed_back_without_the_host(model, executor: CpuExecutor) -> None:
    """Ten decodes are submitted before the first result is read."""
    start = plan([3], [0], [PROMPT], orders=mapped(3, [9, 40, 2]))
    decodes = [plan([3], [37 + k], [[FED_BACK]], decodes=1) for k in range(10)]
    results = run(executor, start, *decodes)
    assert [int(result.tokens[0]) for result in results] == model.generate(PROMPT, 11)


def test_rows_that_do_not_sample_answer_minus_one(executor: CpuExecutor) -> None:
    chunks = plan([0, 1], [0, 0], [PROMPT[:20], PROMPT[:5]], samples=[False, True], orders=mapped(0, [1, 2]))
    (result,) = run(executor, chunks)
    assert result.tokens[0] == -1
    assert result.tokens[1] >= 0
    assert result.failed.tolist() == [False, False]


def test_a_fork_writes_into_its_copy_only(model, executor: CpuExecutor) -> None:
    """Two rows share the frames of one prompt; one gets a copy of the last page before it writes: both answer
    alike, then go their own ways, and the original's frame is as it was.
    """
    (first,) = run(executor, plan([0], [0], [PROMPT], orders=mapped(0, [10, 11, 12])))
    original = executor.pool.data[12].clone()
    fork = mapped(1, [10, 11, 20], copies=PageCopies(int32(12), int32(20)))
    (second,) = run(executor, plan([1], [37], [[5]], orders=fork))
    assert torch.equal(executor.pool.data[12], original)
    assert torch.equal(executor.pool.data[20][:, :, :, :5], original[:, :, :, :5])
    assert not torch.equal(executor.pool.data[20][:, :, :, 5], original[:, :, :, 5])
    assert [int(second.tokens[0])] == model.generate([*PROMPT, 5], 1)
    (third,) = run(executor, plan([0], [37], [[FED_BACK]], decodes=1))
    assert [int(first.tokens[0]), int(third.tokens[0])] == model.generate(PROMPT, 2)


def test_a_remapped_page_is_read_from_its_new_frame(model, executor: CpuExecutor) -> None:
    """Copies come before table changes, both before the step's own reads: a page moved in the step itself is found."""
    run(executor, plan([0], [0], [PROMPT], orders=mapped(0, [10, 11, 12])))
    executor.pool.data[30] = 7.5
    move = mapped(0, [30], first_page=1, copies=PageCopies(int32(11), int32(30)))
    (moved,) = run(executor, plan([0], [37], [[FED_BACK]], orders=move, decodes=1))
    assert int(moved.tokens[0]) == model.generate(PROMPT, 2)[1]


def test_settings_stay_with_their_row(executor: CpuExecutor) -> None:
    """Stored once, used by each later step: same seed and position, same token, in another row and beside others."""
    hot = SamplingParameters(temperature=5.0, seed=11)
    settings = RowSettings(int32(2), [hot])
    first = replace(plan([2], [0], [PROMPT], orders=mapped(2, [1, 2, 3])), settings=settings)
    later = [replace(plan([2], [37 + k], [[FED_BACK]], decodes=1), settings=None) for k in range(5)]
    tokens = [int(result.tokens[0]) for result in run(executor, first, *later)]
    (again,) = PlanDriver(executor, seed=1).generate([PROMPT], 6, sampling=[hot])
    assert again.output == tokens
    (other,) = PlanDriver(executor, seed=1).generate(
        [PROMPT], 6, sampling=[SamplingParameters(temperature=5.0, seed=12)]
    )
    assert other.output != tokens


def test_an_error_reaches_the_ticket_and_the_next_step_runs(model, executor: CpuExecutor) -> None:
    """A plan that names a row out of range fails alone."""
    bad = executor.submit(plan([999], [0], [PROMPT]))
    good = executor.submit(plan([0], [0], [PROMPT], orders=mapped(0, [4, 5, 6])))
    with pytest.raises(IndexError):
        bad.wait()
    assert bad.is_done()
    assert [int(good.wait().tokens[0])] == model.generate(PROMPT, 1)


def test_a_nan_marks_its_row_only(model, executor: CpuExecutor) -> None:
    """C38: the embedding of one token is broken: its Sequence fails, its neighbour does not."""
    executor._parameters.embedding[PROMPT[3]] = float("nan")
    clean = [token for token in PROMPT if token != PROMPT[3]]
    broken = plan([0, 1], [0, 0], [PROMPT[:20], clean[:5]], samples=[False, True], orders=mapped(0, [1, 2]))
    orders = MemoryOrders(table_changes=TableChanges(int32(0, 0, 1), int32(0, 1, 0), int32(1, 2, 3)))
    (result,) = run(executor, replace(broken, orders=orders))
    assert result.failed.tolist() == [True, False]
    assert int(result.tokens[1]) == model.generate(clean[:5], 1)[0]
    assert bool(executor.pool.data.isfinite().all())


def test_logits_that_are_not_finite_mark_their_row(model, cpu_kernels) -> None:
    """C38: the hidden states are sound and one row of the output matrix is not: whoever samples fails."""
    config = read_config(model.folder)
    parameters = load_parameters(model.folder, config, torch.float32)
    parameters.head.weight[5] = float("inf")
    executor = CpuExecutor(config, parameters, frames=8, max_rows=2, max_pages=4, threads=1, native=cpu_kernels)
    orders = MemoryOrders(table_changes=TableChanges(int32(0, 1), int32(0, 0), int32(1, 2)))
    (result,) = run(executor, plan([0, 1], [0, 0], [PROMPT[:5], PROMPT[:6]], samples=[True, False], orders=orders))
    executor.close()
    assert result.failed.tolist() == [True, False]


def test_a_plan_of_orders_alone_is_carried_out(executor: CpuExecutor) -> None:
    executor.pool.data[5] = 3.25
    orders = MemoryOrders(PageCopies(int32(5), int32(6)))
    empty = StepPlan(0, orders, None, int32(), int32(), int32(0), int32(), np.zeros(0, np.bool_), 0)
    (result,) = run(executor, empty)
    assert len(result.tokens) == len(result.failed) == 0
    assert bool((executor.pool.data[6] == 3.25).all())


def test_close_finishes_what_is_enqueued_and_may_be_repeated(model, cpu_kernels) -> None:
    executor = executor_of(model.folder, cpu_kernels)
    tickets = [executor.submit(plan([0], [0], [PROMPT], orders=mapped(0, [1, 2, 3]))) for _ in range(5)]
    executor.close()
    executor.close()
    assert all(ticket.is_done() for ticket in tickets)
    assert not any(thread.name == "cpu-executor" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(plan([0], [0], [PROMPT]))


def test_other_page_sizes(model, cpu_kernels) -> None:
    executor = executor_of(model.folder, cpu_kernels, page_size=5, max_pages=32)
    made = PlanDriver(executor, page_size=5).generate([PROMPT, PROMPT[5:9]], 9, budget=11)
    executor.close()
    assert [s.output for s in made] == [model.generate(PROMPT, 9), model.generate(PROMPT[5:9], 9)]


def test_dtype_follows_the_checkpoint_and_the_processor(model, monkeypatch: pytest.MonkeyPatch) -> None:
    full = read_config(model.folder)  # a float32 checkpoint
    half = replace(full, dtype="bfloat16")
    for multiplies, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("model.cpu_executor.multiplies_bfloat16", lambda answer=multiplies: answer)
        assert choose_dtype(half) == expected
        assert choose_dtype(full) == torch.float32
        assert choose_dtype(full, "bfloat16") == torch.bfloat16
        assert choose_dtype(half, "float16") == torch.float16


def test_threads_are_measured_on_real_steps(model, cpu_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement leaves no trace: in the pool, the caller's thread count, or the answers."""
    monkeypatch.setattr("model.cpu_executor.usable_cores", lambda: 2)
    before = torch.get_num_threads()
    executor = executor_of(model.folder, cpu_kernels, threads=0)
    assert executor.threads.many == 2
    assert executor.threads.few in (1, 2)
    assert torch.get_num_threads() == before
    assert not bool(executor.pool.data.any())
    (made,) = PlanDriver(executor).generate([PROMPT], 2)
    executor.close()
    assert made.output == model.generate(PROMPT, 2)


def test_pages_go_to_swap_and_come_back_to_other_frames(model, cpu_kernels) -> None:
    """The frames are overwritten meanwhile, and the rest of the answer is the same."""
    running = executor_of(model.folder, cpu_kernels, slots=8)
    running.want_slots(8)
    running._store.wait()
    first = plan([0], [0], [PROMPT], orders=mapped(0, [0, 1, 2]))
    tokens = [int(running.submit(first).wait().tokens[0])]
    running.start(SwapOrders(1, out_frames=int32(0, 1, 2), out_slots=int32(5, 2, 7)))
    running.submit(plan([1], [0], [PROMPT[::-1]], orders=mapped(1, [2, 1, 0]))).wait()
    assert running.ended() == [(1, True)]
    running.start(SwapOrders(2, in_slots=int32(5, 2, 7), in_frames=int32(40, 41, 42)))
    again = plan([0], [len(PROMPT)], [tokens], orders=mapped(0, [40, 41, 42]), decodes=1)
    tokens.append(int(running.submit(again).wait().tokens[0]))
    running.close()
    assert running.ended() == [(2, True)]
    assert tokens == model.generate(PROMPT, 2)


def test_a_swap_to_a_slot_without_memory_fails_and_the_executor_goes_on(model, cpu_kernels) -> None:
    running = executor_of(model.folder, cpu_kernels, slots=8)
    running.start(SwapOrders(1, out_frames=int32(0), out_slots=int32(5)))
    result = running.submit(plan([0], [0], [PROMPT], orders=mapped(0, [0, 1, 2]))).wait()
    running.close()
    assert running.ended() == [(1, False)]
    assert result.tokens[0] >= 0


def test_work_that_fails_beside_a_step_is_told_and_steps_are_still_answered(
    model, cpu_kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a copy that never ends would be waited for, by an engine that looks alive."""
    running = executor_of(model.folder, cpu_kernels, slots=8)

    def fail(*_: Any) -> bool:
        raise ValueError("nobody thought of this")

    monkeypatch.setattr(running, "_move", fail)
    running.start(SwapOrders(1, out_frames=int32(0), out_slots=int32(5)))
    (result,) = run(running, plan([0], [0], [PROMPT], orders=mapped(0, [0, 1, 2])))
    assert result.tokens[0] >= 0
    with pytest.raises(RuntimeError, match="worker has failed") as raised:
        running.ended()
    assert "nobody thought of this" in str(raised.value.__cause__)
    running.close()


def test_frames_that_go_give_their_memory_back_and_are_zero_when_they_return(model) -> None:
    """What stays keeps its content; the system has the pages of the rest."""
    config = read_config(model.folder)
    pool = KvPool(config, torch.float32, frames=4096, page_size=16)
    pool.data.fill_(1)
    before = resident_bytes()
    size = pool.frame(0).numel()
    pool.give_back(1024)
    assert before - resident_bytes() > 2500 * size
    assert bool((pool.data[:1024] == 1).all())
    assert float(pool.data[1024 + mmap.PAGESIZE // size + 1 :].abs().max()) == 0
    pool.data[4095].fill_(2)
    pool.give_back(4096)
    assert float(pool.data[4095].mean()) == 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("most", [1, 2, 7, 19])
def test_a_step_that_finds_no_memory_is_computed_in_parts(
    model, executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Decodes, chunks that are cut, prompts that are scored: all as if there had been memory."""
    prompts = [PROMPT, PROMPT[:16], PROMPT[3:4], PROMPT[10:27]]
    sizes = short_of_memory(executor, lambda tokens: tokens > most, monkeypatch)
    made = PlanDriver(executor).generate(prompts, [6, 3, 7, 5], budget=50, arrive=1)
    assert min(sizes) <= most < max(sizes)
    for prompt, sequence in zip(prompts, made, strict=True):
        assert sequence.output == model.generate(prompt, len(sequence.output))
        assert not sequence.failed


def test_parts_of_a_step_score_what_the_whole_scores(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = plan([0, 1], [0, 0], [PROMPT[:20], PROMPT[5:16]], samples=[False, True])
    places = int32(0, 5, 14, 15, 16, 22, 30)
    asked = replace(chunks, scored=ScoredTokens(places, int32(*range(7)), 3), orders=two_rows())
    (whole,) = run(executor, asked)
    short_of_memory(executor, lambda tokens: tokens > 8, monkeypatch)
    (parts,) = run(executor, replace(asked, orders=MemoryOrders()))
    assert whole.tokens.tolist() == parts.tokens.tolist()
    assert whole.scored is not None
    assert parts.scored is not None
    assert whole.scored.ids.tolist() == parts.scored.ids.tolist()
    np.testing.assert_allclose(whole.scored.chosen, parts.scored.chosen, rtol=1e-5)
    np.testing.assert_allclose(whole.scored.values, parts.scored.values, rtol=1e-5)


def test_a_nan_in_a_part_marks_its_row_only(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """C38 in parts: the row that is cut fails by its first part."""
    executor._parameters.embedding[PROMPT[3]] = float("nan")
    clean = [token for token in PROMPT if token != PROMPT[3]]
    short_of_memory(executor, lambda tokens: tokens > 16, monkeypatch)
    step = plan([0, 1], [0, 0], [PROMPT[:20], clean[:5]], samples=[True, True], orders=two_rows())
    (result,) = run(executor, step)
    assert result.failed.tolist() == [True, False]


def test_without_memory_for_one_token_all_rows_fail_and_the_next_step_runs(
    model, executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        sizes = short_of_memory(executor, lambda tokens: tokens > 0, short)
        (nothing,) = run(executor, plan([0, 1], [0, 0], [PROMPT[:20], PROMPT[:5]], orders=two_rows()))
    assert sizes == [25, 12, 6, 3, 1]
    assert nothing.lacks_memory
    assert nothing.failed.tolist() == [True, True]
    (again,) = run(executor, plan([1], [0], [PROMPT[:5]]))
    assert not again.lacks_memory
    assert [int(again.tokens[0])] == model.generate(PROMPT[:5], 1)


def test_sampling_that_finds_no_memory_fails_its_rows(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.cpu_executor.sample", lambda *_: no_memory())
    (nothing,) = run(executor, plan([0], [0], [PROMPT], orders=mapped(0, [4, 5, 6])))
    assert nothing.lacks_memory
    assert nothing.failed.tolist() == [True]


def test_native_buffers_that_do_not_grow_leave_nothing_behind(model, native, monkeypatch) -> None:
    """Between two steps of the same size one that is larger finds no memory: the second has buffers again."""
    executor = executor_of(model.folder, native)
    empty = torch.empty

    def refuse(*shape: Any, **more: Any) -> torch.Tensor:
        if shape and isinstance(shape[0], tuple) and shape[0][0] > 8:
            raise MemoryError
        return empty(*shape, **more)

    (first,) = run(executor, plan([0], [0], [PROMPT[:5]], orders=two_rows()))
    with monkeypatch.context() as short:
        short.setattr("model.native_kernels.torch.empty", refuse)
        (large,) = run(executor, plan([0], [0], [PROMPT[:20]]))
    (again,) = run(executor, plan([0], [0], [PROMPT[:5]]))
    executor.close()
    assert [int(each.tokens[0]) for each in (first, large, again)] == [
        *model.generate(PROMPT[:5], 1),
        *model.generate(PROMPT[:20], 1),
        *model.generate(PROMPT[:5], 1),
    ]


def two_rows() -> MemoryOrders:
    return MemoryOrders(table_changes=TableChanges(int32(0, 0, 1), int32(0, 1, 0), int32(1, 2, 3)))


def scarce(function: Any, most: int, sizes: list[int]) -> Any:
    """`function`, which finds no memory for more than `most` rows of its first argument."""

    def refuse(rows: torch.Tensor, *more: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > most:
            no_memory()
        return function(rows, *more)

    return refuse


@pytest.mark.parametrize("most", [1, 2, 3])
def test_prompts_are_scored_in_parts_where_memory_is_short(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    chunks = plan([0, 1], [0, 0], [PROMPT[:20], PROMPT[5:16]], samples=[False, True], orders=two_rows())
    asked = replace(chunks, scored=ScoredTokens(int32(0, 5, 14, 15, 16, 22, 30), int32(*range(7)), 3))
    (whole,) = run(executor, asked)
    sizes: list[int] = []
    monkeypatch.setattr("model.cpu_executor.log_probs", scarce(cpu_executor.log_probs, most, sizes))
    (parts,) = run(executor, replace(asked, orders=MemoryOrders()))
    assert max(sizes) == 7
    assert whole.scored is not None
    assert parts.scored is not None
    assert parts.tokens.tolist() == whole.tokens.tolist()
    for name in ("chosen", "ranks", "ids", "values"):
        assert np.array_equal(getattr(parts.scored, name), getattr(whole.scored, name))


@pytest.mark.parametrize("most", [1, 2])
def test_rows_are_sampled_in_parts_where_memory_is_short(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Penalties count once: what is tried again has been adjusted before."""
    kinds = [
        SamplingParameters(temperature=0.8, seed=3, repetition_penalty=1.5, logprobs=2),
        SamplingParameters(temperature=0.0, presence_penalty=1.0, logprobs=3),
        SamplingParameters(temperature=1.0, seed=4, top_p=0.7),
        SamplingParameters(temperature=0.9, seed=5),
    ]
    prompts = [PROMPT, PROMPT[:16], PROMPT[3:4], PROMPT[10:27]]
    alone = PlanDriver(executor).generate(prompts, 6, sampling=kinds)
    sizes: list[int] = []
    monkeypatch.setattr(sampler, "_choose", scarce(sampler._choose, most, sizes))
    monkeypatch.setattr(sampler, "log_probs", scarce(sampler.log_probs, most, sizes))
    made = PlanDriver(executor, seed=1).generate(prompts, 6, sampling=kinds)
    assert max(sizes) == 4
    assert [each.output for each in made] == [each.output for each in alone]
