"""What a model folder says about its network: the fields of config.json in use, checked, with the defaults of its
family.

Nothing is guessed. A field that changes the result and is not built (a sliding window in use, an unknown rope variant,
quantised weights) is refused here, at start, because a network computed half right answers fluently and wrongly.

Owns: the names of the known architectures, their differences (`_Family`), and the derived limit `max_positions`.
Sources: the configuration classes of transformers 5 (defaults of missing keys); no torch is imported here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model.errors import BadCheckpoint, ModelNotFound, UnknownArchitecture, UnsupportedFeature

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions turn into angles; `model.rope` has the formulas. Fields after `theta` mean something for some
    kinds.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn: how much longer the context became
    original_positions: int = 0  # llama3, yarn: positions of the first training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: derived from the factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0: not given
    mscale_all_dim: float = 0.0  # yarn; 0: not given
    truncate: bool = True  # yarn: round the borders of the ramp


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network, as it will be computed."""

    architecture: str
    vocabulary: int  # rows of the embedding and of the output matrix
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSettings
    max_positions: int  # prompt and output of one Sequence never exceed this; see _max_positions
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each query and key head before the rotation (Qwen3)
    tied_embeddings: bool  # the output matrix is the embedding
    dtype: DtypeName | None  # of the checkpoint; None: the files do not say
    end_ids: tuple[int, ...]  # union of all files, ascending
    start_id: int | None  # the start token, if the model has one
    sampling: SamplingDefaults


@dataclass(frozen=True, slots=True)
class _Family:
    """Where one architecture differs from Llama, and its defaults for keys that config.json may lack."""

    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden / heads
    max_positions: int = 2048
    window: Literal["never", "always", "flag"] = "never"  # what switches `sliding_window` on


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(mlp_bias=None),
    "MistralForCausalLM": _Family(False, False, kv_heads=8, max_positions=131_072, window="always"),
    "Qwen2ForCausalLM": _Family(True, False, kv_heads=32, max_positions=32_768, window="flag"),
    "Qwen3ForCausalLM": _Family(qk_norm=True, kv_heads=32, head_dim=128, max_positions=32_768, window="flag"),
}
KNOWN_ARCHITECTURES = tuple(_FAMILIES)


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's files in `folder`.

    Raises: ModelNotFound without config.json; else what `parse_config` raises.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} is not a model folder: it has no config.json")
    generation = folder / "generation_config.json"
    return parse_config(
        _read_json(path),
        _read_json(generation) if generation.is_file() else {},
        tokenizer_end_id(folder),
    )


