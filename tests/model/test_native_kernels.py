"""The CPU kernels in C++: what `test_attention.py` (the same tests for both implementations) leaves open."""

import ctypes
import platform

import kept_builds
import numpy as np
import pytest
import torch
from cpu_cases import Case
from network import Network
from torch.nn import functional

from model import native_library
from model.config import read_config
from model.loader import load_parameters
from model.native_kernels import NetworkSizes, Operator, Step
from model.parameters import Linear

Native = ctypes.CDLL
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}


@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 14, 15, 29, 56, 57, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 7), (32, 64), (33, 96), (100, 65), (260, 130)])
@DTYPES
def test_a_linear_equals_float64(native: Native, tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Every number of rows in a tile, outputs and inputs that fill no panel or pair, with and without a bias."""
    x, weight = random(tokens, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    bias = random(outputs, seed=2, dtype=dtype) if tokens % 2 else None
    ours = Case(native, [tokens], [tokens], dtype=dtype).linear(x, Linear(weight, bias))
    wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(ours.double(), wide, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-4)


@DTYPES
def test_what_is_not_finite_passes_through_a_linear(native: Native, dtype: torch.dtype) -> None:
    """The failed flag of a row depends on it; the other rows stay as they are."""
    x, weight = random(4, 64, dtype=dtype), random(40, 64, seed=1, dtype=dtype)
    clean = Case(native, [4], [4], dtype=dtype).linear(x, Linear(weight)).clone()
    x[1, 63], x[2, 0] = float("nan"), float("inf")
    ours = Case(native, [4], [4], dtype=dtype).linear(x, Linear(weight))
    assert not ours[1:3].isfinite().any()
    assert torch.equal(ours[[0, 3]], clean[[0, 3]])


@DTYPES
def test_silu_mul_equals_float64(native: Native, dtype: torch.dtype) -> None:
    """Also far outside of what exp can hold, and for what is not finite."""
    gate_up = torch.cat((torch.linspace(-200, 200, 401), random(401)))[None].to(dtype)
    gate_up[0, :3] = torch.tensor([float("nan"), float("inf"), -90.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    ours = Case(native, [1], [1], dtype=dtype).silu_mul(gate_up)
    torch.testing.assert_close(ours.double(), functional.silu(gate) * up, equal_nan=True, **tolerance(dtype))


@pytest.mark.parametrize("width", [1, 15, 33, 576])
@DTYPES
def test_rms_norm_equals_the_torch_kernels(native: Native, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(3, width, dtype=dtype), random(3, width, seed=1, dtype=dtype), random(width, seed=2)
    ours, theirs = (Case(kernels, [3], [3], dtype=dtype, hidden=width) for kernels in (native, None))
    wanted, total = theirs.rms_norm(x, residual, weight)
    normed, summed = ours.rms_norm(x, residual.clone(), weight)
    torch.testing.assert_close(normed, wanted, **tolerance(dtype))
    assert torch.equal(summed, total)
    normed, summed = ours.rms_norm(x, None, weight)
    torch.testing.assert_close(normed, theirs.rms_norm(x, None, weight)[0], **tolerance(dtype))
    assert summed is x


@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 64), (2, 2, 6)])
@pytest.mark.parametrize("page_size", [3, 16])
@DTYPES
def test_append_equals_the_torch_kernels(
    native: Native, shape: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> None:
    """With norms of queries and keys: the same queries, and the same pool."""
    heads, kv_heads, head_dim = shape
    norms = random(head_dim, seed=5), random(head_dim, seed=6)
    results = []
    for kernels in (native, None):
        case = Case(
            kernels, [40, 7, 33], [1, 1, 20], page_size, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
        qkv = random(22, (heads + 2 * kv_heads) * head_dim, seed=4, dtype=dtype)
        results.append((case.append(qkv, 1, *norms).clone(), case.pool.data))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_infinity_becomes_the_largest_bfloat16(native: Native, bad: float) -> None:
    case = Case(native, [9, 12], [1, 1], dtype=torch.bfloat16)
    c = case.config
    qkv = torch.zeros(2, (c.heads + 2 * c.kv_heads) * c.head_dim, dtype=torch.bfloat16)
    qkv[1, -1] = bad
    case.append(qkv, 0)
    written = case.pool.data[case.tables[1, 0], 0, 1, -1, 11, -1]
    assert torch.equal(written, torch.tensor(bad).nan_to_num(nan=0.0).bfloat16().nan_to_num())
    assert case.failed(torch.zeros(2, 4, dtype=torch.bfloat16)).tolist() == [False, True]


def test_a_query_that_is_not_finite_spoils_its_own_result_only(native: Native) -> None:
    case = Case(native, [40, 40], [1, 9])
    q = case.queries()
    clean = case.attention(q, 0).clone()
    q[3, 1, 2] = float("nan")
    spoilt = case.attention(q, 0)
    dims = case.config.head_dim
    assert spoilt[3, dims : 2 * dims].isnan().all()
    spoilt[3, dims : 2 * dims] = clean[3, dims : 2 * dims]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("page_size", [1, 5, 64, 100])
@DTYPES
def test_attention_with_other_page_sizes(native: Native, page_size: int, dtype: torch.dtype) -> None:
    """Pages of odd sizes, and pages larger than what attention takes at a time."""
    arguments = [130, 7, 64, 201], [1, 1, 64, 65], page_size, dtype
    case, other = Case(native, *arguments), Case(None, *arguments)
    q = case.queries()
    torch.testing.assert_close(case.attention(q, 2), other.attention(q, 2), **tolerance(dtype))


@DTYPES
def test_threads_do_not_change_a_bit(native: Native, tiny, dtype: torch.dtype) -> None:
    """Work is divided among threads, sums are not. Four threads on any machine: they sleep, wake and meet."""
    folder = tiny("Qwen3").folder
    ids = np.random.default_rng(0).integers(0, 211, (3, 40)).tolist()
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 4, 2):
        network = Network.load(folder, native, dtype, rows=3)
        torch.set_num_threads(threads)
        network.step(ids, [0, 0, 0])
        results += [network.step([[5], ids[1][:3], [9]], [40, 40, 40])]
        network.kernels.close()
        network.kernels.close()
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@DTYPES
def test_the_batch_does_not_change_a_bit(native: Native, tiny, dtype: torch.dtype) -> None:
    """A token's logits are the same bits in whatever chunks its Sequence is computed, and beside whatever rows."""
    folder = tiny("Qwen3").folder
    ids = np.random.default_rng(0).integers(0, 211, (3, 150)).tolist()
    network = Network.load(folder, native, dtype, rows=3)
    alone = network.logits(ids[0], [150])
    for chunks in ([1] * 20 + [130], [64, 1, 1, 17, 67], [149, 1]):
        assert torch.equal(network.logits(ids[0], chunks), alone)
    network.step([row[:100] for row in ids], [0, 0, 0])
    assert torch.equal(network.step([ids[0][100:101], ids[1][100:150]], [100, 100])[0], alone[100])


def test_steps_of_any_size_follow_each_other(native: Native, tiny) -> None:
    """Buffers grow with the steps: what a larger step left in them is not seen by a smaller one, and the other way."""
    model = tiny("Llama")
    network = Network.load(model.folder, native)
    ids = np.random.default_rng(0).integers(0, 211, 70).tolist()
    wanted = model.logits(ids)
    for chunks in ([1] * 3 + [67], [70], [2, 68], [60, 10], [30, 1, 39]):
        torch.testing.assert_close(network.logits(ids, chunks), wanted, rtol=1e-4, atol=2e-4)


def test_weights_are_kept_once(native: Native, tiny) -> None:
    """With tied embeddings the packed output matrix is the embedding, and packing adds less than a panel a matrix."""
    folder = tiny("Qwen2", tie_word_embeddings=True, vocab_size=224, hidden_size=96).folder
    config = read_config(folder)
    parameters = load_parameters(folder, config, torch.float32)
    plain = sum(
        linear.weight.numel() for layer in parameters.layers for linear in (layer.qkv, layer.output, layer.down)
    )
    network = Network(config, parameters, native)
    assert parameters.embedding is parameters.head.weight
    assert (
        sum(
            layer.qkv.weight.numel() + layer.output.weight.numel() + layer.down.weight.numel()
            for layer in parameters.layers
        )
        == plain
    )
    assert network.logits([3, 1, 4], [3]).isfinite().all()


def test_a_token_outside_of_the_vocabulary_is_refused(native: Native, tiny) -> None:
    """The kernels read where they are told to: what comes from outside is checked before."""
    network = Network.load(tiny("Llama").folder, native)
    with pytest.raises(IndexError, match="210"):
        network.step([[211]], [0])


def test_float16_is_refused(native: Native) -> None:
    with pytest.raises(ValueError, match="float16"):
        Case(native, [1], [1], dtype=torch.float16)


def test_bfloat16_is_nearer_to_float32_than_the_torch_kernels_or_as_near(native: Native, tiny) -> None:
    """Sums, scores and logits are float32 in both; the logits are not rounded to bfloat16 at the end."""
    model = tiny("Llama")
    ids = np.random.default_rng(0).integers(0, 211, 75).tolist()
    wanted = model.logits(ids)
    errors = [
        (Network.load(model.folder, kernels, torch.bfloat16).logits(ids, [40, 1, 34]) - wanted).pow(2).mean().sqrt()
        for kernels in (native, None)
    ]
    assert errors[0] < 1.2 * errors[1]


def test_the_structs_are_those_of_the_sources(native: Native) -> None:
    """ctypes and C++ must agree about every size, or the kernels read elsewhere."""
    native.pagewalk_struct_bytes.restype = ctypes.c_int64
    sizes = [native.pagewalk_struct_bytes(i) for i in range(3)]
    assert sizes == [ctypes.sizeof(NetworkSizes), ctypes.sizeof(Step), ctypes.sizeof(Operator)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="chooses instructions of x86-64")
@pytest.mark.parametrize("instructions", ["x86-64", "x86-64-v3"])
def test_processors_without_avx512(native: Native, tiny, monkeypatch: pytest.MonkeyPatch, instructions: str) -> None:
    """Vectors of four lanes (what aarch64 gets) and of eight, bfloat16 without its instructions: as right as here."""
    options = [f"-march={instructions}" if o.startswith("-march") else o for o in native_library.OPTIONS]
    monkeypatch.setattr(native_library, "OPTIONS", tuple(options))
    other = native_library.load(cache_folder=kept_builds.build_folder())
    model = tiny("Qwen3", head_dim=20, hidden_size=100)
    ids = np.random.default_rng(0).integers(0, 211, 75).tolist()
    ours = Network.load(model.folder, other).logits(ids, [40, 1, 34])
    torch.testing.assert_close(ours, model.logits(ids), rtol=1e-4, atol=2e-4)
    arguments = [40, 7, 64, 31, 17], [1, 1, 64, 15, 16], 16, torch.bfloat16
    q = Case(None, *arguments).queries()
    wanted = Case(None, *arguments).attention(q, 1)
    torch.testing.assert_close(Case(other, *arguments).attention(q, 1), wanted, **tolerance(torch.bfloat16))
    x, weight = random(15, 65, dtype=torch.bfloat16), random(100, 65, seed=1, dtype=torch.bfloat16)
    wide = functional.linear(x.double(), weight.double())
    linear = Case(other, [15], [15], dtype=torch.bfloat16).linear(x, Linear(weight))
    torch.testing.assert_close(linear.double(), wide, rtol=1e-2, atol=1e-4)
