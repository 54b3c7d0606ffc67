"""GGUF files: read once, dequantised, and written as a folder that the rest of `model/` knows: safetensors + JSON.

What differs in a GGUF file: tensors have llama.cpp's names and block formats; for Llama, the rows of q and k are
permuted (llama.cpp rotates neighbouring pairs, we rotate halves); config and tokenizer are metadata. Quantised weights
become bfloat16, plain ones keep their type.

Owns: both name maps, the permutation, and the recipes of the tokenizers (`tokenizer.ggml.model` and `.pre`). A kind
that is not listed is refused: a wrong splitting rule gives fluent text from wrong ids.
Source: the GGUF specification (docs/gguf.md in ggml); formats through the `gguf` package.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Block
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from model.config import RopeSettings
from model.errors import BadCheckpoint, ModelError, UnsupportedFeature
from model.loader import INDEX
from model.rope import inverse_frequencies
from model.source import Report

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_PERMUTED = ("llama",)

SHARD_BYTES = 2 << 30
"""A shard is dequantised in memory before it is written: this bounds what a conversion of a large model needs."""


def convert(path: Path, folder: Path, report: Report) -> None:
    """Write the model in `path` into the empty `folder`: config.json, generation_config.json, *.safetensors,
    tokenizer.json, tokenizer_config.json.

    Raises: BadCheckpoint if the file is broken; UnsupportedFeature for architectures, ropes and tokenizers not known.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise BadCheckpoint(f"{path} is not a readable GGUF file: {error}") from error
    metadata = _Metadata(path, reader)
    architecture = metadata.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedFeature(f"{path}: GGUF architecture {architecture!r}; known: {', '.join(_ARCHITECTURES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, architecture, tensors)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_weights(folder, metadata, architecture, config, tensors, report)
    try:
        tokenizer = _tokenizer(metadata)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise BadCheckpoint(f"{path}: its tokenizer cannot be built: {error}") from error
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # `save` hides an OSError
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


class _Metadata:
    """The file's key-value part."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def text(self, key: str) -> str:
        return str(self._required(key))

    def number(self, key: str) -> int:
        value = self._required(key)
        if not isinstance(value, int):
            raise UnsupportedFeature(f"{self.path}: {key} is {value!r}; one whole number for all layers is supported")
        return value

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise BadCheckpoint(f"{self.path}: metadata {key} is missing")
        return value


# --- config.json -----------------------------------------------------------------------------------------------------


def _config(metadata: _Metadata, architecture: str, tensors: dict[str, Any]) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if metadata.get(key("expert_count"), 0):
        raise UnsupportedFeature(f"{metadata.path}: mixtures of experts are not supported")
    if "token_embd.weight" not in tensors:
        raise BadCheckpoint(f"{metadata.path}: tensor token_embd.weight is missing")
    hidden, heads = metadata.number(key("embedding_length")), metadata.number(key("attention.head_count"))
    head_dim = int(metadata.get(key("attention.key_length")) or hidden // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if (size := metadata.get(key(name))) not in (None, head_dim):
            raise UnsupportedFeature(f"{metadata.path}: {key(name)} is {size}, but the head size is {head_dim}")
    positions = metadata.number(key("context_length"))
    theta = float(metadata.get(key("rope.freq_base"), 10_000.0))
    eps = metadata.get(key("attention.layer_norm_rms_epsilon"), 1e-6)
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.number(key("feed_forward_length")),
        "num_hidden_layers": metadata.number(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get(key("attention.head_count_kv"), heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(
            np.format_float_positional(np.float32(eps))
        ),  # 1e-5, not 9.99999974e-06: float32 in the file
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_theta": theta, **_rope(metadata, architecture, tensors, theta, head_dim, positions)},
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": metadata.get(key("attention.sliding_window")) or None,
        "use_sliding_window": bool(metadata.get(key("attention.sliding_window"))),
        "max_window_layers": 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": str(_stored_dtype(tensors)).removeprefix("torch."),
    }


def _rope(
    metadata: _Metadata, architecture: str, tensors: dict[str, Any], theta: float, head_dim: int, positions: int
) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    factor = metadata.get(prefix + "factor")
    if "rope_freqs.weight" in tensors:
        return _llama3(metadata, tensors["rope_freqs.weight"], theta, head_dim)
    if kind == "none" or factor is None:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = metadata.get(prefix + "original_context_length", positions)
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
    raise UnsupportedFeature(f"{metadata.path}: rope scaling {kind!r}; known: none, linear, yarn, and llama3's factors")


def _llama3(metadata: _Metadata, tensor: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """The file holds the divisor of each frequency, not the four numbers that made them. Llama 3 was published with
    these three, and the fourth is the largest divisor; if they do not reproduce the file, it is another variant.
    """
    stored = torch.from_numpy(_dequantised(tensor).reshape(-1).copy())
    factor = float(round(stored.max().item(), 4))
    rope = RopeSettings("llama3", theta, factor, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, _ = inverse_frequencies(RopeSettings(theta=theta), head_dim)
    expected, _ = inverse_frequencies(rope, head_dim)
    if stored.shape != plain.shape or not torch.allclose(plain / stored, expected, rtol=1e-4):
        raise UnsupportedFeature(f"{metadata.path}: rope_freqs.weight is not the scaling of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message
    ends = {metadata.get(f"tokenizer.ggml.{name}") for name in names} - {None}
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": sorted(ends)}


# --- Weights ---------------------------------------------------------------------------------------------------------

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_CONFIG = {"rope_freqs.weight"}  # became rope parameters
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def _checkpoint_name(name: str) -> str | None:
    """llama.cpp's tensor name in the words of a checkpoint; None if it is not known here."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else None
    return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else None


def _write_weights(
    folder: Path,
    metadata: _Metadata,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Any],
    report: Report,
) -> None:
    names = {name: _checkpoint_name(name) for name in tensors if name not in _IN_CONFIG}
    unknown = [name for name, known in names.items() if known is None]
    if unknown:
        raise UnsupportedFeature(f"{metadata.path}: unknown tensors: {', '.join(unknown[:8])}")
    dtype = _stored_dtype(tensors)
    shards = _shards({name: int(tensors[name].n_elements) * dtype.itemsize for name in names})
    places: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        content: dict[str, Tensor] = {}
        for name in shard:
            weight = _dequantised(tensors[name])
            if architecture in _PERMUTED and (".attn_q." in name or ".attn_k." in name):
                heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
                weight = _halves_from_pairs(weight, heads)
            known = str(names[name])
            content[known] = torch.from_numpy(np.array(weight)).to(dtype)  # a copy: the file's pages are read-only
            places[known] = file
            done += 1
            if done % 50 == 0:
                report(f"converted {done} of {len(names)} tensors")
        try:
            safetensors.torch.save_file(content, folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # it has no other word for a disk that is full
            raise OSError(f"{file}: {error}") from error
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {}, "weight_map": places})


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, cut where a shard would pass SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _stored_dtype(tensors: dict[str, Any]) -> torch.dtype:
    """The type to store all tensors in: that of the plain matrices, or bfloat16 if the file is quantised."""
    kinds = {tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {Block.F32}:
        return torch.float32
    return torch.float16 if kinds <= {Block.F32, Block.F16} else torch.bfloat16


def _dequantised(tensor: Any) -> npt.NDArray[np.float32]:
    """The tensor as float32, (rows, columns) as a checkpoint has it."""
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise UnsupportedFeature(f"GGUF block format {tensor.tensor_type.name} of {tensor.name}: {error}") from error


def _halves_from_pairs(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of each head's rows: 0, D/2, 1, D/2 + 1, … becomes 0, 1, …, D/2, D/2 + 1, …"""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# --- Tokenizer -------------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*first: Any, gpt2_regex: bool) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_regex)
    return pre_tokenizers.Sequence([*first, last])


def _split(pattern: str) -> Any:
    return _byte_level(pre_tokenizers.Split(Regex(pattern), behavior="isolated"), gpt2_regex=False)


_PRE_TOKENIZERS = {
    "default": lambda: _byte_level(gpt2_regex=True),
    "gpt-2": lambda: _byte_level(gpt2_regex=True),
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), gpt2_regex=True),
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "tekken": lambda: _split(_TEKKEN),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a piece that is a token is not merged anew
_START_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # where the file does not say add_bos_token
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # Unicode NFC first


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    kind = metadata.text("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise BadCheckpoint(f"{metadata.path}: metadata tokenizer.ggml.tokens is missing")
    if kind == "gpt2":
        tokenizer = _byte_level_tokenizer(metadata, tokens)
        adds_start = metadata.get("tokenizer.ggml.pre") in _START_BY_DEFAULT
    elif kind == "llama":
        tokenizer, adds_start = _sentencepiece_tokenizer(metadata, tokens), True
    else:
        raise UnsupportedFeature(f"{metadata.path}: GGUF tokenizer {kind!r}; known: gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or []
    for wanted in (_CONTROL, _USER_DEFINED):
        added = [
            AddedToken(token, normalized=False, special=wanted == _CONTROL)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == wanted
        ]
        (tokenizer.add_special_tokens if wanted == _CONTROL else tokenizer.add_tokens)(added)
    start = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_start) and start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[start]} $A",
            pair=f"{tokens[start]} $A {tokens[start]}:1 $B:1",
            special_tokens=[(tokens[start], start)],
        )
    return tokenizer


def _byte_level_tokenizer(metadata: _Metadata, tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedFeature(f"{metadata.path}: pre-tokenizer {pre!r}; known: {', '.join(_PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(metadata: _Metadata, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: spaces are ▁, unknown characters fall back to bytes; merges follow from the scores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise BadCheckpoint(f"{metadata.path}: metadata tokenizer.ggml.scores is missing")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two tokens, best score of the result first; ties by the shorter left part."""
    found = []
    for token, number in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(vocabulary[a], vocabulary[b], a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        found += [(-scores[number], len(a), len(b), a, b) for _, _, a, b in sorted(known)]
    found.sort(key=lambda entry: entry[:3])
    return [(a, b) for *_, a, b in found]


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")

    def token(name: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[number]

    settings = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.text('general.architecture')}.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {name: value for name, value in settings.items() if value is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
