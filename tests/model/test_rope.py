"""Inverse frequencies equal transformers' own, for every kind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.config import parse_config
from model.rope import inverse_frequencies

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64,
        "beta_slow": 2,
        "truncate": False,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 500_000.0), (80, 1_000_000.0)])
def test_frequencies_equal_transformers(kind: dict[str, Any], head_dim: int, theta: float) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 131_072}
    rope = {**kind, "rope_theta": theta}
    reference = transformers.LlamaConfig(**fields, rope_parameters=dict(rope))
    theirs, scale = ROPE_INIT_FUNCTIONS[kind["rope_type"]](reference)
    sizes = {"vocab_size": 9, "intermediate_size": 9, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    ours, our_scale = inverse_frequencies(parse_config({**fields, **sizes, "rope_parameters": rope}).rope, head_dim)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale)


def test_plain_frequencies() -> None:
    rope = SimpleNamespace(kind="default", theta=100.0, factor=1.0)
    frequencies, scale = inverse_frequencies(rope, 4)  # type: ignore[arg-type]
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    assert scale == 1.0
