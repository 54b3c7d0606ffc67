"""What can go wrong in this package.

CudaError
├── CompileError       NVRTC refused a kernel; carries its log
├── DriverError        a call of the CUDA driver failed; carries its code and name
│   └── OutOfDriverMemory  for want of memory, which leaves everything as it was; a MemoryError, too
├── ShapeMismatch      a tensor does not fit the kernel: a mistake of the caller, not of a client
└── UnsupportedDevice  no kernel runs on this device, or none for this head size or dtype
"""


class CudaError(Exception):
    """The root: catch this to catch everything below."""


class CompileError(CudaError):
    """NVRTC refused a source. The message ends with its log."""


class DriverError(CudaError):
    """A driver call did not succeed."""

    def __init__(self, what: str, code: int, name: str) -> None:
        super().__init__(f"{what}: {name} ({code})")
        self.code = code


class OutOfDriverMemory(DriverError, MemoryError):
    """A driver call found no memory. Nothing has changed by it."""


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def driver_error(what: str, code: int, name: str) -> DriverError:
    """The error for a driver call that has returned `code`."""
    return (OutOfDriverMemory if code == OUT_OF_MEMORY else DriverError)(what, code, name)


class ShapeMismatch(CudaError):
    """A tensor's shape, dtype or layout is not what the kernel takes."""


class UnsupportedDevice(CudaError):
    """The device, or the shape of the model, is none that the kernels are made for. The message says which are."""
