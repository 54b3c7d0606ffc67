"""Rotary position embeddings: from `RopeSettings` to one inverse frequency per pair of dimensions, and a scale.

The angle of pair i at position p is p * inverse_frequencies[i]; dimension i is paired with dimension i + D / 2. Angles
are float32 throughout: bf16 counts exactly only to 256, float32 to 16 million.

Sources: Su 2021 (default); Chen 2023 (linear); Meta's Llama 3.1 release (llama3); Peng 2023, §3.2-3.4 (yarn). The
results equal transformers' `modeling_rope_utils` (tests/model/test_rope.py).
"""

import math

import torch
from torch import Tensor

from model.config import RopeSettings


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> tuple[Tensor, float]:
    """((D / 2,) float32 inverse frequencies, the factor of cos and sin: 1 except for yarn)."""
    plain = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim), _yarn_scale(rope)
    return plain, 1.0  # default; and dynamic, which differs only past max_positions


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def _llama3(plain: Tensor, rope: RopeSettings) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_stretched = rope.original_positions / rope.low_freq_factor
    stretched = torch.where(wavelength > shortest_stretched, plain / rope.factor, plain)
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = ~(wavelength < longest_kept) & ~(wavelength > shortest_stretched)
    return torch.where(between, (1 - blend) * stretched / rope.factor + blend * stretched, stretched)


def _yarn(plain: Tensor, rope: RopeSettings, head_dim: int) -> Tensor:
    """Dimensions that turn often in the original context are kept, those that turn rarely are stretched."""

    def dimension_with(turns: float) -> float:
        return (head_dim * math.log(rope.original_positions / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero; the ramp becomes a step
    stretched_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    # The same order of operations as the original: 1 / (factor * frequency), not plain / factor.
    stretched = 1.0 / (rope.factor * (1.0 / plain))
    kept_share = 1 - stretched_share
    return stretched * (1 - kept_share) + plain * kept_share


def _yarn_scale(rope: RopeSettings) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
