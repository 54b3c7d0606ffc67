"""What the system refuses while the server runs or starts: room on a disk, open files. With a process of its own, whose
limits are set from outside."""

import http.client
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from server_process import PATIENCE_S, Process
from tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit and /proc are Linux's")

BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(params=[0, 2], ids=["one process", "two front ends"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Process]:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # else modules that are cut short stay so
    tiny = ["--model", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "8MiB", "--threads", "1"]
    process = Process(*tiny, "--front-ends", str(request.param), "--log-format", "json", folder=tmp_path)
    try:
        process.until(lambda: process.status("/ready") == 200)
        yield process
    finally:
        process.stop()


def pids(server: Process) -> list[int]:
    return [server.process.pid, *server.front_ends()]


def limit(server: Process, what: int, most: int) -> None:
    """Of the engine's process and its front ends; the hard limit stays."""
    for pid in pids(server):
        _, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, hard))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_a_disk_that_is_full_for_the_log_costs_lines_and_nothing_else(server: Process) -> None:
    """A file may not grow, as on a full disk; with room again there are lines again. The exit is orderly."""
    answer = json.loads(server.ask("POST", "/v1/completions", BODY))["choices"][0]["text"]
    size = server.err.stat().st_size
    limit(server, resource.RLIMIT_FSIZE, size)
    for _ in range(20):
        assert json.loads(server.ask("POST", "/v1/completions", BODY))["choices"][0]["text"] == answer
        assert server.status("/v1/nothing") == 404
    assert server.status("/live") == server.status("/ready") == 200
    assert server.err.stat().st_size == size
    limit(server, resource.RLIMIT_FSIZE, 1 << 30)
    server.until(lambda: bool(server.ask("POST", "/v1/completions", BODY)) and server.err.stat().st_size > size)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_connections_beyond_the_limit_of_open_files_are_reset_and_nobody_else_is(server: Process) -> None:
    """Those that find no place are reset; streams go on. With room again the server answers as before, and no file is
    left open."""
    before = [open_files(pid) for pid in pids(server)]
    stream = server.stream(3000)
    assert stream.readline().startswith(b"data: ")
    limit(server, resource.RLIMIT_NOFILE, max(open_files(pid) for pid in pids(server)) + 4)
    waiting = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S) for _ in range(60)]
    for connection in waiting:
        connection.connect()
        with suppress(ConnectionError):
            connection.request("GET", "/live")
    assert '"finish_reason":"length"' in stream.read().decode()
    answers = [answer(connection) for connection in waiting]
    assert {"200"} < set(answers) <= {"200", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
    stream.close()
    limit(server, resource.RLIMIT_NOFILE, 1024)
    server.until(lambda: server.status("/ready") == 200)
    assert json.loads(server.ask("POST", "/v1/completions", BODY))["usage"]["completion_tokens"] == 5
    for thing in [*server.responses, *server.connections]:
        thing.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(open_files(pid) > count for pid, count in zip(pids(server), before, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answer(connection: http.client.HTTPConnection) -> str:
    """What came within a second."""
    connection.sock.settimeout(1)
    try:
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def check(model: Path, cache: Path, most: int, **environ: str) -> subprocess.CompletedProcess[str]:
    """`pagewalk check` where no file may have more than `most` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "service", "check", str(model), "--kv-cache-memory-bytes", "1MiB", "--threads", "1"],
        env={"PAGEWALK_CACHE": str(cache), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"} | environ,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_disk_that_is_full_for_compiled_kernels_leaves_torch_s(model: Path, tmp_path: Path) -> None:
    """A warning, no half-written library."""
    stub = tmp_path / "c++"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && exit 0', 'while [ "$1" != -o ]; do shift; done']
    stub.write_text("\n".join([*lines, 'exec head -c 100000 /dev/zero > "$2"\n']))
    stub.chmod(0o755)
    result = check(model, tmp_path / "cache", 2000, CXX=str(stub), PAGEWALK_LOAD_FORMAT="dummy")
    assert result.returncode == 0, result.stderr
    assert "torch kernels" in result.stdout
    assert list((tmp_path / "cache" / "native").iterdir()) == []
