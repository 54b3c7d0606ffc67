"""Weights that are whole files and still nonsense, and a configuration that is not whole."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked_commands import Command, Ended, run_all
from tiny_model import write_tiny_model

from model.config import read_config
from model.parameters import allocate, parts_of


def write_weights(folder: Path, value: float) -> None:
    """All of a tiny model's tensors, by the names of a checkpoint, full of one number."""
    config = read_config(folder)
    parts = parts_of(config, allocate(config, torch.float32, "cpu"))
    tensors = {part.name: torch.full(part.shape, value) for part in parts}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """`pagewalk check` of models by name."""
    folders = {name: write_tiny_model(tmp_path_factory.mktemp(name)) for name in ("sound", "not-numbers", "cut-short")}
    write_weights(folders["sound"], 0.01)
    write_weights(folders["not-numbers"], float("nan"))
    text = (folders["cut-short"] / "config.json").read_text()
    assert json.loads(text)
    (folders["cut-short"] / "config.json").write_text(text[: len(text) // 2])
    commands = [Command(["check", str(folder), "--kv-cache-memory-bytes", "1MiB"]) for folder in folders.values()]
    return dict(zip(folders, run_all(commands, tmp_path_factory.mktemp("said")), strict=True))


def test_weights_that_are_not_numbers_end_the_start_in_one_line(checked: dict[str, Ended]) -> None:
    """The generation before the doors open finds it: no server is ready that can answer nobody."""
    sound, broken = checked["sound"], checked["not-numbers"]
    assert sound.returncode == 0, sound.stderr
    assert broken.returncode != 0, broken.stdout
    *_, last = broken.stderr.splitlines()
    assert last.startswith("pagewalk: error: "), broken.stderr
    assert "not finite" in last
    assert "Traceback" not in broken.stderr


def test_a_configuration_that_is_cut_short_ends_the_start_in_one_line(checked: dict[str, Ended]) -> None:
    broken = checked["cut-short"]
    assert broken.returncode == 3, broken.stderr
    *_, last = broken.stderr.splitlines()
    assert last.startswith("pagewalk: error: ")
    assert "config.json" in last
