"""Penalties, biases and bans: transformers' processors, plain definitions, and what a row remembers as it goes on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batch import sampled, stored, tokens_of
from slow_sampling import Case, slow_adjusted

from model.adjustments import Adjustments
from model.step_plan import RowSettings, SamplingParameters

VOCABULARY = 30
GREEDY = {"temperature": 0.0}

token_ids = st.integers(0, VOCABULARY - 1)
histories = st.lists(token_ids, min_size=4, max_size=12)
any_logits = st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY)


def adjusted(case: Case) -> torch.Tensor:
    """The logits (1, V) that a row samples from."""
    logits = torch.from_numpy(case.logits.astype(np.float32))[None].clone()
    rows = np.array([2], np.int32)
    stored([case], rows).take(rows).adjustments.apply(logits, np.array([len(case.tokens)]))
    return logits


def case_of(logits: list[float], prompt: list[int], output: list[int] = (), **parameters) -> Case:
    return Case(np.array(logits, np.float32), SamplingParameters(**parameters), list(prompt), list(output))


def processed(processor, case: Case) -> torch.Tensor:
    """What a processor of transformers makes of the row."""
    return processor(torch.tensor([case.tokens]), torch.from_numpy(case.logits)[None].clone())


@settings(max_examples=100, deadline=None)
@given(logits=any_logits, prompt=histories, output=histories, penalty=st.sampled_from([0.5, 1.1, 2.0, 7.5]))
def test_the_repetition_penalty_is_transformers(logits, prompt, output, penalty) -> None:
    import transformers

    case = case_of(logits, prompt, output, repetition_penalty=penalty)
    expected = processed(transformers.RepetitionPenaltyLogitsProcessor(penalty), case)
    torch.testing.assert_close(adjusted(case), expected, rtol=1e-6, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    logits=any_logits,
    prompt=histories,
    output=histories,
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_bad_words_are_transformers(logits, prompt, output, words) -> None:
    """Words of 1, 2 and 3 tokens, of which some end a prompt or begin an output."""
    import transformers

    prompt, output = [token % 4 for token in prompt], [token % 4 for token in output]
    unique = [list(word) for word in {tuple(word) for word in words}]
    case = case_of(logits, prompt, output, bad_words=unique)
    torch.testing.assert_close(adjusted(case), processed(transformers.NoBadWordsLogitsProcessor(unique), case))


@settings(max_examples=50, deadline=None)
@given(
    logits=any_logits, output=histories, minimum=st.integers(0, 14), barred=st.sets(token_ids, min_size=1, max_size=4)
)
def test_min_tokens_is_transformers(logits, output, minimum, barred) -> None:
    """Several ids are barred until the output is long enough, and the prompt does not count."""
    import transformers

    prompt = [1, 2, 3]
    case = case_of(logits, prompt, output, min_tokens=minimum, barred_ids=sorted(barred))
    processor = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), minimum, sorted(barred))
    torch.testing.assert_close(adjusted(case), processed(processor, case))


@settings(max_examples=50, deadline=None)
@given(logits=any_logits, allowed=st.sets(token_ids, min_size=1, max_size=29))
def test_allowed_tokens_are_what_transformers_does_not_suppress(logits, allowed) -> None:
    import transformers

    case = case_of(logits, [0], allowed_token_ids=sorted(allowed))
    others = [token for token in range(VOCABULARY) if token not in allowed]
    torch.testing.assert_close(adjusted(case), processed(transformers.SuppressTokensLogitsProcessor(others), case))


@settings(max_examples=50, deadline=None)
@given(logits=any_logits, bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), min_size=1))
def test_biases_are_transformers(logits, bias) -> None:
    import transformers

    case = case_of(logits, [0], logit_bias=bias)
    processor = transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    torch.testing.assert_close(adjusted(case), processed(processor, case))


@settings(max_examples=100, deadline=None)
@given(logits=any_logits, prompt=histories, output=histories, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_the_output(logits, prompt, output, presence, frequency) -> None:
    case = case_of(logits, prompt, output, presence_penalty=presence, frequency_penalty=frequency)
    counts = np.bincount(output, minlength=VOCABULARY)
    expected = case.logits - (frequency * counts + presence * (counts > 0))
    torch.testing.assert_close(adjusted(case)[0], torch.from_numpy(expected.astype(np.float32)), rtol=1e-5, atol=1e-5)


def test_the_order_is_penalties_then_bias_then_bans() -> None:
    """A bias is not divided by a penalty, and no bias brings a banned token back."""
    case = case_of(
        [4.0, 1.0, 2.0], [0], [0], repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={0: 3.0, 1: 1e30}
    )
    assert adjusted(case)[0].tolist() == [4.0 / 2 - 0.5 + 3.0, np.float32(1e30), 2.0]
    banned = case_of([4.0, 1.0, 2.0], [0], logit_bias={1: 100.0}, bad_words=[[1]])
    assert adjusted(banned)[0].tolist() == [4.0, -np.inf, 2.0]


def test_biases_of_100_force_and_forbid() -> None:
    logits = np.random.default_rng(0).standard_normal(VOCABULARY) * 5
    best = int(logits.argmax())
    for parameters in ({}, {"top_p": 0.9}, {"temperature": 2.0}):
        forced = [case_of(logits, [0], logit_bias={7: 100.0}, seed=seed, **parameters) for seed in range(50)]
        assert set(tokens_of(forced)) == {7}
        forbidden = [case_of(logits, [0], logit_bias={best: -100.0}, seed=seed, **parameters) for seed in range(50)]
        assert best not in tokens_of(forbidden)


def test_penalties_that_leave_float32_are_held() -> None:
    """No infinity and no NaN comes out of them, so the row does not fail."""
    for penalty in (1e-300, 1e-38, 1e38, 1e300):
        case = case_of([9.0, -9.0, 0.0], [0, 1, 2], [1], repetition_penalty=penalty, frequency_penalty=-2.0, **GREEDY)
        assert bool(adjusted(case).isfinite().all())
        assert not sampled([case]).failed.any()


# --- what a row remembers


@settings(max_examples=60, deadline=None)
@given(
    prompt=histories,
    tokens=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=90),
    kinds=st.permutations(
        [
            {"repetition_penalty": 1.5, "bad_words": [[1, 2], [3], [0, 4, 5]]},
            {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 2, "barred_ids": [0, 1]},
            {"bad_words": [[1, 1, 1, 1], [2, 0]]},
        ]
    ),
)
def test_a_row_goes_on_as_if_it_were_stored_anew(prompt, tokens, kinds) -> None:
    """Tokens that were added one by one count as if the whole history had been given, and each row has its own."""
    prompt = [token % 6 for token in prompt]
    rows = np.array([4, 0, 2], np.int32)
    logits = np.linspace(-4, 4, 6, dtype=np.float32)
    cases = [Case(logits, SamplingParameters(**kind), prompt) for kind in kinds]
    table = stored(cases, rows)
    for step in tokens:
        order = np.random.default_rng(len(tokens)).permutation(3)
        table.add(rows[order], np.array(step, np.int32)[order])
        for case, token in zip(cases, step, strict=True):
            case.output.append(token)
    found = torch.from_numpy(np.stack([logits] * 3))
    positions = np.array([len(case.tokens) for case in cases])
    table.take(rows).adjustments.apply(found, positions)
    np.testing.assert_allclose(found.numpy(), np.stack([slow_adjusted(case) for case in cases]), rtol=1e-6)


def test_a_row_remembers_nothing_of_who_was_there_before() -> None:
    """The one before had more tokens, some of which would complete the new one's bad word; a neighbour has many too."""
    rows = np.array([1, 2], np.int32)
    parameters = SamplingParameters(
        temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0, bad_words=[[5, 6, 7], [6, 3]]
    )
    logits = np.arange(1, 11, dtype=np.float32)
    before = Case(logits, parameters, [1, 2, 3, 4], [8, 5, 9])
    table = stored([before, before], rows)
    after = Case(logits, parameters, [6], [])
    table.store(RowSettings(rows[:1], [parameters], np.array([1], np.int32), [after.history]))
    for token in (4, 6):
        found = torch.from_numpy(np.stack([logits, logits]))
        table.take(rows).adjustments.apply(found, np.array([len(after.tokens), len(before.tokens)]))
        assert found.tolist() == [slow_adjusted(after).tolist(), slow_adjusted(before).tolist()]
        table.add(rows, np.array([token, token], np.int32))
        after.output.append(token)
        before.output.append(token)


