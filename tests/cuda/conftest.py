"""Fixtures of the kernel tests. A test of a kernel takes `device` and runs in every place that kernels run in:

    emulated-90    the kernels' source compiled for this CPU, by the code paths of Hopper; needs g++
    gpu            the machine's GPU (marked `gpu`)

Cases marked `gpu` (large ones, graphs) do not run on the emulated device.
"""

from pathlib import Path

import kept_builds
import pytest
import torch
from emulated_gpu import EmulatedLoader
from kernel_devices import Device, open_device

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is marked `gpu` for another reason than its device."""
    out = [item for item in items if item.get_closest_marker("gpu") and "[emulated-" in item.name]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Where kernels are compiled to."""
    return kept_builds.build_folder()


@pytest.fixture(scope="session", params=["emulated-90", GPU])
def device(request: pytest.FixtureRequest, build_folder: Path) -> Device:
    """Each place that kernels run in."""
    if request.param != "gpu" and not EmulatedLoader.is_possible():
        pytest.skip("the emulated GPU needs g++")
    return open_device(request.param, build_folder)


@pytest.fixture(scope="session", params=["emulated-80", "emulated-90", GPU])
def any_device(request: pytest.FixtureRequest, build_folder: Path) -> Device:
    """The same, and by the code paths of what was before Hopper."""
    if request.param != "gpu" and not EmulatedLoader.is_possible():
        pytest.skip("the emulated GPU needs g++")
    return open_device(request.param, build_folder)


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded; on the CPU, so that all devices see the same numbers."""
    return torch.Generator().manual_seed(1)
