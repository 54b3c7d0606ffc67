"""A server for other people's clients: a process of the server's own venv, seen from the clients' one.

Nothing of ours is imported here: the clients' venv has neither torch nor this project (make test-compat).
"""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER_PYTHON = os.environ.get("SERVER_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
KEY = "sk-compat"
PATIENCE_S = 300.0  # the first start converts the demo model


@dataclass
class Served:
    """A server that is ready."""

    port: int
    key: str
    model: str
    process: subprocess.Popen[bytes]
    is_killed: bool = False

    def kill(self) -> None:
        """At once: its end is no fault then."""
        self.is_killed = True
        self.process.kill()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def python(*arguments: str, **environ: str) -> str:
    """What the server's Python prints."""
    env = os.environ | environ
    done = subprocess.run([SERVER_PYTHON, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def serving(folder: Path, model: str, *arguments: str) -> Iterator[Served]:
    """`pagewalk serve` with one key, until the block ends."""
    port = free_port()
    ports = ["--port", str(port), "--admin-port", "0", "--api-key", KEY, "--served-model-name", "served"]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [SERVER_PYTHON, "-m", "service", "serve", model, *ports, *arguments], cwd=ROOT, stdout=out, stderr=out
        )
    try:
        end = time.monotonic() + PATIENCE_S
        while not is_ready(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        served = Served(port, KEY, "served", process)
        yield served
        assert served.is_killed or process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(60)
    assert " 500 " not in log.read_text()
    assert "handler failed" not in log.read_text()


def is_ready(port: int, path: str = "/ready") -> bool:
    """Whether whoever listens there says 200."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        connection.close()
    except OSError:
        return False
    return response.status == 200
