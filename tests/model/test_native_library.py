"""Compiling the CPU kernels: the cache, and everything that can go wrong with a compiler.

The compilers here are scripts: they tell a version, and copy the library that the tests' real compiler made.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model import native_library
from model.errors import NoNativeKernels
from model.native_library import load

LOADED = "pagewalk_run"


@pytest.fixture
def real(native: ctypes.CDLL) -> Path:
    return Path(native._name)


def compiler(folder: Path, body: str, name: str = "stub++") -> Path:
    """A script that writes a line into `calls` each time it compiles; $out is the file that it is to write."""
    script = folder / name
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "stub 1.0"; exit 0; }}
echo compiled >> {folder}/calls
while [ "$1" != -o ]; do shift; done
out=$2
{body}
"""
    )
    script.chmod(0o755)
    return script


def calls(folder: Path) -> int:
    log = folder / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """use(path): that is the compiler."""
    return lambda path: monkeypatch.setenv("CXX", str(path))


def test_the_library_is_compiled_once_and_then_found(real: Path, tmp_path: Path, use) -> None:
    use(compiler(tmp_path, f'cp {real} "$out"'))
    said: list[str] = []
    for _ in range(2):
        assert hasattr(load(cache_folder=tmp_path / "cache", report=said.append), LOADED)
    assert calls(tmp_path) == 1
    assert [line.split(" CPU")[0] for line in said] == ["compiling the", "the"]
    entries = list((tmp_path / "cache" / "native").iterdir())
    assert [sorted(file.name for file in entry.iterdir()) for entry in entries] == [["kernels.sha256", "kernels.so"]]


@pytest.mark.parametrize("change", ["sources", "options", "compiler", "processor"])
def test_whatever_decides_the_code_is_in_the_key(
    real: Path, tmp_path: Path, use, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    use(compiler(tmp_path, f'cp {real} "$out"'))
    load(cache_folder=tmp_path)
    if change == "sources":
        copy = shutil.copytree(native_library.SOURCES, tmp_path / "sources")
        with (copy / "numbers.hpp").open("a") as file:
            file.write("// changed\n")
        monkeypatch.setattr(native_library, "SOURCES", copy)
    elif change == "options":
        monkeypatch.setattr(native_library, "OPTIONS", (*native_library.OPTIONS, "-g"))
    elif change == "compiler":
        script = tmp_path / "stub++"
        script.write_text(script.read_text().replace("stub 1.0", "stub 1.1"))
    else:
        monkeypatch.setattr(native_library, "_processor", lambda: ["another"])
    load(cache_folder=tmp_path)
    assert calls(tmp_path) == 2
    assert len(list((tmp_path / "native").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "no library", "no hash"])
def test_a_damaged_entry_is_compiled_again(real: Path, tmp_path: Path, use, damage: str) -> None:
    """It is never loaded: a library that is cut short can end the process."""
    use(compiler(tmp_path, f'cp {real} "$out"'))
    cache = tmp_path / "cache"
    path = next((cache / "native").glob("*/kernels.so"), None) or Path(load(cache_folder=cache)._name)
    content = path.read_bytes()
    if damage == "no library":
        path.unlink()
    elif damage == "no hash":
        path.with_suffix(".sha256").unlink()
    else:
        path.unlink()  # a new file: the old one is mapped by this process
        path.write_bytes(content[:1000] if damage == "truncated" else content[:-1] + b"\xff")
    assert hasattr(load(cache_folder=cache), LOADED)
    assert calls(tmp_path) == 2
    assert path.read_bytes() == content
    assert [entry.name for entry in (cache / "native").iterdir()] == [path.parent.name]


def test_two_processes_that_start_at_once_both_get_it(real: Path, tmp_path: Path, use) -> None:
    """Both compile, since neither is done when the other looks; one entry stays."""
    meet = 'touch "$0.$$"; while [ $(ls "$0".* | wc -l) -lt 2 ]; do sleep 0.02; done'
    use(compiler(tmp_path, f'{meet}; cp {real} "$out"'))
    code = (
        f"from pathlib import Path; from model.native_library import load; load(cache_folder=Path({str(tmp_path)!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert calls(tmp_path) == 2
    assert len(list((tmp_path / "native").iterdir())) == 1
    load(cache_folder=tmp_path)
    assert calls(tmp_path) == 2


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoNativeKernels, match=r"none of g\+\+, clang\+\+, c\+\+ is on the PATH; install one"):
        load(cache_folder=tmp_path)


def test_a_compiler_that_is_named_and_not_there(tmp_path: Path, use) -> None:
    """Another one is not taken in its place."""
    use(tmp_path / "missing")
    with pytest.raises(NoNativeKernels, match=r"CXX is .*missing, which is not there"):
        load(cache_folder=tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, use) -> None:
    use(compiler(tmp_path, 'for i in 1 2 3 4 5 6 7; do echo "error $i" >&2; done; exit 1'))
    with pytest.raises(NoNativeKernels) as raised:
        load(cache_folder=tmp_path)
    assert str(raised.value).endswith("did not compile the CPU kernels: error 1; error 2; error 3; error 4; error 5")
    assert list((tmp_path / "native").iterdir()) == []


def test_a_compiler_that_writes_nothing_of_use(tmp_path: Path, use) -> None:
    use(compiler(tmp_path, 'echo junk > "$out"'))
    with pytest.raises(NoNativeKernels, match="cannot be loaded"):
        load(cache_folder=tmp_path)
    assert list((tmp_path / "native").iterdir()) == [], "the next start compiles it again"


def test_a_cache_that_cannot_be_written(real: Path, tmp_path: Path, use) -> None:
    use(compiler(tmp_path, f'cp {real} "$out"'))
    (tmp_path / "file").write_text("")
    with pytest.raises(NoNativeKernels, match="cannot be kept in"):
        load(cache_folder=tmp_path / "file")
