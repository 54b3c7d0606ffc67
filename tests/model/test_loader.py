"""Weights: each parameter filled exactly once, each stored tensor used or known; errors name the tensors (C35)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from network import Network
from safetensors.torch import load_file, save_file

from model.config import read_config
from model.errors import BadCheckpoint, ModelNotFound
from model.loader import load_parameters
from model.parameters import allocate, parts_of, random_parameters

IDS = list(range(20))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def load(folder: Path) -> None:
    load_parameters(folder, read_config(folder), torch.float32)


@pytest.mark.parametrize("stored", [False, True], ids=["without the tensor", "with the tensor"])
def test_tied_embeddings_use_the_embedding(tiny, stored: bool) -> None:
    """Tied: the output matrix is the embedding, whether or not a copy (here a wrong one) is stored."""
    model = tiny(tie_word_embeddings=True)
    if stored:
        rewrite(model.folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(211, 96)}))
    ours = Network.load(model.folder).logits(IDS, [20])
    torch.testing.assert_close(ours, model.logits(IDS), rtol=1e-4, atol=2e-4)


def test_untied_embeddings_use_their_own_matrix(tiny) -> None:
    model = tiny(tie_word_embeddings=False)
    assert not torch.equal(model.reference.lm_head.weight, model.reference.model.embed_tokens.weight)
    ours = Network.load(model.folder).logits(IDS, [20])
    torch.testing.assert_close(ours, model.logits(IDS), rtol=1e-4, atol=2e-4)


def test_untied_without_its_matrix_is_refused(tiny) -> None:
    model = tiny(tie_word_embeddings=False)
    rewrite(model.folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(BadCheckpoint, match=r"missing tensors: lm_head\.weight"):
        load(model.folder)


def test_a_missing_tensor_is_named(tiny) -> None:
    model = tiny()
    rewrite(model.folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(BadCheckpoint, match=r"missing tensors: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(model.folder)


def test_an_unused_tensor_is_named(tiny) -> None:
    """A bias that this network would leave out means that another network was trained."""
    model = tiny()
    rewrite(model.folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}))
    with pytest.raises(BadCheckpoint, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(model.folder)


def test_a_wrong_shape_is_named(tiny) -> None:
    model = tiny()
    rewrite(model.folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(95)}))
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight has shape \(95,\), not \(96,\)"):
        load(model.folder)


def test_stored_rotary_frequencies_are_ignored(tiny) -> None:
    """Old checkpoints store the angles; they are computed here."""
    model = tiny()
    rewrite(
        model.folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    load(model.folder)


def shard(folder: Path) -> list[str]:
    """Split model.safetensors in two, with an index. Returns the tensors' names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return names


def test_shards_are_loaded_by_their_index(tiny) -> None:
    model = tiny("Qwen3")
    whole = load_parameters(model.folder, read_config(model.folder), torch.float32)
    shard(model.folder)
    progress: list[tuple[int, int]] = []
    parts = load_parameters(
        model.folder,
        read_config(model.folder),
        torch.float32,
        report=lambda done, total: progress.append((done, total)),
    )
    assert torch.equal(whole.layers[1].qkv.weight, parts.layers[1].qkv.weight)
    assert torch.equal(whole.head.weight, parts.head.weight)
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] == parts.size_bytes()


def test_a_missing_shard_is_named(tiny) -> None:
    model = tiny()
    shard(model.folder)
    (model.folder / "part-1.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"part-1\.safetensors"):
        load(model.folder)


def test_a_tensor_in_two_shards_is_refused(tiny) -> None:
    model = tiny()
    names = shard(model.folder)
    first, second = (model.folder / f"part-{number}.safetensors" for number in (0, 1))
    save_file({**load_file(second), names[0]: load_file(first)[names[0]]}, second)
    with pytest.raises(BadCheckpoint, match="stored twice"):
        load(model.folder)


def test_a_truncated_file_is_refused(tiny) -> None:
    model = tiny()
    file = model.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        load(model.folder)


def test_a_folder_without_weights_says_so(tiny, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny().folder / "config.json", folder)
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        load(folder)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_parts_cover_every_parameter_once(tiny, family: str) -> None:
    """Filling each part with its number leaves no element untouched and none overwritten."""
    config = read_config(tiny(family).folder)
    parameters = allocate(config, torch.float32, "cpu")
    parts = parts_of(config, parameters)
    for part in parts:
        part.target.fill_(0.0)
    for part in parts:
        part.target.add_(1.0)
    tensors = [parameters.embedding, parameters.norm, parameters.head.weight]
    for layer in parameters.layers:
        tensors += [layer.input_norm, layer.mlp_norm, layer.qkv.weight, layer.output.weight, layer.gate_up.weight]
        tensors += [t for t in (layer.qkv.bias, layer.output.bias, layer.q_norm, layer.k_norm) if t is not None]
    assert all(bool((tensor == 1.0).all()) for tensor in tensors)
    assert len({part.name for part in parts}) == len(parts)
    assert sum(part.target.numel() for part in parts) * 4 == parameters.size_bytes()


def test_random_parameters_repeat_by_seed(tiny) -> None:
    config = read_config(tiny("Qwen2").folder)
    one, same, other = (random_parameters(config, torch.float32, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.layers[0].qkv.weight, same.layers[0].qkv.weight)
    assert not torch.equal(one.layers[0].qkv.weight, other.layers[0].qkv.weight)
    assert bool(one.layers[0].qkv.bias.isfinite().all())
