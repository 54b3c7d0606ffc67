"""Files and folders that settings name.

A device or a pipe in place of a file could be read for ever, or fill the memory: only a plain file is read, and a link
to one, up to a bound that no file of its kind comes near.
"""

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 16 << 20
"""Of a file that a setting names; keys of 100,000 tenants are 8 MB."""


def read_plain(path: Path | str, most_bytes: int = MOST_BYTES, *, folder: int | None = None, flags: int = 0) -> bytes:
    """The whole of a file. folder: an open one that `path` is in. flags: more of os.open's. Raises OSError."""
    # O_NONBLOCK: a pipe that nobody writes to would not even be opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1) if facts.st_size <= most_bytes else b""
    finally:
        os.close(descriptor)
    if (size := max(facts.st_size, len(data))) > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most_bytes}")
    return data


def read_text(path: Path | str) -> str:
    """What a file that a setting names says, in UTF-8. Raises ValueError: `PATH cannot be read: why`."""
    try:
        return check_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def check_file(path: Path | str) -> bytes:
    """What it holds. Raises ValueError: `PATH cannot be read: why`."""
    try:
        return read_plain(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def check_folder(path: Path | str) -> None:
    """Raises ValueError: `PATH cannot be used: why`."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        raise ValueError(f"{path} cannot be used: {error.strerror}") from error
