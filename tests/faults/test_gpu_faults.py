"""A GPU that fails for good while the server runs: an illegal address, in a process of its own. Everybody is told, the
process ends with a code, and the next one serves."""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import PATIENCE_S, Process
from tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu

MAIN = Path(__file__).parents[1] / "support" / "breaking_server.py"
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9}
SHAPE |= {"num_key_value_heads": 3, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's shape, with a few of its layers."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), **SHAPE)


def start(model: Path, folder: Path, front_ends: int) -> Process:
    folder.mkdir(exist_ok=True)
    sizes = ["--kv-cache-memory-bytes", "256MiB", "--max-num-seqs", "64", "--max-num-batched-tokens", "512"]
    arguments = ["--model", str(model), "--load-format", "dummy", "--device", "cuda", "--log-format", "json", *sizes]
    more = ["--front-ends", str(front_ends), "--swap-memory-bytes", "64MiB"]
    return Process(*arguments, *more, folder=folder, program=(str(MAIN),), BREAK=str(folder / "break"))


@pytest.fixture(params=[0, 2], ids=["one process", "two front ends"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Process]:
    process = start(model, tmp_path, request.param)
    try:
        process.until(lambda: process.status("/ready") == 200)
        yield process
    finally:
        process.stop()


def test_an_illegal_address_ends_streams_with_an_error_and_the_process_with_a_code(
    server: Process, model: Path, tmp_path: Path
) -> None:
    """C41. No hang in what is let go of; whoever asks for its health is told the truth; a restart serves."""
    streams = [server.stream(8000) for _ in range(3)]
    for stream in streams:
        assert stream.readline().startswith(b"data: ")
    (tmp_path / "break").touch()
    began = time.monotonic()
    for stream in streams:
        *_, error, done, end = stream.read().decode().split("\n\n")
        assert "stopped because of an internal error" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert (done, end) == ("data: [DONE]", "")
    told_s = time.monotonic() - began
    try:
        assert server.status("/health") in (503, None)
        assert server.status("/live") in (503, None)
    except http.client.HTTPException:  # cut off amid the answer: red enough
        assert server.process.wait(PATIENCE_S) == 70
    assert server.process.wait(PATIENCE_S) == 70
    sys.stdout.write(f"told after {told_s:.2f} s, ended after {time.monotonic() - began:.2f} s\n")
    *lines, last = server.err.read_text().splitlines()
    died = [line for line in lines if line.startswith("{") and json.loads(line)["event"] == "engine died"]
    assert len(died) == 1
    assert "illegal memory access" in died[0]
    assert last.startswith("pagewalk: error: the engine has stopped: ")
    again = start(model, tmp_path / "again", 0)
    try:
        again.until(lambda: again.status("/ready") == 200)
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
        assert json.loads(again.ask("POST", "/v1/completions", body))["usage"]["completion_tokens"] == 5
    finally:
        again.stop()
