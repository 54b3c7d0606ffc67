"""The executor's part in sampling: what its rows remember from step to step, log-probabilities and scored tokens."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from plan_driver import GREEDY, PlanDriver, int32

from mm.page_copies import MemoryOrders, TableChanges
from model.config import read_config
from model.cpu_executor import CpuExecutor
from model.loader import load_parameters
from model.step_plan import FED_BACK, RowSettings, SamplingParameters, ScoredTokens, StepPlan

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 211, 21)]
PENALIZED = SamplingParameters(temperature=0.0, repetition_penalty=1.3)
WORDS = [[5], [60, 61], [PROMPT[-1], 7]]
OTHERS = SamplingParameters(
    temperature=0.9, top_p=0.95, presence_penalty=0.8, frequency_penalty=0.4, bad_words=WORDS, seed=8, logprobs=3
)


@pytest.fixture
def model(tiny):
    return tiny("Qwen3", seed=4)


@pytest.fixture
def executor(model) -> Iterator[CpuExecutor]:
    config = read_config(model.folder)
    parameters = load_parameters(model.folder, config, torch.float32)
    running = CpuExecutor(config, parameters, frames=64, max_rows=8, max_pages=8, threads=1)
    yield running
    running.close()


class Row:
    """Makes plans for one Sequence in a row of its own frames; what was sampled is fed back on the device."""

    def __init__(self, row: int, prompt: list[int], sampling: SamplingParameters, output: list[int] = ()) -> None:
        self.row, self.prompt, self.sampling = row, prompt, sampling
        self.output = list(output)
        self.computed = 0

    def plan(self, count: int | None = None, *, samples: bool = True, scored: ScoredTokens | None = None) -> StepPlan:
        """The next `count` tokens of those that are known; None: one that the device knows."""
        known = self.prompt + self.output
        ids = [FED_BACK] if count is None else known[self.computed : self.computed + count]
        orders, settings = MemoryOrders(), None
        if self.computed == 0:
            pages = np.arange(8, dtype=np.int32)
            orders = MemoryOrders(
                table_changes=TableChanges(np.full_like(pages, self.row), pages, self.row * 8 + pages)
            )
            history = known if self.sampling.needs_history else []
            settings = RowSettings(int32(self.row), [self.sampling], int32(len(self.prompt)), [int32(*history)])
        plan = StepPlan(
            step=0,
            orders=orders,
            settings=settings,
            rows=int32(self.row),
            starts=int32(self.computed),
            query_starts=int32(0, len(ids)),
            token_ids=int32(*ids),
            samples=np.array([samples]),
            decodes=int(count is None),
            scored=scored,
        )
        self.computed += len(ids)
        return plan


def go_on(executor: CpuExecutor, row: Row, tokens: int, first: int | None = None) -> list[int]:
    """Sample `tokens` more; the first after `first` known ones. All steps are submitted before any result is read."""
    plans = [row.plan(first)] + [row.plan() for _ in range(tokens - 1)]
    tickets = [executor.submit(plan) for plan in plans]
    return [int(ticket.wait().tokens[0]) for ticket in tickets]


@pytest.mark.parametrize("budget", [5, 512])
def test_penalties_and_bad_words_are_those_of_transformers_generate(model, executor: CpuExecutor, budget: int) -> None:
    """Prefilled in chunks beside others and fed back on the device: the tokens of `generate`."""
    greedy = model.generate(PROMPT, 24)
    words = [[PROMPT[-1], greedy[0]], [greedy[2]], greedy[4:7]]  # the first one crosses the end of the prompt
    kinds = [
        (PENALIZED, {"repetition_penalty": 1.3}),
        (SamplingParameters(temperature=0.0, bad_words=words), {"bad_words_ids": words}),
        (SamplingParameters(temperature=0.0, bad_words=[greedy[4:7]]), {"bad_words_ids": [greedy[4:7]]}),
    ]
    made = PlanDriver(executor).generate(
        [PROMPT] * 3, 24, budget=budget, sampling=[ours for ours, _ in kinds], arrive=1
    )
    for sequence, (_, theirs) in zip(made, kinds, strict=True):
        ids = torch.tensor([PROMPT])
        out = model.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None, **theirs
        )
        assert sequence.output == out[0, len(PROMPT) :].tolist()
        assert sequence.output != greedy


@pytest.mark.parametrize("sampling", [PENALIZED, OTHERS])
def test_a_row_that_is_entered_again_samples_what_it_would_have(executor: CpuExecutor, sampling) -> None:
    """Preempted after 9 tokens: it comes back in another row, with its history, and is computed again in chunks."""
    whole = go_on(executor, Row(0, PROMPT, sampling), 20, len(PROMPT))
    again = Row(3, PROMPT, sampling, whole[:9])
    executor.submit(again.plan(13, samples=False)).wait()
    assert go_on(executor, again, 11, len(PROMPT) + 9 - 13) == whole[9:]
    assert len(set(whole)) > 10


@pytest.mark.parametrize("sampling", [PENALIZED, OTHERS])
def test_a_row_that_rests_while_others_run_goes_on(executor: CpuExecutor, sampling) -> None:
    """As when its pages are in swap: it keeps its row, and the next token it computes comes from the host."""
    whole = go_on(executor, Row(0, PROMPT, sampling), 20, len(PROMPT))
    row, other = Row(1, PROMPT, sampling), Row(2, PROMPT[::-1], OTHERS)
    row.output = go_on(executor, row, 9, len(PROMPT))
    go_on(executor, other, 12, len(PROMPT))
    assert go_on(executor, row, 11, 1) == whole[9:]


def test_a_token_for_a_row_that_was_given_up_is_forgotten(executor: CpuExecutor) -> None:
    """A step was on its way when its Sequence ended. What it sampled is no part of who enters the row next."""
    whole = go_on(executor, Row(0, PROMPT, OTHERS), 12, len(PROMPT))
    before = Row(1, PROMPT[::-1], OTHERS)
    go_on(executor, before, 5, len(PROMPT))
    junk = executor.submit(before.plan())
    assert go_on(executor, Row(1, PROMPT, OTHERS), 12, len(PROMPT)) == whole
    assert junk.wait().tokens[0] >= 0


def test_log_probabilities_are_of_rows_that_sample_and_ask(executor: CpuExecutor, model) -> None:
    """In the plan's order, as wide as the widest asks; a chunk in the middle of a prompt has none."""
    prompts = [PROMPT[:6], PROMPT[3:9], PROMPT[5:12], PROMPT[8:10]]
    kinds = [SamplingParameters(temperature=0.0, logprobs=count) for count in (2, 5, -1, 0)]
    together = StepPlan(
        step=0,
        orders=MemoryOrders(table_changes=TableChanges(int32(0, 1, 2, 3), int32(0, 0, 0, 0), int32(0, 8, 16, 24))),
        settings=RowSettings(int32(0, 1, 2, 3), kinds),
        rows=int32(3, 1, 2, 0),
        starts=int32(0, 0, 0, 0),
        query_starts=int32(0, 2, 8, 15, 21),
        token_ids=int32(*prompts[3], *prompts[1], *prompts[2], *prompts[0]),
        samples=np.array([True, False, True, True]),
        decodes=0,
    )
    result = executor.submit(together).wait()
    assert result.scored is None
    assert result.logprobs is not None
    assert result.logprobs.ids.shape == (2, 2)
    for place, prompt in enumerate((prompts[3], prompts[0])):
        expected = model.logits(prompt)[-1].log_softmax(-1)
        np.testing.assert_allclose(result.logprobs.values[place], expected.topk(2).values, rtol=0, atol=1e-4)
        assert result.logprobs.chosen[place] == result.logprobs.values[place, 0]


