"""`pagewalk serve` as a process of its own."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 180.0  # only a hang takes as long; on a busy machine a start in a new venv takes a minute


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _inode(port: int, client_port: int) -> str:
    """Of the server's socket of a connection on 127.0.0.1, from the kernel's table."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(fields[i].split(":")[1], 16) for i in (1, 2))
        if (local, remote) == (port, client_port):
            return fields[9]
    raise AssertionError("no such connection")


def _command_line(pid: str) -> bytes:
    """Empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


class Process:
    """`pagewalk serve` on a free port. program: what Python is to run for the command `pagewalk`."""

    def __init__(
        self, *arguments: str, folder: Path, program: Sequence[str] = ("-m", "service"), **environ: str
    ) -> None:
        """environ: variables beside those of this process."""
        self.port = free_port()
        self.err = folder / "stderr"
        self.out = folder / "stdout"
        self.connections: list[http.client.HTTPConnection] = []
        self.responses: list[http.client.HTTPResponse] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWALK_")}
        inherited["PYTHONPATH"] = os.pathsep.join(
            path or str(Path.cwd()) for path in sys.path
        )  # the same modules as here
        ports = ["--port", str(self.port), "--admin-port", "0"]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", *ports, *arguments],
                stdout=out,
                stderr=err,
                env=inherited | environ,
            )

    def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """The answer, its body unread; `stop` closes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = (headers or {}) | ({"Content-Type": "application/json"} if body is not None else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        self.connections.append(connection)
        self.responses.append(response)
        return response

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> str:
        return self.open(method, path, body, headers).read().decode()

    def status(self, path: str) -> int | None:
        """None: nobody listens."""
        try:
            response = self.open("GET", path)
        except ConnectionError:
            return None
        response.read()
        return response.status

    def front_ends(self) -> list[int]:
        """Process ids of the front ends that run."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                found += (task / "children").read_text().split()
        return sorted(int(pid) for pid in found if b"front_end_process" in _command_line(pid))

    def listening(self) -> int:
        """Sockets that take connections: each front end has one of its own."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(fields[3] == "0A" and int(fields[1].split(":")[1], 16) == self.port for fields in lines)

    def owner(self, response: http.client.HTTPResponse) -> int:
        """The front end that answers: the process that holds the other end of the connection."""
        connection = self.connections[self.responses.index(response)]
        client_port = connection.sock.getsockname()[1]
        inode = _inode(self.port, client_port)
        for pid in self.front_ends():
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) == f"socket:[{inode}]":
                        return pid
        raise AssertionError("no front end holds this connection")

    def streams_of_all(self, tokens: int) -> dict[int, http.client.HTTPResponse]:
        """A stream of each front end: the system deals connections out, so some may get more than one."""
        found: dict[int, http.client.HTTPResponse] = {}
        pids = self.front_ends()
        for _ in range(64):
            stream = self.stream(tokens)
            stream.readline()
            found.setdefault(self.owner(stream), stream)
            if len(found) == len(pids):
                return found
        raise AssertionError("all connections go to one front end")

    def hang_up(self, response: http.client.HTTPResponse) -> None:
        """Leave amid an answer."""
        connection = self.connections[self.responses.index(response)]
        response.close()
        connection.close()

    def metrics(self) -> dict[str, float]:
        """Samples by their text: name and labels."""
        lines = [line.rsplit(" ", 1) for line in self.ask("GET", "/metrics").splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    def gauge(self, name: str) -> float:
        """A sample by its name alone."""
        return next(value for text, value in self.metrics().items() if text.split("{")[0] == name)

    def stop(self) -> None:
        for thing in [*self.responses, *self.connections]:
            thing.close()
        self.process.kill()
        self.process.wait()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended: {self.err.read_text()}"
            assert time.monotonic() < end, self.err.read_text()
            time.sleep(0.02)

    def stream(self, tokens: int) -> http.client.HTTPResponse:
        body = {"prompt": "the", "stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        response = self.open("POST", "/v1/completions", body)
        assert response.status == 200
        return response

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.read_text().splitlines()]
