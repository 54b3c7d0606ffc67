"""`pagewalk serve` as a process of its own."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # only a hang takes as long


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """`pagewalk serve` on a free port."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.port = free_port()
        self.err = folder / "stderr"
        self.out = folder / "stdout"
        self.connections: list[http.client.HTTPConnection] = []
        self.responses: list[http.client.HTTPResponse] = []
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWALK_")}
        ports = ["--port", str(self.port), "--admin-port", "0"]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service", "serve", *ports, *arguments], stdout=out, stderr=err, env=environ
            )

    def open(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The answer, its body unread; `stop` closes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        self.connections.append(connection)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        self.responses.append(response)
        return response

    def ask(self, method: str, path: str, body: Any = None) -> str:
        return self.open(method, path, body).read().decode()

    def status(self, path: str) -> int | None:
        """None: nobody listens."""
        try:
            response = self.open("GET", path)
        except ConnectionError:
            return None
        response.read()
        return response.status

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