def parse_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, tokenizer_end: int | None = None
) -> ModelConfig:
    """Check the fields of a config.json and of a generation_config.json.

    Raises: UnknownArchitecture, UnsupportedFeature, BadCheckpoint; the message names the field.
    """
    generation = generation or {}
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_what_is_not_built(config)

    vocabulary, hidden = _size(config, "vocab_size"), _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", family.kv_heads or heads, null=heads)
    head_dim = _size(config, "head_dim", family.head_dim or hidden // heads, null=hidden // heads)
    if not config.get("head_dim") and family.head_dim is None and hidden % heads:
        raise BadCheckpoint(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if heads % kv_heads:
        raise BadCheckpoint(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedFeature(f"config.json: head_dim {head_dim} is odd: rotary positions need pairs of dimensions")

    positions = _size(config, "max_position_embeddings", family.max_positions)
    rope = _rope(config, positions)
    limit = _max_positions(rope, positions)
    layers = _size(config, "num_hidden_layers")
    _refuse_sliding_window(config, family, layers, limit)

    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocabulary=vocabulary,
        layers=layers,
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=limit,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        end_ids=_end_ids(vocabulary, config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer_end),
        start_id=_start_id(vocabulary, config.get("bos_token_id"), generation.get("bos_token_id")),
        sampling=SamplingDefaults(
            temperature=generation.get("temperature"),
            top_k=generation.get("top_k"),
            top_p=generation.get("top_p"),
            repetition_penalty=generation.get("repetition_penalty"),
        ),
    )


# --- What is refused -------------------------------------------------------------------------------------------------


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    raise UnknownArchitecture(
        f"config.json: architecture {', '.join(map(str, names)) or 'missing'} is unknown; "
        f"known: {', '.join(KNOWN_ARCHITECTURES)}"
    )


def _refuse_what_is_not_built(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise UnsupportedFeature(
            f"config.json: quantised weights ({method}) are not supported; use the plain checkpoint"
        )
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedFeature(f"config.json: hidden_act {activation!r} is not supported; supported: silu")


def _refuse_sliding_window(config: Mapping[str, Any], family: _Family, layers: int, limit: int) -> None:
    """A window that no layer uses, or that no Sequence can outgrow, changes nothing; any other is refused."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedFeature(f"config.json: layer_types {', '.join(unknown)} are not supported")
        windowed = sum(kind == "sliding_attention" for kind in kinds)
        if windowed and window is None:
            raise BadCheckpoint("config.json: layer_types has sliding_attention, but sliding_window is not set")
    elif window is None:
        return
    elif family.window == "flag":
        first = _size(config, "max_window_layers", 28, minimum=0)
        windowed = max(0, layers - first) if config.get("use_sliding_window", False) else 0
    else:
        windowed = layers
    if windowed and window is not None and window < limit:
        raise UnsupportedFeature(
            f"config.json: a sliding window of {window} tokens in {windowed} of {layers} layers is not supported: "
            f"attention here is always full"
        )


# --- Positions -------------------------------------------------------------------------------------------------------


def _rope(config: Mapping[str, Any], positions: int) -> RopeSettings:
    """`rope_scaling` (with `type` or `rope_type`) or transformers 5's `rope_parameters`; theta in either place."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise BadCheckpoint(f"config.json: rope parameters must be an object, not {scaling!r}")
    if "full_attention" in scaling:  # one entry a kind of layer; all our layers are full (checked elsewhere)
        scaling = scaling["full_attention"]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedFeature(
            f"config.json: rope variant {kind!r} is unknown; known: default, linear, dynamic, llama3, yarn"
        )
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedFeature(f"config.json: partial_rotary_factor {partial} is not supported; supported: 1")
    theta = _number(scaling if "rope_theta" in scaling else config, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeSettings(theta=theta)
    original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    if kind == "yarn" and scaling.get("factor") is None and original:
        factor = positions / original
    else:
        factor = _number(scaling, "factor")
    if kind == "dynamic":  # NTK scaling starts past the trained positions, which max_positions never allows
        return RopeSettings(kind="dynamic", theta=theta, factor=factor)
    if kind == "linear":
        return RopeSettings(kind="linear", theta=theta, factor=factor, original_positions=int(original or 0))
    original = int(original or positions)
    if kind == "llama3":
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        if high <= low:
            raise BadCheckpoint(f"config.json: rope high_freq_factor {high} must exceed low_freq_factor {low}")
        return RopeSettings(
            "llama3", theta, factor, original_positions=original, low_freq_factor=low, high_freq_factor=high
        )
    return RopeSettings(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_positions=original,
        attention_factor=scaling.get("attention_factor"),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _max_positions(rope: RopeSettings, positions: int) -> int:
    """The longest Sequence that the angles are right for.

    max_position_embeddings, except where a file gives the first training's length and a factor (yarn; linear if it says
    the original length): then their product, if larger. dynamic is never stretched: its angles change with the length
    of the Sequence, so keys in the cache would go stale.
    """
    if rope.kind == "yarn" or (rope.kind == "linear" and rope.original_positions):
        return max(positions, round(rope.original_positions * rope.factor))
    return positions


# --- Tokens ----------------------------------------------------------------------------------------------------------


def tokenizer_end_id(folder: Path) -> int | None:
    """The id of the tokenizer's own end token, from tokenizer_config.json and tokenizer.json; None if it has none."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    settings = _read_json(path)
    token = settings.get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    for number, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(number)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    content = _read_json(tokenizer)
    for added in content.get("added_tokens") or []:
        if added.get("content") == token:
            return int(added["id"])
    vocabulary = (content.get("model") or {}).get("vocab")
    found = vocabulary.get(token) if isinstance(vocabulary, Mapping) else None
    return None if found is None else int(found)


def _end_ids(vocabulary: int, *sources: Any) -> tuple[int, ...]:
    """The union: chat models stop at an id that only one of the files may name."""
    ids: set[int] = set()
    for source in sources:
        for token in source if isinstance(source, list) else [source]:
            if token is None:
                continue
            if not isinstance(token, int):
                raise BadCheckpoint(f"eos_token_id {token!r} is not an integer")
            if 0 <= token < vocabulary:  # an id without a logit can never be sampled
                ids.add(token)
    return tuple(sorted(ids))


def _start_id(vocabulary: int, *sources: Any) -> int | None:
    return next((s for s in sources if isinstance(s, int) and 0 <= s < vocabulary), None)


# --- Reading fields --------------------------------------------------------------------------------------------------


def _dtype(config: Mapping[str, Any]) -> DtypeName | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    for known in ("float32", "bfloat16", "float16"):
        if name == known:
            return known
    raise UnsupportedFeature(f"config.json: dtype {name!r} is not supported; supported: float32, bfloat16, float16")


_MISSING = object()


def _size(
    config: Mapping[str, Any], key: str, default: int | None = None, *, null: int | None = None, minimum: int = 1
) -> int:
    """A whole number of at least `minimum`. `default` is for a missing key, `null` for an explicit null."""
    value = config.get(key, _MISSING)
    if value is _MISSING:
        value = default
    elif value is None:
        value = null if null is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        shown = "missing" if value is None else repr(value)
        raise BadCheckpoint(f"config.json: {key} must be a whole number of at least {minimum}, but is {shown}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise BadCheckpoint(f"config.json: {key} must be a positive number, but is {value!r}")
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object")
    return content
