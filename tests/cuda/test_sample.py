"""Sampling on the device against the definition in model/sampler.py, on the code paths of Hopper and of others."""

import numpy as np
import pytest
import torch
from device_sampler import DeviceSampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sampling_batch import tokens_of
from slow_sampling import Case, slow_sample

from cuda.errors import ShapeMismatch
from cuda.sample import (
    BLOCK_BYTES,
    FIXED_BYTES,
    MAX_VOCABULARY,
    SHARED_BYTES,
    LogProbRecords,
    TeamShape,
    want_all_logits,
)
from model.step_plan import SamplingParameters


def cases_of(logits: torch.Tensor, parameters: list[SamplingParameters], position: int = 4) -> list[Case]:
    return [Case(x.numpy(), p, prompt=[0] * position) for x, p in zip(logits, parameters, strict=True)]


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(any_device, generator) -> None:
    """Across slices of the row, at its first and last place, and for negative zero, which equals zero."""
    logits = torch.randn(5, 1003, generator=generator)
    logits[0, [900, 12, 500]] = 9.0
    logits[1, 1002] = 9.0
    logits[2, 0] = 9.0
    logits[3] = -1.0
    logits[3, 7], logits[3, 8] = -0.0, 0.0
    logits[4] = -5.0
    sampler = DeviceSampler(any_device, cases_of(logits, [SamplingParameters(temperature=0.0)] * 5))
    tokens, failed = sampler.run()
    assert tokens == [12, 1002, 0, 7, 0]
    assert failed == [0] * 5
    assert sampler.state.last_tokens[torch.from_numpy(sampler.rows).long()].tolist() == tokens


FILTERS = {
    "temperature": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "top-k, top-p": {"top_k": 50, "top_p": 0.95},
    "top-k of 1": {"top_k": 1},
    "top-k, more than lists hold": {"top_k": 400, "top_p": 0.9},
    "top-k of all": {"top_k": 100_000},
    "top-p, tiny": {"top_p": 1e-9},
    "min-p": {"min_p": 0.05},
    "min-p of 1": {"min_p": 1.0},
    "typical": {"typical_p": 0.6},
    "typical, tiny": {"typical_p": 1e-9},
    "all": {"top_k": 90, "top_p": 0.98, "min_p": 0.02, "typical_p": 0.9},
    "all but top-k": {"top_p": 0.98, "min_p": 0.02, "typical_p": 0.9},
}
TEMPERATURES = [1.0, 0.7, 1.5, 100.0, 1e-4, 1e-8, 1e30]


@pytest.mark.parametrize("vocabulary", [7, 1003])
@pytest.mark.parametrize("spread", [0.3, 3.0, 40.0])
def test_draws_are_those_of_the_definition(any_device, vocabulary, spread) -> None:
    """Every setting beside every other, on flat and on peaked logits: the token of the definition, seed by seed."""
    generator = torch.Generator().manual_seed(vocabulary)
    different = 0
    for temperature in TEMPERATURES:
        parameters = [
            SamplingParameters(temperature=temperature, seed=(i * 2**60 + 11 * i) % 2**64, **fields)
            for i, fields in enumerate(FILTERS.values())
        ]
        logits = torch.randn(len(parameters), vocabulary, generator=generator) * spread
        cases = cases_of(logits, parameters, int(torch.randint(1, 100, (1,), generator=generator)))
        tokens, failed = DeviceSampler(any_device, cases).run()
        assert not any(failed)
        different += sum(token != slow_sample(case) for token, case in zip(tokens, cases, strict=True))
    # exp may differ in its last bit between the two, and a draw near an edge then falls on its other side
    assert different <= (0 if any_device.is_emulated else len(TEMPERATURES) * len(FILTERS) // 50)


@pytest.mark.parametrize(
    "vocabulary", [49_152, *(pytest.param(v, marks=pytest.mark.gpu) for v in (128_256, 151_936, 400_000))]
)
@pytest.mark.parametrize(
    "spread", [pytest.param(0.3, marks=pytest.mark.gpu), 3.0, pytest.param(40.0, marks=pytest.mark.gpu)]
)
def test_draws_are_those_of_the_cpu_sampler(any_device, vocabulary, spread) -> None:
    """Vocabularies of real models, and one that no team holds; more rows than get the largest team."""
    generator = torch.Generator().manual_seed(vocabulary)
    different = drawn = 0
    for temperature in (0.8, 1e30):
        parameters = [
            SamplingParameters(temperature=temperature, seed=(i * 2**60 + 11 * i) % 2**64, **fields)
            for i, fields in enumerate([*FILTERS.values()] * 3)
        ]
        logits = torch.randn(len(parameters), vocabulary, generator=generator) * spread
        cases = cases_of(logits, parameters, int(torch.randint(1, 100, (1,), generator=generator)))
        for part in (cases, cases[:14]):
            tokens, failed = DeviceSampler(any_device, part).run()
            assert not any(failed)
            different += sum(ours != theirs for ours, theirs in zip(tokens, tokens_of(part), strict=True))
            drawn += len(part)
    assert different <= (0 if any_device.is_emulated else drawn // 50)  # as above


@pytest.mark.parametrize("vocabulary", [1003, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_rows_that_want_their_largest_logits_need_two_kernels(any_device, vocabulary) -> None:
    """Also with more equal logits than a list holds, and with more near the largest than are compared."""
    generator = torch.Generator().manual_seed(vocabulary)
    fields: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 50, "top_p": 0.95},
        {"top_k": 128, "typical_p": 0.9, "min_p": 0.01},
        {"min_p": 0.05},
        {"min_p": 1e-6, "typical_p": 0.5, "temperature": 9.0},
        {"top_k": 40, "temperature": 1e30},
    ]
    parameters = [SamplingParameters(**{"temperature": 0.8, "seed": i, **way}) for i, way in enumerate(fields)]
    drawn = torch.randn(len(fields), vocabulary, generator=generator) * 3
    for logits in (drawn, torch.full_like(drawn, 2.5), drawn.round()):
        sampler = DeviceSampler(any_device, cases_of(logits, parameters))
        sampler.run()
        assert not want_all_logits(sampler.table.settings[sampler.rows], vocabulary).any()
        tokens, failed = sampler.launch()  # again: all that kernels leave to each other is as it was
        assert not any(failed)
        assert tokens == tokens_of(sampler.cases)


def test_what_wants_all_logits(device) -> None:
    """Log-probabilities, a large top-k, and draws among all tokens."""
    ways = [{"logprobs": 0, "temperature": 0.0}, {"top_k": 129}, {}, {"top_p": 0.9, "min_p": 0.1}, {"typical_p": 0.5}]
    logits = torch.zeros(len(ways), 300)
    sampler = DeviceSampler(device, cases_of(logits, [SamplingParameters(**way) for way in ways]))
    sampler.run()
    assert want_all_logits(sampler.table.settings[sampler.rows], 300).all()


def logits_of(vocabulary: int) -> st.SearchStrategy[np.ndarray]:
    """Ties, neighbours, huge and tiny numbers."""
    few = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, 12.0, 88.0, -200.0, 3e38, -3e38, 1e-40])
    some = st.floats(-30, 30, width=32)
    return arrays(np.float32, vocabulary, elements=st.one_of(few, some), fill=st.sampled_from([0.0, 1.0, -5.0]))


