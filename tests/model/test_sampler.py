"""Sampling as a whole: equal to the rules written out, at extreme settings, and no row that changes another."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batch import counts_of, kept_ids, sampled, stored, tokens_of
from slow_sampling import Case, slow_sample

from model.sampler import sample
from model.step_plan import RowSettings, SamplingParameters

VOCABULARY = 40
GREEDY = SamplingParameters(temperature=0.0)

token_ids = st.integers(0, VOCABULARY - 1)
few_ids = st.lists(token_ids, max_size=4)

any_parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1e-8, 1e-4, 0.3, 1.0, 2.0, 50.0, 1e30, 1e39]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCABULARY - 1, VOCABULARY, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.0, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-14, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1e-9, 0.2, 0.9, 0.999]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 1e-30, 1e30]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -0.5, 2.0, 100.0, 1e38]), max_size=3),
    allowed_token_ids=st.one_of(st.just([]), few_ids),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 3),
    barred_ids=few_ids,
    logprobs=st.integers(-1, 3),
    seed=st.integers(0, 2**64 - 1),
)
tied_logits = st.lists(
    st.integers(-6, 6).map(lambda n: n / 2), min_size=VOCABULARY, max_size=VOCABULARY
)  # few values on purpose: many ties
any_case = st.builds(
    Case,
    logits=tied_logits.map(lambda values: np.array(values, np.float32)),
    parameters=any_parameters,
    prompt=st.lists(token_ids, min_size=1, max_size=6),
    output=st.lists(token_ids, max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(cases=st.lists(any_case, min_size=1, max_size=5))
def test_sampling_equals_the_slow_rules(cases: list[Case]) -> None:
    """All parameters at once, beside other rows: the vectorised way chooses the tokens of the written-out rules."""
    outcome = sampled(cases)
    expected = [slow_sample(case) for case in cases]
    assert outcome.failed.tolist() == [token < 0 for token in expected]
    found = [-1 if failed else token for token, failed in zip(outcome.tokens.tolist(), outcome.failed, strict=True)]
    assert found == expected


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_large_vocabularies_equal_the_slow_rules(spread: float) -> None:
    """Thousands of tokens without ties: here floors and bins cut most of them off before anything is sorted."""
    generator = np.random.default_rng(int(spread * 100))
    kinds = [
        {"top_p": 0.95},
        {"top_p": 0.05},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 1500, "typical_p": 0.5},
        {"min_p": 0.02},
        {"typical_p": 0.2},
        {"typical_p": 0.95},
        {"top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "top_k": 900},
    ]
    cases = [
        Case(
            (generator.standard_normal(3001) * spread).astype(np.float32),
            SamplingParameters(temperature=temperature, seed=seed, **kind),
        )
        for kind in kinds
        for temperature in (0.5, 1.0, 3.0)
        for seed in range(4)
    ]
    assert tokens_of(cases) == [slow_sample(case) for case in cases]


# --- the draw


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[0, [700, 300, 999]] = 5.0
    assert tokens_of([Case(row, GREEDY) for row in logits]) == [300, 0]


def test_tiny_temperatures_are_greedy_and_huge_ones_even() -> None:
    """C23: 1e-8 acts as 0 (equal logits: the lowest id); 1e30 draws every token alike; 1e39 is no infinity."""
    logits = [1.0, 3.0, 3.0, 2.9999]
    assert counts_of(logits, temperature=1e-8)[1] == 2000
    for temperature in (1e30, 1e39):
        assert counts_of(logits, temperature=temperature).min() > 400


def test_large_logits_do_not_overflow() -> None:
    assert counts_of([3e38, -3e38, 1e38], temperature=2.0)[0] == 2000


def test_top_k_keeps_the_lowest_ids_at_the_edge() -> None:
    """Three tokens share the second-largest logit; k = 3 leaves room for two of them."""
    assert kept_ids([1.0, 5.0, 2.0, 2.0, 2.0, 0.0], top_k=3) == {1, 2, 3}


def test_negative_zero_is_equal_to_zero() -> None:
    """Among equals the lowest id is kept, whatever the sign of a zero."""
    assert kept_ids([-0.0, 0.0, -1.0], top_k=1) == {0}
    assert kept_ids([0.0, -0.0, -1.0], top_k=1) == {0}


def test_top_p_keeps_the_fewest_that_reach_the_share() -> None:
    logits = np.log([0.5, 0.2, 0.2, 0.1])
    assert kept_ids(logits, top_p=0.45) == {0}
    assert kept_ids(logits, top_p=0.6) == {0, 1}
    assert kept_ids(logits, top_p=0.85) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_vanishing_top_p_keeps_the_best_token(top_p: float) -> None:
    """C23."""
    assert kept_ids([1.0, 2.0, 2.0], top_p=top_p) == {1}


@pytest.mark.parametrize("top_k", [0, 3, 4, 10**9])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = [0.3, 0.1, 0.2]
    assert counts_of(logits, top_k=top_k).tolist() == counts_of(logits).tolist()


def test_top_k_comes_before_top_p() -> None:
    """Of 0.4, 0.3, 0.3 with k = 2 the first holds 4/7 of what is left: more than half of it, less than half of all."""
    logits = np.log([0.4, 0.3, 0.3])
    assert kept_ids(logits, top_k=2, top_p=0.5) == {0}
    assert kept_ids(logits, top_p=0.5) == {0, 1}


def test_min_p_of_one_keeps_all_that_are_as_likely_as_the_best() -> None:
    """C23."""
    assert kept_ids([2.0, 1.0, 2.0, 1.999], min_p=1.0) == {0, 2}


def test_a_vanishing_typical_p_keeps_the_most_typical_token() -> None:
    """Of 0.6, 0.3, 0.1 the entropy is 0.898 nats, and -ln 0.3 = 1.204 is closer to it than -ln 0.6 = 0.511."""
    assert kept_ids(np.log([0.6, 0.3, 0.1]), typical_p=1e-9) == {1}


# --- rows beside each other


def test_extremes_change_no_neighbour() -> None:
    """C23, all in one batch: every row gives a valid token, and the greedy row's is the one that it has alone."""
    logits = np.random.default_rng(5).standard_normal(500).astype(np.float32) * 4
    extremes = [
        *({"temperature": value} for value in (0.0, 1e-8, 1e-5, 2.0, 100.0, 1e30, 1e39)),
        *({"top_p": value} for value in (0.0, 1e-9, 1.0 - 1e-16)),
        *({"top_k": value} for value in (1, 500, 501, 10**9)),
        *({"min_p": value} for value in (0.0, 1e-300, 1.0)),
        *({"typical_p": value} for value in (1e-300, 1e-9, 1.0 - 1e-16)),
        *({"repetition_penalty": value} for value in (1e-300, 1e300)),
        *({"presence_penalty": value, "frequency_penalty": value} for value in (-2.0, 2.0)),
        *({"logit_bias": {3: value}} for value in (-1e300, -100.0, 100.0, 1e300)),
    ]
    cases = [Case(logits, SamplingParameters(**kind), [1, 2, 3], [3, 4]) for kind in extremes]
    neighbour = Case(logits, GREEDY)
    tokens = tokens_of([neighbour, *cases, neighbour])
    assert tokens[0] == tokens[-1] == tokens_of([neighbour])[0] == int(logits.argmax())
    assert tokens[1:-1] == [slow_sample(case) for case in cases]


