"""Front ends in processes of their own: a server with two of them, real signals, real deaths.

What clients see must not depend on how many processes answer them; what a process loses when it dies must be its own.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.client import HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from http_events import ends, joined
from server_process import PATIENCE_S, Process
from simulated_executor import SimulatedExecutor
from simulated_server import simulated
from structlog.testing import capture_logs
from tiny_model import POSITIONS, write_tiny_model

from service import front_ends as front_ends_module
from service import server as server_module
from service.engine_link import Serve
from service.front_ends import EngineSide, FrontEnds
from service.loading import Failure, Loaded
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings

LONG = POSITIONS - 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def started(model: Path, folder: Path, front_ends: int, *more: str) -> Process:
    tiny = ["--model", str(model), "--load-format", "dummy", "--kv-cache-memory-bytes", "32MiB", "--threads", "1"]
    process = Process(*tiny, "--front-ends", str(front_ends), "--log-format", "json", *more, folder=folder)
    try:
        process.until(lambda: process.status("/ready") == 200)
    except BaseException:
        process.stop()
        raise
    return process


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two front ends"])
def shared(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that tests share, since none of them harms it."""
    folder = tmp_path_factory.mktemp("server")
    admin = ["--admin-api-key", "root", "--checkpoint-dir", str(folder)]
    process = started(model, folder, request.param, *admin)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def survivor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = started(model, tmp_path_factory.mktemp("survivor"), 2)
    yield process
    process.stop()


@pytest.fixture
def server(survivor: Process) -> Process:
    """A server with two front ends that recovers from what tests do to it, so that the next one finds it whole."""
    assert survivor.status("/ready") == 200
    assert len(survivor.front_ends()) == survivor.listening() == 2
    return survivor


@pytest.fixture
def doomed(model: Path, tmp_path: Path) -> Iterator[Process]:
    """A server with two front ends, for one test."""
    process = started(model, tmp_path, 2)
    yield process
    process.stop()


@pytest.fixture(params=[0, 2], ids=["one process", "two front ends"])
def either(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Process]:
    """A server of each kind, for one test."""
    process = started(model, tmp_path, request.param, "--shutdown-timeout", "10")
    yield process
    process.stop()


def events(text: str) -> list[Any]:
    *frames, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]


def rest(stream: HTTPResponse) -> tuple[str, bool]:
    """What is left of a stream, and whether it came to its end."""
    try:
        return stream.read().decode(), True
    except (IncompleteRead, ConnectionError) as error:
        return getattr(error, "partial", b"").decode(), False


# ---------------------------------------------------------------- the same answers


