"""config.json: defaults, both spellings of rope parameters, end tokens of all files; what is not built is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import SamplingDefaults, parse_config, read_config
from model.errors import BadCheckpoint, ModelNotFound, UnknownArchitecture, UnsupportedFeature

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 4096,
}


def config(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def test_missing_keys_take_the_family_defaults() -> None:
    llama = parse_config(config())
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps, llama.rope.theta) == (6, 16, 1e-6, 10_000.0)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm, llama.tied_embeddings) == (False,) * 5
    qwen2 = parse_config(config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2))
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = parse_config(config(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2))
    assert (qwen3.qk_norm, qwen3.head_dim) == (True, 128)


def test_nulls_mean_derived() -> None:
    parsed = parse_config(config(head_dim=None, num_key_value_heads=None, rope_scaling=None, sliding_window=None))
    assert (parsed.head_dim, parsed.kv_heads, parsed.rope.kind) == (16, 6, "default")


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnknownArchitecture, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*MistralForCausalLM.*Qwen3"):
        parse_config(config(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(UnknownArchitecture, match="missing"):
        parse_config({"vocab_size": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope variant 'longrope'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope variant 'mrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"head_dim": 15}, "odd"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        parse_config(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"hidden_size": 100}, "hidden_size 100 is not a multiple"),
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}, "high_freq"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set"),
    ],
)
def test_what_contradicts_itself_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        parse_config(config(**changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 1024}),
        ("Qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 3}),
        ("Qwen3", {"sliding_window": 1024, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
        ("Mistral", {"sliding_window": 4095}),
    ],
)
def test_a_sliding_window_in_use_is_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature, match=r"sliding window of \d+ tokens"):
        parse_config(config(architectures=[f"{family}ForCausalLM"], num_key_value_heads=2, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 4096}),  # as long as the model: never left
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}),
        ("Qwen2", {"sliding_window": 16}),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}),
        ("Qwen3", {"sliding_window": 16, "layer_types": ["full_attention"] * 4}),
    ],
)
def test_a_window_that_changes_nothing_is_fine(family: str, changes: dict[str, Any]) -> None:
    parsed = parse_config(config(architectures=[f"{family}ForCausalLM"], num_key_value_heads=2, **changes))
    assert parsed.max_positions == 4096


@pytest.mark.parametrize("outer", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inner", ["type", "rope_type"])
@pytest.mark.parametrize("theta", [500_000, 500_000.0])
def test_all_spellings_of_rope_mean_the_same(outer: str, inner: str, theta: float) -> None:
    """C37: rope_scaling or rope_parameters, type or rope_type, theta inside or outside, as integer or float."""
    scaling = {inner: "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    outside = parse_config(config(rope_theta=theta, **{outer: scaling}))
    inside = parse_config(config(**{outer: {**scaling, "rope_theta": theta}}))
    per_layer = parse_config(config(rope_parameters={"full_attention": {**scaling, "rope_theta": theta}}))
    assert outside.rope == inside.rope == per_layer.rope
    assert (inside.rope.kind, inside.rope.theta, inside.rope.factor) == ("yarn", 500_000.0, 4.0)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 4096),
        ({"type": "default"}, 4096),
        ({"type": "linear", "factor": 4.0}, 4096),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"type": "dynamic", "factor": 4.0}, 4096),
        ({"type": "yarn", "factor": 4.0}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 4096),
    ],
)
def test_the_longest_sequence_follows_from_the_rope(scaling: dict[str, Any] | None, limit: int) -> None:
    assert parse_config(config(rope_scaling=scaling)).max_positions == limit


def test_yarn_without_a_factor_derives_it() -> None:
    parsed = parse_config(config(rope_scaling={"type": "yarn", "original_max_position_embeddings": 1024}))
    assert parsed.rope.factor == 4.0


@pytest.mark.parametrize(
    ("own", "generation", "tokenizer", "union"),
    [
        (2, None, None, (2,)),
        ([2, 5], 7, None, (2, 5, 7)),
        (None, [1, 0], 2, (0, 1, 2)),
        (None, None, None, ()),
        (3, 3, 3, (3,)),
        ([2, 100, -1], None, None, (2,)),  # ids without a logit can never be sampled
    ],
)
def test_end_ids_are_the_union_of_all_files(own: Any, generation: Any, tokenizer: int | None, union: tuple) -> None:
    """C39."""
    assert parse_config(config(eos_token_id=own), {"eos_token_id": generation}, tokenizer).end_ids == union


@pytest.mark.parametrize(
    "tokenizer_config",
    [
        {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}},
        {"eos_token": {"content": "<end>", "lstrip": False}},
        {"eos_token": "word"},
        {"eos_token": None},
        None,
    ],
)
def test_a_folder_is_read_as_a_whole(tmp_path: Path, tokenizer_config: dict[str, Any] | None) -> None:
    """C39: end ids of three files, the tokenizer's found by its text; sampling defaults; dtype."""
    (tmp_path / "config.json").write_text(json.dumps(config(eos_token_id=2, torch_dtype="bfloat16", bos_token_id=1)))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3], "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"word": 8}}})
    )
    if tokenizer_config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    end = (tokenizer_config or {}).get("eos_token")
    parsed = read_config(tmp_path)
    assert parsed.end_ids == ((2, 3, 8) if end == "word" else (2, 3, 9) if end else (2, 3))
    assert parsed.sampling == SamplingDefaults(temperature=0.6, top_k=20, top_p=None, repetition_penalty=1.1)
    assert (parsed.dtype, parsed.start_id) == ("bfloat16", 1)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