def test_a_row_is_drawn_as_if_alone() -> None:
    """C24: the token and its log-probabilities are the same alone, among 40 others and in another order."""
    generator = np.random.default_rng(0)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 42},
        {"temperature": 1.2, "top_k": 40, "seed": 7, "logprobs": 4},
        {"top_p": 0.9, "seed": 2**64 - 1},
        {"temperature": 1e-8, "repetition_penalty": 1.4, "logprobs": 0},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.5, "seed": 9, "presence_penalty": 1.0},
        {"min_p": 0.05, "logit_bias": {5: 9.0}, "seed": 5},
        {"typical_p": 0.7, "bad_words": [[7, 8, 9]], "seed": 6, "logprobs": 4},
        {"typical_p": 0.7, "top_p": 0.95, "allowed_token_ids": list(range(100)), "seed": 8},
        {"min_tokens": 5, "barred_ids": [1, 2], "logprobs": 4, "seed": 3},
    ]
    cases = [
        Case(
            (generator.standard_normal(3000) * 3).astype(np.float32),
            SamplingParameters(**kinds[row % len(kinds)]),
            generator.integers(0, 3000, 20).tolist(),
            [*generator.integers(0, 3000, 4).tolist(), 7, 8],
        )
        for row in range(41)
    ]
    together = sampled(cases)
    assert not together.failed.any()
    order = generator.permutation(41)
    shuffled = sampled([cases[row] for row in order])
    assert shuffled.tokens.tolist() == together.tokens[order].tolist()
    alone = [sampled([case]) for case in cases]
    assert [one.tokens.item() for one in alone] == together.tokens.tolist()
    assert together.logprobs is not None
    asking = [one.logprobs for one in alone if one.logprobs is not None]
    assert [float(one.chosen[0]) for one in asking] == together.logprobs.chosen.tolist()
    assert [int(one.ranks[0]) for one in asking] == together.logprobs.ranks.tolist()
    for one, ids, values in zip(asking, together.logprobs.ids, together.logprobs.values, strict=True):
        count = one.ids.shape[1]
        assert (one.ids[0].tolist(), one.values[0].tolist()) == (ids[:count].tolist(), values[:count].tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_flagged_and_harms_nobody(bad: float) -> None:
    """C38: the flag is raised for it alone, its id is a valid one, its neighbours draw what they draw without it."""
    logits = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    broken = logits.copy()
    broken[50] = bad
    kinds = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"top_p": 0.5, "frequency_penalty": 0.5},
        {"top_k": 7, "logit_bias": {50: 3.0}},
        {"typical_p": 0.5, "min_p": 0.01, "logprobs": 0},
        {"allowed_token_ids": [3, 50]},
    ]
    before = tokens_of([Case(logits, SamplingParameters(seed=3, **kind), [4], [50]) for kind in kinds])
    for row in range(len(kinds)):
        cases = [
            Case(broken if other == row else logits, SamplingParameters(seed=3, **kind), [4], [50])
            for other, kind in enumerate(kinds)
        ]
        outcome = sampled(cases)
        assert outcome.failed.tolist() == [other == row for other in range(len(kinds))]
        assert 0 <= outcome.tokens[row] < 100
        others = [token for other, token in enumerate(outcome.tokens.tolist()) if other != row]
        assert others == [token for other, token in enumerate(before) if other != row]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_a_row_of_which_everything_is_banned_fails_alone(kind: dict) -> None:
    logits = np.random.default_rng(2).standard_normal(20).astype(np.float32)
    nothing = SamplingParameters(allowed_token_ids=[4, 5], bad_words=[[4], [5]], logprobs=2, **kind)
    outcome = sampled([Case(logits, SamplingParameters(**kind)), Case(logits, nothing), Case(logits, GREEDY)])
    assert outcome.failed.tolist() == [False, True, False]
    assert 0 <= outcome.tokens[1] < 20
    assert outcome.tokens[[0, 2]].tolist() == tokens_of(
        [Case(logits, SamplingParameters(**kind)), Case(logits, GREEDY)]
    )


def test_a_row_that_is_given_to_another_keeps_nothing() -> None:
    """Every kind of setting is stored, and then a plain row takes the place: nothing of it is left."""
    logits = np.arange(20, dtype=np.float32)
    everything = SamplingParameters(
        temperature=3.0,
        top_k=3,
        top_p=0.4,
        min_p=0.2,
        typical_p=0.3,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={0: 100.0},
        allowed_token_ids=[0, 1, 2],
        bad_words=[[3], [4, 1]],
        min_tokens=10,
        barred_ids=[0],
        logprobs=4,
        seed=5,
    )
    rows = np.array([1], np.int32)
    table = stored([Case(logits, everything, [1, 2], [4])], rows)
    table.add(rows, np.array([2], np.int32))
    table.store(RowSettings(rows, [GREEDY]))
    outcome = sample(torch.from_numpy(logits.copy())[None], table.take(rows), np.array([4]))
    assert outcome.tokens.tolist() == [19]
    assert outcome.logprobs is None
    assert not table.adjustments.asks.any()
