"""A network that is cut amid a stream: a client in a network namespace of its own, and a cable that is pulled.

No packet tells the server. What it sends is never acknowledged: after `UNREAD_S` the system gives the connection up.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_house import PATIENCE_S, real_house
from tiny_model import write_tiny_model

READ_A_STREAM = """
import http.client, json, sys
host, port, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
connection = http.client.HTTPConnection(host, port)
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
for line in connection.getresponse():
    if line != b"\\n":
        print(line.decode(), end="", flush=True)
"""


@dataclass(frozen=True)
class Cable:
    """Between this machine, at `host`, and a namespace."""

    namespace: str
    device: str  # the far end
    host: str

    def set(self, state: str) -> None:
        """ "up" or "down"."""
        command = ["ip", "-n", self.namespace, "link", "set", self.device, state]
        subprocess.run(command, check=True, capture_output=True)

    async def client(self, port: int, tokens: int) -> asyncio.subprocess.Process:
        """A process behind the cable that prints the events of a stream."""
        program = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", READ_A_STREAM]
        return await asyncio.create_subprocess_exec(
            *program, self.host, str(port), str(tokens), stdout=asyncio.subprocess.PIPE
        )


@pytest.fixture
def cable() -> Iterator[Cable]:
    number = os.getpid() % 250
    namespace, near, far = f"pagewalk-{os.getpid()}", f"pwn{os.getpid()}", f"pwf{os.getpid()}"
    host, client = f"10.251.{number}.1", f"10.251.{number}.2"
    commands = [
        f"ip netns add {namespace}",
        f"ip link add {near} type veth peer name {far} netns {namespace}",
        f"ip addr add {host}/30 dev {near}",
        f"ip link set {near} up",
        f"ip -n {namespace} addr add {client}/30 dev {far}",
        f"ip -n {namespace} link set {far} up",
    ]
    try:
        try:
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {error}")
        yield Cable(namespace, far, host)
    finally:
        for command in (f"ip link del {near}", f"ip netns del {namespace}"):
            subprocess.run(command.split(), check=False, capture_output=True)


@pytest.mark.slow
async def test_a_stream_whose_network_is_cut_is_given_up_and_others_go_on(
    cable: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the house no frame is held."""
    monkeypatch.setattr("service.http_server.UNREAD_S", 1.0)
    async with (
        real_house(monkeypatch, write_tiny_model(tmp_path), host="0.0.0.0") as house,
        asyncio.timeout(PATIENCE_S),
    ):
        client = await cable.client(house.server.port, 60_000)
        assert client.stdout is not None
        assert (await client.stdout.readline()).startswith(b"data: ")
        assert (await house.metrics())["vllm:num_requests_running"] == 1
        cable.set("down")
        while (await house.metrics())["vllm:num_requests_running"]:
            await house.post("/v1/completions", {"prompt": [8, 9], "max_tokens": 5})
        assert house.engine.scheduler.memory.available_frames == house.engine.scheduler.memory.frames.usable
        client.kill()
        await client.communicate()

        cable.set("up")
        again = await cable.client(house.server.port, 5)
        text, _ = await again.communicate()
        assert text.decode().splitlines()[-1] == "data: [DONE]"