@pytest.mark.parametrize("samples", [True, False])
def test_scored_tokens_are_of_the_plain_logits(executor: CpuExecutor, model, monkeypatch, samples: bool) -> None:
    """Piece by piece, whether the row samples or not, and whatever its sampling parameters are."""
    monkeypatch.setattr("model.cpu_executor.SCORED_AT_ONCE", 7)
    places = int32(*range(1, 20))
    scored = ScoredTokens(places, int32(*PROMPT[2:21]), 4)
    biased = SamplingParameters(temperature=0.0, logit_bias={3: 100.0}, repetition_penalty=5.0)
    result = executor.submit(Row(0, PROMPT, biased).plan(21, samples=samples, scored=scored)).wait()
    assert result.scored is not None
    expected = model.logits(PROMPT)[1:20].log_softmax(-1)
    np.testing.assert_allclose(result.scored.values, expected.topk(4).values, rtol=0, atol=1e-4)
    np.testing.assert_allclose(result.scored.chosen, expected[range(19), PROMPT[2:21]], rtol=0, atol=1e-4)
    assert result.scored.ids.shape == (19, 4)
    assert result.tokens.tolist() == ([3] if samples else [-1])


def test_a_row_of_which_everything_is_banned_fails_and_the_next_step_runs(executor: CpuExecutor, model) -> None:
    nothing = SamplingParameters(temperature=0.0, allowed_token_ids=[9], bad_words=[[9]], logprobs=1)
    row = Row(0, PROMPT, nothing)
    first = executor.submit(row.plan(len(PROMPT)))
    after = executor.submit(row.plan())
    assert first.wait().failed.tolist() == after.wait().failed.tolist() == [True]
    assert go_on(executor, Row(0, PROMPT, GREEDY), 3, len(PROMPT)) == model.generate(PROMPT, 3)
