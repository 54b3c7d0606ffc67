"""Steps that find no memory on the device: what is tried again, who fails, and that all others never learn of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import GREEDY, PlanDriver, Running, int32
from program_executor import BUDGET, ProgramExecutor, tiny_config

import model.cuda_rows
import model.device_program
from cuda.errors import DriverError, OutOfDriverMemory, driver_error
from mm.page_copies import TableChanges
from model.out_of_memory import in_parts, is_out_of_memory
from model.step_plan import RowSettings, SamplingParameters

CONFIG = tiny_config()
PROMPTS = [np.random.default_rng(i).integers(0, 211, length).tolist() for i, length in enumerate((3, 16, 40))]
PENALISED = SamplingParameters(temperature=0.0, repetition_penalty=1.4)


@pytest.fixture
def executor(device: Any) -> ProgramExecutor:
    return ProgramExecutor(device, CONFIG, torch.float32)


def outputs(executor: Any, sampling: list[SamplingParameters] | None = None) -> list[Running]:
    return PlanDriver(executor).generate(PROMPTS, 8, budget=BUDGET, sampling=sampling)


def no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def fails_at(launches: set[int], monkeypatch: pytest.MonkeyPatch, executor: ProgramExecutor) -> list[int]:
    """The network finds no memory in its last layer, at these of its runs. Returns how often it has run."""
    logits, runs = executor.program.kernels.logits, [0]

    def refuse(*arguments: Any) -> Any:
        runs[0] += 1
        if runs[0] in launches:
            no_memory()
        return logits(*arguments)

    monkeypatch.setattr(executor.program.kernels, "logits", refuse)
    return runs


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`"
        ),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        driver_error("launch of scan", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:40],
)
def test_every_allocator_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_of_a_device_are_not_for_want_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(driver_error("launch of scan", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert not issubclass(DriverError, MemoryError)
    assert issubclass(OutOfDriverMemory, DriverError)


def test_work_is_halved_until_there_is_memory_for_it() -> None:
    asked: list[tuple[int, int]] = []

    def work(part: slice) -> list[int]:
        asked.append((part.start, part.stop))
        if part.stop - part.start > 3:
            raise MemoryError
        return list(range(part.start, part.stop))

    assert in_parts(work, 2, 12) == [[2, 3], [4, 5, 6], [7, 8], [9, 10, 11]]
    assert asked[:3] == [(2, 12), (2, 7), (2, 4)]
    with pytest.raises(torch.OutOfMemoryError):
        in_parts(lambda part: no_memory() if part.start <= 5 < part.stop else None, 0, 8)


def test_a_step_that_finds_no_memory_is_tried_again_and_nobody_sees_it(
    executor: ProgramExecutor, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid its launches: what the first try has left counts for nothing."""
    sampling = [PENALISED, GREEDY, SamplingParameters(temperature=0.9, seed=3, logprobs=2)]
    alone = [each.output for each in outputs(ProgramExecutor(device, CONFIG, torch.float32), sampling)]
    runs = fails_at({1, 3, 7}, monkeypatch, executor)
    made = outputs(executor, sampling)
    assert [each.output for each in made] == alone
    assert not any(each.failed for each in made)
    assert runs == [8 + 3]


def test_a_step_without_any_memory_fails_its_rows_and_the_next_one_runs(
    executor: ProgramExecutor, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its orders are carried out all the same: what memory was mapped for it is mapped."""
    (alone,) = PlanDriver(ProgramExecutor(device, CONFIG, torch.float32)).generate(PROMPTS[2:], 8, budget=BUDGET)
    fails_at({1, 2}, monkeypatch, executor)
    driver = PlanDriver(executor)
    row = Running(0, PROMPTS[2], 8)
    settings = RowSettings(int32(0), [GREEDY])
    lost = executor.submit(driver._plan([(row, 40)], 0, settings)).wait()
    assert lost.lacks_memory
    assert lost.failed.tolist() == [True]
    driver.steps = 1
    while len(row.output) < 8:
        driver._step([row], BUDGET, None)
    assert row.output == alone.output
    assert not row.failed


def test_a_row_whose_history_finds_no_memory_fails_alone(
    executor: ProgramExecutor, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start, and when its history has grown."""
    sampling = [PENALISED, GREEDY, PENALISED]
    monkeypatch.setattr(model.cuda_rows, "FIRST_ROOM", 4)
    alone = outputs(ProgramExecutor(device, CONFIG, torch.float32), sampling)

    def refusing(refused: Callable[[int], bool]) -> Any:
        empty = torch.empty

        def empty_or_not(size: int, **more: Any) -> torch.Tensor:
            if "device" in more and refused(size):
                no_memory()
            return empty(size, **more)

        return empty_or_not

    for refused, failing in ((lambda size: size == 64, [2]), (lambda size: size == 8, [0])):
        executor = ProgramExecutor(device, CONFIG, torch.float32)
        with monkeypatch.context() as short:
            short.setattr("model.cuda_rows.torch.empty", refusing(refused))
            made = outputs(executor, sampling)
        assert [place for place, each in enumerate(made) if each.failed] == failing
        for place in {0, 1, 2} - set(failing):
            assert made[place].output == alone[place].output


def test_page_tables_that_change_in_many_places_go_ahead_in_parts(
    executor: ProgramExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.device_program, "UPLOADED_CHANGES", 3)
    rows, pages, frames = int32(*[1] * 4, *[6] * 3), int32(0, 1, 2, 3, 7, 6, 5), int32(9, 8, 7, 6, 5, 4, 3)
    executor.program._send_ahead(TableChanges(rows, pages, frames))
    assert executor.program.state.page_tables[rows.tolist(), pages.tolist()].tolist() == frames.tolist()
    assert int(executor.program.state.page_tables.count_nonzero()) == 7
