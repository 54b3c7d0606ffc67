"""From C++ to functions: compile `native/` with this machine's compiler, keep the library on disk, load it.

    native/*.cpp, *.hpp ──hash──▶ <cache>/native/<hash>/ ──there?──▶ check, load
                                        ▲ no: compile, rename

Owns the cache. An entry's key covers everything that decides the code: sources, options, the compiler, and the
processor (`-march=native`: a cache that moves to another machine must not bring its instructions along). An entry is a
folder that appears by one rename, so a reader sees all of it or nothing, and two processes that compile at once cannot
mix. It carries the library's hash: a damaged file is compiled again, never run.
"""

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from model.errors import NoNativeKernels

SOURCES = Path(__file__).parent / "native"
MAIN = "program.cpp"
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",
    "-fno-math-errno",  # with these two, loops vectorise; NaN and infinity behave as ever (no -ffast-math)
    "-fno-trapping-math",
    "-fopenmp-simd",  # sums may be added in another order where a loop says so; no OpenMP at run time
    "-fvisibility=hidden",
    "-w",
    "-fPIC",
    "-shared",
    "-pthread",
)
COMPILE_TIMEOUT_S = 300

Report = Callable[[str], None]


def load(*, cache_folder: Path | None = None, report: Report = lambda line: None) -> ctypes.CDLL:
    """The compiled kernels. The first time on a machine this takes 10 to 20 s of compiling.

    cache_folder: None for PAGEWALK_CACHE, else the user's cache folder; report: told before and after compiling.
    Raises: NoNativeKernels, with the reason and what to do, if there is no compiler or it fails.
    """
    command = compiler()
    text = "".join(f"// {path.name}\n{path.read_text(encoding='utf-8')}" for path in sorted(SOURCES.glob("*.[ch]pp")))
    key = json.dumps([text, OPTIONS, _version(command), _processor()])
    entry = (cache_folder or _default_cache_folder()) / "native" / hashlib.sha256(key.encode()).hexdigest()[:24]
    library = entry / "kernels.so"
    if not _is_whole(library):
        report(f"compiling the CPU kernels with {command}, once for this machine: 10 to 20 s")
        _build(command, entry)
        report(f"the CPU kernels are compiled: {library}")
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        shutil.rmtree(entry, ignore_errors=True)  # of another C library, perhaps: the next start compiles it again
        raise NoNativeKernels(f"the CPU kernels cannot be loaded: {error}") from error


def compiler() -> str:
    """CXX if it is set, else the first compiler on the PATH. Raises NoNativeKernels."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        if found := shutil.which(name):
            return found
    wanted = f"CXX is {asked}, which is not there" if asked else f"none of {', '.join(COMPILERS)} is on the PATH"
    raise NoNativeKernels(f"no C++ compiler: {wanted}; install one (Debian, Ubuntu: apt-get install g++)")


def _version(command: str) -> str:
    try:
        return subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNativeKernels(f"{command} does not tell its version: {error}") from error


def _processor() -> list[str]:
    """What decides the instructions that `native` means: the model and features of the first processor."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return [platform.machine(), platform.processor()]
    first = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    named = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    return [platform.machine(), *(line for line in first if line.partition(":")[0].strip() in named)]


def _default_cache_folder() -> Path:
    base = os.environ.get("PAGEWALK_CACHE")
    return Path(base) if base else Path.home() / ".cache" / "pagewalk"


def _is_whole(library: Path) -> bool:
    """Whether the entry is there and the library is what the compiler wrote."""
    try:
        wanted = library.with_suffix(".sha256").read_text(encoding="ascii")
        return hashlib.sha256(library.read_bytes()).hexdigest() == wanted
    except (OSError, UnicodeDecodeError):
        return False


def _build(command: str, entry: Path) -> None:
    """Compile into a scratch folder, then give it the entry's name. If another process was first, its result is as
    good.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".tmp-") as scratch:
            ready = Path(scratch) / "entry"
            ready.mkdir()
            library = ready / "kernels.so"
            _compile(command, library)
            library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest(), "ascii")
            if entry.exists() and not _is_whole(entry / library.name):
                entry.rename(Path(scratch) / "damaged")
            try:
                ready.rename(entry)
            except OSError:
                if not _is_whole(entry / library.name):
                    raise
    except OSError as error:
        raise NoNativeKernels(f"the CPU kernels cannot be kept in {entry.parent}: {error}") from error


def _compile(command: str, library: Path) -> None:
    arguments = [command, *OPTIONS, "-o", str(library), str(SOURCES / MAIN)]
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernels(f"{command} did not compile the CPU kernels: {error}") from error
    if result.returncode:
        said = "; ".join(result.stderr.splitlines()[:5]) or f"exit code {result.returncode}"
        raise NoNativeKernels(f"{command} did not compile the CPU kernels: {said}")