BODIES: list[dict[str, Any]] = [
    {"prompt": "the quick", "max_tokens": 8},
    {"prompt": [5, 6, 7], "max_tokens": 20, "n": 3, "temperature": 1, "seed": 3},
    {"prompt": ["a", "the dog"], "max_tokens": 6, "n": 2, "temperature": 1, "seed": 4, "logprobs": 2},
    {"prompt": "the", "max_tokens": 40, "temperature": 1, "seed": 7, "stop": ["a", "fox"]},
    {"prompt": "the", "max_tokens": 12, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    {"prompt": "the", "max_tokens": 5, "n": 2, "use_beam_search": True, "beam_width": 3},
    {"prompt": "the", "max_tokens": 90, "n": 3, "seed": 8, "structured_outputs": {"regex": "[a-f]{5} is [0-9]{2,9}!"}},
    {"prompt": "the", "max_tokens": 90, "seed": 9, "response_format": {"type": "json_object"}, "logprobs": 1},
]


@pytest.fixture(scope="module")
def answers() -> dict[int, Any]:
    """What the first kind of server said to each body."""
    return {}


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_answers_do_not_depend_on_the_processes(shared: Process, answers: dict[int, Any], number: int) -> None:
    """C05: whole and streamed, choices, stops, scores and beams: equal texts, ends and usage with either server."""
    body = {"temperature": 0} | BODIES[number]
    whole = json.loads(shared.ask("POST", "/v1/completions", body))
    streams = {key: value for key, value in body.items() if key != "prompt_logprobs"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    if "beam_width" in body:
        streamed = None
    else:
        found = events(shared.ask("POST", "/v1/completions", streams | options))
        assert joined(found) == {choice["index"]: choice["text"] for choice in whole["choices"]}
        streamed = joined(found), ends([event for event in found if event["choices"]])
        assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    usage = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    said = whole["choices"], usage, streamed
    assert answers.setdefault(number, said) == said


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("POST", "/tokenize", {"prompt": "the quick"}, 200),
        ("GET", "/live", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", "/v1/completions", {"prompt": "the", "max_tokens": 2 * POSITIONS}, 400),
        ("POST", "/v1/completions", {"prompt": "the", "nonsense": 1}, 400),
        ("POST", "/v1/completions", {"prompt": "the", "model": "other"}, 404),
    ],
)
def test_each_front_end_knows_what_one_process_knows(
    shared: Process, method: str, path: str, body: Any, status: int
) -> None:
    """Several times: the system deals connections out to all of them."""
    for _ in range(6):
        response = shared.open(method, path, body)
        response.read()
        assert response.status == status


def test_metrics_are_of_the_whole_server(shared: Process) -> None:
    """Requests to any front end are counted once, whichever is asked for the counts, and never fall."""
    name = 'pagewalk_http_requests_total{method="GET",route="/version",status="200"}'
    before = shared.metrics().get(name, 0)
    for asked in range(1, 13):
        shared.ask("GET", "/version")
        assert shared.metrics()[name] == before + asked
    texts = [shared.metrics() for _ in range(6)]
    counts = [{sample: text[sample] for sample in text if "vllm:generation_tokens_total" in sample} for text in texts]
    assert all(count == counts[0] for count in counts)
    assert shared.gauge("pagewalk_front_ends") == len(shared.front_ends())


def test_load_and_the_admin_port_see_the_whole_server(shared: Process) -> None:
    streams = [shared.stream(LONG) for _ in range(6)]
    for stream in streams:
        stream.readline()
    for _ in range(6):
        assert json.loads(shared.ask("GET", "/load")) == {"server_load": 6}
        assert shared.gauge("vllm:num_requests_running") == 6
    for stream in streams:
        shared.hang_up(stream)
    shared.until(lambda: json.loads(shared.ask("GET", "/load")) == {"server_load": 0})


def test_operators_see_the_whole_server_from_any_process(shared: Process) -> None:
    """Views and streams over the link, too; and that nothing is there is told as what it is."""
    stream = shared.stream(LONG)
    stream.readline()
    headers = {"Authorization": "Bearer root"}
    for _ in range(4):
        (sequence,) = json.loads(shared.ask("GET", "/admin/v1/sequences", headers=headers))["sequences"]
        assert sequence["state"] == "decode"
        maps = shared.ask("GET", f"/admin/v1/sequences/{sequence['id']}/maps.txt", headers=headers)
        assert maps.startswith("00000000-")
        missing = json.loads(shared.ask("GET", "/admin/v1/sequences/9.9/maps", headers=headers))
        assert missing["error"]["type"] == "NotFoundError"
        frames = shared.open("GET", "/admin/v1/frames/stream?interval=0.1", headers=headers)
        kinds = [json.loads(frames.readline().removeprefix(b"data: "))["kind"]]
        frames.readline()
        kinds.append(json.loads(frames.readline().removeprefix(b"data: "))["kind"])
        assert kinds == ["whole", "delta"]
        shared.hang_up(frames)
    shared.hang_up(stream)
    shared.until(lambda: shared.gauge("vllm:num_requests_running") == 0)


def test_a_stream_is_forked_from_whatever_process_it_is_asked(shared: Process) -> None:
    """Connections are dealt out to all front ends; the one that streams the parent is one of them."""
    body = {"prompt": "the", "stream": True, "max_tokens": LONG, "ignore_eos": True, "temperature": 0}
    stream = shared.open("POST", "/v1/completions", body | {"request_id": "parent"})
    stream.readline()
    for _ in range(8):
        body = {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
        answer = json.loads(shared.ask("POST", "/v1/requests/cmpl-parent/fork", body))
        assert (answer["forked_from"], answer["usage"]["completion_tokens"]) == ("parent", 3)
        asked = {"prompt": answer["choices"][0]["prompt_token_ids"], "temperature": 0, "return_token_ids": True}
        again = json.loads(shared.ask("POST", "/v1/completions", asked | {"max_tokens": 3, "ignore_eos": True}))
        assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    shared.hang_up(stream)
    shared.until(lambda: shared.gauge("vllm:num_requests_running") == 0)


def test_a_request_is_saved_and_restored_from_whatever_process_it_is_asked(shared: Process) -> None:
    asked_tokens = 800
    body = {"prompt": "the", "stream": True, "max_tokens": asked_tokens, "ignore_eos": True, "temperature": 0}
    stream = shared.open("POST", "/v1/completions", body | {"request_id": "saved", "return_token_ids": True})
    stream.readline()
    headers = {"Authorization": "Bearer root"}
    done = json.loads(shared.ask("POST", "/admin/v1/sequences/saved/checkpoint", {"path": "a"}, headers))
    assert done["done"]
    refused = json.loads(shared.ask("POST", "/admin/v1/sequences/saved/checkpoint", {"path": "a"}))
    assert refused["error"]["type"] == "AuthenticationError"
    lines = [json.loads(line.removeprefix(b"data: ")) for line in stream if line.startswith(b"data: {")]
    tokens = [token for event in lines for token in event["choices"][0]["token_ids"]]
    for _ in range(4):
        asked = {"path": "a", "return_token_ids": True}
        answer = json.loads(shared.ask("POST", "/admin/v1/restore", asked, headers))
        (choice,) = answer["choices"]
        known = len(choice["token_ids"])
        assert known == asked_tokens - answer["restored_tokens"]
        assert choice["token_ids"] == tokens[len(tokens) - known :]
    shared.until(lambda: shared.gauge("vllm:num_requests_running") == 0)


def test_limits_that_operators_set_are_known_to_every_process(shared: Process) -> None:
    """A request that has become too large is refused where it comes in, whichever process that is."""
    headers = {"Authorization": "Bearer root"}
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True}
    path = "/admin/v1/tenants/default"
    done = json.loads(shared.ask("POST", path, {"max": 10, "high": 10}, headers))
    assert done["after"]["max"] == 10
    for _ in range(6):
        shared.until(lambda: shared.open("POST", "/v1/completions", body).status == 400)
    assert json.loads(shared.ask("POST", path, {"max": "max", "high": "max"}, headers))["done"]
    for _ in range(6):
        shared.until(lambda: shared.open("POST", "/v1/completions", body).status == 200)
    shared.until(lambda: shared.gauge("vllm:num_requests_running") == 0)


def test_leaving_cancels_whatever_process_streams(shared: Process) -> None:
    """C08, C09: six choices each, left after the first event: nothing runs on, no frame is held, aborts are counted."""
    abort = next(name for name in shared.metrics() if "request_success" in name and '"abort"' in name)
    before = shared.metrics()[abort]
    for _ in range(4):
        body = {"prompt": "the", "stream": True, "n": 6, "max_tokens": LONG, "ignore_eos": True}
        stream = shared.open("POST", "/v1/completions", body)
        stream.readline()
        shared.hang_up(stream)
    shared.until(lambda: shared.gauge("vllm:num_requests_running") == 0)
    assert shared.metrics()['pagewalk_kv_frames{state="active"}'] == 0
    shared.until(lambda: shared.metrics()[abort] == before + 24)


# ---------------------------------------------------------------- the end


def test_a_drain_lets_streams_of_all_front_ends_end(either: Process) -> None:
    """503 for what is new, the end for what runs, then exit code 0 and no process left."""
    pids = either.front_ends()
    streams = list(either.streams_of_all(1000).values()) if pids else [either.stream(1000)]
    either.process.send_signal(signal.SIGTERM)
    either.until(lambda: either.status("/ready") == 503)
    refused = either.open("POST", "/v1/completions", {"prompt": "the"})
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) > 0
    for stream in streams:
        text, is_whole = rest(stream)
        assert is_whole
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert either.process.wait(PATIENCE_S) == 0
    assert not any(is_running(pid) for pid in pids)


