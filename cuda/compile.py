"""From a kernel's source to device code: paste the includes, hash, compile with NVRTC, keep the result on disk.

    kernels/x.cu ──paste──▶ one text ──NVRTC──▶ cubin, names, log ───────────▶ launch.DeviceLoader
                                                    └──rename──▶ <cache>/<hash>/ ──checked──┘

This file owns the cache. Its key covers everything that decides the code: text (with every project header pasted in,
because an include that is only named does not change a hash), options, architecture, instances and NVRTC's version. An
entry is a folder that appears by one rename, so a reader sees all of it or nothing, and two writers cannot mix. Its
checksum covers its key, too: what is damaged, or lies in the wrong place, is compiled again and never run. Where
nothing can be written, kernels are compiled all the same, at every start.

NVRTC works on one program at a time in a process, so several are compiled by several processes (`build_apart`), which
send what they have made through a pipe.

Compiling needs neither a driver nor a GPU nor a CUDA toolkit: the kernels include nothing but files of this project.
"""

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc
from cuda.errors import CompileError

KERNELS = Path(__file__).parent / "kernels"
"""Never importlib.resources.files("cuda"): that finds NVIDIA's part of the name."""

CUBIN, ABOUT = "kernels.cubin", "build.json"
FORMAT = 2  # of an entry
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")  # what the tests compile for: Ampere, Ada, Hopper