SHARES = st.one_of(st.just(1.0), st.floats(1e-9, 1.0))

PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.one_of(st.just(0.0), st.sampled_from([1e-5, 0.01, 1.0, 7.0, 1e30]), st.floats(0.1, 3)),
    top_k=st.one_of(st.just(0), st.integers(1, 40), st.integers(120, 400)),
    top_p=SHARES,
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    typical_p=SHARES,
    seed=st.integers(0, 2**64 - 1),
)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_draw_is_that_of_the_definition(any_device, data) -> None:
    """Whatever hypothesis thinks of, for a vocabulary that no vector divides; rows beside each other."""
    vocabulary = data.draw(st.sampled_from([1, 3, 33, 301]))
    rows = data.draw(st.integers(1, 4))
    cases = [Case(data.draw(logits_of(vocabulary)), data.draw(PARAMETERS)) for _ in range(rows)]
    tokens, failed = DeviceSampler(any_device, cases).run()
    assert not any(failed)
    assert tokens == [slow_sample(case) for case in cases]


def test_ties_at_the_edge_keep_the_lowest_ids(any_device) -> None:
    """Logits of a few values only: the filters cut through equals, and the draw shows who was kept."""
    logits = (torch.arange(2600) % 3).float().repeat(6, 1)
    filters = [{"top_k": 250}, {"top_k": 5}, {"top_p": 0.4}, {"top_k": 210, "top_p": 0.97}, {"typical_p": 0.3}]
    filters.append({"top_k": 1000, "top_p": 0.5})
    for seed in range(3):
        cases = cases_of(logits, [SamplingParameters(temperature=100.0, seed=seed, **f) for f in filters], seed + 1)
        assert DeviceSampler(any_device, cases).run()[0] == [slow_sample(case) for case in cases]


def test_all_logits_equal(any_device) -> None:
    """The worst case for histograms and lists: everything is a candidate."""
    logits = torch.full((5, 4099), 1.25)
    filters = [{}, {"top_k": 7}, {"top_p": 0.3}, {"top_k": 1000, "top_p": 0.5}, {"typical_p": 0.5}]
    for seed in range(2):
        cases = cases_of(logits, [SamplingParameters(seed=seed, **f) for f in filters], 9)
        assert DeviceSampler(any_device, cases).run()[0] == [slow_sample(case) for case in cases]


