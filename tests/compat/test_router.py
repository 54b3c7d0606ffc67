"""The router of compose.yaml's profile `scale`, before two servers on the CPU."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from compat_server import ROOT, Served, free_port, is_ready, serving

pytestmark = pytest.mark.compat

ROUTER_S = 60.0
NOTICED_S = 60.0
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
TOPICS = [
    "On ferries and their timetables: ",
    "Of bread, its crust and its crumb: ",
    "Why the tide turns: ",
    "A moth flies at night: ",
]


class Router:
    """The router's process, and the servers behind it."""

    def __init__(self, port: int, replicas: list[Served]) -> None:
        self.port, self.replicas = port, replicas

    def complete(self, prompt: str, max_tokens: int = 1) -> int:
        """Ask for tokens: the status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = json.dumps({"model": "served", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.replicas[0].key}"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status


def answered(served: Served) -> int:
    """Completions that this server has answered, by its own count."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    mine = [
        line
        for line in text.splitlines()
        if line.startswith("pagewalk_http_requests_total{") and "/v1/completions" in line
    ]
    return sum(int(float(line.rpartition(" ")[2])) for line in mine)


@pytest.fixture
def router(tmp_path: Path, tiny_model: Path) -> Iterator[Router]:
    """Two servers, and the router as the image starts it."""
    with ExitStack() as stack:
        replicas = []
        for number in (1, 2):
            folder = tmp_path / str(number)
            folder.mkdir()
            # The router writes bodies anew, with fields of other servers in them.
            options = ["--load-format", "dummy", "--kv-cache-memory-bytes", "8MiB", "--unknown-fields", "ignore"]
            replicas.append(stack.enter_context(serving(folder, str(tiny_model), *options)))
        port = free_port()
        options = COMPOSE["services"]["router"]["command"]
        options = options[options.index("--policy") :]
        command = [sys.executable, "-m", "vllm_router.launch_router", "--port", str(port), *options]
        urls = ["--worker-urls", *(replica.root for replica in replicas), "--prometheus-port", str(free_port())]
        log = (tmp_path / "router.log").open("w")
        process = subprocess.Popen([*command, *urls], stdout=log, stderr=log)
        try:
            end = time.monotonic() + ROUTER_S
            while not is_ready(port, "/health"):
                assert process.poll() is None, (tmp_path / "router.log").read_text()
                assert time.monotonic() < end, (tmp_path / "router.log").read_text()
                time.sleep(0.2)
            yield Router(port, replicas)
        finally:
            process.terminate()
            process.wait(30)
            log.close()


def test_prompts_that_begin_alike_go_to_one_server(router: Router) -> None:
    """Topics that come at once are spread by load; later prompts go to where their topic's pages are."""
    with ThreadPoolExecutor(len(TOPICS)) as clients:
        assert set(clients.map(lambda topic: router.complete(topic * 2, max_tokens=40), TOPICS)) == {200}
    homes = set()
    for topic in TOPICS:
        for number in range(5):
            before = [answered(replica) for replica in router.replicas]
            assert router.complete(topic * 2 + str(number)) == 200
            (home,) = [i for i, replica in enumerate(router.replicas) if answered(replica) != before[i]]
            homes.add((topic, home))
    assert len(homes) == len(TOPICS), homes
    assert {home for _, home in homes} == {0, 1}, "both servers work"


def test_a_server_that_is_killed_is_survived(router: Router) -> None:
    """Until the router has noticed, requests that went there fail (clients try those again); then none does."""
    assert {router.complete(topic) for topic in TOPICS} == {200}
    router.replicas[0].kill()
    end = time.monotonic() + NOTICED_S
    while any(router.complete(f"{topic} again") != 200 for topic in TOPICS):
        assert time.monotonic() < end
        time.sleep(0.2)
    statuses = [router.complete(f"{topic} {number}") for topic in TOPICS for number in range(5)]
    assert statuses == [200] * 20
