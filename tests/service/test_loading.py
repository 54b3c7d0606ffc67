"""What can go wrong while a model loads, as the person who started the server is told."""

import ast
import re
from pathlib import Path

import msgspec
import pytest
import torch
from real_house import real_house
from tiny_model import write_tiny_model

from cuda.errors import UnsupportedDevice, driver_error
from model.errors import BadCheckpoint, OutOfDeviceMemory
from service.errors import ConfigurationError
from service.loading import EXIT_DEVICE, EXIT_MODEL, Failure, _failures, check, load
from service.metrics import Metrics
from service.settings import Settings


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


async def test_the_shortest_context_there_is_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with real_house(monkeypatch, write_tiny_model(tmp_path), max_model_len=2) as house:
        answer = await house.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
        assert answer["usage"]["total_tokens"] == 2


async def test_a_pool_of_one_token_is_refused_by_the_setting_s_name(tmp_path: Path) -> None:
    settings = Settings(model=str(write_tiny_model(tmp_path)), load_format="dummy", dtype="float32", page_size=1)
    frame = msgspec.structs.replace(settings, kv_cache_memory_bytes=1)
    with pytest.raises(ConfigurationError, match="one frame takes") as caught:
        await load(frame, Metrics("0"))
    one = int(str(caught.value).rsplit(" ", 1)[1])
    with pytest.raises(ConfigurationError, match="that is one token"):
        await load(msgspec.structs.replace(settings, kv_cache_memory_bytes=one), Metrics("0"))


async def test_a_check_says_in_one_line_what_runs_and_quotes_prompt_and_text_as_one(tmp_path: Path) -> None:
    settings = Settings(
        model=str(write_tiny_model(tmp_path)),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        threads=1,
        kv_cache_memory_bytes=1 << 20,
    )
    said = await check(settings)
    matched = re.fullmatch(r"\S+ works \(float32 on cpu.*, \d+ frames\): (.*)", said)
    assert matched is not None, said
    assert ast.literal_eval(matched[1]).startswith("The capital of France is")
