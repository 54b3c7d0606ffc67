"""Sampling: known random numbers, the edges of top-k and top-p, extreme settings, and no row that changes another."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampler import MASS_BITS, SamplingRows, _high_product, philox, random_words, sample
from model.step_plan import RowSettings, SamplingParameters


def rows(*parameters: SamplingParameters) -> SamplingRows:
    stored = SamplingRows.greedy(len(parameters))
    stored.store(RowSettings(np.arange(len(parameters), dtype=np.int32), list(parameters)))
    return stored


def draw(logits: torch.Tensor, *parameters: SamplingParameters, position: int = 0) -> list[int]:
    tokens, failed = sample(logits, rows(*parameters), np.full(len(parameters), position))
    assert not failed.any()
    return tokens.tolist()


def draws(logits: list[float], count: int = 2000, **parameters: float) -> np.ndarray:
    """How often each token comes out over `count` seeds."""
    table = torch.tensor([logits]).repeat(count, 1)
    tokens = draw(table, *(SamplingParameters(seed=seed, **parameters) for seed in range(count)))
    return np.bincount(tokens, minlength=len(logits))


def slow_sample(logits: np.ndarray, parameters: SamplingParameters, position: int) -> int:
    """The rules of sampler.py one token at a time, in Python integers."""
    scaled = (logits - logits.max()) / np.float32(parameters.temperature)
    mass = [int(m) for m in torch.from_numpy(scaled).exp().numpy() * np.float32(2**MASS_BITS)]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if 0 < parameters.top_k < len(order):
        order = order[: parameters.top_k]
    if parameters.top_p < 1:
        wanted = max(1, int(np.ceil(parameters.top_p * sum(mass[token] for token in order))))
        running = np.cumsum([mass[token] for token in order])
        order = order[: int((running < wanted).sum()) + 1]
    kept = sorted(order)
    random = int(random_words(np.array([parameters.seed], np.uint64), np.array([position]))[0])
    threshold = random * sum(mass[token] for token in kept) >> 64
    for token in kept:
        threshold -= mass[token]
        if threshold < 0:
            return token
    raise AssertionError("no token")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    assert philox(np.array([counter], np.uint64), np.array([key], np.uint64)).tolist() == [words]


def test_random_words_are_keyed_by_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0, 0], np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 2**40])
    words = random_words(seeds, positions)
    assert len(set(words.tolist())) == 6
    assert words[0] == 0x6627E8D5 | 0xE169C58D << 32


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [700, 300, 999]] = 5.0
    assert draw(logits, *[SamplingParameters(temperature=0.0)] * 2) == [300, 0]


def test_tiny_temperatures_are_greedy_and_huge_ones_even() -> None:
    """C23: 1e-8 acts as 0 (equal logits: the lowest id); 1e30 draws every token alike; 1e39 is no infinity."""
    logits = [1.0, 3.0, 3.0, 2.9999]
    assert draws(logits, temperature=1e-8)[1] == 2000
    for temperature in (1e30, 1e39):
        assert draws(logits, temperature=temperature).min() > 400


def test_large_logits_do_not_overflow() -> None:
    assert draws([3e38, -3e38, 1e38], temperature=2.0)[0] == 2000


def test_draws_follow_the_distribution() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = torch.tensor(logits).div(0.7).softmax(0).numpy()
    found = draws(logits, 20_000, temperature=0.7) / 20_000
    assert np.abs(found - expected).max() < 0.015  # four standard deviations


def test_top_k_keeps_the_lowest_ids_at_the_edge() -> None:
    """Three tokens share the second-largest logit; k = 3 leaves room for two of them."""
    assert set(np.flatnonzero(draws([1.0, 5.0, 2.0, 2.0, 2.0, 0.0], top_k=3))) == {1, 2, 3}


def test_top_p_keeps_the_fewest_that_reach_the_share() -> None:
    logits = np.log([0.5, 0.2, 0.2, 0.1]).tolist()
    assert set(np.flatnonzero(draws(logits, top_p=0.45))) == {0}
    assert set(np.flatnonzero(draws(logits, top_p=0.6))) == {0, 1}
    assert set(np.flatnonzero(draws(logits, top_p=0.85))) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_vanishing_top_p_keeps_the_best_token(top_p: float) -> None:
    """C23."""
    assert draws([1.0, 2.0, 2.0], top_p=top_p)[1] == 2000


@pytest.mark.parametrize("top_k", [0, 3, 4, 10**9])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = [0.3, 0.1, 0.2]
    assert draws(logits, top_k=top_k).tolist() == draws(logits).tolist()


def test_top_k_comes_before_top_p() -> None:
    """Of 0.4, 0.3, 0.3 with k = 2 the first holds 4/7 of what is left: more than half of it, less than half of all."""
    logits = np.log([0.4, 0.3, 0.3]).tolist()
    assert set(np.flatnonzero(draws(logits, top_k=2, top_p=0.5))) == {0}
    assert set(np.flatnonzero(draws(logits, top_p=0.5))) == {0, 1}


def test_a_flat_distribution_widens_the_search() -> None:
    """top-p 0.9 of 5,000 equal tokens: the first 4,500 ids, far more than the search starts with."""
    logits = torch.zeros(300, 5000)
    tokens = draw(logits, *(SamplingParameters(top_p=0.9, seed=seed) for seed in range(300)))
    assert max(tokens) < 4500
    assert max(tokens) > 4300
    assert min(tokens) < 100


def test_a_row_is_drawn_as_if_alone() -> None:
    """C24: equal seeds and positions draw equal tokens, whatever stands beside them and in whatever order."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3000, generator=generator) * 3
    kinds = [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=0.8, seed=42),
        SamplingParameters(temperature=1.2, top_k=40, seed=7),
        SamplingParameters(top_p=0.9, seed=2**64 - 1),
        SamplingParameters(temperature=1e-8),
        SamplingParameters(temperature=0.8, top_k=5, top_p=0.5, seed=9),
    ] * 2
    together = draw(logits, *kinds, position=17)
    alone = [draw(logits[row : row + 1], kinds[row], position=17)[0] for row in range(12)]
    order = np.random.default_rng(0).permutation(12)
    shuffled = draw(logits[order], *(kinds[row] for row in order), position=17)
    assert together == alone
    assert [together[row] for row in order] == shuffled
    assert draw(logits, *kinds, position=18) != together


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_flagged_and_harms_nobody(bad: float) -> None:
    """C38: the flag is raised for it alone, its id is a valid one, its neighbours draw what they draw without it."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    kinds = [SamplingParameters(temperature=t, top_p=p, seed=3) for t, p in ((0, 1), (1, 1), (1, 0.5), (0, 1))]
    before = draw(logits, *kinds)
    for row in range(4):
        broken = logits.clone()
        broken[row, 50] = bad
        tokens, failed = sample(broken, rows(*kinds), np.zeros(4, np.int64))
        assert failed.tolist() == [r == row for r in range(4)]
        assert [t for r, t in enumerate(tokens.tolist()) if r != row] == [t for r, t in enumerate(before) if r != row]
        assert 0 <= tokens[row] < 100


@given(random=st.integers(0, 2**64 - 1), total=st.integers(0, 2**63 - 1))
def test_the_scaled_random_number_is_exact(random: int, total: int) -> None:
    """Every carry between the 32-bit halves: compared with Python's long integers."""
    product = _high_product(np.array([random], np.uint64), torch.tensor([[total]]))
    assert product.item() == random * total >> 64


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=40),
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 2.0, 50.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
def test_sampling_equals_the_slow_rules(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    """Many ties on purpose: the vectorised path and the written-out rules choose the same token."""
    parameters = SamplingParameters(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    array = np.array(logits, np.float32)
    assert draw(torch.from_numpy(array)[None], parameters, position=position) == [
        slow_sample(array, parameters, position)
    ]