def test_candidates_of_one_block_only(any_device) -> None:
    """Logits that fall with the id: all that may be kept is in the first block's slice, more than its list holds."""
    logits = -torch.arange(9000, dtype=torch.float32).repeat(4, 1) / 500
    filters = [{"top_k": 100}, {"top_k": 128, "top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.7}]
    cases = cases_of(logits, [SamplingParameters(seed=3, **f) for f in filters])
    assert DeviceSampler(any_device, cases).run()[0] == [slow_sample(case) for case in cases]


def test_a_row_draws_the_same_in_any_batch(any_device, generator) -> None:
    """Alone, beside others, and where so many rows sample that teams are smaller."""
    logits = torch.randn(40, 515, generator=generator) * 2
    cases = cases_of(logits, [SamplingParameters(seed=i, top_p=0.9 if i % 2 else 1.0, logprobs=3) for i in range(40)])
    together = DeviceSampler(any_device, cases)
    tokens, _ = together.run()
    assert together.log_probs is not None
    for i in (0, 1, 39):
        alone = DeviceSampler(any_device, [cases[i]])
        assert alone.run()[0] == [tokens[i]]
        assert alone.log_probs is not None
        for one, of_all in zip(alone.log_probs, together.log_probs, strict=True):
            assert np.array_equal(one[0], of_all[i])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 150, 299])
def test_a_row_that_is_not_finite_is_flagged_alone(any_device, generator, bad, place) -> None:
    """Its neighbours sample as if nothing were; its token is at least an id."""
    logits = torch.randn(3, 300, generator=generator)
    cases = cases_of(logits, [SamplingParameters(seed=5, logprobs=2)] * 3)
    expected = [slow_sample(case) for case in cases]
    cases[1].logits[place] = bad
    tokens, failed = DeviceSampler(any_device, cases).run()
    assert failed == [0, 1, 0]
    assert 0 <= tokens[1] < 300
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_is_flagged(any_device, temperature) -> None:
    """There is no largest one; its token is an id all the same."""
    logits = torch.full((1, 300), float("nan"))
    tokens, failed = DeviceSampler(any_device, cases_of(logits, [SamplingParameters(temperature)])).run()
    assert failed == [1]
    assert 0 <= tokens[0] < 300


def test_sequences_that_do_not_sample_report_their_flag(any_device, generator) -> None:
    """A chunk in the middle of a prompt: token -1, its row's flag is reported and cleared, its last token stays."""
    logits = torch.randn(3, 300, generator=generator)
    logits[2] = float("nan")  # not read
    cases = cases_of(logits, [SamplingParameters(temperature=0.0, logprobs=1)] * 3)
    sampler = DeviceSampler(any_device, cases, samples=[True, False, False])
    sampler.state.failed[int(sampler.rows[1])] = 1
    sampler.state.last_tokens.fill_(55)
    tokens, failed = sampler.run()
    assert tokens == [int(logits[0].argmax()), -1, -1]
    assert failed == [0, 1, 0]
    assert not sampler.state.failed.any()
    assert sampler.state.last_tokens[int(sampler.rows[1])] == 55
    assert sampler.launch()[1] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 256, 1024])
@pytest.mark.parametrize("vocabulary", [49_152, 128_256, 151_936])
def test_large_batches_agree_with_small_ones(device, vocabulary, batch) -> None:
    """Every third row is drawn again in a batch of its own kind: the same token by another team."""
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(8, vocabulary, generator=generator) * 3
    filters = list(FILTERS.values())
    cases = [
        Case(logits[i % 8].numpy(), SamplingParameters(seed=i, **filters[i % len(filters)]), prompt=[0] * (1 + i))
        for i in range(batch)
    ]
    tokens, failed = DeviceSampler(device, cases).run()
    assert not any(failed)
    some = list(range(0, batch, 3 if batch < 100 else 37))
    assert DeviceSampler(device, [cases[i] for i in some]).run()[0] == [tokens[i] for i in some]


def test_teams_fit() -> None:
    """Two blocks of a team fit a multiprocessor while eight blocks are enough; what fits nowhere is not resident."""
    for vocabulary in (7, 32_000, 49_152, 128_256, 151_936, 262_144, MAX_VOCABULARY):
        for largest in (True, False):
            shape = TeamShape.of(90, vocabulary, largest=largest)
            if not shape.is_resident:
                assert vocabulary > 380_000
                assert shape.shared_bytes == FIXED_BYTES
                continue
            assert (shape.shared_bytes - FIXED_BYTES) // 4 * shape.blocks >= vocabulary + 3
            assert shape.shared_bytes <= (SHARED_BYTES if vocabulary <= 163_000 else BLOCK_BYTES)
    assert TeamShape.of(90, 49_152, largest=False).blocks == 4
    assert TeamShape.of(80, 49_152, largest=True) == TeamShape(1, is_resident=False, shared_bytes=FIXED_BYTES)


def test_a_vocabulary_that_sums_cannot_hold_is_refused(device) -> None:
    """Before any launch."""
    with pytest.raises(ShapeMismatch, match="vocabulary"):
        LogProbRecords(device.loader, MAX_VOCABULARY + 1)