def test_front_ends_leave_signals_to_the_engine_s_process(server: Process) -> None:
    """A terminal sends SIGINT, and an init system SIGTERM, to every process of a server."""
    streams = server.streams_of_all(500)
    for pid in streams:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    for stream in streams.values():
        assert rest(stream)[0].endswith("data: [DONE]\n\n")


def test_a_port_that_is_taken_by_a_server_that_would_share_it(server: Process, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    arguments = ["--model", str(model), "--load-format", "dummy", "--front-ends", "2", "--port", str(server.port)]
    second = Process(*arguments, folder=folder)
    assert second.process.wait(PATIENCE_S) == 2
    assert f"127.0.0.1:{server.port} is in use" in second.err.read_text()


def test_a_model_that_is_not_there_ends_the_start_in_one_line(tmp_path: Path) -> None:
    """Whatever the front ends are doing just then."""
    process = Process("--model", str(tmp_path / "nowhere"), "--front-ends", "2", folder=tmp_path)
    assert process.process.wait(PATIENCE_S) == 3
    (line,) = process.err.read_text().splitlines()
    assert line.startswith("pagewalk: error: ")


# ---------------------------------------------------------------- deaths


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def replaced(server: Process, dead: int) -> Callable[[], bool]:
    def check() -> bool:
        if dead in server.front_ends() or server.listening() != 2:
            return False
        try:
            return server.gauge("pagewalk_front_ends") == 2
        except ConnectionError:
            return False  # its name goes before its socket does, while the last of its threads ends

    return check


def test_a_front_end_that_is_killed_loses_its_own_streams_only(server: Process) -> None:
    """The others go on; its Sequences are cancelled; another takes its place; counts do not fall."""
    versions = 'pagewalk_http_requests_total{method="GET",route="/version",status="200"}'
    for _ in range(8):
        server.ask("GET", "/version")
    assert server.metrics()[versions] == 8
    time.sleep(1.2)  # longer than between two reports: what is counted by then is not lost
    streams = server.streams_of_all(1000)
    dead, other = streams
    os.kill(dead, signal.SIGKILL)
    assert not rest(streams[dead])[1]
    text, is_whole = rest(streams[other])
    assert is_whole
    assert '"finish_reason":"length"' in text
    server.until(replaced(server, dead))
    server.until(lambda: server.gauge("vllm:num_requests_running") == 0)
    found = server.metrics()
    assert found['pagewalk_kv_frames{state="active"}'] == 0
    assert found[versions] == 8
    assert len(server.streams_of_all(5)) == 2, "the new one serves"
    lines = [line for line in server.log() if "another takes its place" in line["event"]]
    assert [line["code"] for line in lines if line["pid"] == dead] == [-signal.SIGKILL]


@pytest.mark.parametrize("content", [None, "", "two words\n"], ids=["gone", "empty", "broken"])
def test_a_front_end_is_replaced_while_the_file_of_keys_is_broken(
    model: Path, tmp_path: Path, content: str | None
) -> None:
    """By one that opens to the same keys as the others; when the file is good again, all follow it."""
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = started(model, tmp_path, 2, "--api-key-file", str(file))

    def statuses(key: str) -> set[int]:
        """Of connections enough that each front end has some."""
        headers = {"Authorization": f"Bearer {key}"}
        return {server.open("GET", "/v1/models", headers=headers).status for _ in range(32)}

    try:
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: any(line["event"] == "keys not reloaded" for line in server.log()))
        for dead in server.front_ends():
            os.kill(dead, signal.SIGKILL)
            server.until(replaced(server, dead))
        server.until(lambda: server.listening() == 2)
        assert (statuses("old"), statuses("other")) == ({200}, {401})
        file.write_text("new\n")
        server.until(lambda: statuses("new") == {200})
        assert statuses("old") == {401}
        assert [line["keys"] for line in server.log() if line["event"] == "keys reloaded"] == [1], "read once for all"
    finally:
        server.stop()