log = logging.getLogger("pagewalk.kernels")

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_CHATTER = re.compile(r"^\s*$|^ptxas info(?!.*Performance Loss)|^ptxas\s+\.")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes of the machine, as ptxas reports it."""

    registers: int
    stack_bytes: int
    spill_bytes: int  # stores and loads together
    shared_bytes: int  # of its own variables: dynamic shared memory comes on top


@dataclass(frozen=True, slots=True)
class Build:
    """Compiled kernels of one file, and what the compiler said about them."""

    code: bytes = field(repr=False)  # a cubin
    names: dict[str, str]  # instance, such as "rms_norm<bf16, 1>" -> its symbol in the cubin
    log: str

    def digest(self, key: str) -> str:
        """Of all there is to it, as what is kept under `key`."""
        about = json.dumps([key, self.names, self.log]).encode()
        return hashlib.sha256(len(about).to_bytes(8, "big") + about + self.code).hexdigest()

    @property
    def warnings(self) -> list[str]:
        """Lines of the log that are more than reports of resources. "Potential Performance Loss" (C7510 to C7515) means
        serialized tensor cores: a failed build, though ptxas calls it info.
        """
        return [line for line in self.log.splitlines() if not _CHATTER.match(line)]

    def resources(self) -> dict[str, Resources]:
        """Registers, stack and spills of every instance."""
        found: dict[str, Resources] = {}
        symbol, stack, spills = "", 0, 0
        for line in self.log.splitlines():
            if match := _ENTRY.search(line):
                symbol = match[1]
            elif match := _STACK.search(line):
                stack, spills = int(match[1]), int(match[2]) + int(match[3])
            elif match := _REGISTERS.search(line):
                found[symbol] = Resources(int(match[1]), stack, spills, int(match[2] or 0))
        return {instance: found[symbol] for instance, symbol in self.names.items()}


def default_cache_folder() -> Path:
    """Where cubins are kept if the caller names no place: PAGEWALK_CACHE, else the user's cache folder."""
    base = os.environ.get("PAGEWALK_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "pagewalk") / "kernels"


def read_source(file: str) -> str:
    """The text of kernels/`file` with every project header pasted in, each once, at its first include."""
    pasted: set[str] = set()

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        pasted.add(name)
        return _INCLUDE.sub(lambda match: paste(match[1]), (KERNELS / name).read_text(encoding="utf-8"))

    return paste(file)


def build(file: str, instances: Sequence[str], architecture: str, *, cache_folder: Path | None = None) -> Build:
    """Device code of kernels/`file` for `architecture` ("sm_90a"), with all `instances`; out of the cache if it is
    there.

    instances: names of kernels, templates with their arguments: "decode_plan", "paged_decode<bf16, 128, 4, 4, 3, 2>".
    Raises: CompileError with NVRTC's log.
    """
    wanted = _Wanted.of(file, instances, architecture, cache_folder)
    if (found := wanted.found()) is not None:
        return found
    built = Build(*_compile(file, wanted.text, instances, wanted.options))
    wanted.keep(built)
    return built


def cached(file: str, instances: Sequence[str], architecture: str, *, cache_folder: Path | None = None) -> Build | None:
    """What `build` would return at once, or None: it would have to compile."""
    return _Wanted.of(file, instances, architecture, cache_folder).found()


def build_apart(file: str, instances: Sequence[str], architecture: str, *, cache_folder: Path | None = None) -> Build:
    """`build` by a process of its own, for which the calling thread waits."""
    wanted = _Wanted.of(file, instances, architecture, cache_folder)
    paths = [str(KERNELS.parents[1]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "cuda.compile", architecture, file, *instances],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        check=False,
    )
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        raise CompileError(said or f"{file}: the compiling process ended with {ended.returncode}")
    about, _, code = ended.stdout.partition(b"\n")
    built = Build(code, **json.loads(about))
    wanted.keep(built)
    return built


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be built, and where the cache has it."""

    text: str
    options: tuple[str, ...]
    entry: Path

    @classmethod
    def of(cls, file: str, instances: Sequence[str], architecture: str, cache_folder: Path | None) -> "_Wanted":
        text = read_source(file)
        options = _options(architecture)
        key = json.dumps([FORMAT, text, options, sorted(instances), nvrtc.nvrtcVersion()[1:]])
        name = f"{Path(file).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        return cls(text, options, (cache_folder or default_cache_folder()) / name)

    def found(self) -> Build | None:
        """What the cache has, if it is whole. What is not is told of, and in the way until `keep`."""
        try:
            return self._read()
        except FileNotFoundError as error:
            if not self.entry.exists():
                return None
            why = str(error)
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = str(error) or type(error).__name__
        log.warning("damaged kernels in the cache, which are compiled again: %s: %s", self.entry, why)
        return None

    def keep(self, built: Build) -> None:
        """Write an entry, whole or not at all. If another process was first, its result is as good."""
        about = {"names": built.names, "log": built.log, "digest": built.digest(self.entry.name)}
        try:
            self.entry.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.entry.parent, prefix=".tmp-") as scratch:
                ready = Path(scratch) / "entry"
                ready.mkdir()
                (ready / CUBIN).write_bytes(built.code)
                (ready / ABOUT).write_text(json.dumps(about), encoding="utf-8")
                if self.entry.exists() and not self._is_whole():
                    self.entry.rename(Path(scratch) / "damaged")
                try:
                    ready.rename(self.entry)
                except OSError:
                    if not self._is_whole():
                        raise
        except OSError as error:
            log.warning("compiled kernels cannot be kept, so every start compiles them: %s", error)

    def _is_whole(self) -> bool:
        try:
            self._read()
        except (OSError, ValueError, TypeError, KeyError):
            return False
        return True

    def _read(self) -> Build:
        """Raises OSError, ValueError, TypeError or KeyError for anything but a whole entry of this key."""
        facts = json.loads((self.entry / ABOUT).read_bytes())
        built = Build((self.entry / CUBIN).read_bytes(), facts["names"], facts["log"])
        if built.digest(self.entry.name) != facts["digest"]:
            raise ValueError("its checksum is another")
        return built


def _options(architecture: str) -> tuple[str, ...]:
    return "-std=c++17", f"-arch={architecture}", "--ptxas-options=-v"


def _compile(
    file: str, text: str, instances: Sequence[str], options: Sequence[str]
) -> tuple[bytes, dict[str, str], str]:
    """Run NVRTC: code, symbol of each instance, log."""
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], []))
    try:
        for instance in instances:
            _checked(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        said = _text_of(nvrtc.nvrtcGetProgramLogSize(program), nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{file} for {options[1]}: {status.name}\n{said}")
        code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        names = {name: _checked(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in instances}
        return code, names, said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, or CompileError."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) > 1 else None


def _text_of(size: tuple[Any, ...], read: Any, program: Any) -> str:
    text = b" " * _checked(size)
    _checked(read(program, text))
    return text.decode(errors="replace").rstrip("\0 \n")


def main(arguments: Sequence[str]) -> int:
    """ARCHITECTURE FILE INSTANCE...: the process of `build_apart`; returns its exit code. What is compiled goes to its
    standard output: a line of JSON, then the code.
    """
    architecture, file, *instances = arguments
    try:
        code, names, said = _compile(file, read_source(file), instances, _options(architecture))
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(json.dumps({"names": names, "log": said}).encode() + b"\n" + code)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
