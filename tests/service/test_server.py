"""The server as a process: start, drain, exit codes. A tiny model with random weights, real signals and sockets."""

import asyncio
import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Command, Ended, run_all
from server_process import PATIENCE_S, Process
from simulated_executor import SimulatedExecutor
from simulated_server import simulated
from structlog.testing import capture_logs
from tiny_model import POSITIONS, write_tiny_model

from service import __main__ as entry_point
from service import loading
from service import server as server_module
from service.loading import Failure, Loaded
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start_one(*arguments: str) -> Process:
        tiny = ["--model", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "32MiB", "--threads", "1"]
        process = Process(*tiny, *arguments, folder=tmp_path)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.stop()


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWALK_")}
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=inherited | environ,
        check=False,
    )


def test_a_server_from_start_to_stop(start: Start) -> None:
    """C41: live before ready; the printed line streams a chat; SIGTERM lets a stream end and refuses new requests."""
    server = start()
    server.until(lambda: server.status("/live") is not None)
    assert server.status("/live") == 200
    assert server.status("/ready") == server.status("/health") == 503, "torch alone takes longer than this to load"
    assert "vllm:" not in server.ask("GET", "/metrics")
    server.until(lambda: server.status("/ready") == 200)
    assert server.status("/health") == 200

    words = shlex.split(server.out.read_text())
    assert words[:2] == ["curl", "-N"]
    address = re.fullmatch(rf"http://127\.0\.0\.1:{server.port}(/v1/chat/completions)", words[2])
    assert address is not None
    body = json.loads(words[words.index("-d") + 1])
    answer = server.ask("POST", address[1], body | {"max_tokens": 4})
    assert answer.startswith("data: {")
    assert answer.endswith("data: [DONE]\n\n")

    metrics = server.ask("GET", "/metrics")
    assert re.search(r'vllm:num_requests_running\{engine="0",model_name="tiny-model\d*"\} 0\.0', metrics)

    stream = server.stream(1000)
    stream.readline()
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.status("/ready") == 503)
    assert server.status("/live") == server.status("/health") == 200
    refused = server.open("POST", "/v1/completions", {"prompt": "the"})
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) > 0
    rest = stream.read().decode()
    assert '"finish_reason":"length"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert server.process.wait(PATIENCE_S) == 0
    assert [line["event"] for line in server.log() if line["logger"] == "pagewalk.server"] == [
        *("loaded", "ready", "signal", "draining")
    ]


def test_what_outlasts_the_timeout_gets_an_error_event(start: Start) -> None:
    server = start("--shutdown-timeout", "0.2")
    server.until(lambda: server.status("/ready") == 200)
    stream = server.stream(POSITIONS - 100)
    stream.readline()
    server.process.send_signal(signal.SIGINT)
    *_, error, done, end = stream.read().decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert (done, end) == ("data: [DONE]", "")
    assert server.process.wait(PATIENCE_S) == 0


