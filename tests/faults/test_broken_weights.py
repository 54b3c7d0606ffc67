"""Weights that are whole files and still nonsense."""

import json
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch
from tiny_model import write_tiny_model

from model.config import read_config
from model.parameters import allocate, parts_of


def write_weights(folder: Path, value: float) -> None:
    """All of a tiny model's tensors, by the names of a checkpoint, full of one number."""
    config = read_config(folder)
    parts = parts_of(config, allocate(config, torch.float32, "cpu"))
    tensors = {part.name: torch.full(part.shape, value) for part in parts}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", "check", str(folder), "--kv-cache-memory-bytes", "1MiB"]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)


def test_weights_that_are_not_numbers_end_the_start_in_one_line(tmp_path: Path) -> None:
    """The generation before the doors open finds it: no server is ready that can answer nobody."""
    write_tiny_model(tmp_path)
    write_weights(tmp_path, 0.01)
    sound = check(tmp_path)
    assert sound.returncode == 0, sound.stderr
    write_weights(tmp_path, float("nan"))
    broken = check(tmp_path)
    assert broken.returncode != 0, broken.stdout
    *_, last = broken.stderr.splitlines()
    assert last.startswith("pagewalk: error: "), broken.stderr
    assert "not finite" in last
    assert "Traceback" not in broken.stderr


def test_a_configuration_that_is_cut_short_ends_the_start_in_one_line(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)
    (tmp_path / "config.json").write_text(text[: len(text) // 2])
    broken = check(tmp_path)
    assert broken.returncode == 3, broken.stderr
    *_, last = broken.stderr.splitlines()
    assert last.startswith("pagewalk: error: ")
    assert "config.json" in last
