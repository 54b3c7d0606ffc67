"""The network agrees with transformers, in float32, for every family, rope kind and head shape, in any chunks."""

import ctypes
import random

import pytest
import torch
from network import Network

from model.config import read_config

Native = ctypes.CDLL | None
IDS = [random.Random(5).randrange(211) for _ in range(75)]
CHUNKS = [[75], [1] * 20 + [55], [16, 1, 1, 17, 33, 7], [64, 11]]
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=["at once", "decode first", "mixed", "past a page"])
def test_logits_of_each_family(cpu_kernels: Native, tiny, family: str, chunks: list[int]) -> None:
    """Prefill, chunked prefill and decode give the same logits as transformers at every position."""
    model = tiny(family)
    ours = Network.load(model.folder, cpu_kernels).logits(IDS, chunks)
    torch.testing.assert_close(ours, model.logits(IDS), **CLOSE)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {"attention_bias": True}),
        ("Llama", {"mlp_bias": True}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"attention_bias": True}),
        ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 16}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("Mistral", {"sliding_window": 256}),
    ],
)
def test_logits_of_variants(cpu_kernels: Native, tiny, family: str, fields: dict) -> None:
    """Biases, tied embeddings, and windows that are switched off, in no layer, or as long as the model's limit."""
    model = tiny(family, **fields)
    ours = Network.load(model.folder, cpu_kernels).logits(IDS, [40, 1, 1, 33])
    torch.testing.assert_close(ours, model.logits(IDS), **CLOSE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden", "head_dim"),
    [
        (9, 3, 576, 64),
        (14, 2, 112, None),
        (12, 2, 96, None),
        (8, 1, 64, None),
        (6, 6, 96, None),
        (15, 5, 120, None),
        (4, 2, 320, 80),
        (4, 2, 96, 96),
        (16, 8, 1024, 128),
        (2, 1, 64, 256),
    ],
)
def test_logits_of_head_shapes(
    cpu_kernels: Native, tiny, heads: int, kv_heads: int, hidden: int, head_dim: int | None
) -> None:
    """C36: any ratio of heads, any head size, explicit or from the hidden size (a null in the file)."""
    model = tiny(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        head_dim=head_dim,
        initializer_range=0.05,
    )
    ours = Network.load(model.folder, cpu_kernels).logits(IDS, [40, 1, 1, 33])
    torch.testing.assert_close(ours, model.logits(IDS), **CLOSE)


ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 16,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_logits_of_rope_kinds(cpu_kernels: Native, tiny, kind: str) -> None:
    """C37: positions 0, the page edge, either side of the original limit, and the last one of the model."""
    model = tiny("Llama", rope_parameters={"rope_theta": 10_000.0, **ROPES[kind]})
    limit = read_config(model.folder).max_positions
    assert limit == 256
    ids = [random.Random(6).randrange(211) for _ in range(limit)]
    ours = Network.load(model.folder, cpu_kernels).logits(ids, [64, 1, 1, 62, 128])
    theirs = model.logits(ids)
    places = [0, 1, 15, 16, 63, 64, 65, limit - 1]
    torch.testing.assert_close(ours[places], theirs[places], **CLOSE)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)


def test_a_batch_is_computed_as_if_alone(cpu_kernels: Native, tiny) -> None:
    """Decodes and chunks of several Sequences in one step: each row's logits are those it has alone."""
    model = tiny("Qwen3")
    prompts = [IDS[:33], IDS[5:21], IDS[10:75], IDS[40:41]]
    alone = [model.logits(ids)[-1] for ids in prompts]
    network = Network.load(model.folder, cpu_kernels, rows=4)
    network.step([ids[:-1] or [0] for ids in prompts], [0] * 4)
    together = network.step([ids[-1:] for ids in prompts], [len(ids) - 1 for ids in prompts], decodes=4)
    torch.testing.assert_close(together, torch.stack(alone), **CLOSE)
    mixed = network.step(
        [prompts[0][-1:], prompts[1][-1:], prompts[2], prompts[3]],
        [len(prompts[0]) - 1, len(prompts[1]) - 1, 0, 0],
        decodes=2,
    )
    torch.testing.assert_close(mixed[[0, 1, -2, -1]], torch.stack(alone), **CLOSE)


def test_bfloat16_stays_near_float32(cpu_kernels: Native, tiny) -> None:
    """bf16 has 8 bits: logits agree to a few percent of their spread."""
    model = tiny("Llama")
    ours = Network.load(model.folder, cpu_kernels, torch.bfloat16).logits(IDS, [40, 1, 34])
    theirs = model.logits(IDS)
    assert (ours - theirs).abs().max() < 0.05 * theirs.std() * 4


def test_a_long_run_of_one_token(cpu_kernels: Native, tiny) -> None:
    """C38: 1,000 equal tokens: attention weights are all alike, sums stay finite and right."""
    model = tiny("Llama", max_position_embeddings=1024)
    network = Network.load(model.folder, cpu_kernels, tokens=1024)
    ours = network.logits([7] * 1000, [512, 488])
    assert not network.failed.any()
    torch.testing.assert_close(ours, model.logits([7] * 1000), **CLOSE)
