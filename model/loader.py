"""Weights: from the safetensors files of a model folder into `Parameters`.

Rules, checked before the first byte is copied, so a wrong checkpoint fails in milliseconds:
1. Each parameter is filled by exactly one stored tensor of its shape.
2. Each stored tensor fills a parameter or is on the list of those that a checkpoint may hold without need
   (`_ignored`). Anything else means that the network here is not the one that was trained: an error that names it.

For the CPU files are mapped into memory, not read: each tensor is copied once, from the page cache to its place. To a
GPU they are read by many threads (weight_reader.py).
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model.config import ModelConfig
from model.errors import BadCheckpoint, ModelNotFound
from model.parameters import Parameters, Part, allocate, parts_of, random_parameters
from model.weight_reader import read_tensors, stored_tensors

__all__ = ["load_parameters", "random_parameters", "weight_files"]

Report = Callable[[int, int], None]
"""Progress: report(done_bytes, total_bytes)."""

INDEX = "model.safetensors.index.json"


def load_parameters(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    report: Report | None = None,
) -> Parameters:
    """Load the weights in `folder`, converted to `dtype`, onto `device`.

    Raises: ModelNotFound without weights; BadCheckpoint naming every missing, unused or misshapen tensor.
    """
    parameters = allocate(config, dtype, device)
    parts = {part.name: part for part in parts_of(config, parameters)}
    places = _check(folder, config, parts)
    if parameters.embedding.is_cuda:
        wanted = [
            (stored[name], parts[name].target)
            for path, names in places.items()
            for stored in [stored_tensors(path)]
            for name in sorted(names, key=lambda name: stored[name].begin)
        ]
        read_tensors(wanted, parameters.embedding.device, report)
        return parameters
    total_bytes = sum(part.target.numel() * part.target.element_size() for part in parts.values())
    done_bytes = 0
    for path, names in places.items():
        with safe_open(path, framework="pt", device="cpu") as stored:
            for name in names:
                target = parts[name].target
                target.copy_(stored.get_tensor(name))  # converts the dtype on the way
                done_bytes += target.numel() * target.element_size()
                if report is not None:
                    report(done_bytes, total_bytes)
    return parameters


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index lists, or the single file.

    Raises: ModelNotFound if there is none; BadCheckpoint if one of the index is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BadCheckpoint(f"cannot read {index}: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BadCheckpoint(f"{folder}: {INDEX} lists files that are missing: {_shown(missing)}")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():  # beside it there may be a second copy in another layout
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} has no *.safetensors files (other formats are not read)")
    return files


def _check(folder: Path, config: ModelConfig, parts: dict[str, Part]) -> dict[Path, list[str]]:
    """Hold both rules; returns which tensors to take from which file."""
    places: dict[Path, list[str]] = {}
    filled: dict[str, Path] = {}
    problems: list[str] = []
    unused: list[str] = []
    for path in weight_files(folder):
        places[path] = []
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 (it cannot be iterated)
                    if name not in parts:
                        if not _ignored(name, config):
                            unused.append(name)
                        continue
                    shape = tuple(stored.get_slice(name).get_shape())
                    if name in filled:
                        problems.append(f"{name} is stored twice: {filled[name].name} and {path.name}")
                    elif shape != parts[name].shape:
                        problems.append(f"{name} has shape {shape}, not {parts[name].shape}")
                    filled[name] = path
                    places[path].append(name)
        except SafetensorError as error:
            raise BadCheckpoint(f"cannot read {path}: {error}") from error
    missing = [name for name in parts if name not in filled]
    if missing:
        problems.append(f"missing tensors: {_shown(missing)}")
    if unused:
        problems.append(f"tensors that {config.architecture} does not use: {_shown(unused)}")
    if problems:
        raise BadCheckpoint(f"{folder}: " + "; ".join(problems))
    return places


_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


def _ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that hold nothing of their own: the angles (computed here), the copy of a tied embedding."""
    return bool(_IGNORED.fullmatch(name)) or (config.tied_embeddings and name == "lm_head.weight")


def _shown(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
