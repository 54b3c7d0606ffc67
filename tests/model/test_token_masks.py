"""Masks of tokens in the sampler, against the rules written out; and steps that wait for them, on the CPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_sampling import sampled
from plan_driver import PlanDriver
from program_executor import cpu_executor, tiny_config
from slow_sampling import Case, slow_adjusted, slow_sample

from model.step_plan import SamplingParameters
from model.token_masks import mask_words

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 2.0},
    {"temperature": 0.8, "logit_bias": {3: 50.0, 7: 60.0}, "seed": 6},
    {"temperature": 1.0, "allowed_token_ids": [3, 5, 7, 64], "min_tokens": 3, "barred_ids": [64], "seed": 7},
    {"temperature": 1.0, "typical_p": 0.7, "logprobs": 3, "seed": 8},
]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_masked_rows_beside_others_are_those_of_the_definition(data: st.DataObject) -> None:
    """Any vocabulary, also where nothing is left: then the row fails, and its neighbours do not."""
    vocabulary = data.draw(st.sampled_from([65, 70, 96, 211]))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    cases = []
    for _ in range(data.draw(st.integers(1, 4))):
        mask = random.random(vocabulary) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        cases.append(
            Case(
                random.normal(size=vocabulary).astype(np.float32) * 3,
                SamplingParameters(**data.draw(st.sampled_from(KINDS))),
                [3, 5],
                [7, 7, 3],
                mask if data.draw(st.booleans()) else None,
            )
        )
    made, logits = sampled(cases)
    for i, case in enumerate(cases):
        expected = slow_sample(case)
        assert bool(made.failed[i]) == (expected < 0)
        if expected >= 0:
            assert int(made.tokens[i]) == expected
            assert np.array_equal(logits[i].numpy(), slow_adjusted(case))


@pytest.mark.parametrize("place", [3, 40])
def test_a_logit_that_is_not_finite_is_not_hidden_by_a_mask(place: int) -> None:
    logits = np.random.default_rng(1).normal(size=70).astype(np.float32)
    bad = logits.copy()
    bad[place] = np.nan
    mask = np.zeros(70, np.bool_)
    mask[3] = True
    greedy = SamplingParameters(temperature=0.0)
    made, _ = sampled([Case(bad, greedy, mask=mask), Case(logits, greedy, mask=mask)])
    assert made.failed.tolist() == [True, False]
    assert made.tokens[1] == 3


def test_log_probabilities_are_among_what_a_mask_leaves() -> None:
    mask = np.zeros(70, np.bool_)
    mask[[3, 9]] = True
    asking = SamplingParameters(temperature=0.0, logprobs=2)
    made, _ = sampled([Case(np.zeros(70, np.float32), asking, mask=mask)])
    assert made.logprobs is not None
    assert made.logprobs.ids.tolist() == [[3, 9]]
    assert np.allclose(np.exp(made.logprobs.values), 0.5)


def test_steps_that_wait_for_masks_sample_under_them_on_the_cpu() -> None:
    """Prefill and decodes, masked rows beside others, which say what they say without them."""
    config = tiny_config()
    prompts = [[1, 2, 3], [4] * 20, [5, 6], [7] * 9]
    executor = cpu_executor(config, torch.float32)
    free = PlanDriver(executor).generate(prompts, 8)
    executor.close()
    executor = cpu_executor(config, torch.float32)
    mask = np.zeros(config.vocabulary, np.bool_)
    mask[[10, 30, 200]] = True
    assert executor.masks.shape[1] == mask_words(config.vocabulary)
    made = PlanDriver(executor, masked={1: mask, 2: mask}).generate(prompts, 8)
    executor.close()
    assert [each.output for each in made][::3] == [each.output for each in free][::3]
    for each in made[1:3]:
        assert set(each.output) <= {10, 30, 200}
        assert not each.failed
