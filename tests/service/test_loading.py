"""What can go wrong while a model loads, as the person who started the server is told."""

import pytest
import torch

from cuda.errors import UnsupportedDevice, driver_error
from model.errors import BadCheckpoint, OutOfDeviceMemory
from service.loading import EXIT_DEVICE, EXIT_MODEL, Failure, _failures


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("20 GiB"), EXIT_DEVICE),
        (driver_error("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"), EXIT_DEVICE),
        (torch.OutOfMemoryError("CUDA out of memory."), EXIT_DEVICE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), EXIT_DEVICE),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), EXIT_DEVICE),
        (RuntimeError("Found no NVIDIA driver on your system"), EXIT_DEVICE),
        (driver_error("cuInit", 999, "CUDA_ERROR_UNKNOWN"), EXIT_DEVICE),
        (UnsupportedDevice("Tesla T4 has compute capability 7.5"), EXIT_DEVICE),
        (OutOfDeviceMemory("no room for a frame"), EXIT_DEVICE),
        (BadCheckpoint("a tensor is missing"), EXIT_MODEL),
        (OSError(28, "No space left on device"), EXIT_MODEL),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_ours_is_one_line_with_a_code(error: Exception, code: int) -> None:
    with pytest.raises(Failure) as failure, _failures("load the model"):
        raise error
    assert failure.value.code == code
    assert "\n" not in str(failure.value)


def test_a_fault_of_ours_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="no such attribute"), _failures("load the model"):
        raise RuntimeError("no such attribute")
