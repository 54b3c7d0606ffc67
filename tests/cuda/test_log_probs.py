"""Log-probabilities on the device against float64, and against the list that they must agree with."""

import numpy as np
import pytest
import torch
from device_sampler import DeviceSampler
from kernel_devices import Device
from slow_sampling import Case

from cuda.errors import ShapeMismatch
from cuda.sample import MAX_LIKELIEST, RECORD_WORDS, LogProbRecords, LogProbWords, read_records
from model.step_plan import SamplingParameters

VOCABULARIES = [1, 5, 1003, *(pytest.param(size, marks=pytest.mark.gpu) for size in (49_152, 151_936))]


def check(words: LogProbWords, i: int, logits: np.ndarray, token: int, likeliest: int) -> None:
    """Place i: of `token` among logits (V) float32."""
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    order = np.lexsort((np.arange(len(logits)), -logits))[:likeliest]
    assert words.ids[i, : len(order)].tolist() == order.tolist()
    values = words.values[i, : len(order)]
    finite = np.isfinite(exact[order])
    assert np.abs(values[finite] - exact[order][finite]).max(initial=0) < 1e-4
    assert np.isneginf(values[~finite]).all()
    assert abs(words.chosen[i] - exact[token]) < 1e-4
    assert words.ranks[i] == 1 + (logits > logits[token]).sum()
    if token in order:
        assert words.chosen[i] == values[order.tolist().index(token)]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_sampled_tokens_are_reported(any_device, vocabulary) -> None:
    """Every way to sample, with more and fewer of the likeliest; a row that does not ask stands beside them."""
    generator = torch.Generator().manual_seed(vocabulary)
    ways = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}]
    ways += [{"temperature": 50.0}, {"top_k": 300, "temperature": 9.0}]
    cases = [
        Case(
            (torch.randn(vocabulary, generator=generator) * 3).numpy(),
            SamplingParameters(seed=i, logprobs=[5, 0, 1, MAX_LIKELIEST, -1][i % 5], **way),
        )
        for i, way in enumerate(ways * 2)
    ]
    sampler = DeviceSampler(any_device, cases)
    tokens, failed = sampler.run()
    assert not any(failed)
    asking = [i for i, case in enumerate(cases) if case.parameters.logprobs >= 0]
    assert sampler.log_probs is not None
    assert len(sampler.log_probs.chosen) == len(asking)
    for place, i in enumerate(asking):
        check(sampler.log_probs, place, cases[i].logits, tokens[i], cases[i].parameters.logprobs)


def test_they_are_of_adjusted_logits(any_device, generator) -> None:
    """Of the logits after bans and biases, before the temperature. Banned tokens follow the others, by id."""
    logits = torch.randn(300, generator=generator)
    wanted = SamplingParameters(
        temperature=0.01, allowed_token_ids=[200, 7, 9], logit_bias={7: 2.0}, logprobs=MAX_LIKELIEST
    )
    sampler = DeviceSampler(any_device, [Case(logits.numpy(), wanted)])
    tokens, _ = sampler.run()
    adjusted = np.full(300, -np.inf, np.float32)
    adjusted[[200, 7, 9]] = logits[[200, 7, 9]].numpy() + np.array([0, 2, 0], np.float32)
    assert sampler.log_probs is not None
    check(sampler.log_probs, 0, adjusted, tokens[0], MAX_LIKELIEST)


def score(device: Device, logits: torch.Tensor, targets: list[int], likeliest: int) -> LogProbWords:
    records = torch.full((len(targets), RECORD_WORDS), -7, dtype=torch.int32, device=device.name)
    ids = torch.tensor(targets, dtype=torch.int32, device=device.name)
    launch = LogProbRecords(device.loader, logits.shape[1])
    launch(device.stream, logits.to(device.name), ids, likeliest, records)
    device.synchronize()
    return read_records(records.cpu().numpy(), likeliest)


@pytest.mark.parametrize("likeliest", [0, 1, 20, MAX_LIKELIEST])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_given_tokens_are_scored(any_device, vocabulary, likeliest) -> None:
    """Flat, peaked, equal and tied logits; the first and the last token; more places than get the largest team."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(36, vocabulary, generator=generator) * torch.tensor([0.1, 3.0, 30.0, 0.0]).repeat(9)[:, None]
    logits[1] = logits[1].round()
    targets = torch.randint(0, vocabulary, (36,), generator=generator).tolist()
    targets[:2] = 0, vocabulary - 1
    words = score(any_device, logits, targets, likeliest)
    for i, target in enumerate(targets):
        check(words, i, logits[i].numpy(), target, likeliest)


def test_places_that_are_not_finite_mean_nothing(any_device, generator) -> None:
    """NaN, and no memory of another step."""
    logits = torch.randn(2, 100, generator=generator)
    logits[0, 50] = float("inf")
    words = score(any_device, logits, [3, 4], 2)
    assert np.isnan(words.chosen[0])
    assert np.isnan(words.values[0]).all()
    assert words.ids[0].tolist() == [0, 0]
    check(words, 1, logits[1].numpy(), 4, 2)


def test_more_than_a_record_holds_is_refused(device) -> None:
    """Before anything is read."""
    with pytest.raises(ShapeMismatch, match="33"):
        score(device, torch.zeros(1, 100), [0], MAX_LIKELIEST + 1)
