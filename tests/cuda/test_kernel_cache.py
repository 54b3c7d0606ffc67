"""What can be wrong with the cache of compiled kernels: whatever it is, the right code runs, and a line says so."""

import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import small_disk

import cuda.compile
from cuda.compile import ABOUT, CUBIN, Build, build, build_apart, cached
from cuda.launch import DeviceLoader, KernelSpec

WANTED = ("page_copy.cu", ["page_copy"], "sm_90a")
CODE = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for NVRTC: the architectures of what it was asked for. Its code says which that was."""
    asked: list[str] = []

    def compile_one(file: str, text: str, instances: Any, options: Any) -> tuple[bytes, dict[str, str], str]:
        asked.append(options[1].removeprefix("-arch="))
        return CODE + asked[-1].encode(), {name: name for name in instances}, "ptxas info"

    monkeypatch.setattr(cuda.compile, "_compile", compile_one)
    return asked


def entry_of(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def of_another_architecture(entry: Path) -> None:
    """An entry under a name that is not its own."""
    build("page_copy.cu", ["page_copy"], "sm_80", cache_folder=entry.parent / "other")
    other = entry_of(entry.parent / "other")
    for file in (CUBIN, ABOUT):
        (other / file).replace(entry / file)
    other.rmdir()
    other.parent.rmdir()


def rename_a_kernel(entry: Path) -> None:
    about = json.loads((entry / ABOUT).read_text())
    (entry / ABOUT).write_text(json.dumps(about | {"names": {"page_copy": "another"}}))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "code that is cut": lambda entry: cut(entry / CUBIN, 1000),
    "no code": lambda entry: cut(entry / CUBIN, 0),
    "code that is not there": lambda entry: (entry / CUBIN).unlink(),
    "one wrong bit": lambda entry: flip(entry / CUBIN, 999),
    "more code": lambda entry: (entry / CUBIN).write_bytes(CODE + CODE),
    "facts that are cut": lambda entry: cut(entry / ABOUT, 20),
    "no facts": lambda entry: cut(entry / ABOUT, 0),
    "facts that are not there": lambda entry: (entry / ABOUT).unlink(),
    "facts of another form": lambda entry: (entry / ABOUT).write_text("[1, 2]"),
    "facts that are no text": lambda entry: (entry / ABOUT).write_bytes(b"\xff\xfe{}"),
    "a wrong name": rename_a_kernel,
    "another architecture's": of_another_architecture,
    "a folder in place of the code": lambda entry: ((entry / CUBIN).unlink(), (entry / CUBIN).mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_is_damaged_is_told_of_and_compiled_again(
    tmp_path: Path, compiled: list[str], damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Once: then the entry is whole again, and nothing is left beside it."""
    first = build(*WANTED, cache_folder=tmp_path)
    damage(entry_of(tmp_path))
    compiled.clear()
    caplog.clear()
    assert cached(*WANTED, cache_folder=tmp_path) is None
    assert "damaged kernels in the cache" in caplog.text
    assert build(*WANTED, cache_folder=tmp_path) == first
    assert build(*WANTED, cache_folder=tmp_path) == first
    assert compiled == ["sm_90a"]
    assert [path.name for path in sorted(entry_of(tmp_path).iterdir())] == [ABOUT, CUBIN]


def test_a_file_in_place_of_an_entry_is_replaced(tmp_path: Path, compiled: list[str]) -> None:
    first = build(*WANTED, cache_folder=tmp_path)
    entry = entry_of(tmp_path)
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()
    entry.write_text("not a folder")
    assert build(*WANTED, cache_folder=tmp_path) == build(*WANTED, cache_folder=tmp_path) == first
    assert len(compiled) == 2


def test_nothing_is_said_of_what_was_never_there(
    tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    build(*WANTED, cache_folder=tmp_path)
    build(*WANTED, cache_folder=tmp_path)
    assert caplog.records == []


def refuse_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that is full in the middle of the code."""

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)


def test_a_full_disk_costs_the_cache_and_nothing_else(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No half of an entry; with room again it is kept."""
    with monkeypatch.context() as full:
        refuse_writes(full)
        built = build(*WANTED, cache_folder=tmp_path)
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert build(*WANTED, cache_folder=tmp_path) == built
    assert cached(*WANTED, cache_folder=tmp_path) == built
    assert len(compiled) == 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with small_disk(tmp_path / "disk", 64 << 10) as folder:
        yield folder


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_real_disk_that_takes_nothing_leaves_kernels_that_run(
    disk: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled by a process of its own, which writes nothing."""
    if state == "full":
        (disk / "other").write_bytes(bytes(60 << 10))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    built = build_apart(*WANTED, cache_folder=disk / "kernels")
    assert built.code[:4] == b"\x7fELF"
    assert "compiled kernels cannot be kept" in caplog.text
    assert cached(*WANTED, cache_folder=disk / "kernels") is None
    left = [path for path in disk.rglob("*") if path.name not in ("other", "kernels")]
    assert left == []


@pytest.mark.gpu
def test_a_gpu_never_runs_what_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cubin with a wrong byte amid its instructions: the kernel that runs copies whole frames all the same."""
    spec = KernelSpec("page_copy", "PPPq", 256)
    device = torch.cuda.current_device()
    first = DeviceLoader(device, cache_folder=tmp_path)
    first.load("page_copy.cu", [spec])
    first.finish()
    flip(entry_of(tmp_path) / CUBIN, (entry_of(tmp_path) / CUBIN).stat().st_size // 2)
    logging.getLogger("pagewalk.kernels").setLevel(logging.WARNING)
    loader = DeviceLoader(device, cache_folder=tmp_path)
    (kernel,) = loader.load("page_copy.cu", [spec])
    loader.finish()
    assert "damaged kernels" in caplog.text
    pool = torch.arange(4 * 4096, dtype=torch.int32, device="cuda").view(4, -1)
    pages = torch.tensor([3, 0], dtype=torch.int32, device="cuda")
    kernel.launch(torch.cuda.current_stream().cuda_stream, (1, 1), pool, pages[:1], pages[1:], 4 * 4096)
    torch.cuda.synchronize()
    assert torch.equal(pool[0], pool[3])


def test_a_digest_covers_the_key_the_names_and_the_code() -> None:
    built = Build(b"code", {"k": "s"}, "log")
    others = [Build(b"codf", {"k": "s"}, "log"), Build(b"code", {"k": "t"}, "log"), Build(b"code", {"k": "s"}, "lof")]
    assert len({built.digest("a"), built.digest("b"), *(other.digest("a") for other in others)}) == 5
