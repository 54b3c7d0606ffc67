"""Reading safetensors files by many threads in pieces gives what the safetensors library reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.errors import BadCheckpoint
from model.weight_reader import StoredTensor, read_tensors, stored_tensors

CPU = torch.device("cpu")


def write(
    folder: Path, dtype: torch.dtype, *, device: torch.device = CPU
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two files of tensors of odd sizes, an empty and a scalar one among them. Returns what they hold, and targets."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(3, 5), (1,), (1000, 7), (0, 4), (), (17,), (129, 33)]
    tensors = {f"t{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}
    for part in (0, 1):
        some = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % 2 == part}
        save_file(some, folder / f"{part}.safetensors", metadata={"format": "pt"})
    return tensors, {name: torch.full_like(tensor, 7, device=device) for name, tensor in tensors.items()}


def stored(folder: Path) -> dict[str, StoredTensor]:
    return stored_tensors(folder / "0.safetensors") | stored_tensors(folder / "1.safetensors")


def read_all(folder: Path, targets: dict[str, Tensor], device: torch.device = CPU, **more) -> None:
    read_tensors([(where, targets[name]) for name, where in stored(folder).items()], device, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("piece_bytes", [16, 1000, 1 << 20])
def test_every_tensor_arrives_whole(tmp_path: Path, dtype: torch.dtype, piece_bytes: int) -> None:
    tensors, targets = write(tmp_path, dtype)
    read_all(tmp_path, targets, piece_bytes=piece_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor), name


@pytest.mark.gpu
@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_arrives_on_the_gpu(tmp_path: Path, dtype: torch.dtype, piece_bytes: int) -> None:
    device = torch.device("cuda", 0)
    tensors, targets = write(tmp_path, dtype, device=device)
    targets = {name: target.to(torch.bfloat16) for name, target in targets.items()}
    read_all(tmp_path, targets, device, piece_bytes=piece_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].cpu(), tensor.to(torch.bfloat16)), name


def test_numbers_are_converted_to_the_targets_format(tmp_path: Path) -> None:
    tensors, targets = write(tmp_path, torch.float32)
    targets = {name: target.to(torch.bfloat16) for name, target in targets.items()}
    read_all(tmp_path, targets, piece_bytes=1000)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor.to(torch.bfloat16)), name


def test_a_part_of_a_tensor_can_be_a_target(tmp_path: Path) -> None:
    """As a fused matrix holds several stored ones: rows beside it stay."""
    tensors, _ = write(tmp_path, torch.float32)
    fused = torch.zeros(1002, 7)
    read_tensors([(stored(tmp_path)["t2"], fused[1:1001])], CPU)
    assert torch.equal(fused[1:1001], tensors["t2"])
    assert not fused[0].any()
    assert not fused[1001].any()


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    tensors, targets = write(tmp_path, torch.float32)
    told: list[tuple[int, int]] = []
    read_all(tmp_path, targets, piece_bytes=1000, report=lambda done, total: told.append((done, total)))
    size = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_file_that_got_shorter_is_an_error(tmp_path: Path) -> None:
    """Not zeros, and not an endless loop."""
    _, targets = write(tmp_path, torch.float32)
    where = stored(tmp_path)
    path = tmp_path / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match="shorter"):
        read_tensors([(where[name], targets[name]) for name in where], CPU)


def test_a_number_format_of_no_network_is_named(tmp_path: Path) -> None:
    save_file({"mask": torch.zeros(3, dtype=torch.int64)}, tmp_path / "m.safetensors")
    with pytest.raises(BadCheckpoint, match="mask is stored as I64, not as one of F64, F32"):
        stored_tensors(tmp_path / "m.safetensors")


def test_places_are_those_of_the_library(tmp_path: Path) -> None:
    write(tmp_path, torch.bfloat16)
    content = (tmp_path / "0.safetensors").read_bytes()
    for name, tensor in load_file(tmp_path / "0.safetensors").items():
        where = stored_tensors(tmp_path / "0.safetensors")[name]
        assert content[where.begin : where.end] == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
