"""Which graphs are captured with cuBLASLt. That both multiply right: tests/model/test_golden.py on a GPU."""

import json

import pytest
import torch

from bench.offline import SHAPES
from model.blas_choice import products_by_lt, takes_lt
from model.config import ModelConfig, read_config


@pytest.fixture
def config_of(tmp_path):
    def read(shape: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
        return read_config(tmp_path)

    return read


def test_large_networks_take_cublaslt_for_tens_to_some_two_hundred_tokens(config_of) -> None:
    sizes = [tokens for tokens in (1, 16, 28, 32, 64, 208, 256, 8192) if takes_lt(config_of("8b"), tokens)]
    assert sizes == [32, 64, 208]


@pytest.mark.parametrize("shape", ["smol", "qwen06b"])
def test_networks_of_small_matrices_stay_with_cublas(config_of, shape) -> None:
    assert not any(takes_lt(config_of(shape), tokens) for tokens in range(1024))


@pytest.mark.parametrize("wanted", [True, False])
def test_the_choice_ends_with_the_capture_also_when_that_fails(wanted, monkeypatch) -> None:
    chosen = ["cublas"]

    def preferred(library: str | None = None) -> str:  # torch's own knows no cuBLASLt in a build for CPUs
        chosen.append(library or chosen[-1])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)

    def capture() -> None:
        with products_by_lt(wanted=wanted):
            assert chosen[-1] == ("cublaslt" if wanted else "cublas")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture()
    assert chosen[-1] == "cublas"
