"""Pages between executors: what one has computed, another goes on from, in whatever order either keeps a page."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import GREEDY, PlanDriver, Running
from program_executor import BUDGET, PAGES, ROWS, ProgramExecutor, cpu_executor, spread, tiny_config
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import FrameLayout, FramePool, plain_pages, raw_pages
from mm.page_copies import SwapOrders
from model.cpu_executor import CpuExecutor
from model.cuda_executor import CudaExecutor
from model.step_plan import RowSettings

LAYOUT = FrameLayout(layers=3, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_plain_pages_are_what_the_pool_reads(dtype: torch.dtype, head_dim: int) -> None:
    layout = FrameLayout(layers=3, kv_heads=2, head_dim=head_dim, dtype=dtype)
    pool = FramePool(layout, 5, "cpu")
    pool.data.copy_(torch.randn(pool.data.shape))
    raw = pool.data[[4, 0, 2]].view(torch.uint8).view(3, layout.frame_bytes)
    plain = plain_pages(raw, layout)
    for layer in range(3):
        keys, values = pool.read(torch.tensor([4, 0, 2]), layer)
        assert torch.equal(plain[:, layer, 0], keys)
        assert torch.equal(plain[:, layer, 1], values)
    assert torch.equal(raw_pages(plain, layout), raw)


def test_pages_of_another_shape_are_refused() -> None:
    plain = torch.zeros(2, 3, 2, 2, 16, 64, dtype=torch.bfloat16)
    assert raw_pages(plain, LAYOUT).shape == (2, LAYOUT.frame_bytes)
    for other in (plain[:, :2], plain.float(), plain[..., :32]):
        with pytest.raises(ShapeMismatch):
            raw_pages(other, LAYOUT)


@pytest.mark.parametrize("to_the_device", [True, False], ids=["to the device", "from the device"])
def test_an_executor_goes_on_from_the_pages_of_another(device: Any, to_the_device: bool) -> None:
    """In float32 with the very tokens that the CPU executor makes alone."""
    config = tiny_config()
    prompt = np.random.default_rng(1).integers(0, 211, 37).tolist()
    alone = cpu_executor(config, torch.float32)
    (whole,) = PlanDriver(alone, seed=7).generate([prompt], 30, budget=BUDGET // 2)
    alone.close()
    cpu = cpu_executor(config, torch.float32)
    other = ProgramExecutor(device, config, torch.float32)
    layout = other.program.pool.layout

    def read_device(frames: list[int]) -> Tensor:
        device.synchronize()
        raw = other.program.pool.data[frames].cpu().view(torch.uint8).view(len(frames), -1)
        return plain_pages(raw, layout)

    def write_device(frames: list[int], pages: Tensor) -> None:
        raw = raw_pages(pages, layout).view(torch.float32).view(len(frames), *other.program.pool.data.shape[1:])
        other.program.pool.data[frames] = raw.to(other.program.pool.data.device)

    def read_cpu(frames: list[int]) -> Tensor:
        return cpu.plain_pages(torch.stack([cpu.pool.frame(frame) for frame in frames]))

    if to_the_device:
        output = continued(cpu, read_cpu, other, write_device, prompt)
    else:
        output = continued(other, read_device, cpu, write_cpu(cpu), prompt)
    cpu.close()
    assert output == whole.output


def write_cpu(cpu: CpuExecutor) -> Callable[[list[int], Tensor], None]:
    def write(frames: list[int], pages: Tensor) -> None:
        for frame, raw in zip(frames, cpu.raw_pages(pages), strict=True):
            cpu.pool.frame(frame).copy_(raw)

    return write


def continued(
    first: Any,
    read: Callable[[list[int]], Tensor],
    second: Any,
    write: Callable[[list[int], Tensor], None],
    prompt: list[int],
) -> list[int]:
    """30 tokens: 11 of one executor, then the rest of another, which has other frames."""
    driver = PlanDriver(first, seed=2)
    frames = driver.free[::-1]
    (begun,) = driver.generate([prompt], 11, budget=BUDGET // 2)
    pages = read(frames[: begun.pages])
    tokens = prompt + begun.output
    driver = PlanDriver(second, seed=3)
    write(driver.free[::-1][: begun.pages], pages)
    rest = Running(0, tokens, 19, done=len(tokens) - 1)
    settings = RowSettings(np.zeros(1, np.int32), [GREEDY])
    while len(rest.output) < rest.wanted:
        driver._step([rest], BUDGET, settings if driver.steps == 0 else None)
    return begun.output + rest.output


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_gpu_copies_pages_to_memory_of_their_own_and_back(dtype: torch.dtype) -> None:
    """Beside the swap area, and by the same stream."""
    config = tiny_config()
    executor = CudaExecutor(
        config,
        spread(config, dtype, "cuda"),
        frames=60,
        utilization=0.5,
        max_running=ROWS,
        max_rows=ROWS,
        max_pages=PAGES,
        max_batched_tokens=BUDGET,
        swap_bytes=0,
    )
    pool = executor._program.pool
    pool.data.copy_(torch.randn(pool.data.shape, device="cuda").to(dtype))
    torch.cuda.synchronize()
    store = executor.new_store(5)
    store.want(5)
    store.wait()
    sources, targets = np.array([7, 3, 4, 59, 0], np.int32), np.array([20, 21, 30, 9, 1], np.int32)
    places = np.arange(5, dtype=np.int32)
    executor.start(SwapOrders(-1, out_frames=sources, out_slots=places), store)
    wait(executor, -1)
    raw = torch.stack([store.slot(place) for place in range(5)])
    plain = executor.plain_pages(raw)
    for layer in range(config.layers):
        keys, values = pool.read(torch.from_numpy(sources).cuda(), layer)
        assert torch.equal(plain[:, layer, 0], keys.cpu())
        assert torch.equal(plain[:, layer, 1], values.cpu())
    for place, page in enumerate(executor.raw_pages(plain)):
        store.slot(place).copy_(page)
    executor.start(SwapOrders(-2, in_slots=places, in_frames=targets), store)
    wait(executor, -2)
    assert torch.equal(pool.data[targets.tolist()], pool.data[sources.tolist()])
    store.close()
    executor.close()


def wait(executor: CudaExecutor, ticket: int) -> None:
    for _ in range(100_000):
        if ended := executor.ended():
            assert ended == [(ticket, True)]
            return
    raise AssertionError("the copy never ends")
