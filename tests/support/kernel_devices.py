"""Where the kernels of a test run: a GPU, or this CPU."""

from dataclasses import dataclass
from pathlib import Path

import torch
from emulated_gpu import EmulatedLoader

from cuda.launch import DeviceLoader, KernelLoader


@dataclass
class Device:
    """A place that kernels run in."""

    loader: KernelLoader
    name: str  # for torch: "cpu" or "cuda"

    @property
    def is_emulated(self) -> bool:
        return self.name == "cpu"

    @property
    def stream(self) -> int:
        return 0 if self.is_emulated else torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        """Wait for the kernels; raises what went wrong in them."""
        if not self.is_emulated:
            torch.cuda.synchronize()


def open_device(name: str, folder: Path) -> Device:
    """ "gpu", or "emulated-" and a compute capability; `folder` keeps what is compiled for the CPU."""
    if name == "gpu":
        return Device(DeviceLoader(), "cuda")
    return Device(EmulatedLoader(folder, int(name[-2:])), "cpu")
