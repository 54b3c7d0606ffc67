"""The definition of model/sampler.py one token at a time, in Python integers and float32 scalars: the oracle of both
samplers. exp is torch's, over the whole row, so that its last bit is the same.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from model.philox import random_words
from model.step_plan import SamplingParameters

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
ONE = 2**40


@dataclass
class Case:
    """A row: logits (V) float32, and what is known of its Sequence."""

    logits: np.ndarray
    parameters: SamplingParameters
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    mask: np.ndarray | None = None  # (V) bool: what its grammar admits

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def history(self) -> np.ndarray:
        """What RowSettings carries."""
        return np.array(self.tokens if self.parameters.needs_history else [], np.int32)


def slow_adjusted(case: Case) -> np.ndarray:
    """Step A: (V,) float32."""
    p, x = case.parameters, case.logits.astype(np.float32).copy()
    f32 = np.float32
    repetition = f32(min(max(p.repetition_penalty, SMALLEST), LARGEST))
    with np.errstate(over="ignore"):
        for token in set(case.tokens):
            changed = x[token] / repetition if x[token] > 0 else x[token] * repetition
            if count := case.output.count(token):
                changed -= f32(p.frequency_penalty) * f32(count) + f32(p.presence_penalty)
            x[token] = np.clip(changed, -LARGEST, LARGEST)
        for token, value in p.logit_bias.items():
            x[token] = np.clip(x[token] + f32(min(max(value, -LARGEST), LARGEST)), -LARGEST, LARGEST)
    banned = set(range(len(x))) - set(p.allowed_token_ids) if p.allowed_token_ids else set()
    if len(case.output) < p.min_tokens:
        banned |= set(p.barred_ids)
    banned |= {word[-1] for word in p.bad_words if case.tokens[len(case.tokens) - len(word) + 1 :] == word[:-1]}
    x[list(banned)] = -np.inf
    if case.mask is not None:
        x[~case.mask] = -np.inf
    return x


def packed_masks(masks: list[np.ndarray]) -> np.ndarray:
    """(N, ceil(V / 32)) int32: bit id % 32 of word id // 32 of each (V) bool."""
    bits = np.zeros((len(masks), -(-len(masks[0]) // 32) * 32), np.bool_)
    bits[:, : len(masks[0])] = masks
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def slow_kept(adjusted: np.ndarray, p: SamplingParameters) -> dict[int, int]:
    """Step D up to the draw: the kept tokens and their mass."""
    temperature = np.float32(min(p.temperature, LARGEST))
    with np.errstate(over="ignore"):
        distance = (adjusted.max() - adjusted) / temperature
    mass = [int(weight * ONE) for weight in torch.from_numpy(-distance).exp().numpy()]
    left = sorted(range(len(adjusted)), key=lambda token: (-adjusted[token], token))
    if p.top_k > 0:
        left = left[: p.top_k]
    if p.top_p < 1:
        left = _first(left, mass, p.top_p)
    left = [token for token in left if mass[token] >= math.floor(p.min_p * ONE) or adjusted[token] == adjusted.max()]
    if p.typical_p < 1:
        left = [token for token in left if mass[token]]
        surprise = sum(int(np.float32(mass[token]) * distance[token]) for token in left)
        mean = np.float32(np.float64(surprise) / np.float64(sum(mass[token] for token in left)))
        left = sorted(left, key=lambda token: (abs(distance[token] - mean), token))
        left = _first(left, mass, p.typical_p)
    return {token: mass[token] for token in sorted(left)}


def _first(ordered: list[int], mass: list[int], share: float) -> list[int]:
    wanted = max(1, math.ceil(share * sum(mass[token] for token in ordered)))
    kept, running = [], 0
    for token in ordered:
        if running >= wanted:
            break
        kept.append(token)
        running += mass[token]
    return kept


def slow_sample(case: Case) -> int:
    """The token of a row, or -1 if nothing is left."""
    adjusted = slow_adjusted(case)
    if np.isneginf(adjusted).all():
        return -1
    if case.parameters.temperature < 1e-5:
        return int(np.flatnonzero(adjusted == adjusted.max())[0])
    kept = slow_kept(adjusted, case.parameters)
    random = int(random_words(np.array([case.parameters.seed], np.uint64), np.array([len(case.tokens)]))[0])
    threshold = random * sum(kept.values()) >> 64
    for token, mass in kept.items():
        threshold -= mass
        if threshold < 0:
            return token
    raise AssertionError("no token")
