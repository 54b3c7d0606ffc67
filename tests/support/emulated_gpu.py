"""Kernels that run on the CPU: a KernelLoader over emulated_gpu.hpp and the machine's C++ compiler."""

import ctypes
import fcntl
import functools
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cuda.compile import KERNELS, read_source
from cuda.launch import TENSOR_MAP_BYTES, Argument, ArgumentBlock, Grid, Kernel, KernelSpec
from model.native_library import _processor, _version

HEADER = Path(__file__).parent / "emulated_gpu.hpp"

SOURCE = """
#include "{header}"
#include "{kernels}"
extern "C" void run(
    const unsigned* grid, unsigned cluster, unsigned block, unsigned shared, unsigned seed, void** arguments) {{
  emulator::run(grid, cluster, block, shared, seed, [arguments] {{ emulator::invoke({instance}, arguments); }});
}}
extern "C" int parameters(int* sizes) {{ return emulator::parameter_sizes({instance}, sizes); }}
"""

OPTIONS = ("-std=c++17", "-O2", "-march=native", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off")

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""That a block may have, by compute capability."""


@functools.cache
def _machine() -> list[str]:
    """What decides the code besides sources and options."""
    return [_version("g++"), *_processor()]


class EmulatedKernel:
    """Runs at launch, to the end; the stream means nothing. `seed` shuffles the order of the warps.

    Compiled when it is first launched: a launcher asks for kernels of all sizes, a test runs one.
    """

    clusters_at_once = 2

    def __init__(self, library: Callable[[], ctypes.CDLL], spec: KernelSpec) -> None:
        self._library = library
        self._run: Any = None
        self._spec = spec
        self._arguments = ArgumentBlock(spec.signature)
        self.seed = 0

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
        if self._run is None:
            self._run = self._checked_run()
        self._arguments.pack(arguments)
        sizes = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)[:3]
        self.seed += 1
        spec = self._spec
        self._run(
            (ctypes.c_uint * 3)(*sizes),
            spec.cluster,
            spec.block,
            spec.shared_bytes,
            self.seed,
            self._arguments.pointers,
        )

    def _checked_run(self) -> Any:
        library, sizes = self._library(), (ctypes.c_int * 64)()
        count = library.parameters(sizes)
        assert list(sizes[:count]) == self._arguments.sizes, (
            f"{self._spec.instance} takes {list(sizes[:count])}, its launcher packs {self._arguments.sizes}"
        )
        return library.run


class EmulatedLoader:
    """A device of `multiprocessors` that is of compute capability `capability`, on the CPU."""

    def __init__(self, folder: Path, capability: int, multiprocessors: int = 3) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors
        self._folder = folder

    @staticmethod
    def is_possible() -> bool:
        return shutil.which("g++") is not None

    def load(self, file: str, specs: Sequence[KernelSpec]) -> list[Kernel]:
        for spec in specs:
            assert spec.shared_bytes <= SHARED_BYTES[self.capability], f"{spec.instance}: {spec.shared_bytes} bytes"
        return [EmulatedKernel(partial(self._library, file, spec.instance), spec) for spec in specs]

    def tensor_map(
        self, matrix: Tensor, box_rows: int, box_columns: int, *, interleaved: bool = False, is_shared: bool = False
    ) -> bytes:
        """emulated_gpu.hpp: TensorMap."""
        rows, columns = matrix.shape
        assert matrix.element_size() == 2, f"tensor map of {matrix.dtype}"
        assert matrix.is_contiguous(), "tensor map of a matrix whose rows do not follow each other"
        assert matrix.data_ptr() % 16 == 2 * columns % 16 == 0, f"tensor map of {rows} x {columns}"
        assert box_rows in range(1, 257), f"boxes of {box_rows} rows"
        assert box_columns == 64, f"boxes of {box_columns} columns: others are swizzled otherwise"
        assert not interleaved or rows % 16 == box_rows % 16 == 0, f"boxes of {box_rows} rows of {rows}, interleaved"
        packed = struct.pack("Pqqiii", matrix.data_ptr(), rows, columns, box_rows, box_columns, interleaved)
        return packed.ljust(TENSOR_MAP_BYTES, b"\xff")

    def _library(self, file: str, instance: str) -> ctypes.CDLL:
        """Compiled once for all processes: whoever comes second waits for the first."""
        options = [*OPTIONS, f"-D__CUDA_ARCH__={self.capability * 10}"]
        parts = [SOURCE, instance, HEADER.read_text(), read_source(file), *options, *_machine()]
        stem = self._folder / f"{Path(file).stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
        library = stem.with_suffix(".so")
        with stem.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                source, scratch = stem.with_suffix(".cpp"), stem.with_suffix(".tmp")
                source.write_text(SOURCE.format(header=HEADER, kernels=KERNELS / file, instance=instance))
                subprocess.run(["g++", *options, "-o", scratch, source], check=True)
                scratch.rename(library)
        return ctypes.CDLL(str(library))
