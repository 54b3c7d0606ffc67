"""Where tests keep what they compile: by content, so that all processes of all runs compile each kernel once."""

import shutil
import time
from pathlib import Path

from model.native_library import _default_cache_folder

KEPT_S = 14 * 24 * 3600


def build_folder() -> Path:
    """Beside the caches of servers. What was compiled long ago is deleted: mostly of kernels that have changed."""
    folder = _default_cache_folder() / "test-builds"
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        try:
            if entry.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except FileNotFoundError:
            continue  # another process was first
    return folder
