"""What a kernel asks of the driver when it is loaded."""

import ctypes
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda import launch
from cuda.compile import Build, build
from cuda.errors import CompileError, DriverError, UnsupportedDevice
from cuda.launch import AwaitedKernel, DeviceKernel, DeviceLoader, KernelSpec

DEFAULT, MOST = 48 << 10, 227 << 10
MAX_DYNAMIC_SHARED_BYTES, PREFERRED_CARVEOUT = 8, 9


class FakeDriver:
    """Functions that have the driver's attributes and its limit, and refuse a launch as it does."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, int], int] = {}

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: ctypes.c_void_p) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes.get((function.value, attribute), DEFAULT)
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        if attribute == MAX_DYNAMIC_SHARED_BYTES and value > MOST:
            return 1
        self.attributes[function.value, attribute] = value
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        return 1  # no parameters

    def cuLaunchKernelEx(self, configuration: Any, function: ctypes.c_void_p, *_: Any) -> int:
        asked = ctypes.cast(configuration, ctypes.POINTER(launch._Configuration))[0].shared_bytes
        return int(asked > self.attributes.get((function.value, MAX_DYNAMIC_SHARED_BYTES), DEFAULT))

    def cuTensorMapEncodeTiled(self, target: Any, dtype: int, rank: int, matrix: Any, *more: Any) -> int:
        sizes, pitch, box, *_ = [list(numbers) for numbers in more[:4]]
        self.tensor_map = dtype, rank, matrix.value, sizes, pitch, box
        ctypes.memset(target.value, 7, 128)
        return int(target.value % 64 != 0 or max(box) > 256)

    def cuGetErrorName(self, code: int, name: Any) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(launch, "driver", lambda: driver)
    return driver


@pytest.mark.parametrize("sizes", [(90 << 10, 60 << 10), (60 << 10, 90 << 10), (100 << 10, 0)])
def test_launchers_of_one_function_keep_the_largest_size(driver, sizes) -> None:
    """A cubin is loaded once, so two launchers hold the same function: the later must not take the earlier's memory."""
    kernels = [DeviceKernel(7, KernelSpec("k", "", 32, size), None) for size in sizes]
    for kernel in kernels:
        kernel.launch(0, 1)


def test_all_kernels_prefer_shared_memory(driver) -> None:
    """Else one that needs little of it could not run beside one that needs much."""
    DeviceKernel(7, KernelSpec("k", "", 32), None)
    assert driver.attributes[7, PREFERRED_CARVEOUT] == 100


def test_too_much_shared_memory_is_said_at_once(driver) -> None:
    """When the kernel is loaded, with its name and the size."""
    with pytest.raises(DriverError, match="wide: 300000 bytes of shared memory"):
        DeviceKernel(7, KernelSpec("wide", "", 32, 300_000), None)


class Loaded:
    """Stands for a kernel on a device: remembers its launches."""

    clusters_at_once = 3

    def __init__(self, spec: KernelSpec, built: Build) -> None:
        self.spec, self.built = spec, built
        self.launches: list[tuple[int, Any]] = []

    def launch(self, stream: int, grid: Any, *arguments: Any) -> None:
        self.launches.append((stream, grid))


@pytest.fixture
def loader(monkeypatch, tmp_path: Path) -> DeviceLoader:
    """Of a Hopper device that is not there: cubins are compiled, and `Loaded`."""
    device = SimpleNamespace(name="fake", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(launch, "_load", Loaded)
    return DeviceLoader(cache_folder=tmp_path)


def test_a_tensor_map_names_columns_before_rows(loader, driver) -> None:
    """And the bytes of a row. What the driver refuses is an error."""
    matrix = torch.zeros(40, 24, dtype=torch.bfloat16)
    assert loader.tensor_map(matrix, 16, 64) == b"\7" * 128
    assert driver.tensor_map == (9, 2, matrix.data_ptr(), [24, 40], [48], [64, 16])
    with pytest.raises(DriverError, match="tensor map of 40 x 24, boxes of 300 x 64"):
        loader.tensor_map(matrix, 300, 64)


def test_an_interleaved_tensor_map_has_eight_rows_of_either_half_in_turn(loader, driver) -> None:
    matrix = torch.zeros(160, 24, dtype=torch.bfloat16)
    loader.tensor_map(matrix, 32, 64, interleaved=True)
    pitches = [48, 80 * 48, 8 * 48]  # the next row, the other half, the next eight rows
    assert driver.tensor_map == (9, 4, matrix.data_ptr(), [24, 8, 2, 10], pitches, [64, 8, 2, 2])


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (12, 0)])
def test_a_device_that_the_kernels_are_not_for_is_refused_by_name(monkeypatch, major, minor) -> None:
    device = SimpleNamespace(name="fake", major=major, minor=minor, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    with pytest.raises(UnsupportedDevice, match=rf"fake .* {major}\.{minor}: the kernels are for 8\.0 to 10\.3"):
        DeviceLoader()


COPY, SCATTER = KernelSpec("page_copy", "PPPq", 256), KernelSpec("scatter", "PPPPPPiiiii", 256)


def test_kernels_that_are_not_in_the_cache_come_with_finish(loader) -> None:
    """All files are compiled beside each other; who asked has kernels at once, and can launch them afterwards."""
    kernels = [*loader.load("page_copy.cu", [COPY]), *loader.load("scatter.cu", [SCATTER])]
    told: list[tuple[int, int]] = []
    loader.finish(lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    for kernel, spec in zip(kernels, (COPY, SCATTER), strict=True):
        kernel.launch(7, 2)
        assert kernel.loaded().spec == spec
        assert kernel.loaded().launches == [(7, 2)]
        assert kernel.clusters_at_once == 3


def test_kernels_of_the_cache_are_loaded_at_once(loader, tmp_path) -> None:
    """Nothing is compiled, and nothing is told."""
    build("page_copy.cu", ["page_copy"], "sm_90a", cache_folder=tmp_path)
    (kernel,) = loader.load("page_copy.cu", [COPY])
    assert isinstance(kernel, Loaded)
    told: list[int] = []
    loader.finish(lambda done, total: told.append(done))
    assert told == []


def test_a_launch_before_finish_waits_for_the_compiler(loader) -> None:
    (kernel,) = loader.load("page_copy.cu", [COPY])
    kernel.launch(7, 2)
    assert kernel.loaded().launches == [(7, 2)]


def test_a_kernel_that_does_not_compile_ends_the_start(loader) -> None:
    loader.load("page_copy.cu", [KernelSpec("no_such_kernel", "", 32)])
    with pytest.raises(CompileError, match="no_such_kernel"):
        loader.finish()


def test_an_awaited_kernel_is_loaded_once() -> None:
    compiled: Future[Build] = Future()
    compiled.set_result(Build(b"", {}, ""))
    loads: list[Build] = []

    def load(built: Build) -> Any:
        loads.append(built)
        return Loaded(COPY, built)

    kernel = AwaitedKernel(compiled, load)
    for _ in range(3):
        kernel.launch(0, 1)
    assert len(loads) == 1
