"""Disks that are full, for whatever the server writes: who has asked for a file is told, and nobody else notices."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import PATIENCE_S, Process
from small_disk import fill, small_disk
from tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and tmpfs are Linux's")

BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        yield folder


def started(model: Path, folder: Path, front_ends: int, *more: str) -> Process:
    tiny = ["--model", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "16MiB", "--threads", "1"]
    return Process(*tiny, "--front-ends", str(front_ends), "--log-format", "json", *more, folder=folder)


def completes(server: Process) -> bool:
    return bool(json.loads(server.ask("POST", "/v1/completions", BODY))["usage"]["completion_tokens"] == 5)


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [0, 2])
def test_a_server_whose_output_goes_nowhere_starts_serves_and_ends(
    model: Path, tmp_path: Path, front_ends: int
) -> None:
    """Its log and what it prints: every write fails, as on a disk that is full from the start."""
    for name in ("stdout", "stderr"):
        (tmp_path / name).symlink_to("/dev/full")
    server = started(model, tmp_path, front_ends)
    try:
        server.until(lambda: server.status("/ready") == 200)
        assert completes(server)
        assert server.status("/v1/nothing") == 404
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    finally:
        server.stop()


@pytest.mark.parametrize(("command", "code"), [(["openapi"], 74), (["config", "show"], 74), (["nonsense"], 2)])
def test_a_command_whose_output_cannot_be_written_says_so_by_its_code(command: list[str], code: int) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-m", "service", *command], stdout=full, stderr=full, cwd=ROOT)
    assert ended.returncode == code


@pytest.mark.slow
def test_a_log_on_a_full_disk_loses_lines_and_goes_on_when_there_is_room(
    model: Path, tmp_path: Path, disk: Path
) -> None:
    (tmp_path / "stdout").touch()
    (tmp_path / "stderr").symlink_to(disk / "log")
    server = started(model, tmp_path, 0)
    try:
        server.until(lambda: server.status("/ready") == 200)
        stuffing = fill(disk)
        size = (disk / "log").stat().st_size
        for _ in range(60):  # more than its last block has room for
            assert completes(server)
        assert server.status("/live") == server.status("/ready") == 200
        full = (disk / "log").stat().st_size
        assert full - size < 4096
        stuffing.unlink()
        server.until(lambda: completes(server) and (disk / "log").stat().st_size > full)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [0, 2])
def test_a_checkpoint_on_a_full_disk_is_refused_and_its_request_goes_on(
    model: Path, tmp_path: Path, disk: Path, front_ends: int
) -> None:
    """With 503 and the reason; no part of a file stays. With room again it is written."""
    key = {"Authorization": "Bearer root"}
    server = started(model, tmp_path, front_ends, "--checkpoint-dir", str(disk), "--admin-api-key", "root")
    try:
        server.until(lambda: server.status("/ready") == 200)
        body = {"prompt": [5, 6, 7], "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        stream = server.open("POST", "/v1/completions", body, {"X-Request-Id": "long"})
        assert stream.readline().startswith(b"data: ")
        stuffing = fill(disk)
        answer = server.open("POST", "/admin/v1/sequences/long/checkpoint", {"path": "a"}, key)
        assert answer.status == 503
        assert "the disk is full" in json.loads(answer.read())["error"]["message"]
        assert [path.name for path in disk.iterdir()] == ["stuffing"]
        assert stream.readline() is not None
        assert completes(server)
        stuffing.unlink()
        answer = server.open("POST", "/admin/v1/sequences/long/checkpoint", {"path": "a"}, key)
        assert answer.status == 200, answer.read()
        assert [path.name for path in disk.iterdir()] == ["a"]
    finally:
        server.stop()
