"""A server in a process of its own, for benchmarks that measure it over HTTP."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

NAME = "bench"
"""What clients call the model."""


@contextmanager
def serving(
    flags: Sequence[str], variables: Mapping[str, str] | None = None, *, tree: Path | None = None
) -> Iterator[str]:
    """A server on a free port. Yields its base URL when it is ready. Its errors go where ours go.

    variables: of the environment, beside ours. tree: the checkout that it is of; None: this one.
    """
    ports = ["--port", "0", "--admin-port", "0"]
    command = [
        *(sys.executable, "-P", "-m", "service", "serve", "--served-model-name", NAME, *ports),
        *("--log-level", "warning", *flags),
    ]
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - text, as sys.path has it
    if tree is not None:
        paths.insert(0, str(tree))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    # In the checkout: one of before 2026-12-01 compiles kernels by a process that finds its modules there
    process = subprocess.Popen(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line.rstrip(), file=sys.stderr)
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found.group()
                return
        raise SystemExit(f"the server ended with code {process.wait()}")
    finally:
        process.terminate()
        process.communicate()
