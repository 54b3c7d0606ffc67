"""top-k, top-p, min-p and typical-p: the kept sets of transformers' warpers, and draws that follow the distribution."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_batch import counts_of

from model.sampling_rows import SamplingRows
from model.step_plan import RowSettings, SamplingParameters
from model.truncation import kept_tokens

some_logits = st.lists(st.floats(-12, 12, width=32), min_size=2, max_size=60)
tied_logits = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=60)
any_logits = st.one_of(some_logits, tied_logits).map(lambda values: np.array(values, np.float32))
shares = st.floats(0.001, 0.999)

# Two ways to compute the same may differ by this: then rounding decides who is first, or where a share is reached.
ROUNDING = 1e-5


def ours(logits: np.ndarray, **parameters: float) -> set[int]:
    """The kept ids of a row."""
    rows = SamplingRows.greedy(1)
    rows.store(RowSettings(np.zeros(1, np.int32), [SamplingParameters(**parameters)]))
    values = torch.from_numpy(logits)[None]
    highest = values.amax(-1)
    kept = kept_tokens(values, (values - highest[:, None]).exp(), highest, rows)
    return set(kept.ids[kept.mass > 0].tolist())


def theirs(warper: str, logits: np.ndarray, value: float) -> set[int]:
    """What transformers' warper keeps, computed in float64, of what has mass here."""
    import transformers

    scores = torch.from_numpy(logits.astype(np.float64))[None]
    kept = getattr(transformers, warper)(value)(None, scores).isfinite()[0]
    has_mass = (scores - scores.amax()).exp()[0] >= 2.0**-40
    return set((kept & has_mass).nonzero()[:, 0].tolist())


def is_edge(order: np.ndarray, logits: np.ndarray, share: float) -> bool:
    """Whether the sum over the first tokens of `order` comes so close to the share that rounding decides."""
    p = torch.from_numpy(logits.astype(np.float64)).softmax(0).numpy()[order]
    return bool((np.abs(np.cumsum(p) - share) < ROUNDING).any())


def is_cut_among_equals(kept: set[int], everything: set[int], keys: np.ndarray, within: float = 0.0) -> bool:
    """Whether `kept` is `everything` but for tokens with the last key, of which the lowest ids are kept."""
    if not kept <= everything or not kept:
        return False
    last = max(keys[token] for token in kept)
    tied = sorted(token for token in everything if abs(keys[token] - last) <= within)
    kept_tied = [token for token in tied if token in kept]
    return everything - set(tied) <= kept and kept_tied == tied[: len(kept_tied)]


@settings(max_examples=200, deadline=None)
@given(logits=any_logits, k=st.integers(1, 59))
def test_top_k_is_transformers(logits: np.ndarray, k: int) -> None:
    """transformers keeps all that are equal to the k-th; here exactly k are kept, the lowest ids."""
    assume(k < len(logits))
    kept = ours(logits, top_k=k)
    everything = theirs("TopKLogitsWarper", logits, k)
    assert len(kept) == k
    assert is_cut_among_equals(kept, everything, -logits)


@settings(max_examples=200, deadline=None)
@given(logits=any_logits, share=shares)
def test_top_p_is_transformers(logits: np.ndarray, share: float) -> None:
    """Among equals at the edge transformers keeps any; so the kept logits are compared, and the ids that are kept."""
    assume(not is_edge(np.argsort(-logits, kind="stable"), logits, share))
    kept = ours(logits, top_p=share)
    other = theirs("TopPLogitsWarper", logits, share)
    assert sorted(logits[list(kept)]) == sorted(logits[list(other)])
    equals = set(np.flatnonzero(logits >= logits[list(kept)].min()).tolist())
    assert is_cut_among_equals(kept, equals, -logits)


@settings(max_examples=200, deadline=None)
@given(logits=any_logits, share=shares)
def test_min_p_is_transformers(logits: np.ndarray, share: float) -> None:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    assume(not (np.abs(weights - share) < ROUNDING).any())
    assert ours(logits, min_p=share) == theirs("MinPLogitsWarper", logits, share)


