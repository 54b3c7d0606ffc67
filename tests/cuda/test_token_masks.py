"""Masks of tokens on the device, against the definition in model/sampler.py, and in whole steps."""

from typing import Any

import numpy as np
import pytest
import torch
from device_sampler import DeviceSampler
from masked_sampling import sampled
from plan_driver import PlanDriver
from program_executor import ProgramExecutor, cpu_executor, tiny_config
from slow_sampling import Case, slow_adjusted, slow_sample

from model.step_plan import SamplingParameters

LARGE = [pytest.param(vocabulary, marks=pytest.mark.gpu) for vocabulary in (49_152, 50_257, 128_256, 151_936)]

ASKING = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {5: 9.0, 17: 9.0}, "seed": 3},
    {"temperature": 1.0, "allowed_token_ids": list(range(0, 1000, 2)), "seed": 4},
    {"temperature": 0.7, "min_tokens": 9, "barred_ids": [1, 2, 4], "bad_words": [[7], [9, 3, 12]], "seed": 5},
    {"temperature": 1.0, "typical_p": 0.6, "logprobs": 4, "seed": 6},
    {"temperature": 1.0, "top_p": 0.8, "seed": 7},
]
PROMPT, OUTPUT = [3, 5, 900, 5, 17, 1002], [5, 9, 9, 17, 3, 9, 3, 3]


def cases_of(vocabulary: int, generator: torch.Generator, shares: list[float]) -> list[Case]:
    """Every kind under masks that leave these shares of the vocabulary, and without one."""
    cases = []
    for fields in ASKING:
        for share in [*shares, None]:
            logits = (torch.randn(vocabulary, generator=generator) * 3).numpy()
            mask = None
            if share is not None:
                mask = (torch.rand(vocabulary, generator=generator) < share).numpy()
                mask[[0, vocabulary - 1]] = True
            cases.append(Case(logits, SamplingParameters(**fields), PROMPT, OUTPUT, mask))
    return cases


@pytest.mark.parametrize("vocabulary", [1003, 1024])
def test_masked_rows_beside_others_are_those_of_the_definition(any_device, generator, vocabulary) -> None:
    """Bit for bit, and rows without a mask stay as they are."""
    cases = cases_of(vocabulary, generator, [0.001, 0.3, 0.999])
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    for i, case in enumerate(cases):
        assert np.array_equal(sampler.logits[i].cpu().numpy(), slow_adjusted(case)), case.parameters
    assert not any(failed)
    assert tokens == [slow_sample(case) for case in cases]
    assert not sampler.adjust._counts.any()
    assert not sampler.adjust.masked.any()


@pytest.mark.parametrize("vocabulary", LARGE)
def test_large_vocabularies_sample_as_the_cpu_does(any_device, generator, vocabulary) -> None:
    cases = cases_of(vocabulary, generator, [0.0, 0.01, 0.7])
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    expected, logits = sampled(cases)
    assert torch.equal(sampler.logits[: len(cases)].cpu(), logits)
    assert not any(failed)
    assert tokens == expected.tokens.tolist()


def test_a_row_of_which_nothing_is_left_fails_alone(any_device, generator) -> None:
    logits = torch.randn(3, 1003, generator=generator)
    masks = [np.zeros(1003, np.bool_), None, np.arange(1003) == 7]
    greedy = SamplingParameters(temperature=0.0)
    cases = [Case(x.numpy(), greedy, mask=mask) for x, mask in zip(logits, masks, strict=True)]
    tokens, failed = DeviceSampler(any_device, cases).run()
    assert failed == [1, 0, 0]
    assert tokens[1:] == [slow_sample(cases[1]), 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [7, 100])
def test_a_logit_that_was_not_finite_is_not_hidden(any_device, generator, bad, place) -> None:
    """Under the mask, or left by it; of a row that asks for nothing else, and of one that does."""
    for fields in ({}, {"repetition_penalty": 1.2, "allowed_token_ids": [7, 8, 9]}):
        logits = torch.randn(2, 1003, generator=generator)
        logits[0, place] = bad
        mask = (np.arange(1003) == 7) | (np.arange(1003) == 8)
        cases = [Case(x.numpy(), SamplingParameters(temperature=0.0, **fields), [7], [], mask) for x in logits]
        tokens, failed = DeviceSampler(any_device, cases).run()
        assert failed == [1, 0]
        assert tokens[1] == slow_sample(cases[1])


@pytest.mark.parametrize("is_padded", [False, True])
def test_steps_that_wait_for_masks_are_those_of_the_cpu_executor(device: Any, is_padded: bool) -> None:
    """Prefill, decodes, rows that join; masked rows beside others; the same tokens, to the last."""
    config = tiny_config()
    prompts = [np.random.default_rng(i).integers(0, 211, length).tolist() for i, length in enumerate((3, 16, 40, 5))]
    sampling = [SamplingParameters(temperature=i % 2 * 0.9, seed=i, repetition_penalty=1.1) for i in range(4)]
    masks = {row: np.random.default_rng(row).random(211) < 0.1 for row in (1, 2)}
    outputs = []
    for executor in (
        cpu_executor(config, torch.float32),
        ProgramExecutor(device, config, torch.float32, is_padded=is_padded),
    ):
        made = PlanDriver(executor, masked=masks).generate(prompts, 12, budget=32, sampling=sampling, arrive=1)
        assert not any(each.failed for each in made)
        outputs.append([each.output for each in made])
        executor.close()
    assert outputs[0] == outputs[1]
    for row, mask in masks.items():
        assert mask[outputs[0][row]].all()
