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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 96, 208])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (2000, 4096)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_captured_product_is_right_by_either_library(rows, outputs, inputs, out_dtype) -> None:
    """As the network has them: 16 bits, into a given result of 16 bits, or of 32 as the head's."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(outputs, inputs, generator=generator, device="cuda") * inputs**-0.5).bfloat16()
    expected = x.double() @ weight.double().t()
    errors = []
    for wanted in (False, True):
        out = torch.full((rows, outputs), torch.nan, dtype=out_dtype, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with products_by_lt(wanted=wanted), torch.cuda.graph(graph):
            if out_dtype == torch.float32:
                torch.mm(x, weight.t(), out_dtype=out_dtype, out=out)
            else:
                torch.mm(x, weight.t(), out=out)
        graph.replay()
        errors.append(float((out.double() - expected).abs().max() / expected.abs().max()))
    assert max(errors) <= (2**-8 if out_dtype == torch.bfloat16 else 2**-14)  # float32 sums of up to 14,336