def test_memory_follows_different_tokens_and_not_the_length() -> None:
    """A row that repeats ten tokens for ever keeps a table of ten."""
    table = Adjustments(2)
    rows = np.array([1], np.int32)
    parameters = [SamplingParameters(frequency_penalty=0.1, bad_words=[[1, 2, 3]])]
    table.store(RowSettings(rows, parameters, np.zeros(1, np.int32), [np.arange(10, dtype=np.int32).repeat(500)]))
    before = table.counts._ids.nbytes, table.words._tails.nbytes
    for token in range(3000):
        table.add(rows, np.array([token % 10], np.int32))
    assert (table.counts._ids.nbytes, table.words._tails.nbytes) == before
    _, ids, counts = table.take(rows).counts.entries()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict.fromkeys(range(10), 800)


@pytest.mark.parametrize(
    "parameters",
    [{"repetition_penalty": 1.2}, {"bad_words": [[1, 2]]}, {"min_tokens": 3, "barred_ids": [1]}],
)
def test_settings_without_the_history_that_they_need_are_refused(parameters: dict) -> None:
    table = Adjustments(2)
    with pytest.raises(ValueError, match="histories"):
        table.store(RowSettings(np.array([1], np.int32), [SamplingParameters(**parameters)]))
    assert not table.asks.any()


def test_an_id_out_of_range_reaches_no_other_row() -> None:
    """The front end refuses such ids; if one came through, it would be an error, not another row's logit."""
    table = Adjustments(2)
    table.store(RowSettings(np.array([0], np.int32), [SamplingParameters(logit_bias={VOCABULARY: 1.0})]))
    with pytest.raises(IndexError):
        table.apply(torch.zeros(2, VOCABULARY), np.zeros(2, np.int64))
