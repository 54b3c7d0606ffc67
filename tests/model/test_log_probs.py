"""Log-probabilities: torch's in float64, order and ties, the very same float, and SmolLM2 beside transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batch import sampled
from slow_sampling import Case

from model.log_probs import joined, log_probs
from model.step_plan import SamplingParameters


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.floats(-30, 30, width=32), st.integers(-2, 2).map(float), st.just(-np.inf)),
        min_size=1,
        max_size=50,
    ).filter(lambda values: max(values) > -np.inf),
    likeliest=st.integers(0, 32),
    data=st.data(),
)
def test_values_ids_and_ranks_are_those_of_a_stable_sort(logits, likeliest, data) -> None:
    """Falling by value, the lowest id first among equals; minus infinity stays; never more than the vocabulary."""
    x = torch.tensor([logits])
    chosen = data.draw(st.integers(0, len(logits) - 1))
    found = log_probs(x, torch.tensor([chosen]), likeliest)
    expected = x.double().log_softmax(-1)[0].numpy()
    order = np.argsort(-x[0].numpy(), kind="stable")[:likeliest]
    assert found.ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(found.values[0], expected[order], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.chosen[0], expected[chosen], rtol=1e-6, atol=1e-6)
    assert found.ranks[0] == 1 + (x[0] > x[0, chosen]).sum()
    assert (found.ids.dtype, found.ranks.dtype, found.values.dtype) == (np.int32, np.int32, np.float32)
    if chosen in order:
        assert found.values[0, order.tolist().index(chosen)] == found.chosen[0]


def test_a_large_vocabulary_is_exact_to_1e6() -> None:
    """152k tokens, flat and peaked: what the integer sum cuts off does not show."""
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.1, 3.0, 12.0):
        x = torch.randn(3, 151_936, generator=generator) * spread
        found = log_probs(x, torch.tensor([0, 5, 151_935]), 20)
        expected = x.double().log_softmax(-1)
        np.testing.assert_allclose(found.values, expected.topk(20).values.numpy(), rtol=0, atol=3e-6)
        np.testing.assert_allclose(found.chosen, expected[range(3), [0, 5, 151_935]].numpy(), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_place_that_is_not_finite_harms_no_other(bad: float) -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    before = log_probs(x, torch.tensor([1, 2, 3]), 5)
    x[1] = bad
    after = log_probs(x, torch.tensor([1, 2, 3]), 5)
    for name in ("chosen", "ranks", "ids", "values"):
        assert (getattr(after, name)[[0, 2]] == getattr(before, name)[[0, 2]]).all()


def test_no_places_have_no_log_probabilities() -> None:
    found = log_probs(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64), 3)
    assert (found.chosen.shape, found.ids.shape) == ((0,), (0, 3))
    assert joined([found, found]).values.shape == (0, 3)


def test_they_are_of_the_adjusted_logits_before_temperature_and_truncation() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    parameters = SamplingParameters(temperature=0.5, top_k=1, logit_bias={0: -100.0}, bad_words=[[3]], logprobs=4)
    found = sampled([Case(logits, parameters)]).logprobs
    assert found is not None
    assert found.ids[0].tolist() == [1, 2, 0, 3]
    np.testing.assert_allclose(found.values[0, :2], np.log([0.6, 0.4]), rtol=1e-6)
    assert found.values[0, 3] == -np.inf
    assert (found.ranks[0], found.chosen[0]) == (1, found.values[0, 0])


def test_only_rows_that_ask_are_reported_in_order_and_as_wide_as_the_widest() -> None:
    logits = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    cases = [
        Case(row, SamplingParameters(seed=4, temperature=2.0, logprobs=count))
        for row, count in zip(logits, (-1, 0, -1, 7, 2), strict=True)
    ]
    outcome = sampled(cases)
    assert outcome.logprobs is not None
    assert outcome.logprobs.ids.shape == (3, 7)
    expected = torch.from_numpy(logits).double().log_softmax(-1)[range(5), outcome.tokens.tolist()]
    np.testing.assert_allclose(outcome.logprobs.chosen, expected[[1, 3, 4]], rtol=1e-6)
    assert sampled([cases[0], cases[2]]).logprobs is None


@pytest.mark.slow
def test_log_probabilities_of_smollm2_are_transformers(smollm2_folder: Path, golden) -> None:
    """Scored prompt tokens and sampled ones, in float32: within 1e-4 of log_softmax of transformers' logits."""
    import transformers
    from plan_driver import int32

    from mm.page_copies import MemoryOrders, TableChanges
    from model.config import read_config
    from model.cpu_executor import CpuExecutor
    from model.loader import load_parameters
    from model.step_plan import RowSettings, ScoredTokens, StepPlan

    prompt = next(entry.prompt for entry in golden if 40 <= len(entry.prompt) <= 300)
    count = len(prompt)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)  # (T, V)
    config = read_config(smollm2_folder)
    executor = CpuExecutor(
        config, load_parameters(smollm2_folder, config, torch.float32), frames=40, max_rows=1, max_pages=32, threads=1
    )
    pages = np.arange(-(-count // 16), dtype=np.int32)
    plan = StepPlan(
        step=0,
        orders=MemoryOrders(table_changes=TableChanges(np.zeros_like(pages), pages, pages + 1)),
        settings=RowSettings(int32(0), [SamplingParameters(temperature=0.0, logprobs=20)]),
        rows=int32(0),
        starts=int32(0),
        query_starts=int32(0, count),
        token_ids=int32(*prompt),
        samples=np.array([True]),
        decodes=0,
        scored=ScoredTokens(np.arange(count - 1, dtype=np.int32), int32(*prompt[1:]), 5),
    )
    result = executor.submit(plan).wait()
    executor.close()
    assert result.scored is not None
    assert result.logprobs is not None
    best = expected.topk(20, dim=-1)
    close = {"rtol": 0, "atol": 1e-4}
    np.testing.assert_allclose(result.scored.values, best.values[:-1, :5], **close)
    np.testing.assert_allclose(result.scored.chosen, expected[range(count - 1), prompt[1:]], **close)
    np.testing.assert_allclose(result.logprobs.values[0], best.values[-1], **close)
    assert result.logprobs.ids[0, 0] == result.tokens[0] == best.indices[-1, 0]
    assert result.logprobs.chosen[0] == result.logprobs.values[0, 0]
