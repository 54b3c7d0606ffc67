"""Kernels as Python objects: load the device code, pack the arguments, launch on the stream that the caller names.

The stream is an argument and never a default: `torch.cuda.current_stream().cuda_stream`, read once a step. So a launch
inside a stream capture is captured, always; a CuPy RawKernel would go to CuPy's own stream and be lost without a word.

A launcher module (kv_append.py, ...) asks a KernelLoader for kernels, and so never knows whether they run on a device:
the tests hand it a loader that runs the same source on the CPU.

Programmatic dependent launch (`overlap=True`, Hopper): the kernel may start while the one before it in the stream still
runs. It must execute `griddepcontrol.wait` in every thread block before it touches what that one reads or writes, and
before it returns: else the kernel after it could overtake the one before it.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cuda.compile import Build, build_apart, cached
from cuda.errors import UnsupportedDevice, driver_error

Grid = int | tuple[int, int] | tuple[int, int, int]
Argument = Tensor | float | None
"""A tensor is passed as its address, None as the null pointer, a number by the letter of the kernel's signature."""

LEAST_CAPABILITY, MOST_CAPABILITY = 80, 103
"""Later devices (RTX 50) give a block 99 KB of shared memory, and the kernels for 9.0 and up take more."""

TENSOR_MAP_BYTES = 128

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTION_NONE, _PROMOTION_256B = 0, 3  # CU_TENSOR_MAP_L2_PROMOTION_*


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Which kernel, and how it is always launched.

    signature: one letter a parameter, as in `struct`: P pointer, i int32, q int64, f float32. A kernel of the driver is
    checked against it when it is loaded: number and sizes of the parameters.
    """

    instance: str
    signature: str
    block: int  # threads
    shared_bytes: int = 0  # dynamic shared memory
    overlap: bool = False  # programmatic dependent launch, where the device can
    cluster: int = 1  # blocks that see each other's shared memory (Hopper, at most 8): grids are multiples of it


class Kernel(Protocol):
    """Something that can be launched."""

    @property
    def clusters_at_once(self) -> int:
        """How many of its clusters the device holds; of a kernel without: of no meaning."""
        ...

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
        """Enqueue on the raw `stream`. The caller keeps the memory of tensors and addresses alive."""
        ...


class KernelLoader(Protocol):
    """Where kernels come from."""

    capability: int  # of the device: 80, 89, 90
    multiprocessors: int

    def load(self, file: str, specs: Sequence[KernelSpec]) -> list[Kernel]:
        """The kernels of kernels/`file`, in the order of `specs`."""
        ...

    def tensor_map(
        self, matrix: Tensor, box_rows: int, box_columns: int, *, interleaved: bool = False, is_shared: bool = False
    ) -> bytes:
        """What `box_copy` finds a matrix (R, C) of 16-bit numbers by: TENSOR_MAP_BYTES that must lie on the device, at
        a multiple of 64.

        The matrix is contiguous; its address, and the bytes of a row, are multiples of 16. Boxes have at most 256 rows
        and 64 columns, 128 bytes by which they are swizzled; what of them lies outside the matrix is zeros.
        interleaved, for `box_copy_interleaved`: a box has 8 rows of the matrix's first half, then the 8 of the second
        that belong to them, and so on; R and `box_rows` are multiples of 16. is_shared: several blocks read the same
        boxes, so what lies beside one comes into the L2 with it. Raises DriverError for what the driver refuses.
        """
        ...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


def _attribute(number: int, *values: int) -> _Attribute:
    return _Attribute(number, 0, (ctypes.c_int * 16)(*values))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class ArgumentBlock:
    """Memory that holds one kernel's arguments, and the array of pointers to them that the driver takes.

    Packed anew for each launch: the driver copies the arguments before the call returns. One thread at a time.
    """

    def __init__(self, signature: str) -> None:
        self.packer = struct.Struct("@" + signature)
        self.memory = ctypes.create_string_buffer(self.packer.size)
        base = ctypes.addressof(self.memory)
        ends = [struct.calcsize("@" + signature[: i + 1]) for i in range(len(signature))]
        self.sizes = [struct.calcsize(letter) for letter in signature]
        self.pointers = (ctypes.c_void_p * len(signature))(
            *[base + end - size for end, size in zip(ends, self.sizes, strict=True)]
        )

    def pack(self, arguments: Sequence[Argument]) -> None:
        """Raises struct.error if the number or a type of the arguments differs from the signature."""
        self.packer.pack_into(self.memory, 0, *[_plain(argument) for argument in arguments])


def _plain(argument: Argument) -> float:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else argument


class DeviceKernel:
    """A function of the driver. Launches cost 4-8 us of host time each, so a decode step is a graph."""

    def __init__(self, function: int, spec: KernelSpec, owner: Any) -> None:
        self._owner = owner  # the module that holds the code must outlive the kernel
        self._function = ctypes.c_void_p(function)
        self._arguments = ArgumentBlock(spec.signature)
        self._configuration = _Configuration(1, 1, 1, spec.block, 1, 1, spec.shared_bytes, None, None, 0)
        attributes = []
        if spec.overlap:
            attributes.append(_attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        if spec.cluster > 1:
            attributes.append(_attribute(_CLUSTER_DIMENSION, spec.cluster, 1, 1))
        if attributes:
            self._attributes = (_Attribute * len(attributes))(*attributes)
            self._configuration.attributes = self._attributes
            self._configuration.attribute_count = len(attributes)
        self._configuration_pointer = ctypes.byref(self._configuration)
        self._name = spec.instance
        self._launch = driver().cuLaunchKernelEx
        self._reserve_shared(spec)
        self._check_parameters()
        self.clusters_at_once = self._count_clusters(spec.cluster) if spec.cluster > 1 else 0

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
        self._arguments.pack(arguments)
        configuration = self._configuration
        if isinstance(grid, int):
            configuration.grid_x = grid
        else:
            configuration.grid_x, configuration.grid_y, configuration.grid_z = (*grid, 1)[:3]
        configuration.stream = stream
        code = self._launch(self._configuration_pointer, self._function, self._arguments.pointers, None)
        if code:
            check(code, f"launch of {self._name}")

    def _reserve_shared(self, spec: KernelSpec) -> None:
        """Raise the function's limit. It is never lowered: launchers of other sizes may hold the same function, since
        a cubin is loaded once.

        And take shared memory before L1, whatever the kernel needs itself: a multiprocessor divides the two anew only
        when it is empty, so kernels that differ in this could not start while another ends.
        """
        limit, what = ctypes.c_int(), f"{spec.instance}: {spec.shared_bytes} bytes of shared memory"
        check(driver().cuFuncGetAttribute(ctypes.byref(limit), _MAX_DYNAMIC_SHARED_BYTES, self._function), what)
        if spec.shared_bytes > limit.value:
            code = driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, spec.shared_bytes)
            check(code, what)
        check(driver().cuFuncSetAttribute(self._function, _PREFERRED_CARVEOUT, 100), what)

    def _count_clusters(self, cluster: int) -> int:
        count = ctypes.c_int()
        self._configuration.grid_x = cluster  # the driver refuses a grid that is not made of clusters
        code = driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, self._configuration_pointer)
        check(code, f"clusters of {self._name}")
        return count.value

    def _check_parameters(self) -> None:
        """Compare the signature with what the compiled kernel takes (its parameters' number and sizes)."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        sizes: list[int] = []
        while (
            driver().cuFuncGetParamInfo(
                self._function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
            )
            == 0
        ):
            sizes.append(size.value)
        assert sizes == self._arguments.sizes, (
            f"{self._name} takes parameters of {sizes} bytes, its launcher packs {self._arguments.sizes}"
        )


class AwaitedKernel:
    """A kernel that is still being compiled: who needs it waits."""

    def __init__(self, build: Future[Build], load: Callable[[Build], DeviceKernel]) -> None:
        self._build, self._load = build, load
        self._kernel: DeviceKernel | None = None

    @property
    def clusters_at_once(self) -> int:
        return self.loaded().clusters_at_once

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
        (self._kernel or self.loaded()).launch(stream, grid, *arguments)

    def loaded(self) -> DeviceKernel:
        """Raises CompileError."""
        if self._kernel is None:
            self._kernel = self._load(self._build.result())
        return self._kernel


class DeviceLoader:
    """Kernels for one device, compiled at first use and cached on disk (see compile.py).

    What is not in the cache is compiled by as many processes as there are cores, while launchers ask for more.
    """

    def __init__(self, device_index: int = 0, *, cache_folder: Path | None = None) -> None:
        properties = torch.cuda.get_device_properties(device_index)
        self.capability = 10 * properties.major + properties.minor
        self.multiprocessors: int = properties.multi_processor_count
        if not LEAST_CAPABILITY <= self.capability <= MOST_CAPABILITY:
            raise UnsupportedDevice(
                f"{properties.name} has compute capability {self.capability / 10}: the kernels are for "
                f"{LEAST_CAPABILITY / 10} to {MOST_CAPABILITY / 10}"
            )
        suffix = "a" if self.capability >= 90 else ""  # Hopper's own instructions exist in the "a" form only
        self.architecture = f"sm_{self.capability}{suffix}"
        self._cache_folder = cache_folder
        self._awaited: list[AwaitedKernel] = []
        self._builds: list[Future[Build]] = []
        self._compilers: ThreadPoolExecutor | None = None

    def load(self, file: str, specs: Sequence[KernelSpec]) -> list[Kernel]:
        instances = list(dict.fromkeys(spec.instance for spec in specs))  # one may be wanted with several clusters
        if self.capability < 90:
            specs = [replace(spec, overlap=False) for spec in specs]
        built = cached(file, instances, self.architecture, cache_folder=self._cache_folder)
        if built is not None:
            return [_load(spec, built) for spec in specs]
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        build = self._compilers.submit(build_apart, file, instances, self.architecture, cache_folder=self._cache_folder)
        self._builds.append(build)
        awaited = [AwaitedKernel(build, partial(_load, spec)) for spec in specs]
        self._awaited += awaited
        return list(awaited)

    def tensor_map(
        self, matrix: Tensor, box_rows: int, box_columns: int, *, interleaved: bool = False, is_shared: bool = False
    ) -> bytes:
        rows, columns = matrix.shape
        pitch = columns * matrix.element_size()
        sizes, pitches, box = [columns, rows], [pitch], [box_columns, box_rows]
        if interleaved:  # eight rows, of both halves, of each eight
            sizes = [columns, 8, 2, rows // 16]
            pitches, box = [pitch, rows // 2 * pitch, 8 * pitch], [box_columns, 8, 2, box_rows // 16]
        memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64  # where the driver wants it
        dimensions = len(sizes)
        code = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            _DATA_TYPES[matrix.dtype],
            dimensions,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * dimensions)(*sizes),
            (ctypes.c_uint64 * (dimensions - 1))(*pitches),
            (ctypes.c_uint32 * dimensions)(*box),
            (ctypes.c_uint32 * dimensions)(*[1] * dimensions),
            0,  # not interleaved in the driver's sense
            _SWIZZLE_128B,
            _PROMOTION_256B if is_shared else _PROMOTION_NONE,
            0,  # zeros outside
        )
        check(code, f"tensor map of {rows} x {columns}, boxes of {box_rows} x {box_columns}")
        return ctypes.string_at(address, TENSOR_MAP_BYTES)

    def finish(self, report: Callable[[int, int], None] | None = None) -> None:
        """Wait until all that was asked for is compiled, and load it: report(done, total) cubins. Raises CompileError.

        Without this a kernel is waited for at its first launch.
        """
        for done, build in enumerate(as_completed(self._builds), start=1):
            build.result()
            if report is not None:
                report(done, len(self._builds))
        for kernel in self._awaited:
            kernel.loaded()
        self._builds, self._awaited = [], []
        if self._compilers is not None:
            self._compilers.shutdown()
            self._compilers = None


def _load(spec: KernelSpec, built: Build) -> DeviceKernel:
    module = _module(built.digest(""), torch.cuda.current_device(), built)
    return DeviceKernel(module.get_function(built.names[spec.instance]).ptr, spec, module)


_modules: dict[tuple[str, int], Any] = {}


def _module(digest: str, device: int, built: Build) -> Any:
    """Its code on the device; loaded once, whoever asks."""
    if (digest, device) not in _modules:
        from cupy.cuda.function import Module  # starts nothing, but it is not there on machines without CUDA

        _modules[digest, device] = module = Module()
        module.load(built.code)
    return _modules[digest, device]


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises UnsupportedDevice where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedDevice(f"no CUDA driver on this machine ({error})") from error


def check(code: int, what: str) -> None:
    """Raises DriverError unless `code` is CUDA_SUCCESS."""
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise driver_error(what, code, (name.value or b"unknown error").decode())
