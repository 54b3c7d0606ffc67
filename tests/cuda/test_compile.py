"""Every kernel that a launcher can ask for compiles for every architecture, within its registers, without a GPU."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuda.compile
from cuda.adjust import Adjust
from cuda.batch_linear import BatchLinear
from cuda.compile import ARCHITECTURES, Build, build, build_apart, cached, read_source
from cuda.errors import CompileError
from cuda.frames import FrameLayout, FramePool
from cuda.kv_append import KvAppend
from cuda.launch import Argument, Grid, Kernel, KernelSpec
from cuda.page_copy import PageCopy
from cuda.paged_attention_f32 import PagedAttentionF32
from cuda.paged_decode import MANY_NARROW, PagedDecode
from cuda.paged_prefill import PagedPrefill
from cuda.rms_norm import RmsNorm
from cuda.sample import LogProbRecords, Sample, StepResults
from cuda.scatter import DeviceState, Scatter
from cuda.shared_prefix import SharedPrefix
from cuda.silu_mul import SiluMul
from cuda.thin_linear import (
    ROW_CLASSES,
    ThinAdd,
    ThinAppend,
    ThinEmbed,
    ThinGate,
    ThinLogits,
    ThinProduct,
    ThinWorkspace,
)

MANY_BLOCKS = {f"paged_decode<{e}, 64, {g}, 4, 4, 3>" for e in ("bf16", "fp16") for g in (4, 8)}
"""Instances of MANY_NARROW: three blocks must fit a multiprocessor's registers."""

NORM = (512, 56)
"""Threads and registers of rms_norm where rows have at most 4,096 numbers."""
NORM_SHARED_BYTES = 128
"""Of its block, to which the driver adds a KiB, as to every block."""
ONLY_HOPPER = {"batch_linear.cu", "paged_prefill_hopper.cu"}

FILES = sorted(path.name for path in cuda.compile.KERNELS.glob("*.cu"))
ROOT = Path(cuda.compile.__file__).parents[1]


class NotLaunchable:
    """What a RecordingLoader hands out."""

    clusters_at_once = 0

    def launch(self, stream: int, grid: Grid, *arguments: Argument) -> None:
        raise AssertionError("nothing runs here")


class RecordingLoader:
    """Remembers which kernels the launchers ask for on a device of one capability."""

    multiprocessors = 2

    def __init__(self, architecture: str) -> None:
        self.capability = int(architecture[3:5])
        self.asked: dict[str, set[KernelSpec]] = {file: set() for file in FILES}

    def load(self, file: str, specs: Sequence[KernelSpec]) -> list[Kernel]:
        self.asked[file].update(specs)
        return [NotLaunchable() for _ in specs]

    def tensor_map(
        self, matrix: Tensor, box_rows: int, box_columns: int, *, interleaved: bool = False, is_shared: bool = False
    ) -> bytes:
        raise AssertionError("no matrix is there")


