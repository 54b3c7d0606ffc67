"""What a kernel asks of the driver when it is loaded."""

import ctypes
from typing import Any

import pytest

from cuda import launch
from cuda.errors import DriverError
from cuda.launch import DeviceKernel, KernelSpec

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
