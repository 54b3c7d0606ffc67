"""Commands of `pagewalk` that run to their end, each in a process of its own, forked from one that has loaded torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from server_process import PATIENCE_S

FORKING = """
import json, os, sys
import service.assembly  # torch
from service.__main__ import main

for number, (arguments, environ) in enumerate(json.load(sys.stdin)):
    pid = os.fork()
    if not pid:
        for descriptor, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
        os.environ.update(environ)
        main(arguments)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True)
class Command:
    """What follows `pagewalk`, and variables beside those of this process."""

    arguments: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A process that has."""

    returncode: int
    stdout: str
    stderr: str


def run_all(commands: Sequence[Command], folder: Path) -> list[Ended]:
    """One after the other; `folder`, an empty one, gets what they print."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWALK_")}
    inherited["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        input=json.dumps([(list(command.arguments), dict(command.environ)) for command in commands]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        cwd=folder,
        env=inherited,
        check=True,
    )
    codes = [int(line) for line in done.stdout.splitlines()]
    return [
        Ended(code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text())
        for number, code in enumerate(codes)
    ]