def everything_asked_for(architecture: str) -> dict[str, set[KernelSpec]]:
    """All launchers, for all dtypes, head sizes and sizes of groups."""
    loader = RecordingLoader(architecture)
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 128)):
        for width in (576, 4096, 8192, *([16384] if dtype.itemsize == 2 else [])):
            RmsNorm(loader, dtype, width, 1e-5)
        SiluMul(loader, dtype, 1536)
        pool = FramePool(FrameLayout(1, 1, head_dim, dtype), 1, "cpu")
        angles = torch.zeros(4, head_dim // 2)
        KvAppend(loader, pool, 4, angles, angles, 1e-5)
        PageCopy(loader, pool)
        if dtype == torch.float32:
            PagedAttentionF32(loader, pool, 4)
        else:
            for portable in (False, True):
                PagedPrefill(loader, pool, 4, 128, portable=portable)
            for heads in (4, 8):
                PagedDecode(loader, pool, heads)
            if SharedPrefix.is_possible(loader, dtype):
                SharedPrefix(loader, pool, 4, 1)
            if BatchLinear.is_possible(loader, dtype):
                BatchLinear(loader, dtype, "cpu", weights=1, inputs=1, outputs=128)
            work = ThinWorkspace("cpu")
            most = {"rows": ROW_CLASSES[-1] if dtype == torch.bfloat16 else 1}
            ThinEmbed(loader, dtype, 576)
            ThinAppend(loader, work, pool, 4, 576, angles, angles, **most)
            ThinProduct(loader, work, dtype, 960, 4096, **most)
            ThinAdd(loader, work, dtype, 576, 4096, **most)
            ThinGate(loader, work, dtype, 1536, 4096, **most)
            for share in (1, 8):
                ThinLogits(loader, work, dtype, 1000, 576, share=share, **most)
            ThinLogits(loader, work, dtype, 49152, 576, **most)
            if loader.capability >= 90:
                most["streams"] = True
                ThinAppend(loader, work, pool, 4, 4096, angles, angles, **most)
                ThinProduct(loader, work, dtype, 960, 4096, **most)
                ThinAdd(loader, work, dtype, 576, 14336, **most)
                ThinGate(loader, work, dtype, 1536, 4096, **most)
                ThinLogits(loader, work, dtype, 1000, 4096, **most)
    state = DeviceState("cpu", max_rows=1, max_pages=1, max_sequences=1, max_tokens=1, upload_words=64)
    if architecture != "sm_90a":  # the others have the same code, and 40 such kernels take half a minute
        thin = loader.asked["thin_linear.cu"]
        thin -= {spec for spec in thin if re.search(r"<\w+, (4|8|16), ", spec.instance)}
    Scatter(loader, state)
    for vocabulary in (8, 49152, 128256, 151936, 400000):  # as many kinds of teams
        Adjust(loader, state, vocabulary)
        Sample(loader, state, StepResults(1, 1, page_locked=False), vocabulary)
        LogProbRecords(loader, vocabulary)
    return loader.asked


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_compiles_without_spills_or_warnings(file, architecture, build_folder) -> None:
    """A spill in a kernel costs more than any trick gains; C7510 and C7512 (warnings) mean serialized tensor cores."""
    specs = everything_asked_for(architecture)[file]
    if file in ONLY_HOPPER and architecture != "sm_90a":
        assert not specs
        return
    assert specs, "no launcher asks for this file's kernels"
    built = build(file, sorted({spec.instance for spec in specs}), architecture, cache_folder=build_folder)
    assert built.warnings == []
    resources = built.resources()
    for spec in specs:
        need = resources[spec.instance]
        assert need.spill_bytes == 0, spec.instance
        assert need.stack_bytes == 0, spec.instance
        assert need.registers * spec.block <= 65536, spec.instance
        if spec.instance in MANY_BLOCKS:
            assert -(-need.registers // 8) * 8 * spec.block * MANY_NARROW.blocks_per_multiprocessor <= 65536, (
                spec.instance
            )
        if file == "batch_linear.cu":  # a norm's block fits beside it, or the two could not overlap
            quarter = sum(-(-threads // 128) * registers for threads, registers in ((spec.block, need.registers), NORM))
            assert quarter * 32 <= 65536 // 4, spec.instance  # which has every fourth warp
            assert spec.shared_bytes + need.shared_bytes + NORM_SHARED_BYTES + 2 * 1024 <= 228 * 1024, spec.instance
        limit = {80: 163, 89: 99, 90: 227}[int(architecture[3:5])] * 1024
        assert spec.shared_bytes + need.shared_bytes <= limit, spec.instance


def test_serialized_tensor_cores_are_a_warning() -> None:
    """ptxas says it as info, among its reports of resources."""
    loss = "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    log = f"ptxas info    : Used 168 registers\n{loss}\nptxas info    : (C7519) warpgroup.arrive is injected"
    assert Build(b"", {}, log).warnings == [loss]


def test_a_second_build_is_read_from_the_disk(tmp_path, monkeypatch) -> None:
    """Same text, options and compiler: no compiler runs."""
    first = build("page_copy.cu", ["page_copy"], "sm_80", cache_folder=tmp_path)
    monkeypatch.setattr(cuda.compile, "_compile", None)
    assert build("page_copy.cu", ["page_copy"], "sm_80", cache_folder=tmp_path) == first
    assert first.code[:4] == b"\x7fELF"


def test_what_another_process_builds_is_of_this_checkout(tmp_path, monkeypatch) -> None:
    """Whatever lies in the folder that the program was started in, such as another checkout."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("")
    (tmp_path / "cuda" / "compile.py").write_text("raise SystemExit('the other one')")
    monkeypatch.chdir(tmp_path)
    assert build_apart("page_copy.cu", ["page_copy"], "sm_80", cache_folder=tmp_path / "cache").names


def test_what_another_process_builds_is_in_the_cache(tmp_path) -> None:
    """The same code as by a build here."""
    wanted = ("page_copy.cu", ["page_copy"], "sm_80")
    assert cached(*wanted, cache_folder=tmp_path / "apart") is None
    apart = build_apart(*wanted, cache_folder=tmp_path / "apart")
    assert cached(*wanted, cache_folder=tmp_path / "apart") == apart
    here = build(*wanted, cache_folder=tmp_path / "here")
    assert (apart.code, apart.names) == (here.code, here.names), "the log may tell how long it took"


def test_what_another_process_cannot_build_is_said_here(tmp_path) -> None:
    """With the compiler's own words."""
    with pytest.raises(CompileError, match="no_such_kernel"):
        build_apart("page_copy.cu", ["no_such_kernel"], "sm_80", cache_folder=tmp_path)


def test_an_edited_include_is_another_build(tmp_path, monkeypatch) -> None:
    """The key covers what is pasted in, and every architecture has its own entry."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "a.cu").write_text('#include "b.cuh"\nextern "C" __global__ void k(int* p) { *p = VALUE; }\n')
    monkeypatch.setattr(cuda.compile, "KERNELS", kernels)
    seen = set()
    for value, architecture in ((1, "sm_80"), (2, "sm_80"), (2, "sm_90a")):
        (kernels / "b.cuh").write_text(f"#define VALUE {value}\n")
        seen.add(build("a.cu", ["k"], architecture, cache_folder=tmp_path).code)
    assert len(seen) == 3


def test_another_process_may_have_been_first(tmp_path, monkeypatch) -> None:
    """Its entry is used, and no scratch is left behind."""
    compile_once = cuda.compile._compile

    def overtaken(*arguments):
        result = compile_once(*arguments)
        monkeypatch.setattr(cuda.compile, "_compile", compile_once)
        build("page_copy.cu", ["page_copy"], "sm_80", cache_folder=tmp_path)
        return result

    monkeypatch.setattr(cuda.compile, "_compile", overtaken)
    assert build("page_copy.cu", ["page_copy"], "sm_80", cache_folder=tmp_path).code
    assert len(list(tmp_path.iterdir())) == 1


def test_a_refused_source_says_where(tmp_path, monkeypatch) -> None:
    """The error carries the compiler's own words."""
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void k() { return nonsense; }\n')
    monkeypatch.setattr(cuda.compile, "KERNELS", tmp_path)
    with pytest.raises(CompileError, match='identifier "nonsense" is undefined'):
        build("broken.cu", ["k"], "sm_80", cache_folder=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("file", FILES)
def test_sources_name_no_header_but_ours(file) -> None:
    """Pasting left no include behind: a build needs no toolkit."""
    assert "#include" not in read_source(file)


ORDERS = [
    ("cuda.compile", "cuda.pathfinder", "cuda.bindings.nvrtc", "cupy"),
    ("cupy", "cuda.compile", "cuda.bindings.nvrtc", "cuda.pathfinder"),
    ("cuda.pathfinder", "cupy", "cuda.compile", "cuda.bindings.nvrtc"),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
@pytest.mark.parametrize("first", [True, False])
def test_the_name_cuda_is_shared(order, first, tmp_path) -> None:
    """NVIDIA's packages and ours import together, in any order, wherever the repository stands on the path."""
    script = f"""
import importlib, sys, json
sys.path[:] = [p for p in sys.path if p not in ("", {str(ROOT)!r})]
sys.path.insert(0 if {first} else len(sys.path), {str(ROOT)!r})
print(json.dumps([importlib.import_module(name).__name__ for name in {order!r}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout) == list(order)


def test_a_package_that_hides_ours_is_named(tmp_path) -> None:
    """Old distributions shipped a regular package `cuda`: start says so, and where it is."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("")
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from model.cuda_namespace import check_cuda_namespace
check_cuda_namespace()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"hidden by {tmp_path / 'cuda' / '__init__.py'}" in done.stderr
