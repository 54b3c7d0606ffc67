"""Sampling from plan to result: rows' memory, log-probabilities, scored tokens; the CPU executor is the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import PlanDriver, int32
from program_executor import PAGES, ROWS, ProgramExecutor, cpu_executor, tiny_config

import model.cuda_rows
from mm.page_copies import MemoryOrders, TableChanges
from model.cuda_rows import CudaRows
from model.executor import Executor
from model.step_plan import LogProbs, RowSettings, SamplingParameters, ScoredTokens, StepPlan, StepResult

CONFIG = tiny_config()
PROMPTS = [np.random.default_rng(i).integers(0, 211, length).tolist() for i, length in enumerate((3, 16, 40, 5, 21, 9))]
SAMPLING = [
    SamplingParameters(temperature=0.0, repetition_penalty=1.4, logprobs=4),
    SamplingParameters(temperature=0.9, presence_penalty=1.5, frequency_penalty=0.7, seed=3),
    SamplingParameters(
        temperature=1.1, min_p=0.02, bad_words=[[5], [60, 61]], min_tokens=12, barred_ids=[1, 2], seed=4
    ),
    SamplingParameters(temperature=0.8, top_p=0.8, logit_bias={3: 4.0, 9: 4.0}, frequency_penalty=0.9, seed=5),
    SamplingParameters(temperature=1.0, typical_p=0.7, allowed_token_ids=list(range(0, 211, 4)), seed=6, logprobs=1),
    SamplingParameters(temperature=0.0),
]


class Recorder:
    """Passes plans on, and keeps the results."""

    polls = 0

    def __init__(self, executor: Any) -> None:
        self.executor, self.frames = executor, executor.frames
        self.results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> Any:
        ticket = self.executor.submit(plan)
        self.results.append(ticket.wait())
        return ticket


@pytest.fixture
def executors(device: Any) -> Any:
    made = [cpu_executor(CONFIG, torch.float32), ProgramExecutor(device, CONFIG, torch.float32)]
    yield made
    for executor in made:
        executor.close()


def generate(executor: Executor, prompts: list[list[int]], sampling: list[SamplingParameters], tokens: int) -> Any:
    recorder: Any = Recorder(executor)
    made = PlanDriver(recorder).generate(prompts, tokens, budget=32, sampling=sampling, arrive=2)
    assert not any(sequence.failed for sequence in made)
    return [sequence.output for sequence in made], recorder.results


def check_close(ours: LogProbs | None, theirs: LogProbs | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    assert ours.ids.shape == theirs.ids.shape
    assert np.array_equal(ours.ranks, theirs.ranks)
    assert np.array_equal(ours.ids, theirs.ids)
    assert np.abs(ours.chosen - theirs.chosen).max(initial=0) < 1e-3  # the logits themselves differ in their last bits
    finite = np.isfinite(theirs.values)
    assert np.array_equal(finite, np.isfinite(ours.values))
    assert np.abs(ours.values[finite] - theirs.values[finite]).max(initial=0) < 1e-3


@pytest.mark.parametrize("first_room", [1, 256])
def test_tokens_and_reports_are_those_of_the_cpu_executor(executors: Any, first_room: int, monkeypatch: Any) -> None:
    """Every kind of parameter in one batch, chunked prefill, feedback; also where histories outgrow their memory."""
    monkeypatch.setattr(model.cuda_rows, "FIRST_ROOM", first_room)
    (theirs, expected), (ours, results) = (generate(executor, PROMPTS, SAMPLING, 30) for executor in executors)
    assert ours == theirs
    assert any(result.logprobs is not None for result in expected)
    for one, other in zip(results, expected, strict=True):
        check_close(one.logprobs, other.logprobs)


def test_a_row_forgets_who_had_it_before(executors: Any) -> None:
    """The same rows with other parameters, twice: lists, histories and reports of the first are gone."""
    orders = SAMPLING, SAMPLING[::-1], SAMPLING
    outputs = [[generate(executor, PROMPTS, order, 8)[0] for order in orders] for executor in executors]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == outputs[0][2]


def scored_plan(scored: ScoredTokens, prompt: list[int], step: int) -> StepPlan:
    pages = np.arange(PAGES, dtype=np.int32)
    return StepPlan(
        step=step,
        orders=MemoryOrders(table_changes=TableChanges(np.zeros_like(pages), pages, pages)),
        settings=RowSettings(int32(0), [SamplingParameters(temperature=0.0, logit_bias={0: 100.0}, logprobs=2)]),
        rows=int32(0),
        starts=int32(0),
        query_starts=int32(0, len(prompt)),
        token_ids=int32(*prompt),
        samples=np.array([True]),
        decodes=0,
        scored=scored,
    )


@pytest.mark.parametrize("likeliest", [0, 5])
def test_scored_tokens_are_those_of_the_cpu_executor(executors: Any, likeliest: int) -> None:
    """A prompt's own tokens, more than one piece of them, without the row's bias; the row samples as well."""
    prompt = PROMPTS[2]
    places = np.arange(len(prompt) - 1, dtype=np.int32)
    assert len(places) > 2 * ROWS
    scored = ScoredTokens(places, int32(*prompt[1:]), likeliest)
    theirs, ours = (executor.submit(scored_plan(scored, prompt, 1)).wait() for executor in executors)
    assert ours.tokens.tolist() == theirs.tokens.tolist() == [0]
    assert len(ours.scored.chosen) == len(places)
    check_close(ours.scored, theirs.scored)
    check_close(ours.logprobs, theirs.logprobs)
    nobody = ScoredTokens(int32(), int32(), likeliest)
    assert len(executors[1].submit(scored_plan(nobody, prompt, 2)).wait().scored.chosen) == 0


def test_each_parameter_is_in_its_field_of_the_record() -> None:
    """Of two rows that are stored together, in any order."""
    rows = CudaRows(4, 100, "cpu", page_locked=False)
    given = SamplingParameters(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, typical_p=0.75, logprobs=3, seed=2**63 + 5
    )
    rows.store(RowSettings(int32(2, 1), [SamplingParameters(temperature=0.0), given], int32(4, 6)))
    found = {name: rows.settings[name][1].tolist() for name in rows.settings.dtype.names or ()}
    assert found == {
        "seed": 2**63 + 5, "top_p": 0.25, "typical_p": 0.75, "least_mass": 2**37, "history": 0, "lists": 0,
        "temperature": 0.5, "repetition": 1.0, "presence": 0.0, "frequency": 0.0, "top_k": 7, "log_probs": 3,
        "prompt": 6, "min_tokens": 0, "adjusts": 0, "unused": [0, 0, 0],
    }  # fmt: skip
    assert (rows.settings["prompt"][2], rows.settings["log_probs"][2]) == (4, -1)
    many = SamplingParameters(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, min_tokens=9)
    rows.store(RowSettings(int32(3), [many], int32(1), [int32(8)]))
    names = ("presence", "frequency", "repetition", "min_tokens", "adjusts")
    assert [rows.settings[name][3].tolist() for name in names] == [0.5, 0.25, 2.0, 9, 1]


def test_a_missing_history_is_refused() -> None:
    """Not sampled without it."""
    rows = CudaRows(4, 100, "cpu", page_locked=False)
    with pytest.raises(ValueError, match="history"):
        rows.store(RowSettings(int32(1), [SamplingParameters(repetition_penalty=1.2)]))


def test_rows_without_memory_take_none() -> None:
    """Settings alone need no words, no room and no reports; a row that no longer asks gives its memory back."""
    rows = CudaRows(4, 100, "cpu", page_locked=False)
    asking = SamplingParameters(presence_penalty=0.5, logprobs=2)
    plan = scored_plan(ScoredTokens(int32(), int32(), 0), [1, 2], 0)
    plan = replace(plan, rows=int32(2))
    rows.store(RowSettings(int32(2), [asking], int32(1), [int32(7)]))
    assert rows.settings["history"][2]
    assert rows.reports(plan)[0].tolist() == [0]
    rows.store(RowSettings(int32(2), [SamplingParameters()]))
    assert not rows.settings["history"][2]
    assert not rows.settings["adjusts"][2]
    assert not rows._words
    assert len(rows.reports(plan)[0]) == 0
    assert rows.make_room(plan) is None