@pytest.mark.parametrize("content", [None, "{}"], ids=["gone", "another"])
def test_a_front_end_is_replaced_by_one_with_the_same_tokenizer(
    model: Path, tmp_path: Path, content: str | None
) -> None:
    """Whatever has become of the model's folder: two front ends that disagree about ids would be worse than none."""
    own = shutil.copytree(model, tmp_path / "model")
    server = started(own, tmp_path, 2)
    asked = {"messages": [{"role": "user", "content": "the fox"}]}

    def ids() -> set[str]:
        """From connections enough that each front end has some."""
        return {server.open("POST", "/tokenize", asked).read().decode() for _ in range(32)}

    try:
        before = ids()
        assert len(before) == 1
        for file in own.glob("tokenizer*.json"):
            if content is None:
                file.unlink()
            else:
                file.write_text(content)
        for dead in server.front_ends():
            os.kill(dead, signal.SIGKILL)
            server.until(replaced(server, dead))
        server.until(lambda: server.listening() == 2)
        assert ids() == before
    finally:
        server.stop()


def test_a_front_end_without_its_certificate_says_so(model: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run([*command, "-subj", "/CN=x", "-keyout", key, "-out", cert], check=True, capture_output=True)
    files = ["--tls-cert", str(cert), "--tls-key", str(key)]
    tiny = ["--model", str(model), "--load-format", "dummy", "--threads", "1", "--log-format", "json"]
    server = Process(*tiny, "--front-ends", "1", *files, folder=tmp_path)
    try:
        server.until(lambda: any(line["event"] == "ready" for line in server.log()))
        content = cert.rename(tmp_path / "elsewhere")
        os.kill(server.front_ends()[0], signal.SIGKILL)

        def said() -> list[str]:
            return [line["reason"] for line in server.log() if "another takes its place" in line["event"]]

        server.until(lambda: len(said()) >= 2)
        assert str(cert) in said()[1]
        assert not any("exception" in line for line in server.log())
        content.rename(cert)
        server.until(lambda: server.listening() == 1)
    finally:
        server.stop()


def test_nobody_is_told_that_the_model_loads_while_a_front_end_is_replaced(server: Process) -> None:
    """The other one answers everybody, until the new one can."""
    dead = server.front_ends()[0]
    os.kill(dead, signal.SIGKILL)
    server.until(lambda: server.listening() == 1)
    statuses: list[int | None] = []

    def ask() -> bool:
        statuses.append(server.status("/ready"))
        return server.listening() == 2

    server.until(ask)
    statuses += [server.status("/ready") for _ in range(20)]
    assert set(statuses) == {200}


def test_a_killed_engine_ends_every_stream_with_an_error_event(doomed: Process) -> None:
    """C06, C40: kill -9 of the engine's process. Nothing of it stays behind."""
    streams = doomed.streams_of_all(LONG)
    doomed.process.kill()
    for stream in streams.values():
        text, is_whole = rest(stream)
        assert is_whole
        *_, error, done, end = text.split("\n\n")
        told = json.loads(error.removeprefix("data: "))["error"]
        assert (told["code"], told["type"]) == (503, "ServiceUnavailableError")
        assert (done, end) == ("data: [DONE]", "")
    assert doomed.process.wait(PATIENCE_S) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in streams):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_frozen_engine_is_told_by_live(model: Path, tmp_path: Path) -> None:
    """C40: SIGSTOP. A front end that hears nothing for the step timeout says so; it recovers when the engine does.

    A server of its own: on a busy machine nothing may be heard of a good engine either for so short a time.
    """
    server = started(model, tmp_path, 2, "--step-timeout", "1")
    try:
        server.until(lambda: server.status("/live") == 200)
        server.process.send_signal(signal.SIGSTOP)
        server.until(lambda: server.status("/live") == 503)
        assert server.status("/health") == server.status("/ready") == 503
        server.process.send_signal(signal.SIGCONT)
        server.until(lambda: server.status("/live") == server.status("/ready") == 200)
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()


