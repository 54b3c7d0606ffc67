"""Penalties, biases and bans on the device, against the definition in model/sampler.py, in whole steps."""

import numpy as np
import pytest
import torch
from device_sampler import DeviceSampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_sampling import Case, slow_adjusted, slow_sample

from cuda.adjust import BLOCKS, pack_lists
from model.step_plan import SamplingParameters

VOCABULARIES = [1003, pytest.param(151_936, marks=pytest.mark.gpu)]

ASKING = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.3},
    "all penalties": {"repetition_penalty": 0.8, "presence_penalty": -1.1, "frequency_penalty": 0.45},
    "extreme penalties": {"repetition_penalty": 1e38, "frequency_penalty": 3e38},
    "bias": {"logit_bias": {5: 100.0, 900: -100.0, 17: 3e38, 18: 0.25}},
    "allowed": {"allowed_token_ids": [3, 31, 32, 64, 900, 1002]},
    "one allowed": {"allowed_token_ids": [1002]},
    "minimum not reached": {"min_tokens": 9, "barred_ids": [1, 2, 1002]},
    "minimum reached": {"min_tokens": 8, "barred_ids": [1, 2, 1002]},
    "bad words": {"bad_words": [[7], [2, 4], [9, 3, 3, 11], [3, 3, 12], [8, 1]]},
    "everything": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 5.0, 4: 5.0},
        "allowed_token_ids": list(range(0, 1000, 3)),
        "min_tokens": 20,
        "barred_ids": [3, 6, 9],
        "bad_words": [[9, 3, 12], [15]],
        "top_k": 20,
    },
}
PROMPT, OUTPUT = [3, 5, 900, 5, 17, 1002], [5, 9, 9, 17, 3, 9, 3, 3]


def check_adjusted(sampler: DeviceSampler) -> None:
    """The logits that the rows were sampled from are those of step A, bit for bit, and the tables are clean."""
    for i, case in enumerate(sampler.cases):
        assert np.array_equal(sampler.logits[i].cpu().numpy(), slow_adjusted(case)), case.parameters
    assert not sampler.adjust._counts.any()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_adjusted_rows_are_those_of_the_definition(any_device, generator, vocabulary) -> None:
    """Every kind beside rows that ask for nothing, which stay as they are."""
    logits = torch.randn(len(ASKING), vocabulary, generator=generator) * 3
    cases = [
        Case(x.numpy(), SamplingParameters(temperature=i % 2 * 0.8, seed=i, **fields), PROMPT, OUTPUT)
        for i, (x, fields) in enumerate(zip(logits, ASKING.values(), strict=True))
    ]
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    check_adjusted(sampler)
    assert not any(failed)
    assert tokens == [slow_sample(case) for case in cases]


IDS = st.integers(0, 40)
PENALTIES = st.one_of(st.just(0.0), st.floats(-2, 2), st.sampled_from([3e38, -3e38]))
ADJUSTING = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.01, 10), st.sampled_from([1e-30, 1e30])),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=5),
    allowed_token_ids=st.lists(IDS, max_size=8),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
    barred_ids=st.lists(IDS, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_adjustment_is_that_of_the_definition(any_device, data) -> None:
    """Also where nothing is left: the row is flagged, and its neighbours sample."""
    values = st.lists(st.floats(-20, 20, width=32), min_size=41, max_size=41)
    tokens = st.lists(IDS, min_size=1, max_size=12)
    cases = [
        Case(np.array(data.draw(values), np.float32), data.draw(ADJUSTING), data.draw(tokens), data.draw(tokens))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    check_adjusted(sampler)
    expected = [slow_sample(case) for case in cases]
    assert failed == [token < 0 for token in expected]
    assert all(0 <= token < 41 for token in tokens)
    assert [t for t, bad in zip(tokens, failed, strict=True) if not bad] == [t for t in expected if t >= 0]


def test_a_history_grows_by_what_is_sampled(any_device, generator) -> None:
    """The device adds each token itself; the next steps count it. With a row that keeps none beside it."""
    logits = torch.randn(2, 301, generator=generator)
    penalized = SamplingParameters(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.9)
    cases = [Case(logits[0].numpy(), penalized, [4, 4]), Case(logits[1].numpy(), SamplingParameters(temperature=0.0))]
    sampler = DeviceSampler(any_device, cases)
    expected = Case(logits[0].numpy(), penalized, [4, 4])
    tokens, _ = sampler.run()
    for _ in range(12):
        assert tokens[0] == slow_sample(expected)
        expected.output.append(tokens[0])
        sampler.state.lengths[:2] += 1
        tokens, _ = sampler.launch()
    assert len(set(expected.output)) > 3  # the penalties did something


def test_more_rows_than_blocks(any_device, generator) -> None:
    """Blocks take rows in turn, with one table each."""
    logits = torch.randn(2 * BLOCKS + 5, 65, generator=generator)
    asking = SamplingParameters(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, bad_words=[[3], [9]])
    cases = [
        Case(x.numpy(), asking if i % 3 else SamplingParameters(temperature=0.0), [i % 65, 7], [i % 11] * (i % 4))
        for i, x in enumerate(logits)
    ]
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    check_adjusted(sampler)
    assert not any(failed)  # what a row's bans were is not the next one's
    assert tokens == [slow_sample(case) for case in cases]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [3, 5, 6, 100])
@pytest.mark.parametrize("fields", ["all penalties", "bias", "everything", "bad words"])
def test_a_logit_that_was_not_finite_is_not_hidden(any_device, generator, bad, place, fields) -> None:
    """Under a ban, a bias, a penalty, or beside them: the row fails, and the one beside it does not."""
    logits = torch.randn(2, 1003, generator=generator)
    logits[0, place] = bad
    cases = [Case(x.numpy(), SamplingParameters(**ASKING[fields]), PROMPT, OUTPUT) for x in logits]
    tokens, failed = DeviceSampler(any_device, cases).run()
    assert failed == [1, 0]
    assert tokens[1] == slow_sample(cases[1])


def test_lists_are_packed_as_the_kernel_reads_them() -> None:
    """Header, and each part where the header says."""
    words = pack_lists(70, {5: 1.5, 6: -1e300}, [0, 33, 69], [8, 9], [[1, 2], [3]]).tolist()
    assert words[:8] == [2, 2, 2, 1, 8, 12, 14, 20]
    values = np.array(words[10:12], np.int32).view(np.float32)
    assert words[8:10] == [5, 6]
    assert values.tolist() == [1.5, -np.finfo(np.float32).max]
    assert words[12:14] == [8, 9]
    assert words[14:20] == [0, 2, 3, 1, 2, 3]
    assert words[20:] == [1, 2, 32]
