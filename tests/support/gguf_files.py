"""GGUF files made by tests: a tiny transformers model in llama.cpp's names, order and metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MERGES = ["h e", "l l", "ll o", "he llo", "Ġ hello", "1 2"]
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    others = [byte for byte in range(256) if byte not in BYTES]
    table = {byte: chr(byte) for byte in BYTES} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k of Llama: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    reference: Any,
    architecture: str,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    quantize: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: str = "gpt2",
    pre: str = "smollm",
) -> None:
    """Write `reference` (a transformers model) as llama.cpp's converter would. `metadata` overrides, without prefix."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        **(metadata or {}),
    }
    for key, value in numbers.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", float(config.rope_parameters["rope_theta"]))
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    add_tokenizer(writer, tokenizer, pre, config.vocab_size)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.to(torch.float32).numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and part in name:
                array = pairs_from_halves(array, heads)
        kind = quantize if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, kind: str, pre: str, size: int) -> None:
    """A small vocabulary of `size` tokens: byte-level ("gpt2", split as `pre` says) or SentencePiece ("llama")."""
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens = ["<end>", "<start>", "<tool>", *byte_alphabet(), "he", "ll", "llo", "hello", "Ġhello", "12"]
        types = [3, 3, 4] + [1] * (len(tokens) - 3)
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(MERGES)
    else:
        pieces = [
            "▁",
            "h",
            "e",
            "l",
            "o",
            "w",
            "r",
            "d",
            "▁h",
            "he",
            "ll",
            "llo",
            "hello",
            "▁hello",
            "▁w",
            "or",
            "▁wor",
            "ld",
        ]
        tokens = ["<unk>", "<start>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
        writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(pieces))])
    tokens += [f"<unused{n}>" for n in range(size - len(tokens))]
    types += [5] * (size - len(types))
    assert len(tokens) == size, "the model's vocabulary is too small for the tokenizer"
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0 if kind == "gpt2" else 2)