def test_a_second_signal_exits_at_once(start: Start) -> None:
    server = start()
    server.until(lambda: server.status("/ready") == 200)
    stream = server.stream(POSITIONS - 100)
    stream.readline()
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.status("/ready") == 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_a_signal_while_the_model_loads(start: Start) -> None:
    server = start()
    server.until(lambda: server.status("/live") == 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert server.out.read_text() == ""
    assert '"level":"error"' not in server.err.read_text().replace(" ", "")


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_that_is_taken(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = "--admin-port" if flag == "--port" else "--port"
        result = run("serve", flag, str(port), other, "0")
    assert result.returncode == 2
    assert result.stderr == (
        f"pagewalk: error: 127.0.0.1:{port} is in use: stop what listens there, or choose another {flag}\n"
    )


CANNOT_WORK = [
    (["serve", "--port", "x"], 2, "--port: must be a whole number"),
    (["serve", "--nonsense"], 2, "--nonsense is no flag"),
    (["serve", "--port", "0", "--admin-port", "0", "--host", "192.0.2.1"], 2, "cannot listen on 192.0.2.1:0"),
    (["check", "--chat-template", "/nowhere"], 2, "--chat-template /nowhere cannot be read"),
    (["check", "--chat-template", "/dev/zero"], 2, "--chat-template /dev/zero cannot be read: it is no plain file"),
    (["serve", "--checkpoint-dir", "/dev/null"], 2, "--checkpoint-dir /dev/null cannot be used: Not a directory"),
    (["check", "/nowhere"], 3, "/nowhere"),
    (["check", "{empty}"], 3, "config.json"),
    (["check", "{model}", "--load-format", "auto"], 3, "safetensors"),
    (["check", "{model}", "--load-format", "dummy", "--tokenizer", "{empty}"], 3, "tokenizer.json"),
    (["check", "{model}", "--load-format", "dummy", "--max-model-len", "200000"], 2, "200000"),
    (["check", "{model}", "--load-format", "dummy", "--kv-cache-memory-bytes", "1"], 2, "kv_cache_memory_bytes"),
    (["check", "{model}", "--load-format", "dummy", "--swap-memory-bytes", "999TiB"], 2, "bytes of memory here"),
    (["check", "{model}", "--load-format", "dummy", "--dtype", "float16", "--cpu-kernels", "native"], 2, "float16"),
    (["check", "{model}", "--load-format", "dummy", "--device", "cuda"], 2, "PyTorch sees no GPU"),
]
"""Arguments, the exit code, and what the line says."""


@pytest.fixture(scope="module")
def cannot_work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """How each of CANNOT_WORK ended."""
    empty = tmp_path_factory.mktemp("empty")
    filled = [[argument.format(model=model, empty=empty) for argument in arguments] for arguments, _, _ in CANNOT_WORK]
    return run_all([Command(arguments) for arguments in filled], tmp_path_factory.mktemp("cannot-work"))


@pytest.mark.parametrize("number", range(len(CANNOT_WORK)), ids=[" ".join(row[0]) for row in CANNOT_WORK])
def test_a_start_that_cannot_work(number: int, cannot_work: list[Ended]) -> None:
    """C42: each ends with a code that scripts can tell, and with one line that says what is wrong."""
    _, code, words = CANNOT_WORK[number]
    result = cannot_work[number]
    *_, last = result.stderr.splitlines()
    assert (result.returncode, last.startswith("pagewalk: error: ")) == (code, True), result.stderr
    assert words in last
    assert "Traceback" not in result.stderr


def test_check_says_that_a_model_works(model: Path) -> None:
    result = run("check", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "1MiB")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(
        r"tiny-model\d* works \((float32|bfloat16) on cpu, (native|torch) kernels, \d+ frames\): .*\n", result.stdout
    )


def test_without_a_compiler_the_torch_kernels_serve_and_the_log_says_so(model: Path, tmp_path: Path) -> None:
    """Unless the kernels were asked for by name: then it is an error. Nothing is said where torch's were asked for."""
    tiny = ("check", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "1MiB", "--log-format", "json")
    flags: list[tuple[str, ...]] = [(), ("--cpu-kernels", "torch"), ("--cpu-kernels", "native")]
    commands = [Command(tiny + more, {"CXX": "/missing/g++"}) for more in flags]
    unasked, asked_for_torch, asked_for_native = run_all(commands, tmp_path)

    assert unasked.returncode == 0, unasked.stderr
    assert "torch kernels" in unasked.stdout
    (warning,) = [line for line in map(json.loads, unasked.stderr.splitlines()) if line["level"] == "warning"]
    assert "CXX is /missing/g++, which is not there" in warning["reason"]
    assert "--cpu-kernels torch" in warning["to_silence"]

    assert (asked_for_torch.returncode, "warning" in asked_for_torch.stderr) == (0, False)
    assert "torch kernels" in asked_for_torch.stdout

    assert asked_for_native.returncode == 2
    last = asked_for_native.stderr.splitlines()[-1]
    assert last.startswith("pagewalk: error: --cpu-kernels native: no C++ compiler: CXX is")


def test_settings_in_force_are_shown() -> None:
    result = run("config", "show", "--port", "9", PAGEWALK_API_KEY="hush")
    assert result.returncode == 0
    assert "port = 9  # flag" in result.stdout
    assert "hush" not in result.stdout


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"pagewalk \d+\.\d+\.\d+\n", result.stdout)


def test_a_fault_of_ours_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def load(settings: Settings, metrics: Metrics) -> Loaded:
        raise ValueError("nobody thought of this")

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr("service.logs.configure", lambda *arguments: None)
    assert entry_point.run(["check"]) == 70


Simulated = tuple[Server, Loaded, SimulatedExecutor]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """A server in this process, with a simulated model."""
    loaded = simulated()

    async def load(settings: Settings, metrics: Metrics) -> Loaded:
        return loaded

    monkeypatch.setattr(server_module, "load", load)
    executor = loaded.assembly.executor
    assert isinstance(executor, SimulatedExecutor)
    return Server(Settings(port=0, admin_port=0, shutdown_timeout_s=0.05), "0"), loaded, executor


async def ready(server: Server) -> "asyncio.Task[int]":
    running = asyncio.create_task(server.run())
    while not server.is_open:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)
    return running


async def post(server: Server, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    data = json.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n{data}".encode())
    return reader, writer


async def test_a_dead_engine_ends_the_process(house: Simulated) -> None:
    """A step that raises: open streams get an error event, and the exit code makes an orchestrator restart it."""
    server, _, executor = house
    with capture_logs() as log:
        async with asyncio.timeout(PATIENCE_S):
            running = await ready(server)
            executor.error = RuntimeError("the device fell off")
            reader, writer = await post(server, {"prompt": [1, 2], "stream": True, "max_tokens": 100})
            answer = (await reader.read()).decode()
            writer.close()
            with pytest.raises(Failure, match="the device fell off") as caught:
                await running
    assert caught.value.code == 70
    assert "503" in answer
    assert [line["event"] for line in log if line["log_level"] == "error"] == ["engine died"]


async def test_a_model_that_cannot_run_never_opens(house: Simulated) -> None:
    """The generation before the doors open fails."""
    server, _, executor = house
    executor.error = RuntimeError("no such kernel")
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    with capture_logs():
        assert await failure_of(server) == "the engine has stopped: no such kernel"
    gc.collect()
    assert unheard == [], "an exception that nobody looked at is a traceback behind the one line"
    assert server.doors is not None
    assert server.doors.front_end.state == "dead"


async def failure_of(server: Server) -> str:
    """The message alone: an exception that is kept keeps the server's tasks."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            await server.run()
        except Failure as failure:
            return str(failure)
    raise AssertionError("the server ended without a word")


async def test_a_step_that_never_ends_does_not_keep_the_process(
    house: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs: after the timeouts the process ends all the same."""
    server, loaded, executor = house
    monkeypatch.setattr(loading, "FLUSH_S", 0.05)
    with capture_logs() as log:
        async with asyncio.timeout(PATIENCE_S):
            running = await ready(server)
            executor.gate.clear()
            _, writer = await post(server, {"prompt": [1, 2], "max_tokens": 100})
            while not loaded.assembly.engine.scheduler.sequences.running:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 0
            writer.close()
    executor.gate.set()
    assert "a step does not end: it is left behind" in [line["event"] for line in log]
