"""Kernels that run on the CPU: a KernelLoader over emulated_gpu.hpp and the machine's C++ compiler."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cuda.compile import KERNELS
from cuda.launch import Argument, ArgumentBlock, Grid, Kernel, KernelSpec

HEADER = Path(__file__).parent / "emulated_gpu.hpp"

ENTRY = """
extern "C" void run_{index}(
    const unsigned* grid, unsigned cluster, unsigned block, unsigned shared, unsigned seed, void** arguments) {{
  emulator::run(grid, cluster, block, shared, seed, [arguments] {{ emulator::invoke({kernel}, arguments); }});
}}
extern "C" int parameters_{index}(int* sizes) {{ return emulator::parameter_sizes({kernel}, sizes); }}
"""


class EmulatedKernel:
    """Runs at launch, to the end; the stream means nothing. `seed` shuffles the order of the warps."""

    clusters_at_once = 2

    def __init__(self, library: ctypes.CDLL, index: int, spec: KernelSpec) -> None:
        self._run = getattr(library, f"run_{index}")
        self._spec = spec
        self._arguments = ArgumentBlock(spec.signature)
        sizes = (ctypes.c_int * 64)()
        count = getattr(library, f"parameters_{index}")(sizes)
        assert list(sizes[:count]) == self._arguments.sizes, (
            f"{spec.instance} takes {list(sizes[:count])}, its launcher packs {self._arguments.sizes}"
        )
        self.seed = 0

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
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
        entries = "".join(ENTRY.format(index=i, kernel=spec.instance) for i, spec in enumerate(specs))
        source = f'#include "{HEADER}"\n#include "{KERNELS / file}"\n{entries}'
        parts = [
            source,
            HEADER.read_text(),
            *(path.read_text() for path in sorted(KERNELS.iterdir())),
            str(self.capability),
        ]
        stem = self._folder / f"{Path(file).stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
        library = stem.with_suffix(".so")
        if not library.exists():
            stem.with_suffix(".cpp").write_text(source)
            scratch = stem.with_suffix(".tmp")
            options = [
                "-std=c++17",
                "-O2",
                "-march=native",
                "-shared",
                "-fPIC",
                "-w",
                "-fno-strict-aliasing",
                "-ffp-contract=off",
                f"-D__CUDA_ARCH__={self.capability * 10}",
            ]
            subprocess.run(["g++", *options, "-o", scratch, stem.with_suffix(".cpp")], check=True)
            scratch.rename(library)
        loaded = ctypes.CDLL(str(library))
        return [EmulatedKernel(loaded, i, spec) for i, spec in enumerate(specs)]