# ---------------------------------------------------------------- the engine's process here, front ends in theirs


@asynccontextmanager
async def house(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Path
) -> AsyncIterator[tuple[Server, SimulatedExecutor, "asyncio.Task[int]"]]:
    """A server whose engine's process is this one, with a simulated model, and two front ends."""
    loaded = simulated(tokenizer)

    async def load(settings: Settings, metrics: Metrics) -> Loaded:
        return loaded

    monkeypatch.setattr(server_module, "load", load)
    executor = loaded.assembly.executor
    assert isinstance(executor, SimulatedExecutor)
    server = Server(Settings(port=0, admin_port=0, front_ends=2, shutdown_timeout_s=0.05, log_level="error"), "0")
    with capture_logs():
        async with asyncio.timeout(PATIENCE_S):
            running = asyncio.create_task(server.run())
            while not server.is_open and not running.done():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        try:
            yield server, executor, running
        finally:
            if not running.done():
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    await running


async def open_stream(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps({"prompt": [1, 2], "stream": True, "max_tokens": 400, "ignore_eos": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    return reader, writer


async def test_a_dead_engine_ends_the_process_and_every_stream(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """C40: a step that raises. Open streams end with an error event, the exit code is not zero, no process is left."""
    async with asyncio.timeout(PATIENCE_S), house(monkeypatch, model) as (server, executor, running):
        assert server.front_ends is not None
        pids = [desk.process.pid for desk in server.front_ends.desks.values() if desk.process is not None]
        executor.gate.clear()  # streams begin, and wait for their first token
        streams = [await open_stream(server) for _ in range(6)]
        while server.front_ends.generating < 6:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        executor.error = RuntimeError("the device fell off")
        executor.gate.set()
        with pytest.raises(Failure, match="the device fell off") as caught:
            await running
        assert caught.value.code == 70
        for reader, writer in streams:
            answer = (await reader.read()).decode()
            assert "503" in answer
            assert "the engine has stopped because of an internal error" in answer
            writer.close()
        assert len(pids) == 2
        assert not any(is_running(pid) for pid in pids)


async def test_a_front_end_that_cannot_make_its_tokenizer_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    async with house(monkeypatch, tmp_path) as (_, _, running):
        with pytest.raises(Failure, match=r"a front end cannot start: .*: tokenizer\.json cannot be used"):
            await running


@pytest.mark.slow
async def test_a_front_end_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """SIGSTOP: it reads nothing and reports nothing. The others serve meanwhile."""
    async with asyncio.timeout(PATIENCE_S), house(monkeypatch, model) as (server, _, _):
        front_ends = server.front_ends
        assert front_ends is not None
        first, _ = front_ends.desks.values()
        assert first.process is not None
        monkeypatch.setattr(front_ends_module, "SILENCE_S", 2.5)
        os.kill(first.process.pid, signal.SIGSTOP)
        while first.number in front_ends.desks:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)
        monkeypatch.setattr(front_ends_module, "SILENCE_S", PATIENCE_S)  # its successor may take longer to start
        while len(front_ends.desks) < 2:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)
        assert await first.process.wait() == -signal.SIGKILL
        await asyncio.gather(*(desk.serves.wait() for desk in front_ends.desks.values()))

        numbers = list(front_ends.desks)
        monkeypatch.setattr(front_ends_module, "SILENCE_S", 2.5)
        time.sleep(3)  # noqa: ASYNC251 - now it is this process that hangs, and hears nobody
        await asyncio.sleep(0.5)
        assert list(front_ends.desks) == numbers


def test_a_front_end_does_not_load_torch() -> None:
    """It starts in half a second, takes no memory of a GPU, and can be replaced under load."""
    code = "import sys, service.front_end_process; print('torch' in sys.modules, 'cupy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False False\n"


@pytest.mark.parametrize(
    ("flags", "has_gpu", "cores", "count"),
    [
        ({}, False, 64, 0),
        ({"device": "cpu"}, True, 64, 0),
        ({}, True, 16, 4),
        ({"device": "cuda"}, False, 2, 1),
        ({}, True, 128, 4),
        ({"front_ends": 0}, True, 16, 0),
        ({"front_ends": 3}, False, 1, 3),
    ],
)
def test_how_many_front_ends_there_are(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], has_gpu: bool, cores: int, count: int
) -> None:
    monkeypatch.setattr(server_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(server_module, "has_nvidia_driver", lambda: has_gpu)
    assert server_module.front_end_count(Settings(**flags)) == count


@pytest.mark.parametrize(("polls", "cores", "may"), [(2000, 8, True), (2000, 7, False), (0, 64, False)])
async def test_front_ends_poll_beside_a_device_that_is_polled_for_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, model: Path, polls: int, cores: int, may: bool
) -> None:
    """Two front ends. On the CPU steps are waited for in a thread: its cores compute."""
    told: list[bool] = []

    async def serve(front_ends: FrontEnds, engine: EngineSide, message: Serve) -> None:
        told.append(message.polls)

    monkeypatch.setattr(SimulatedExecutor, "polls", polls)
    monkeypatch.setattr(server_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(FrontEnds, "_start", start_nothing)
    monkeypatch.setattr(FrontEnds, "serve", serve)
    async with house(monkeypatch, model):
        assert told == [may]


async def start_nothing(front_ends: FrontEnds) -> None:
    """In place of a process."""