@settings(max_examples=300, deadline=None)
@given(logits=any_logits, share=shares)
def test_typical_p_is_transformers(logits: np.ndarray, share: float) -> None:
    """transformers keeps all that are as typical as the last one; here the lowest ids of them, as far as needed."""
    p = torch.from_numpy(logits.astype(np.float64)).softmax(0)
    information = -p.log()
    keys = (information - (p * information).sum()).abs().numpy()
    order = np.argsort(keys, kind="stable")
    assume(not is_edge(order, logits, share))
    # Tokens on both sides of the entropy, equally far but for rounding: then rounding orders them.
    close = np.diff(keys[order]) < ROUNDING
    assume(not (close & (np.diff(logits[order]) != 0)).any())
    everything = theirs("TypicalLogitsWarper", logits, share)
    assert is_cut_among_equals(ours(logits, typical_p=share), everything, keys, ROUNDING)


@pytest.mark.parametrize("distance", [0.3, 1.7, 4.0, 11.9])
def test_min_p_keeps_a_token_that_just_reaches_it(distance: float) -> None:
    """Its weight is the threshold itself, and a little more than its weight is too much."""
    weight = float(torch.tensor(-distance).exp())
    logits = np.array([0.0, -distance, -20.0], np.float32)
    assert ours(logits, min_p=weight) == {0, 1}
    assert ours(logits, min_p=weight + 2.0**-40) == {0}


def test_typical_p_keeps_rare_tokens_before_the_likeliest() -> None:
    """Three thousand tokens hold 85 %, the likeliest 14.55 %. Nine hundred rare ones are less far from the entropy than
    it is, though all of them together are less than what typical_p leaves out: they are kept too.
    """
    probabilities = np.array([0.1455] + [0.85 / 3000] * 3000 + [5e-6] * 900 + [1e-9] * 99)
    assert ours(np.log(probabilities).astype(np.float32), typical_p=0.9) == set(range(3901))


def test_typical_p_is_a_share_of_everything() -> None:
    """Also of the tokens that are too rare to be looked at: they hold 1.2 % here, so 33 more of the others are kept."""
    probabilities = np.array([0.001] + [0.987 / 3000] * 3000 + [0.012 / 999] * 999)
    wanted = int(np.ceil(0.9 / (0.987 / 3000)))
    assert ours(np.log(probabilities).astype(np.float32), typical_p=0.9) == set(range(1, 1 + wanted))


LOGITS = np.log([0.3, 0.22, 0.15, 0.12, 0.08, 0.06, 0.04, 0.03])

# chi-square at 1 - 1e-6, for 1 ... 7 degrees of freedom
CHI_SQUARE = [23.9, 27.6, 30.7, 33.4, 35.9, 38.3, 40.5]


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 1.7}, range(8)),
        ({"top_k": 4}, range(4)),
        ({"top_p": 0.75}, range(4)),
        ({"min_p": 0.25}, range(5)),
        ({"typical_p": 0.45}, [1, 2, 3]),
        ({"typical_p": 0.6}, range(4)),
        ({"top_k": 6, "top_p": 0.9, "min_p": 0.3, "temperature": 0.9}, range(4)),
        ({"top_k": 7, "typical_p": 0.45}, [1, 2, 3]),
    ],
)
def test_draws_follow_the_distribution(parameters: dict, kept: list[int]) -> None:
    """Chi-square of 20,000 draws, seeds 0 ... 19,999, against the renormalised probabilities of the kept tokens."""
    draws = 20_000
    counts = counts_of(LOGITS, draws, **parameters)
    weights = np.exp(LOGITS / parameters.get("temperature", 1.0))
    expected = np.zeros(8)
    expected[list(kept)] = weights[list(kept)] / weights[list(kept)].sum() * draws
    assert set(np.flatnonzero(counts)) == set(kept)
    found, expected = counts[list(kept)], expected[list(kept)]
    assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE[len(list(kept)) - 2]
