"""GGUF files become folders with the same logits and the same token ids; what is not known is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from network import Network
from tokenizers import Tokenizer

from model import gguf_import
from model.config import read_config
from model.errors import BadCheckpoint, UnsupportedFeature
from model.gguf_import import convert

IDS = list(range(3, 43))
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


def converted(path: Path, folder: Path) -> Path:
    folder.mkdir()
    convert(path, folder, lambda line: None)
    return folder


@pytest.fixture
def make(tiny, tmp_path: Path):
    """make(family, architecture, …): (transformers model, GGUF file of it)."""

    def build(family: str, architecture: str, *, fields: dict | None = None, **options):
        model = tiny(family, vocab_size=320, **(fields or {}))
        path = tmp_path / "model.gguf"
        write_gguf(path, model.reference, architecture, **options)
        return model, path

    return build


@pytest.mark.parametrize(
    ("family", "architecture", "fields"),
    [
        ("Llama", "llama", {}),
        ("Llama", "llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ("Mistral", "llama", {"head_dim": 32}),
        ("Qwen2", "qwen2", {}),
        ("Qwen3", "qwen3", {"head_dim": 32}),
    ],
)
def test_logits_survive_the_conversion(make, tmp_path: Path, family: str, architecture: str, fields: dict) -> None:
    model, path = make(family, architecture, fields=fields)
    folder = converted(path, tmp_path / "out")
    assert read_config(folder).dtype == "float32"
    ours = Network.load(folder).logits(IDS, [39, 1])
    torch.testing.assert_close(ours, model.logits(IDS), **CLOSE)


def test_quantised_blocks_become_bfloat16(make, tmp_path: Path) -> None:
    """Q8_0 keeps 8 bits a weight: logits stay within a few percent of their spread."""
    model, path = make("Llama", "llama", fields={"intermediate_size": 128}, quantize=gguf.GGMLQuantizationType.Q8_0)
    folder = converted(path, tmp_path / "out")
    assert read_config(folder).dtype == "bfloat16"
    theirs = model.logits(IDS)
    assert (Network.load(folder).logits(IDS, [40]) - theirs).abs().max() < 0.1 * theirs.std() * 3


def test_large_files_are_written_in_shards(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 100_000)
    model, path = make("Qwen3", "qwen3")
    folder = converted(path, tmp_path / "out")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(Network.load(folder).logits(IDS, [40]), model.logits(IDS), **CLOSE)


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        ),
    ],
)
def test_rope_scaling_survives(make, tmp_path: Path, rope: dict, metadata: dict) -> None:
    model, path = make("Llama", "llama", fields={"rope_parameters": {"rope_theta": 1e4, **rope}}, metadata=metadata)
    folder = converted(path, tmp_path / "out")
    torch.testing.assert_close(Network.load(folder).logits(IDS, [40]), model.logits(IDS), **CLOSE)


def test_llama3_frequencies_are_recognised(make, tmp_path: Path) -> None:
    """The file stores divisors; the four numbers behind them are found again, or the file is refused."""
    from model.config import RopeSettings
    from model.rope import inverse_frequencies

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    fields = {"rope_parameters": rope, "max_position_embeddings": 16_384, "head_dim": 64}
    scaled, _ = inverse_frequencies(RopeSettings("llama3", 500_000.0, 8.0, 8192), 64)
    plain, _ = inverse_frequencies(RopeSettings(theta=500_000.0), 64)
    divisors = (plain / scaled).numpy()
    model, path = make("Llama", "llama", fields=fields, extra={"rope_freqs.weight": divisors})
    folder = converted(path, tmp_path / "out")
    assert read_config(folder).rope.kind == "llama3"
    torch.testing.assert_close(Network.load(folder).logits(IDS, [40]), model.logits(IDS), **CLOSE)
    _, path = make("Llama", "llama", fields=fields, extra={"rope_freqs.weight": divisors**0.5})
    with pytest.raises(UnsupportedFeature, match="rope_freqs"):
        converted(path, tmp_path / "other")


def test_the_end_ids_are_kept(make, tmp_path: Path) -> None:
    _, path = make("Llama", "llama")
    folder = converted(path, tmp_path / "out")
    assert read_config(folder).end_ids == (0,)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<end>"


TEXTS = [
    "hello",
    " hello hello",
    "<start>hello<end>",
    "a<tool>b",
    "x 12 and 1 2",
    "é\n\tü 🙂",
    "",
    "hello world  hello",
]


@pytest.mark.parametrize(
    ("kind", "pre"),
    [("gpt2", "gpt-2"), ("gpt2", "llama-bpe"), ("gpt2", "qwen2"), ("gpt2", "tekken"), ("llama", "default")],
)
def test_token_ids_equal_transformers(make, tmp_path: Path, kind: str, pre: str) -> None:
    """Against transformers' own conversion of the same file."""
    import transformers

    _, path = make("Llama", "llama", tokenizer=kind, pre=pre)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.from_file(str(converted(path, tmp_path / "out") / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_digits_stand_alone(make, tmp_path: Path) -> None:
    """`smollm` splits every digit off before anything else, so the merge of 1 and 2 is never reached, and the spaces
    before a digit stay together. (transformers' conversion of GGUF files leaves this rule out.)
    """
    _, path = make("Llama", "llama")
    tokenizer = Tokenizer.from_file(str(converted(path, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("x12").tokens == ["x", "1", "2"]


def test_a_start_token_is_added_where_the_file_says_so(make, tmp_path: Path) -> None:
    """SentencePiece files do by default."""
    _, path = make("Llama", "llama", tokenizer="llama")
    tokenizer = Tokenizer.from_file(str(converted(path, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<start>", *tokenizer.encode("hello", add_special_tokens=False).tokens]


def test_what_is_not_known_is_refused(make, tmp_path: Path) -> None:
    cases: list[tuple[dict, str]] = [
        ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}}, "ffn_gate_exps"),
        ({"metadata": {"expert_count": 8}}, "experts"),
        ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}}, "longrope"),
        ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count"),
    ]
    for number, (options, message) in enumerate(cases):
        _, path = make("Llama", "llama", **options)
        with pytest.raises(UnsupportedFeature, match=message):
            converted(path, tmp_path / f"out{number}")
    _, path = make("Llama", "phi3")
    with pytest.raises(UnsupportedFeature, match="'phi3'; known: llama, qwen2, qwen3"):
        converted(path, tmp_path / "out-phi3")


def test_a_broken_tokenizer_is_an_error(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge of a token that is not in the vocabulary."""
    monkeypatch.setattr("gguf_files.MERGES", ["h e", "he nothing"])
    _, path = make("Llama", "llama")
    with pytest.raises(BadCheckpoint, match="tokenizer cannot be built"):
        converted(path, tmp_path / "out")


def test_an_unknown_pre_tokenizer_is_refused(make, tmp_path: Path) -> None:
    _, path = make("Llama", "llama", pre="klingon")
    with pytest.raises(UnsupportedFeature, match=r"'klingon'; known: .*smollm"):
        converted(path, tmp_path / "out")


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(7))
    with pytest.raises(BadCheckpoint, match="not a readable GGUF"):
        converted(path, tmp_path / "out")
    path.write_bytes(b"nothing of the kind, but long enough to be read as one")
    with pytest.raises(BadCheckpoint, match="not a readable GGUF"):
        converted(path, tmp_path / "out2")
