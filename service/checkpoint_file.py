"""A checkpoint as a file: one Sequence, with the keys and values of its tokens. And the folder in which these lie.

The file is in safetensors' format, with three tensors:

    header    (N,) uint8: JSON, a `Header`
    pages     (P, layers, K | V, kv heads, page_size, D): the first pages of the Sequence in plain form; zero beyond
              header.positions
    sha256    (32,) uint8: of the header and of the pages' bytes, one after the other

It says what was damaged, not who wrote it: whoever may write to the folder may make checkpoints.
"""

import errno
import hashlib
import os
import secrets
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from service.engine_client import Submit
from service.errors import BadRequest, NotFound, PagewalkError, PermissionDenied, ServiceUnavailable, quoted
from service.plain_files import read_plain

VERSION = 2

HEADER_BYTES = 64 << 20
"""What a file may have beside its pages: tokens are a few bytes each."""


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same where a checkpoint is restored."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str
    page_tokens: int
    config: str  # SHA-256 of all else that keys and values depend on (service/assembly.py)
    weights: str  # the same of some numbers of each tensor

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page in plain form."""
        return self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a Sequence but its keys and values."""

    model: ModelIdentity
    submit: Submit  # as if it came now: its prompt are all tokens so far, max_tokens those that may still come
    answer_begin: int  # where in these the answer begins; of a fork, with what it was forked from
    text_begin: int  # where its text begins: of a fork, after that
    positions: int  # tokens, from the first on, whose keys and values are there
    created: float  # unix time
    version: int = VERSION


class _Version(msgspec.Struct):
    version: int


class NotWritten(ServiceUnavailable):
    """The file could not be written. The Sequence goes on as if nothing had been asked."""


class CheckpointFolder:
    """Where checkpoints lie; None: nowhere. A name is a file's name in it, never a path."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def check(self, name: str) -> None:
        """Raises PermissionDenied without a folder, BadRequest for what is no name."""
        if self._folder is None:
            raise PermissionDenied("This server keeps no checkpoints: start it with --checkpoint-dir FOLDER.")
        if not name or len(name.encode("utf-8", "replace")) > 200 or name.startswith("."):
            raise BadRequest(
                f"path is a name of 1 to 200 bytes that does not begin with a dot: {quoted(name)}", param="path"
            )
        if not name.isprintable() or any(character in name for character in "/\\:"):
            message = (
                f"path is the name of a file in the folder for checkpoints, without / \\ and :, got {quoted(name)}"
            )
            raise BadRequest(message, param="path")

    def write(self, name: str, header: Header, pages: Tensor) -> int:
        """Write one whole file, or none; in place of an older one of that name. Returns its bytes.

        Raises NotWritten, or what `check` raises.
        """
        self.check(name)
        data = encode(header, pages)
        part = f".{secrets.token_hex(8)}.part"
        try:
            folder = self._open()
            try:
                _write_whole(folder, part, data)
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            finally:
                _remove(folder, part)
                os.close(folder)
        except OSError as error:
            words = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or "it failed"
            raise NotWritten(
                f"the checkpoint {quoted(name)} of {len(data)} bytes cannot be written: {words}"
            ) from error
        return len(data)

    def read(self, name: str, most_page_bytes: int) -> tuple[Header, Tensor]:
        """A checkpoint of this version, whole. most_page_bytes: of its pages; a larger file is not read.

        Raises NotFound, BadRequest, or what `check` raises.
        """
        self.check(name)
        try:
            folder = self._open()
            try:
                data = read_plain(name, most_page_bytes + HEADER_BYTES, folder=folder, flags=os.O_NOFOLLOW)
            finally:
                os.close(folder)
        except FileNotFoundError as error:
            raise NotFound(f"There is no checkpoint {quoted(name)}.", param="path") from error
        except OSError as error:
            raise BadRequest(f"{quoted(name)} cannot be read: {error.strerror}", param="path") from error
        try:
            return decode(data)
        except Damaged as error:
            raise BadRequest(f"{quoted(name)} {error}", param="path") from error

    def _open(self) -> int:
        assert self._folder is not None
        return os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)


class Damaged(PagewalkError):
    """Bytes that are no checkpoint; the message goes on after the file's name."""


def encode(header: Header, pages: Tensor) -> bytes:
    """The bytes of a file."""
    pages, text = pages.contiguous(), msgspec.json.encode(header)
    parts = {"header": _bytes(text), "pages": pages, "sha256": _bytes(_digest(text, pages))}
    return safetensors.torch.save(parts)


def decode(data: bytes) -> tuple[Header, Tensor]:
    """Raises Damaged."""
    try:
        parts = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise Damaged("is no checkpoint, or was cut.") from error
    if sorted(parts) != ["header", "pages", "sha256"]:
        raise Damaged("is no checkpoint: it holds something else.")
    text, pages = parts["header"].numpy().tobytes() if parts["header"].dtype == torch.uint8 else b"", parts["pages"]
    if parts["sha256"].tolist() != list(_digest(text, pages)):
        raise Damaged("was damaged: its checksum is another.")
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise Damaged(f"is of version {version} of the format; this server reads {VERSION}.")
        return msgspec.json.decode(text, type=Header), pages
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged("has a header that says nothing to this server.") from error


def _digest(text: bytes, pages: Tensor) -> bytes:
    digest = hashlib.sha256(text)
    digest.update(pages.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _write_whole(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _remove(folder: int, name: str) -> None:
    """What is left of a file that did not get its name."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
